"""A replay against loops in float64: weights, rejections, shares and the gradient's angle; and refused inputs."""

import dataclasses
import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_rc.doctor.inputs import read_evidence
from megatron_rc.doctor.report import examine
from megatron_rc.records.formats.jsonl import write_jsonl
from megatron_rc.records.rollout import RolloutBatch, SamplingParams, save_rollouts
from megatron_rc.replay.__main__ import main
from megatron_rc.replay.gradient import uncorrected
from megatron_rc.replay.outcome import outcome
from megatron_rc.replay.reading import NamedBatch
from megatron_rc.replay.report import as_dict
from megatron_rc.replay.tokens import recorded
from megatron_rc.settings.config import RolloutCorrectionConfig
from tests.replay.batches import scored_batch
from tests.support import correction_oracle as oracle
from tests.support.made_rollouts import made_batch
from tests.support.records import changed
from tests.support.rounding import assert_equal_but_rounding

# The correction, the same settings for the oracle, and the objective that the run trains with.
CASES = {
    "token": (RolloutCorrectionConfig.preset("decoupled_token_is"), oracle.Settings("token"), "ppo_clip"),
    "sequence": (
        RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.9_1.1"),
        oracle.Settings("sequence", criteria=(("seq_mean_k1", math.log(0.9), math.log(1.1)),)),
        "ppo_clip",
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
        "ppo_clip",
    ),
    "bypass": (RolloutCorrectionConfig.preset("bypass_ppo_clip"), oracle.Settings(None), "bypass_ppo_clip"),
    "reinforce": (
        RolloutCorrectionConfig(rollout_is="token", bypass_mode=True, loss_type="reinforce"),
        oracle.Settings("token"),
        "reinforce",
    ),
}


def ppo_gradient(advantage, log_ratio):
    """Return the derivative of PPO's clipped loss of a token by its log-prob; 0 if the ratio is clipped."""
    ratio = math.exp(log_ratio)
    clipped = ratio > 1.2 if advantage > 0 else ratio < 0.8
    return 0.0 if clipped else -advantage * ratio


@dataclass(frozen=True)
class Expected:
    """Outcome of a correction, by loops over tokens."""

    mask: list[list[bool]]  # accepted tokens
    weights: list[list[float]]  # all 1 if the correction has no weights
    cosine: float  # of the angle between the gradients with and without the correction
    length: float  # of the corrected gradient, relative to the uncorrected one
    change: list[float]  # share of each sequence in the squared difference of both gradients


def expected_outcome(batch, settings, objective):
    """Return the expected outcome of a batch; π_θ is ``batch.log_probs``."""
    sampled = batch.response_mask.tolist()
    rollout = batch.rollout_log_probs.double().tolist()
    old = batch.old_log_probs.double().tolist()
    theta = batch.log_probs.double().tolist()
    bypass = objective in ("bypass_ppo_clip", "reinforce")
    correction = oracle.correct(theta if bypass else old, rollout, sampled, settings)
    weights = correction.weights or [[1.0] * len(row) for row in sampled]

    # Derivatives of the loss by the log-prob of each token, by (row, column), before they are averaged.
    rewards = batch.rewards.double()
    uncorrected_terms = {}
    corrected_terms = {}
    for i, row in enumerate(sampled):
        prompt_rewards = rewards[batch.group_ids == batch.group_ids[i]]
        advantage = float((rewards[i] - prompt_rewards.mean()) / (prompt_rewards.std() + 1e-6))
        for t, is_sampled in enumerate(row):
            if not is_sampled:
                continue
            uncorrected_terms[i, t] = ppo_gradient(advantage, theta[i][t] - old[i][t])
            derivative = {
                "ppo_clip": uncorrected_terms[i, t],
                "bypass_ppo_clip": ppo_gradient(advantage, theta[i][t] - rollout[i][t]),
                "reinforce": -advantage,
            }[objective]
            corrected_terms[i, t] = weights[i][t] * correction.mask[i][t] * derivative

    # Both losses are means over tokens.
    num_tokens = len(uncorrected_terms)
    num_accepted = sum(map(sum, correction.mask))
    divisor = num_tokens if settings.denominator == "original" else num_accepted
    uncorrected_gradient = {token: term / num_tokens for token, term in uncorrected_terms.items()}
    corrected_gradient = {token: term / divisor for token, term in corrected_terms.items()}

    dot_product = sum(uncorrected_gradient[token] * corrected_gradient[token] for token in uncorrected_gradient)
    uncorrected_length = math.sqrt(sum(value**2 for value in uncorrected_gradient.values()))
    corrected_length = math.sqrt(sum(value**2 for value in corrected_gradient.values()))
    change = [0.0] * len(sampled)
    for (i, t), value in uncorrected_gradient.items():
        change[i] += (value - corrected_gradient[i, t]) ** 2
    total_change = sum(change)
    return Expected(
        mask=correction.mask,
        weights=weights,
        cosine=dot_product / (uncorrected_length * corrected_length),
        length=corrected_length / uncorrected_length,
        change=[value / total_change for value in change],
    )


