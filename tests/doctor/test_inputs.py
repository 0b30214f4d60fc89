"""What the doctor reads: runs, batches and exports of any program; and one sentence for what it cannot use."""

import csv
import dataclasses
import functools
import json
import math
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_rc import save_rollouts, write_jsonl
from megatron_rc.doctor.__main__ import main
from megatron_rc.doctor.inputs import read_evidence
from megatron_rc.doctor.rules import judge
from megatron_rc.records import tensor_files
from megatron_rc.replay.__main__ import main as replay
from tests.support.exported_runs import exported
from tests.support.made_faults import made
from tests.support.made_rollouts import made_batch


def names_of(path):
    return [verdict.rule.name for verdict in judge(read_evidence(path).facts)]


def batch_of(fault, seed=5):
    """The record of a made batch: a prompt of one token in front of each response."""
    batch = {name: torch.nn.functional.pad(value, (1, 0)) for name, value in made(fault, seed).items()}
    mask = batch.pop("response_mask")
    rollout = batch.pop("rollout_log_probs")
    rewards = torch.arange(len(mask)).float() % 3 - 1
    return made_batch(torch.ones(mask.shape, dtype=torch.int64), mask, rollout, rewards, **batch)


@functools.cache
def metrics_of(fault, **fields):
    """What a run logs of a made batch."""
    return exported(made(fault, 5), {"rollout_is": "token"}, **fields)


def write_lines(path, objects):
    path.write_text("".join(json.dumps(value) + "\n" for value in objects))
    return path


@pytest.mark.parametrize("fault", ["temperature 0.7", "staleness"])
def test_own_batches(tmp_path, fault):
    batch = batch_of(fault)
    expected = [fault.split()[0]]
    save_rollouts(batch, tmp_path / "one.safetensors")
    assert names_of(tmp_path / "one.safetensors") == expected
    assert names_of(tmp_path) == expected
    write_jsonl([batch], tmp_path / "one.jsonl")
    assert names_of(tmp_path / "one.jsonl") == expected
    text = (tmp_path / "one.jsonl").read_text()
    for same_text in (f"\ufeff\n{text}\n", f"[{text.strip().replace(chr(10), ',')}]"):
        (tmp_path / "one.jsonl").write_text(same_text, encoding="utf-8")
        assert names_of(tmp_path / "one.jsonl") == expected


def test_the_last_batch_of_a_folder_with_all_its_replicas(tmp_path):
    half = batch_of("shift").num_sequences // 2
    save_rollouts(batch_of("temperature 0.7"), tmp_path / "step-0000001-replica-0000.safetensors")
    for replica, rows in enumerate((slice(half), slice(half, None))):
        save_rollouts(batch_of("shift").rows(rows), tmp_path / f"step-0000002-replica-{replica:04d}.safetensors")
    evidence = read_evidence(tmp_path)
    assert [verdict.rule.name for verdict in judge(evidence.facts)] == ["shift"]
    assert evidence.facts["num_sequences"] == 2 * half


def test_a_last_batch_that_no_step_finished_gives_way_to_the_one_before(tmp_path):
    """A run that ends between the steps of a batch never writes the trainer's log-probs into its record."""
    unfinished = dataclasses.replace(batch_of("temperature 0.7"), old_log_probs=None, log_probs=None)
    save_rollouts(unfinished, tmp_path / "step-0000002-replica-0000.safetensors")
    assert any("no log-probs of the trainer" in note for note in read_evidence(tmp_path).notes)
    save_rollouts(batch_of("shift"), tmp_path / "step-0000001-replica-0000.safetensors")
    evidence = read_evidence(tmp_path)
    assert not evidence.notes
    assert "step-0000001, the last of its batches that has log-probs of the trainer" in evidence.what
    assert [verdict.rule.name for verdict in judge(evidence.facts)] == ["shift"]


@pytest.mark.parametrize(("step", "expected"), [(0, "precision"), (4, "staleness")])
def test_the_step_in_a_records_name_says_how_old_the_weights_were(tmp_path, step, expected):
    """All tokens of such a batch are of one version: only the step tells that it is an old one."""
    save_rollouts(batch_of("fp8"), tmp_path / f"step-{step:07d}-replica-0000.safetensors")
    assert names_of(tmp_path) == [expected]
    assert names_of(next(tmp_path.iterdir())) == [expected]


