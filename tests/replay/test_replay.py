"""A replay against loops in float64: weights, rejections and shares; and what it refuses."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_rc.doctor.advice import Choice, effect
from megatron_rc.doctor.inputs import read_evidence
from megatron_rc.doctor.report import examine
from megatron_rc.doctor.sampled import Sampled
from megatron_rc.records.formats.jsonl import write_jsonl
from megatron_rc.records.rollout import SamplingParams, save_rollouts
from megatron_rc.replay.__main__ import main
from megatron_rc.replay.outcome import outcome
from megatron_rc.replay.reading import NamedBatch, read_batches
from megatron_rc.replay.tokens import recorded
from megatron_rc.settings.config import RolloutCorrectionConfig
from tests.replay.batches import scored_batch
from tests.support import correction_oracle as oracle
from tests.support.records import changed
from tests.support.rounding import assert_equal_but_rounding

# Each with the settings of the oracle.
CASES = {
    "token": (RolloutCorrectionConfig.preset("decoupled_token_is"), oracle.Settings("token")),
    "sequence": (
        RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.9_1.1"),
        oracle.Settings("sequence", criteria=(("seq_mean_k1", math.log(0.9), math.log(1.1)),)),
    ),
    "icepop": (
        RolloutCorrectionConfig(
            rollout_is="token",
            rollout_is_threshold="0.8_1.3",
            rollout_rs="token_k1",
            rollout_rs_threshold="0.6_1.6",
            rejection_denominator="original",
        ),
        oracle.Settings(
            "token",
            "mask",
            lower=0.8,
            upper=1.3,
            criteria=(("token_k1", math.log(0.6), math.log(1.6)),),
            denominator="original",
        ),
    ),
    "bypass": (RolloutCorrectionConfig.preset("bypass_ppo_clip"), oracle.Settings(None)),
    "reinforce": (
        RolloutCorrectionConfig(rollout_is="token", bypass_mode=True, loss_type="reinforce"),
        oracle.Settings("token"),
    ),
}


def expected(batch, config, settings):
    """(mask, weights of the accepted tokens) by loops, [n][s] each; bypass mode compares π_θ with the engine."""
    trainer = batch.log_probs if config.bypass_mode else batch.old_log_probs
    mask = batch.response_mask.tolist()
    result = oracle.correct(trainer.double().tolist(), batch.rollout_log_probs.double().tolist(), mask, settings)
    weights = result.weights or [[1.0] * len(row) for row in mask]
    accepted = [
        [weight * is_accepted for weight, is_accepted in zip(*rows, strict=True)]
        for rows in zip(weights, result.mask, strict=True)
    ]
    return result.mask, accepted


def with_theta(batch, seed=5, size=0.15):
    """The same where the batch made several steps: π_θ is no longer π_old, and some ratios are clipped."""
    noise = size * torch.randn(batch.old_log_probs.shape, generator=torch.Generator().manual_seed(seed))
    return dataclasses.replace(batch, log_probs=(batch.old_log_probs + noise).clamp(max=-0.005))


def replayed(batches, config, name="it"):
    data = recorded([NamedBatch(str(index), batch) for index, batch in enumerate(batches)])
    return data, outcome(data, name, config)


@pytest.mark.parametrize("case", CASES)
def test_outcomes_are_those_of_loops(case):
    config, settings = CASES[case]
    batch = with_theta(scored_batch(rows=24))
    data, replay = replayed([batch], config)
    mask, weights = expected(batch, config, settings)
    (got,) = replay.masks
    assert got.tolist() == mask
    total = sum(map(sum, weights))
    squares = sum(weight**2 for row in weights for weight in row)
    accepted = int(got.sum())
    assert replay.weights.mean == pytest.approx(total / accepted)
    assert replay.weights.effective_share == pytest.approx(total**2 / (int(data.lengths.sum()) * squares))
    assert replay.weights.largest == pytest.approx(max(max(row) for row in weights))
    assert sum(replay.weights.histogram) + replay.weights.zeros == accepted
    assert case in ("token", "bypass", "reinforce") or accepted < int(data.lengths.sum())


def test_the_doctor_and_replay_have_one_effective_sample_size():
    """Over all tokens that could count: a correction that rejects 90 % of them leaves at most a tenth."""
    batch = scored_batch(rows=200, length=40)
    batch = dataclasses.replace(batch, old_log_probs=batch.rollout_log_probs - 0.5)
    near = torch.arange(200) % 10 == 0
    batch.old_log_probs[near] = batch.rollout_log_probs[near]
    data, replay = replayed([batch], RolloutCorrectionConfig.decoupled_geo_rs("0.9_1.1"))
    choice = Choice("decoupled_geo_rs", "", {"rs_threshold": "0.9_1.1"})
    share = effect(choice, Sampled.of_batch(batch)).eff_sample_size
    assert share == pytest.approx(replay.weights.effective_share)
    assert share == pytest.approx(1 - replay.total.rejected_tokens / replay.total.tokens)
    assert 0.05 < share < 0.15
    assert int(data.lengths.sum()) == replay.total.tokens


def test_rejections_are_counted_by_reward_length_and_age():
    batch = scored_batch(rows=24)
    config = RolloutCorrectionConfig(rollout_is=None, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.95_1.05")
    _, replay = replayed([batch], config)
    (mask,) = replay.masks
    lengths = batch.response_mask.sum(dim=1)
    accepted_lengths = mask.sum(dim=1)
    ages = 3 - batch.policy_versions[:, 0]
    keys = {
        "by_reward": [("negative", "zero", "positive")[int(reward) + 1] for reward in batch.rewards],
        "by_length": [f"{2 ** (n.bit_length() - 1)} to {2 ** n.bit_length() - 1}" for n in lengths.tolist()],
        "by_age": [f"{age} step{'s' * (age != 1)}" for age in ages.tolist()],
    }
    for name, labels in keys.items():
        for bucket in getattr(replay, name):
            in_bucket = torch.tensor([label == bucket.label for label in labels])
            assert in_bucket.sum() == bucket.sequences
            assert lengths[in_bucket].sum() == bucket.tokens
            assert (accepted_lengths[in_bucket] == 0).sum() == bucket.rejected_sequences
            assert (lengths - accepted_lengths)[in_bucket].sum() == bucket.rejected_tokens
        assert sum(bucket.sequences for bucket in getattr(replay, name)) == 24
    assert 0 < replay.total.rejected_tokens < replay.total.tokens
    assert replay.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        replay.total.rejected_tokens / replay.total.tokens
    )


def test_rejections_are_counted_by_turn():
    """A turn is a run of sampled tokens; a sequence counts in each of its turns."""
    batch = scored_batch(rows=24, length=150)
    batch.old_log_probs[3, 4] = torch.nan  # a token that was not scored counts nowhere
    config = RolloutCorrectionConfig(rollout_is=None, rollout_rs="token_k1", rollout_rs_threshold="0.8_1.2")
    _, replay = replayed([batch], config)
    counts = {}
    for sampled, scored, accepted in zip(
        batch.response_mask, ~batch.old_log_probs.isnan(), replay.masks[0], strict=True
    ):
        turns = {}
        turn = -1
        for column in sampled.nonzero().flatten().tolist():
            turn += not sampled[column - 1]
            if scored[column]:
                turns.setdefault(min(turn, 7), []).append(bool(accepted[column]))
        for turn, run in turns.items():
            row = (1, len(run), int(not any(run)), len(run) - sum(run))
            label = f"turn {turn + 1}" + " and later" * (turn == 7)
            counts[label] = tuple(map(sum, zip(counts.get(label, (0,) * 4), row, strict=True)))
    assert "turn 8 and later" in counts
    assert {bucket.label: dataclasses.astuple(bucket)[1:] for bucket in replay.by_turn} == counts
    assert sum(bucket.rejected_sequences for bucket in replay.by_turn) > 0
    assert sum(bucket.rejected_tokens for bucket in replay.by_turn) == replay.total.rejected_tokens


def test_several_batches_are_one():
    """Whatever files they lie in: prompts of one are never those of another, ages are against the own step."""
    first_batch = scored_batch(0)
    second_batch = scored_batch(1, length=26)
    together = dataclasses.replace(
        second_batch, group_ids=second_batch.group_ids + 3, sample_ids=second_batch.sample_ids + 50
    )
    config = RolloutCorrectionConfig.preset("decoupled_seq_is_rs")
    _, apart = replayed([first_batch, second_batch], config)
    _, joined = replayed([type(first_batch).concatenate([first_batch, together])], config)
    assert apart.total == joined.total
    assert apart.weights.mean == pytest.approx(joined.weights.mean)
    data = recorded([NamedBatch("a", first_batch, version=5), NamedBatch("b", scored_batch(1, version=9), version=9)])
    assert data.ages[:12].min() == 2
    assert data.ages[12:].min() == 0


def test_tokens_without_a_score_count_nowhere():
    batch = scored_batch()
    holes = batch.response_mask & (torch.arange(20) % 5 == 0)
    some = dataclasses.replace(batch, old_log_probs=torch.where(holes, torch.nan, batch.old_log_probs))
    fewer = dataclasses.replace(batch, response_mask=batch.response_mask & ~holes)
    config = RolloutCorrectionConfig.preset("decoupled_token_is")
    data, replay = replayed([some], config)
    _, same = replayed([fewer], config)
    assert data.unscored == int(holes.sum()) > 0
    assert replay.metrics == same.metrics


def test_a_batch_that_the_run_did_not_finish_counts_nowhere(folder, capsys):
    """Such a record has no log-probs of the trainer; the others of its folder are replayed."""
    unfinished = dataclasses.replace(scored_batch(9, version=5), old_log_probs=None)
    results = []
    for _ in range(2):
        assert main([str(folder), "--preset=decoupled_seq_is_rs", "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))
        save_rollouts(unfinished, folder / "step-0000005-replica-0000.safetensors")
    assert_equal_but_rounding(results[1]["corrections"], results[0]["corrections"], rel=1e-6)
    assert results[0]["unscored_tokens"] == 0
    assert results[1]["unscored_tokens"] == int(unfinished.response_mask.sum())


def test_tokens_of_no_step_are_as_they_were_scored():
    """As in a mini-batch whose step was left out: log π_θ is NaN there."""
    batch = with_theta(scored_batch())
    left_out = torch.arange(12).unsqueeze(1) >= 6
    some = dataclasses.replace(batch, log_probs=torch.where(left_out, torch.nan, batch.log_probs))
    same = dataclasses.replace(batch, log_probs=torch.where(left_out, batch.old_log_probs, batch.log_probs))
    (data, replay), (_, expected) = (
        replayed([batch_to_replay], RolloutCorrectionConfig.preset("bypass_ppo_clip"))
        for batch_to_replay in (some, same)
    )
    assert data.unscored == 0
    assert replay.metrics == expected.metrics


def test_everything_rejected_leaves_no_weights():
    config = RolloutCorrectionConfig(rollout_is=None, rollout_rs="token_k1", rollout_rs_threshold="0.9999999_1.0000001")
    _, replay = replayed([scored_batch()], config)
    assert (replay.weights.mean, replay.weights.smallest, replay.weights.effective_share) == (0, 0, 0)


# The command


@pytest.fixture
def folder(tmp_path):
    for step in (3, 4):
        path = tmp_path / "records" / f"step-000000{step}-replica-0000.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_rollouts(with_theta(scored_batch(step, version=step)), path)
    return tmp_path / "records"


def test_the_command_writes_json_of_a_grid(folder, tmp_path, capsys):
    (tmp_path / "own.yaml").write_text("rollout_is: token\nrollout_is_threshold: 3.0\n")
    arguments = [str(folder), "--preset=decoupled_token_is", f"--correction={tmp_path}/own.yaml"]
    arguments += ["--grid=rollout_is_threshold=1.1,5", "--grid=rollout_is_batch_normalize=true,false", "--json"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    names = [correction["name"] for correction in report["corrections"]]
    assert len(names) == 8
    assert names[1] == "decoupled_token_is rollout_is_threshold=1.1 rollout_is_batch_normalize=False"
    assert names[7] == "own rollout_is_threshold=5 rollout_is_batch_normalize=False"
    first = report["corrections"][1]
    second = report["corrections"][3]
    assert first["weights"]["largest"] == pytest.approx(1.1)
    assert second["weights"]["largest"] > 1.2
    assert report["corrections"][2]["settings"]["rollout_is_batch_normalize"] is True
    assert report["corrections"][2]["weights"]["mean"] == pytest.approx(1, abs=1e-6)
    assert first["metrics"]["rollout_corr/num_tokens"] == report["tokens"]


def refused(arguments, capsys):
    assert main([str(word) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset=decoupled_tokn_is"], "did you mean 'decoupled_token_is'?"),
        (["--preset=disabled", "--grid=rollout_is_treshold=1,2"], "--grid='rollout_is_treshold' is unknown"),
        (["--preset=disabled", "--grid=rollout_is_threshold"], "expected field=value,value,... for example"),
        (["--preset=token_is", "--grid=rollout_is_threshold=2", "--grid=rollout_is_threshold=3"], "a field twice"),
        (["--preset=token_is", "--grid=rollout_is_threshold=-1"], "--grid rollout_is_threshold=-1 over token_is: "),
        (
            ["--preset=token_is", "--grid=rollout_is_threshold=" + ",".join(map(str, range(1, 70)))],
            "64 can be compared",
        ),
        (["--correction=nowhere.yaml"], "--correction nowhere.yaml: nowhere.yaml cannot be read"),
        (["--preset=disabled", "--html="], "--html '' is a folder: expected the name of a file to write"),
        (["--preset=disabled", "--html=a.jsonl"], "--html a.jsonl is the name of a record: name it something.html"),
        (["--preset=disabled", "--picture=a.safetensors"], "--picture a.safetensors is the name of a record: name it"),
        (["--preset=disabled", "--html=nowhere/a.html"], "--html nowhere/a.html: the folder nowhere does not exist"),
        (["--preset=disabled", "--vocab-size=20"], "expected less than the vocabulary's 20, padding included"),
        (["--preset=token_is", "--grid=proximal_interpolation=true"], "proximal_interpolation"),
    ],
)
def test_flags_that_cannot_serve_are_one_sentence(folder, capsys, arguments, message):
    assert message in refused([folder, *arguments], capsys)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (dataclasses.replace(scored_batch(), old_log_probs=None), "no sampled token has a log-prob of the trainer"),
        (scored_batch().rows([]), "expected records of --save-rollouts"),
        (
            changed(scored_batch(), "rollout_log_probs", 0.5, (2, 4)),
            "the rollout log-prob of sample 102, token 4 is 0.5",
        ),
    ],
    ids=["unscored", "empty", "wrong"],
)
def test_records_that_cannot_serve_are_one_sentence(tmp_path, capsys, batch, message):
    save_rollouts(batch, tmp_path / "a.safetensors")
    assert message in refused([tmp_path / "a.safetensors", "--preset=disabled"], capsys)


def test_files_that_are_not_there_or_do_not_go_together(tmp_path, capsys):
    assert "nowhere is missing" in refused([tmp_path / "nowhere", "--preset=disabled"], capsys)
    assert "no .jsonl file" in refused([tmp_path, "--preset=disabled"], capsys)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "is the folder of a run, whose metrics hold no tokens" in refused([tmp_path, "--preset=disabled"], capsys)
    (tmp_path / "metrics.jsonl").unlink()
    save_rollouts(scored_batch(), tmp_path / "a.safetensors")
    record = tmp_path / "record"
    save_rollouts(scored_batch(), record)
    before = record.read_bytes()
    assert "is the name of a record" in refused([record, "--preset=disabled", f"--html={record}"], capsys)
    assert record.read_bytes() == before
    record.unlink()
    save_rollouts(
        dataclasses.replace(scored_batch(), sampling=SamplingParams(temperature=0.7)), tmp_path / "b.safetensors"
    )
    assert "were sampled differently" in refused([tmp_path, "--preset=disabled"], capsys)


def test_log_probs_that_are_shifted_are_refused(tmp_path, capsys):
    batch = scored_batch(rows=200, length=40, noise=0.01)
    shifted = torch.roll(batch.old_log_probs.nan_to_num(-1.0), 1, dims=1)
    save_rollouts(dataclasses.replace(batch, old_log_probs=shifted), tmp_path / "a.safetensors")
    assert "are shifted by" in refused([tmp_path / "a.safetensors", "--preset=disabled"], capsys)


def test_without_presets_those_are_compared_that_the_doctor_would_try(folder, capsys):
    assert main([str(folder), "--json"]) == 0
    names = [correction["name"] for correction in json.loads(capsys.readouterr().out)["corrections"]]
    report = examine(read_evidence(folder))
    assert names[0].startswith(report.choice.preset)
    assert [name.split()[0] for name in names] == [correction.choice.preset for correction in report.effects]
    assert main([str(folder), "--json", "--grid=rejection_denominator=accepted,original"]) == 0
    assert len(json.loads(capsys.readouterr().out)["corrections"]) == 2 * len(names)


def test_a_record_of_responses_alone_has_sampled_first_tokens(tmp_path, capsys):
    """verl's tensors have no prompt: column 0 is the first token of each response."""
    rollout = -torch.rand(4, 6) - 0.1
    verl = {
        "rollout_log_probs": rollout,
        "old_log_probs": (rollout + 0.05 * torch.randn(4, 6)).clamp(max=0),
        "response_mask": torch.arange(6) < torch.tensor([[6], [5], [4], [1]]),
        "responses": torch.arange(24).view(4, 6),
    }
    torch.save(verl, tmp_path / "a.pt")
    assert main([str(tmp_path / "a.pt"), "--json", "--preset=decoupled_token_is"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == 16


def test_replay_takes_what_the_doctor_takes(tmp_path, capsys):
    """Tensors of verl's names in three formats, and lines of slime's; without tokens, prompts and rewards too."""
    batch = scored_batch()
    verl = {
        "rollout_log_probs": batch.rollout_log_probs.nan_to_num(),
        "old_log_probs": batch.old_log_probs.nan_to_num(),
        "response_mask": batch.response_mask.long(),
        "responses": batch.tokens,
        "token_level_scores": torch.nn.functional.pad(batch.rewards.unsqueeze(1), (19, 0)),
    }
    uid = np.array([f"prompt {group}" for group in batch.group_ids.tolist()])
    torch.save({"batch": verl}, tmp_path / "a.pt")
    np.savez(tmp_path / "b.npz", uid=uid, **{name: value.numpy() for name, value in verl.items()})
    save_file(verl, tmp_path / "c.safetensors")
    rows = [
        {name: value[row].tolist() for name, value in verl.items()} | {"group_id": int(batch.group_ids[row])}
        for row in range(len(uid))
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "e.json").write_text(json.dumps([{**row, "token_level_scores": None} for row in rows], indent=1))
    save_rollouts(batch, tmp_path / "own.safetensors")
    write_jsonl([batch], tmp_path / "own.jsonl")
    reports = {}
    for file in sorted(tmp_path.iterdir()):
        assert read_evidence(file).facts["num_tokens"] == int(batch.response_mask.sum())
        data = recorded(read_batches([str(file)]))
        # The others do not say which prompt a response is of: each response then has a prompt of its own.
        names_prompts = file.name not in ("a.pt", "c.safetensors")
        assert (int(data.group_ids.max()) < len(uid) - 1) == names_prompts
        records = data.parts[0].records
        assert records.tokens[records.response_mask].equal(batch.tokens[batch.response_mask])
        assert main([str(file), "--json", "--preset=decoupled_token_is"]) == 0
        reports[file.name] = json.loads(capsys.readouterr().out)
    report_of_record = reports.pop("own.safetensors")
    (expected,) = report_of_record["corrections"]
    for name, report in reports.items():
        (got,) = report["corrections"]
        assert report["tokens"] == report_of_record["tokens"]
        assert got["weights"]["histogram"] == expected["weights"]["histogram"]
        assert (got["by_reward"] == expected["by_reward"]) == (name != "e.json")