def with_theta(batch, seed=5, size=0.15):
    """Return the batch as after several steps: π_θ is no longer π_old, and some ratios are clipped."""
    noise = size * torch.randn(batch.old_log_probs.shape, generator=torch.Generator().manual_seed(seed))
    return dataclasses.replace(batch, log_probs=(batch.old_log_probs + noise).clamp(max=-0.005))


def replayed(batches, config):
    """Return the recorded tokens of some batches, and the outcome of a correction on them."""
    data = recorded([NamedBatch(str(index), batch) for index, batch in enumerate(batches)])
    return data, outcome(data, uncorrected(data), "it", config)


# Outcomes


@pytest.mark.parametrize("case", CASES)
def test_outcomes_are_those_of_loops(case):
    config, settings, objective = CASES[case]
    batch = with_theta(scored_batch(rows=24))
    data, result = replayed([batch], config)
    expected = expected_outcome(batch, settings, objective)

    (mask,) = result.masks
    assert mask.tolist() == expected.mask
    num_tokens = int(data.lengths.sum())
    num_accepted = int(mask.sum())

    # Weights, 0 at rejected tokens.
    weights = [
        [weight * accepted for weight, accepted in zip(weight_row, mask_row, strict=True)]
        for weight_row, mask_row in zip(expected.weights, expected.mask, strict=True)
    ]
    total = sum(map(sum, weights))
    total_of_squares = sum(weight**2 for row in weights for weight in row)
    assert result.weights.mean == pytest.approx(total / num_accepted)
    assert result.weights.effective_share == pytest.approx(total**2 / (num_tokens * total_of_squares))
    assert result.weights.largest == pytest.approx(max(max(row) for row in weights))
    assert sum(result.weights.histogram) + result.weights.zeros == num_accepted

    assert result.effect.cosine == pytest.approx(expected.cosine, rel=1e-5)
    assert result.effect.length == pytest.approx(expected.length, rel=1e-5)
    assert result.effect.change.tolist() == pytest.approx(expected.change, rel=1e-4, abs=1e-9)

    # The correction has an effect; all but three cases reject tokens.
    assert abs(expected.cosine) < 0.999
    assert case in ("token", "bypass", "reinforce") or num_accepted < num_tokens


@pytest.mark.parametrize("sum_of_logs", [-45.0, -150.0, -280.0])
def test_small_sequence_weights_are_told_apart(sum_of_logs):
    """The effective share and the direction of the gradient, of weights of which float32 has few digits, or none."""
    length = 400
    generator = torch.Generator().manual_seed(0)
    log_weights = sum_of_logs + 3 * torch.randn(8, generator=generator).double()
    rollout = torch.full((8, length), -3.0)
    old = rollout.double() + log_weights.unsqueeze(1) / length
    # The first token of each sequence is the prompt.
    mask = torch.arange(length).expand(8, length) > 0
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    batch = made_batch(torch.ones(8, length).long(), mask, rollout, rewards, old_log_probs=old.float())
    data = recorded([NamedBatch("far", batch)])
    result = outcome(data, uncorrected(data), "sequence", RolloutCorrectionConfig.decoupled_seq_is())

    # The log-probs of the record are float32; shares and angles do not depend on the scale of the weights.
    exact_log_weights = torch.where(mask, old.float().double() - rollout.double(), 0).sum(1)
    weights = (exact_log_weights - exact_log_weights.max()).exp()
    share = float(weights.sum() ** 2 / (8 * weights.square().sum()))
    assert result.weights.effective_share == pytest.approx(share, rel=1e-9)

    advantages = data.advantages.double()
    dot_product = (weights * advantages.square()).sum()
    cosine = float(dot_product / ((weights * advantages).norm() * advantages.norm()))
    assert result.effect.cosine == pytest.approx(cosine, rel=1e-9)