def test_other_programs_records(tmp_path):
    """Lines as slime's samples, NeMo-RL's training data and verl's columns have them."""
    batch = made("temperature 1.4", 5)
    slime = []
    nemo = []
    for row, count in enumerate(batch["response_mask"].sum(dim=1).tolist()):
        rollout, old = (batch[name][row, :count].tolist() for name in ("rollout_log_probs", "old_log_probs"))
        ones = [1] * count
        slime.append({"rollout_log_probs": rollout, "log_probs": old, "loss_mask": ones, "reward": 1.0, "index": row})
        padded = {"generation_logprobs": [0.0, *rollout], "prev_logprobs": [0.0, *old], "token_loss_mask": [0, *ones]}
        nemo.append({**padded, "sample_loss_mask": 1.0, "rewards": 0.5, "token_ids": [7, *ones]})
    nemo[3] |= {"sample_loss_mask": 0.0, "prev_logprobs": [None] * len(nemo[3]["prev_logprobs"])}
    verl = {name: batch[name] for name in ("rollout_log_probs", "old_log_probs", "response_mask")}
    verl["token_level_scores"] = batch["response_mask"] * torch.linspace(-1, 1, len(verl["response_mask"])).unsqueeze(1)
    columns = {name: value.tolist() for name, value in verl.items()}
    for name, objects in (("slime", slime), ("nemo", nemo), ("verl", [columns])):
        assert names_of(write_lines(tmp_path / f"{name}.jsonl", objects)) == ["temperature"], name
    torch.save(verl, tmp_path / "verl.pt")
    for name in ("verl.jsonl", "verl.pt"):  # the sums of the tokens' scores are the rewards
        rewards = read_evidence(tmp_path / name).sampled.rewards
        torch.testing.assert_close(rewards, verl["token_level_scores"].sum(dim=1))
    wrong = {"rollout_log_probs": batch["rollout_log_probs"].contiguous(), "response_mask": torch.ones(2, 3)}
    save_file(wrong, tmp_path / "verl.safetensors")
    with pytest.raises(ValueError, match=r"response_mask has shape \(2, 3\): expected"):
        names_of(tmp_path / "verl.safetensors")


def lines_without_padding(batch):
    """A line for each response, of its sampled tokens alone, without a mask."""
    counts = batch["response_mask"].sum(dim=1).tolist()
    names = ("rollout_log_probs", "old_log_probs")
    return [{name: batch[name][row, :count].tolist() for name in names} for row, count in enumerate(counts)]


def test_responses_that_the_trainer_did_not_score_are_left_out(tmp_path):
    batch = made("temperature 1.4", 5)
    lines = lines_without_padding(batch)
    del lines[0]["old_log_probs"]
    evidence = read_evidence(write_lines(tmp_path / "m.jsonl", lines))
    assert evidence.facts["num_tokens"] == batch["response_mask"][1:].sum()
    assert not evidence.notes
    assert [verdict.rule.name for verdict in judge(evidence.facts)] == ["temperature"]


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [((3, 0), np.float64, "no response has a sampled token"), ((3, 5), np.complex128, "expected real numbers")],
)
@pytest.mark.parametrize("command", [main, replay])
def test_arrays_that_hold_no_log_probs_are_one_sentence(tmp_path, capsys, command, shape, dtype, message):
    log_probs = -np.ones(shape, dtype)
    np.savez(tmp_path / "b.npz", rollout_log_probs=log_probs, old_log_probs=log_probs)
    assert command([str(tmp_path / "b.npz")]) == 2
    assert message in capsys.readouterr().err


def test_no_correction_is_tried_on_a_batch_without_a_usable_token(tmp_path, capsys):
    """Probabilities in place of log-probs."""
    line = {"rollout_log_probs": [0.5] * 20, "old_log_probs": [0.6] * 20}
    assert main([str(write_lines(tmp_path / "m.jsonl", [line] * 4))]) == 1
    text = capsys.readouterr().out
    assert "(unusable)" in text
    assert "no token has usable log-probs" in text
    assert "on this batch" not in text


