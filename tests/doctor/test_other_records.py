"""Records of other programs: what they write in place of log-probs and masks, and the files that they are in."""

import json

import pytest
import torch

from megatron_rc.doctor.__main__ import main
from megatron_rc.doctor.inputs import read_evidence
from megatron_rc.doctor.report import TOO_LITTLE, UNUSABLE, examine
from megatron_rc.doctor.rules import judge
from megatron_rc.replay.__main__ import main as replay
from tests.doctor.test_inputs import lines_without_padding, write_lines
from tests.support.made_faults import made


def names_of(evidence):
    return [verdict.rule.name for verdict in judge(evidence.facts)]


def write_tensors(path, batch):
    torch.save({name: value.clone() for name, value in batch.items()}, path)
    return path


def write_columns(path, batch):
    path.write_text(json.dumps({name: value.tolist() for name, value in batch.items()}))
    return path


WRITERS = pytest.mark.parametrize(
    ("write", "name"), [(write_tensors, "batch.pt"), (write_columns, "batch.jsonl")], ids=["tensors", "lines"]
)


# -- What stands in place of the trainer's log-probs.


def bypass(batch):
    """verl's bypass mode: old_log_probs is a copy of rollout_log_probs."""
    return batch | {"old_log_probs": batch["rollout_log_probs"].clone()}


def forced(batch):
    """NeMo-RL's force_on_policy_ratio: prev_logprobs is zeros_like(generation_logprobs)."""
    return {
        "generation_logprobs": batch["rollout_log_probs"],
        "prev_logprobs": torch.zeros_like(batch["rollout_log_probs"]),
        "token_mask": batch["response_mask"],
    }


@WRITERS
@pytest.mark.parametrize("filled", [bypass, forced])
def test_log_probs_that_no_trainer_computed_are_unknown(tmp_path, capsys, write, name, filled):
    """The engine samples at temperature 0.7, which only the trainer's log-probs could show."""
    path = write(tmp_path / name, filled(made("temperature 0.7", 5)))
    evidence = read_evidence(path)
    assert evidence.sampled.old_log_probs is None
    assert examine(evidence).code == TOO_LITTLE
    note = evidence.notes[0]
    assert "bypass mode" in note
    assert "force_on_policy_ratio" in note
    assert replay([str(path)]) == 2
    assert "bypass mode" in capsys.readouterr().err


@WRITERS
def test_one_token_that_differs_is_a_score(tmp_path, write, name):
    batch = bypass(made(None, 5))
    row, column = batch["response_mask"].nonzero()[0]
    batch["old_log_probs"][row, column] -= 0.001
    assert read_evidence(write(tmp_path / name, batch)).facts["k3_kl"] > 0


# -- Masks.


def without_response_mask(prompt_width):
    """verl's tensors of a healthy batch before the response mask is made: padding has other log-probs."""
    batch = made(None, 5)
    mask = batch.pop("response_mask")
    batch["old_log_probs"] = torch.where(mask, batch["old_log_probs"], -11.0)
    batch["rollout_log_probs"] = torch.where(mask, batch["rollout_log_probs"], 0.0)
    return batch | {"attention_mask": torch.nn.functional.pad(mask.long(), (prompt_width, 0), value=1)}


@WRITERS
@pytest.mark.parametrize("prompt_width", [0, 7])
def test_the_attention_mask_serves_without_a_response_mask(tmp_path, write, name, prompt_width):
    batch = without_response_mask(prompt_width)
    evidence = read_evidence(write(tmp_path / name, batch))
    assert evidence.facts["num_tokens"] == batch["attention_mask"][:, prompt_width:].sum()
    assert names_of(evidence) == []
    assert not evidence.notes


@WRITERS
def test_a_narrow_attention_mask_is_refused(tmp_path, capsys, write, name):
    batch = without_response_mask(0)
    batch["attention_mask"] = batch["attention_mask"][:, 1:]
    assert main([str(write(tmp_path / name, batch))]) == UNUSABLE
    assert "response_mask has" in capsys.readouterr().err


@WRITERS
def test_a_record_without_any_mask_says_so(tmp_path, capsys, write, name):
    batch = without_response_mask(0)
    del batch["attention_mask"]
    path = write(tmp_path / name, batch)
    (note,) = read_evidence(path).notes
    assert "every position is judged" in note
    assert replay([str(path), "--preset", "decoupled_token_is"]) == 0
    assert "every position is judged" in capsys.readouterr().out


def test_a_response_without_a_token_has_an_empty_mask(tmp_path):
    """The attention mask of its prompt is longer than its log-probs."""
    with_tokens = {"rollout_log_probs": [-1.0, -2.0], "old_log_probs": [-1.0, -2.1], "attention_mask": [1, 1, 1, 1]}
    without_tokens = {"rollout_log_probs": [], "old_log_probs": [], "attention_mask": [1, 1]}
    path = write_lines(tmp_path / "batch.jsonl", [with_tokens, without_tokens])
    assert read_evidence(path).facts["num_tokens"] == 2


def test_responses_of_different_lengths_need_no_mask(tmp_path):
    lines = lines_without_padding(made("temperature 1.4", 5))
    assert not read_evidence(write_lines(tmp_path / "batch.jsonl", lines)).notes


# -- slime's files.


def test_slimes_second_format_of_training_data(tmp_path):
    """Since 624b824 --save-debug-train-data writes a dict of tensors for each sample."""
    batch = made("temperature 0.7", 5)
    samples = [
        {
            "data_parallel_rank": 0,
            "sample_index": row,
            "tokens": torch.arange(count + 3),
            "response_lengths": count,
            "loss_masks": torch.ones(count, dtype=torch.int),
            "rewards": 0.5,
            "rollout_log_probs": batch["rollout_log_probs"][row, :count].clone(),
            "log_probs": batch["old_log_probs"][row, :count].clone(),
        }
        for row, count in enumerate(batch["response_mask"].sum(dim=1).tolist())
    ]
    payload = {"format_version": 2, "rollout_id": 3, "rank": 0, "samples": samples, "dp_shards": [{}]}
    torch.save(payload, tmp_path / "3.pt")
    evidence = read_evidence(tmp_path / "3.pt")
    assert names_of(evidence) == ["temperature"]
    assert evidence.program == "slime"
    assert evidence.sampled.rewards.tolist() == [0.5] * len(samples)