# Rejections


def test_rejections_are_counted_by_reward_length_and_age():
    batch = scored_batch(rows=24)
    config = RolloutCorrectionConfig(rollout_is=None, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.95_1.05")
    _, result = replayed([batch], config)
    (mask,) = result.masks
    lengths = batch.response_mask.sum(dim=1)
    num_accepted = mask.sum(dim=1)

    # The label of each sequence's bucket.
    ages = 3 - batch.policy_versions[:, 0]
    labels_of = {
        "by_reward": [("negative", "zero", "positive")[int(reward) + 1] for reward in batch.rewards],
        "by_length": [f"{2 ** (n.bit_length() - 1)} to {2 ** n.bit_length() - 1}" for n in lengths.tolist()],
        "by_age": [f"{age} step" if age == 1 else f"{age} steps" for age in ages.tolist()],
    }
    for name, labels in labels_of.items():
        buckets = getattr(result, name)
        for bucket in buckets:
            in_bucket = torch.tensor([label == bucket.label for label in labels])
            assert in_bucket.sum() == bucket.sequences
            assert lengths[in_bucket].sum() == bucket.tokens
            assert (num_accepted[in_bucket] == 0).sum() == bucket.rejected_sequences
            assert (lengths - num_accepted)[in_bucket].sum() == bucket.rejected_tokens
        assert sum(bucket.sequences for bucket in buckets) == 24

    assert 0 < result.total.rejected_tokens < result.total.tokens
    assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        result.total.rejected_tokens / result.total.tokens
    )


def test_rejections_are_counted_by_turn():
    """A turn is a run of sampled tokens; a sequence counts in each of its turns."""
    batch = scored_batch(rows=24, length=150)
    batch.old_log_probs[3, 4] = torch.nan  # a token that was not scored counts nowhere
    config = RolloutCorrectionConfig(rollout_is=None, rollout_rs="token_k1", rollout_rs_threshold="0.8_1.2")
    _, result = replayed([batch], config)

    counts = {}
    is_scored = ~batch.old_log_probs.isnan()
    for sampled, scored, accepted in zip(batch.response_mask, is_scored, result.masks[0], strict=True):
        # By turn, whether each of its scored tokens is accepted; later turns count with turn 8.
        decisions_of_turns = {}
        turn = -1
        for column in sampled.nonzero().flatten().tolist():
            if not sampled[column - 1]:
                turn += 1
            if scored[column]:
                decisions_of_turns.setdefault(min(turn, 7), []).append(bool(accepted[column]))

        for turn, decisions in decisions_of_turns.items():
            label = "turn 8 and later" if turn == 7 else f"turn {turn + 1}"
            # Sequences, tokens, rejected sequences, rejected tokens.
            counts_of_turn = (1, len(decisions), int(not any(decisions)), len(decisions) - sum(decisions))
            counts_so_far = counts.get(label, (0, 0, 0, 0))
            counts[label] = tuple(map(sum, zip(counts_so_far, counts_of_turn, strict=True)))

    assert "turn 8 and later" in counts
    assert {bucket.label: dataclasses.astuple(bucket)[1:] for bucket in result.by_turn} == counts
    assert sum(bucket.rejected_sequences for bucket in result.by_turn) > 0
    assert sum(bucket.rejected_tokens for bucket in result.by_turn) == result.total.rejected_tokens


# Several batches, and tokens without a score


def test_several_batches_are_one():
    """Prompts of different batches differ, whatever their ids; ages are relative to the batch's own step."""
    first = scored_batch(0)
    second = scored_batch(1, length=26)
    renumbered = dataclasses.replace(second, group_ids=second.group_ids + 3, sample_ids=second.sample_ids + 50)
    config = RolloutCorrectionConfig.preset("decoupled_seq_is_rs")
    _, apart = replayed([first, second], config)
    _, joined = replayed([RolloutBatch.concatenate([first, renumbered])], config)
    assert apart.total == joined.total
    assert apart.weights.mean == pytest.approx(joined.weights.mean)
    assert apart.effect.cosine == pytest.approx(joined.effect.cosine, rel=1e-6)

    at_step_5 = NamedBatch("a", first, version=5)
    at_step_9 = NamedBatch("b", scored_batch(1, version=9), version=9)
    data = recorded([at_step_5, at_step_9])
    assert data.ages[:12].min() == 2
    assert data.ages[12:].min() == 0


