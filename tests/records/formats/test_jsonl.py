"""Records as JSON lines."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings

from megatron_rc.records.formats.jsonl import from_json_lines, read_jsonl, to_json_lines, write_jsonl
from megatron_rc.records.rollout import RolloutBatch, SamplingParams
from tests.support.records import batches, changed, cut, example, identical, known


@settings(max_examples=25, deadline=None)
@given(batch=batches())
def test_lines_keep_what_a_record_says(batch):
    (read_batch,) = from_json_lines(to_json_lines(batch), batch_size=10)
    assert identical(read_batch, cut(known(batch)))


def test_lines_are_plain_json():
    first, *_ = map(json.loads, to_json_lines(example()))
    assert first == {
        "schema_version": 1,
        "sample_id": 7,
        "group_id": 3,
        "reward": 0.5,
        "finish_reason": "stop",
        "sampling": {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "log_probs_mode": "processed", "min_p": 0.0},
        "tokens": [11, 12, 13, 14, 15, 16],
        "response_mask": [0, 0, 1, 0, 0, 1],
        "rollout_log_probs": [None, None, -0.125, None, None, -0.3125],
        "policy_versions": [None, None, 4, None, None, 4],
        "routed_experts": example().routed_experts[0, :6].tolist(),
    }


def test_files_of_lines_are_read_batch_by_batch(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    batch = example()
    untruncated = dataclasses.replace(example(False), sampling=SamplingParams())
    assert write_jsonl((part for part in (batch, untruncated)), path) == 6
    read_batches = list(read_jsonl(path, batch_size=2))
    assert [part.sample_ids.tolist() for part in read_batches] == [[7, 5], [9], [7, 5], [9]]
    assert [part.sampling.temperature for part in read_batches] == [0.5, 0.5, 1.0, 1.0]
    assert identical(RolloutBatch.concatenate(read_batches[:2]), known(batch))
    path.write_text(path.read_text().rstrip("\n"))  # the last line may lack its end
    assert sum(part.num_sequences for part in read_jsonl(path, batch_size=64)) == 6


def test_reading_holds_one_batch_at_a_time():
    taken = []
    lines = (taken.append(line) or line for line in to_json_lines(example()))
    first = next(from_json_lines(lines, batch_size=1))
    assert first.sample_ids.tolist() == [7]
    assert len(taken) == 2


def record(**change):
    """The first line of the example with other fields."""
    return json.dumps(json.loads(next(to_json_lines(example()))) | change)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (record()[:-9], "line 2: no JSON"),
        ("[]", "line 2: a JSON list: expected an object"),
        ("{}", "schema_version is missing: this is no record"),
        (record(text="hello"), "fields unknown or missing: text"),
        (record(tokens=[1, 2.5, 3, 4, 5, 6]), "tokens: expected a list of integers"),
        (record(tokens=[1, 2]), "response_mask: expected 0 or 1 for each of 2 tokens"),
        (record(rollout_log_probs=[None] * 6), "rollout_log_probs has None at token 2: expected a number, or null if"),
        (record(rollout_log_probs=[math.nan] * 6), "NaN is no JSON: .* null"),
        (record(policy_versions=[2**31] * 6), "policy_versions has numbers beyond 32 bits"),
        (record(sample_id="7"), "sample_id is '7': expected an integer"),
        (record(finish_reason="eos"), "finish_reason is 'eos': expected one of stop, length, abort"),
        (record(sampling={"temperature": 1.0}), "sampling parameters: log_probs_mode, top_k, top_p unknown or missing"),
        (record(routed_experts=[[[1]]]), r"routed_experts has shape \(1, 1, 1\): expected \(6, any, any\)"),
    ],
)
def test_lines_that_are_no_records_are_named(line, message):
    with pytest.raises(ValueError, match=message):
        list(from_json_lines([record(), line], batch_size=4))


def test_files_of_lines_that_are_damaged_are_named(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_jsonl([example()], path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"rollouts.jsonl: line 3: no JSON"):
        list(read_jsonl(path, batch_size=2))
    path.write_bytes(whole + b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"rollouts.jsonl is no text: expected JSON lines in UTF-8"):
        list(read_jsonl(path, batch_size=2))
    with pytest.raises(FileNotFoundError, match="nowhere is missing"):
        read_jsonl(tmp_path / "nowhere", batch_size=2)
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        read_jsonl(path, batch_size=0)


def test_lines_cannot_say_nan(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("old")
    with pytest.raises(ValueError, match="sample 5 has a log-prob or a reward that is not finite"):
        write_jsonl([changed(example(), "rewards", math.nan, 1)], path)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_lines_say_null_of_tokens_that_the_trainer_did_not_score():
    batch = dataclasses.replace(example(), old_log_probs=torch.where(example().tokens == 25, torch.nan, -0.5))
    lines = list(to_json_lines(batch))
    assert json.loads(lines[1])["old_log_probs"] == [None, None, -0.5, None]
    (read_batch,) = from_json_lines(lines, batch_size=3)
    assert read_batch.old_log_probs[1, :4].isnan().tolist() == [False, False, False, True]
    bad = record(old_log_probs=[None, None, "x", None, None, -0.5])
    with pytest.raises(ValueError, match="line 1: old_log_probs has 'x' at token 2"):
        list(from_json_lines([bad], batch_size=1))


def test_lines_have_the_rewards_of_turns():
    batch = dataclasses.replace(example(), turn_rewards=torch.where(example().tokens == 25, 0.5, 0.0))
    lines = list(to_json_lines(batch))
    assert json.loads(lines[1])["turn_rewards"] == [None, None, 0.0, 0.5]
    (read_batch,) = from_json_lines(lines, batch_size=3)
    mask = batch.response_mask
    assert torch.equal(read_batch.turn_rewards[mask], batch.turn_rewards[mask])
    with pytest.raises(ValueError, match="line 1: turn_rewards has None at token 2"):
        list(from_json_lines([record(turn_rewards=[None, None, None, None, None, 0.5])], batch_size=1))