def test_a_runs_folder(tmp_path):
    row = metrics_of(None)
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "eval/reward": 0.5}, {"step": 1, **row}, {"step": 2, **row}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rollout_co')  # the run was killed
    assert names_of(tmp_path) == []
    assert "2 steps" in read_evidence(tmp_path).what
    (tmp_path / "config.yaml").write_text("# of a run\npolicy-loss: gspo\n# rollout-is: sequence\n")
    assert names_of(tmp_path) == ["gspo_with_sequence_weights"]
    (tmp_path / "config.yaml").write_text("# metric-prefix: 'mine/'\n")
    mine = {name.replace("rollout_corr/", "mine/"): value for name, value in metrics_of("int4").items()}
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, **mine}])
    assert names_of(tmp_path) == ["precision"]


def test_exports(tmp_path):
    """verl's file logger, NeMo-RL's columns by step, lists, one JSON array, W&B's CSV, and TensorBoard's named."""
    row = metrics_of("int4")
    columns = {name: {"1": value, "2": value} for name, value in row.items()}
    for text in (
        json.dumps({"step": 1, "data": row}) + "\n",
        json.dumps(columns),
        json.dumps({name: [value, value] for name, value in row.items()}),
        json.dumps([row, row], indent=2),
    ):
        (tmp_path / "file.json").write_text(text)
        assert names_of(tmp_path / "file.json") == ["precision"]
    with (tmp_path / "wandb.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        name = "my run - rollout_corr/k3_kl"
        writer.writerow(["Step", name, f"{name}__MIN", f"{name}__MAX"])
        writer.writerows([[step, row["rollout_corr/k3_kl"], 0, 9] for step in range(3)])
        writer.writerow([4, "", "", ""])
    assert names_of(tmp_path / "wandb.csv") == ["precision"]
    lines = [f"1700000000,{step},{row['rollout_corr/k3_kl']}\n" for step in range(3)]
    (tmp_path / "board.csv").write_text("Wall time,Step,rollout_corr/k3_kl\n" + "".join(lines))
    assert names_of(tmp_path / "board.csv") == ["precision"]


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("was here",)


@pytest.mark.parametrize("name", ["batch.pt", "batch.npz"])
def test_nothing_in_a_file_of_tensors_runs(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    if name == "batch.pt":
        torch.save({"rollout_log_probs": torch.ones(1, 1), "more": Hostile()}, tmp_path / name)
    else:
        np.savez(tmp_path / name, rollout_log_probs=np.array([Hostile()], dtype=object))
    with pytest.raises(ValueError, match="could run code and are not read") as raised:
        read_evidence(tmp_path / name)
    assert "weights_only" not in str(raised.value), "PyTorch proposes to load it without a check"
    assert not (tmp_path / "was here").exists()


def test_what_unpacks_to_too_much_is_refused_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "MOST_BYTES", 10_000)
    np.savez_compressed(tmp_path / "a.npz", rollout_log_probs=np.zeros((100, 100)))
    assert (tmp_path / "a.npz").stat().st_size < 1000
    with pytest.raises(ValueError, match="unpacks to 80128 bytes"):
        read_evidence(tmp_path / "a.npz")


def test_metrics_pass_one_by_one(tmp_path):
    """A row was 35 KB of memory: 10^6 rows would have been 35 GB."""
    row = json.dumps({f"train/other_{number}": 0.5 for number in range(100)} | metrics_of(None))
    with (tmp_path / "m.jsonl").open("w") as file:
        for step in range(400):
            file.write(f'{{"step": {step}, {row[1:]}\n')
    tracemalloc.start()
    evidence = read_evidence(tmp_path / "m.jsonl")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "400 steps" in evidence.what
    assert peak < 2 << 20


def test_a_pipe_is_read_once():
    """As a shell's ``<(zcat metrics.jsonl.gz)``: more bytes than one read takes."""
    (reader, writer), row = os.pipe(), metrics_of(None)
    with os.fdopen(writer, "w") as file:
        file.write("".join(json.dumps({"step": step, **row}) + "\n" for step in range(9)))
    with os.fdopen(reader):
        assert ": 9 steps" in read_evidence(Path(f"/dev/fd/{reader}")).what


def test_metrics_with_nan_are_told_and_beyond_their_limits(tmp_path):
    row = metrics_of(None)
    write_lines(tmp_path / "m.jsonl", [row, row | {"rollout_corr/kl": float("nan")}, row])
    evidence = read_evidence(tmp_path / "m.jsonl")
    (note,) = evidence.notes
    assert note.startswith("1 rows have a metric that is NaN or infinite")
    assert evidence.facts["beyond_kl"] == math.inf
    assert evidence.facts["beyond_count"] == 1


@pytest.mark.parametrize("name", ["grad_norm", "reward/mean", "rollout_corr/chi2_seq"])
def test_a_number_that_is_nan_hides_no_other(tmp_path, name):
    """A k3 of 0.5 in all batches but the last, beside a skipped step's gradient norm or an overflow."""
    far = {"rollout_corr/k3_kl": 0.5, "rollout_corr/kl": 0.5, name: math.nan}
    near = {"rollout_corr/k3_kl": 5e-4, "rollout_corr/kl": 5e-4, name: 1.0}
    write_lines(tmp_path / "m.jsonl", [{"step": step, **(far if step < 50 else near)} for step in range(1, 51)])
    assert read_evidence(tmp_path / "m.jsonl").facts["k3_kl"] == 0.5
    assert main([str(tmp_path / "m.jsonl")]) == 1


BAD = {
    "empty.jsonl": ("", "is empty"),
    "nan.jsonl": ('{"step": 1, "rollout_corr/kl": NaN}\n' * 2, "all 2 rows have a number that is NaN"),
    "columns.csv": ("Step,loss\n1,0.5\n", "has no metric of the two policies (its names: Step, loss)"),
    "verl.jsonl": (
        '{"input": "1+1", "output": "2", "gts": "2", "score": 1.0, "step": 7}\n' * 2,
        "has responses without log-probs, as in verl's rollout_data_dir",
    ),
    "value.csv": ("Wall time,Step,Value\n1,2,3\n", "is TensorBoard's table of one metric"),
    "two.csv": ("Step,a - rollout_corr/kl,b - rollout_corr/kl\n1,0,0\n", "both kl: export one run"),
    "length.jsonl": ('{"step": 1, "rollout/response_length": 5.0}', "has no metric"),
    "damaged.jsonl": ('{"a": 1}\n{"a"\n{"a": 1}\n', "line 2 "),
    "cut.jsonl": ('{"rollout_corr/k', "line 1 "),
    "no_mask.jsonl": ('{"rollout_log_probs": [-1.0], "response_mask": [0]}', "no response has a sampled token"),
    "short.jsonl": ('{"rollout_log_probs": [-1.0, -2.0], "old_log_probs": [-1.0]}', "old_log_probs has 1"),
    "one_token.json": (
        '[{"inference_logprobs": -1.0, "trainer_logprobs": -11.0, "mismatch_kl": 0.0}]',
        "its log-probs as lists",
    ),
    "list_first.jsonl": (
        '{"rollout_corr/k3_kl": [1, 2]}\n{"step": 2, "rollout_corr/k3_kl": 1}\n',
        "rollout_corr/k3_kl has a number for each token",
    ),
    "lacking.jsonl": ('{"rollout_log_probs": [-1.0]}\n{"reward": 1}\n', "response 1 has no rollout_log_probs"),
    "own.jsonl": ('{"schema_version": 1, "tokens": [1]}', "line 1: fields unknown or missing"),
    "batch.pkl": ("PK", "pickled ones can run code"),
    "batch.pt": ("PK", "is no dict of tensors"),
    "wide.csv": (f'Step,note,rollout_corr/kl\n1,"{"x" * 140_000}",0\n', "line 2 "),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_input_is_one_sentence(tmp_path, capsys, name):
    text, message = BAD[name]
    (tmp_path / name).write_text(text)
    assert main([str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_paths_that_hold_nothing(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "neither metrics.jsonl" in capsys.readouterr().err
    assert main([str(tmp_path / "gone")]) == 2
    assert "gone cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    assert main([str(tmp_path / "bytes.jsonl")]) == 2
    assert "not a text file" in capsys.readouterr().err