def test_tokens_without_a_score_count_nowhere():
    batch = scored_batch()
    holes = batch.response_mask & (torch.arange(20) % 5 == 0)
    unscored = dataclasses.replace(batch, old_log_probs=torch.where(holes, torch.nan, batch.old_log_probs))
    not_sampled = dataclasses.replace(batch, response_mask=batch.response_mask & ~holes)
    config = RolloutCorrectionConfig.preset("decoupled_token_is")
    data, result = replayed([unscored], config)
    _, expected = replayed([not_sampled], config)
    assert data.unscored == int(holes.sum()) > 0
    assert result.metrics == expected.metrics
    assert result.effect.cosine == expected.effect.cosine


def test_a_batch_that_the_run_did_not_finish_counts_nowhere(folder, capsys):
    """A record without log-probs of the trainer; the other records of its folder are replayed."""
    arguments = [str(folder), "--preset=decoupled_seq_is_rs", "--json"]
    without_unfinished = printed_json(arguments, capsys)

    unfinished = dataclasses.replace(scored_batch(9, version=5), old_log_probs=None)
    save_rollouts(unfinished, folder / "step-0000005-replica-0000.safetensors")
    with_unfinished = printed_json(arguments, capsys)
    assert_equal_but_rounding(with_unfinished["corrections"], without_unfinished["corrections"], rel=1e-6)
    assert without_unfinished["unscored_tokens"] == 0
    assert with_unfinished["unscored_tokens"] == int(unfinished.response_mask.sum())


def test_tokens_of_no_step_are_as_they_were_scored():
    """As in a mini-batch whose step was left out: log π_θ is NaN there."""
    batch = with_theta(scored_batch())
    left_out = torch.arange(12).unsqueeze(1) >= 6
    without_theta = dataclasses.replace(batch, log_probs=torch.where(left_out, torch.nan, batch.log_probs))
    theta = torch.where(left_out, batch.old_log_probs, batch.log_probs)
    with_old_as_theta = dataclasses.replace(batch, log_probs=theta)
    config = RolloutCorrectionConfig.preset("bypass_ppo_clip")
    data, result = replayed([without_theta], config)
    _, expected = replayed([with_old_as_theta], config)
    assert data.unscored == 0
    assert result.metrics == expected.metrics
    assert result.effect.cosine == expected.effect.cosine


# Special outcomes


def test_nothing_corrected_changes_nothing_and_everything_rejected_has_no_direction():
    data, disabled = replayed([scored_batch()], RolloutCorrectionConfig.preset("disabled"))
    assert disabled.effect.cosine == pytest.approx(1, abs=1e-12)
    assert disabled.effect.length == pytest.approx(1, abs=1e-12)
    assert as_dict(data, [disabled], 5)["corrections"][0]["most_affected"] == []

    config = RolloutCorrectionConfig(rollout_is=None, rollout_rs="token_k1", rollout_rs_threshold="0.9999999_1.0000001")
    _, all_rejected = replayed([scored_batch()], config)
    weights = all_rejected.weights
    assert all_rejected.effect.cosine is None
    assert all_rejected.effect.length == 0
    assert (weights.mean, weights.smallest, weights.effective_share) == (0, 0, 0)


def test_rewards_that_are_alike_leave_the_mean_log_prob():
    batch = dataclasses.replace(scored_batch(), rewards=torch.ones(12))
    data, result = replayed([batch], RolloutCorrectionConfig.preset("decoupled_token_is"))
    assert not data.has_advantages
    assert as_dict(data, [result], 0)["gradient_of"].startswith("gradient of the mean log")

    # Without the correction every token has the same derivative; the correction multiplies it by the weight.
    weights = result.token_weights[0][batch.response_mask].double()
    cosine = float(weights.sum() / (weights.square().sum() * len(weights)).sqrt())
    assert result.effect.cosine == pytest.approx(cosine, rel=1e-6)


def test_the_most_affected_sequences_have_their_tokens():
    batch = scored_batch()
    old = batch.old_log_probs.clone()
    column = int(batch.response_mask[7].nonzero()[2])
    old[7, column] = batch.rollout_log_probs[7, column] + 0.45  # weight e^0.45 × … stays below every bound
    batch = dataclasses.replace(batch, old_log_probs=old)
    config = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.7_1.4")
    data, result = replayed([batch], config)

    most_affected = as_dict(data, [result], 12)["corrections"][0]["most_affected"]
    changes = [sequence["change"] for sequence in most_affected]
    assert changes == sorted(changes, reverse=True)

    # Row 7 has the sample id 107.
    (sequence,) = [sequence for sequence in most_affected if sequence["sample_id"] == 107]
    assert sequence["num_tokens"] == len(sequence["tokens"]) == int(batch.response_mask[7].sum())
    (token,) = [token for token in sequence["tokens"] if token[1] == column]
    token_id, _, log_ratio, log_prob, weight, accepted = token
    assert token_id == batch.tokens[7, column]
    assert log_ratio == pytest.approx(0.45, abs=1e-6)
    assert log_prob == pytest.approx(float(batch.rollout_log_probs[7, column]))
    assert (weight, accepted) == (0, False)


# The command


def printed_json(arguments, capsys):
    """Run the command with ``--json`` among its arguments; return the object that it prints."""
    assert main([str(argument) for argument in arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def folder(tmp_path):
    """A folder with the records of two steps."""
    for step in (3, 4):
        path = tmp_path / "records" / f"step-000000{step}-replica-0000.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_rollouts(with_theta(scored_batch(step, version=step)), path)
    return tmp_path / "records"


def test_the_command_prints_tables(folder, capsys):
    assert main([str(folder), "--preset", "decoupled_token_is", "--preset", "bypass_ppo_clip", "--sequences=2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("24 sequences, ")
    for heading in ("rejected tokens (sequences) by reward", "by length", "by age", "by turn", "ESS", "cosine"):
        assert heading in text
    assert text.count("\nsequences that ") == 2
    assert "gradient of the mean policy loss (clipped at 1 ± 0.2) with GRPO's advantages" in text


def test_the_command_writes_json_of_a_grid(folder, tmp_path, capsys):
    (tmp_path / "own.yaml").write_text("rollout_is: token\nrollout_is_threshold: 3.0\n")
    arguments = [
        folder,
        "--preset=decoupled_token_is",
        f"--correction={tmp_path}/own.yaml",
        "--grid=rollout_is_threshold=1.1,5",
        "--grid=rollout_is_batch_normalize=true,false",
        "--json",
    ]
    printed = printed_json(arguments, capsys)
    corrections = printed["corrections"]
    names = [correction["name"] for correction in corrections]
    assert len(names) == 8
    assert names[1] == "decoupled_token_is rollout_is_threshold=1.1 rollout_is_batch_normalize=False"
    assert names[7] == "own rollout_is_threshold=5 rollout_is_batch_normalize=False"

    # Of the preset: thresholds 1.1 and 5, each with and then without normalization.
    assert corrections[1]["weights"]["largest"] == pytest.approx(1.1)
    assert corrections[3]["weights"]["largest"] > 1.2
    assert corrections[2]["settings"]["rollout_is_batch_normalize"] is True
    assert corrections[2]["weights"]["mean"] == pytest.approx(1, abs=1e-6)
    assert corrections[1]["metrics"]["rollout_corr/num_tokens"] == printed["tokens"]


# Refused flags and records


def refusal(arguments, capsys):
    """Return the error of a command that fails; it is one line."""
    assert main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("words", "message"),
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
        (["--preset=disabled", "--sequences=-1"], "--sequences=-1 must be 0 or more"),
        (["--preset=disabled", "--html="], "--html '' is a folder: expected the name of a file to write"),
        (["--preset=disabled", "--html=a.jsonl"], "--html a.jsonl is the name of a record: name the page"),
        (["--preset=disabled", "--html=nowhere/a.html"], "--html nowhere/a.html: the folder nowhere does not exist"),
        (["--preset=disabled", "--vocab-size=20"], "expected less than the vocabulary's 20, padding included"),
        (["--preset=token_is", "--grid=proximal_interpolation=true"], "proximal_interpolation"),
    ],
)
def test_flags_that_cannot_serve_are_one_sentence(folder, capsys, words, message):
    assert message in refusal([folder, *words], capsys)


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
    assert message in refusal([tmp_path / "a.safetensors", "--preset=disabled"], capsys)


def test_files_that_are_not_there_or_do_not_go_together(tmp_path, capsys):
    assert "nowhere is missing" in refusal([tmp_path / "nowhere", "--preset=disabled"], capsys)
    assert "no .jsonl file" in refusal([tmp_path, "--preset=disabled"], capsys)

    # The folder of a run without records.
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "is the folder of a run, whose metrics hold no tokens" in refusal([tmp_path, "--preset=disabled"], capsys)
    (tmp_path / "metrics.jsonl").unlink()

    # A page in the place of a record, which stays as it is.
    save_rollouts(scored_batch(), tmp_path / "a.safetensors")
    record = tmp_path / "record"
    save_rollouts(scored_batch(), record)
    before = record.read_bytes()
    assert "is the name of a record" in refusal([record, "--preset=disabled", f"--html={record}"], capsys)
    assert record.read_bytes() == before
    record.unlink()

    # A second record beside a.safetensors, of another temperature.
    sampled_differently = dataclasses.replace(scored_batch(), sampling=SamplingParams(temperature=0.7))
    save_rollouts(sampled_differently, tmp_path / "b.safetensors")
    assert "were sampled differently" in refusal([tmp_path, "--preset=disabled"], capsys)


def test_log_probs_that_are_shifted_are_refused(tmp_path, capsys):
    batch = scored_batch(rows=200, length=40, noise=0.01)
    shifted = torch.roll(batch.old_log_probs.nan_to_num(-1.0), 1, dims=1)
    save_rollouts(dataclasses.replace(batch, old_log_probs=shifted), tmp_path / "a.safetensors")
    assert "are shifted by" in refusal([tmp_path / "a.safetensors", "--preset=disabled"], capsys)


# Corrections and records that the doctor knows


def test_without_presets_those_are_compared_that_the_doctor_would_try(folder, capsys):
    corrections = printed_json([folder, "--json"], capsys)["corrections"]
    names = [correction["name"] for correction in corrections]
    report = examine(read_evidence(folder))
    assert names[0].startswith(report.choice.preset)
    assert [name.split()[0] for name in names] == [effect.choice.preset for effect in report.effects]

    # A grid of two values over each of them.
    of_grid = printed_json([folder, "--json", "--grid=rejection_denominator=accepted,original"], capsys)
    assert len(of_grid["corrections"]) == 2 * len(names)


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
    printed = printed_json([tmp_path / "a.pt", "--json", "--preset=decoupled_token_is"], capsys)
    assert printed["tokens"] == 16
    sequences = {sequence["sample_id"]: sequence for sequence in printed["corrections"][0]["most_affected"]}
    assert [token[0] for token in sequences[0]["tokens"]] == [0, 1, 2, 3, 4, 5]


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
    rows = []
    for index, group_id in enumerate(batch.group_ids.tolist()):
        row = {name: value[index].tolist() for name, value in verl.items()}
        row["group_id"] = group_id
        rows.append(row)

    # The same batch in each format.
    torch.save({"batch": verl}, tmp_path / "a.pt")
    np.savez(tmp_path / "b.npz", uid=uid, **{name: value.numpy() for name, value in verl.items()})
    save_file(verl, tmp_path / "c.safetensors")
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "e.json").write_text(json.dumps([{**row, "token_level_scores": None} for row in rows], indent=1))
    save_rollouts(batch, tmp_path / "own.safetensors")
    write_jsonl([batch], tmp_path / "own.jsonl")

    printed = {}
    for file in sorted(tmp_path.iterdir()):
        assert read_evidence(file).facts["num_tokens"] == int(batch.response_mask.sum())
        printed[file.name] = printed_json([file, "--json", "--preset=decoupled_token_is"], capsys)

    expected = printed.pop("own.safetensors")
    (expected_correction,) = expected["corrections"]
    for name, replay in printed.items():
        (correction,) = replay["corrections"]
        assert replay["tokens"] == expected["tokens"]
        assert correction["weights"]["histogram"] == expected_correction["weights"]["histogram"]
        has_rewards = name != "e.json"
        assert (correction["by_reward"] == expected_correction["by_reward"]) == has_rewards

        # Advantages compare the rewards of a prompt's responses.
        expected_cosine = pytest.approx(expected_correction["gradient"]["cosine"], rel=1e-5)
        has_same_cosine = correction["gradient"]["cosine"] == expected_cosine
        has_prompts_and_rewards = name in ("b.npz", "d.jsonl", "own.jsonl")
        assert has_same_cosine == has_prompts_and_rewards, (
            f"{name}: the gradient is the same if the record has rewards and says which prompt a response is of"
        )

        first_sequence = correction["most_affected"][0]
        assert any(token[0] for token in first_sequence["tokens"])
