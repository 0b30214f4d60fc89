"""The tokens that an engine kept: the record's methods against lists of lists, readers of other forms, bad records."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rc.doctor.sampled import Sampled
from megatron_rc.records.formats.jsonl import from_json_lines, to_json_lines
from megatron_rc.records.formats.slime import from_slime, to_slime
from megatron_rc.records.rollout import RolloutBatch, SamplingParams, load_rollouts, save_rollouts
from megatron_rc.records.support import sorted_support, support_of, take_support
from tests.support.records import HALF, example, identical

TRUNCATED = dataclasses.replace(HALF, top_p=0.8)
# Kept tokens of each column of the example; the sampled token is among them. One sampled token has all tokens.
LISTS = [
    [[], [], [13, 2, 38], [], [], [16], [], []],
    [[], [], [], [25, 24], [], [], [], []],
    [[], [], [], [], [], [36, 1], [3, 37], [38]],
]


def with_support(batch, lists=LISTS):
    ids, counts = support_of([ids for row in lists for ids in row])
    counts = counts.view(batch.tokens.shape)
    return dataclasses.replace(batch, sampling=TRUNCATED, support_ids=ids, support_counts=counts)


def lists_of(batch):
    ids = batch.support_ids.tolist()
    lists = []
    for row in batch.support_counts.tolist():
        lists.append([])
        for count in row:
            lists[-1].append(ids[:count])
            ids = ids[count:]
    assert not ids
    return lists


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_positions_are_taken_as_from_a_list(data):
    lists = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=8))
    index = data.draw(st.lists(st.integers(-1, len(lists) - 1), max_size=8))
    ids, counts = take_support(*support_of(lists), torch.tensor(index, dtype=torch.int64))
    expected = [[] if position < 0 else lists[position] for position in index]
    assert counts.tolist() == [len(tokens) for tokens in expected]
    assert ids.tolist() == [token for tokens in expected for token in tokens]
    assert ids.dtype == counts.dtype == torch.int32


def test_rows_columns_and_concatenation_keep_each_tokens_ids():
    batch = with_support(example())
    batch.validate(vocab_size=39)
    assert lists_of(batch.rows([2, 0])) == [LISTS[2], LISTS[0]]
    assert lists_of(batch.rows(slice(1, 2))) == LISTS[1:2]
    assert lists_of(batch.rows(torch.tensor([True, False, True]))) == [LISTS[0], LISTS[2]]
    assert lists_of(batch.rows([])) == []
    assert lists_of(batch.at_length(10)) == [[*row, [], []] for row in LISTS]
    assert lists_of(batch.rows([0, 1]).at_length(6)) == [row[:6] for row in LISTS[:2]]
    joined = RolloutBatch.concatenate([batch.rows([1]).at_length(4), batch.rows([0, 2])])
    assert lists_of(joined) == [LISTS[1], LISTS[0], LISTS[2]]
    with pytest.raises(ValueError, match="only some batches have support_ids: keep them apart"):
        RolloutBatch.concatenate([batch, dataclasses.replace(batch, support_ids=None, support_counts=None)])


@settings(max_examples=50, deadline=None)
@given(lists=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=8))
def test_sorted_supports_have_each_id_once_in_ascending_order(lists):
    ids, counts = sorted_support(*support_of(lists))
    expected = [sorted(set(kept_ids)) for kept_ids in lists]
    assert counts.tolist() == [len(kept_ids) for kept_ids in expected]
    assert ids.tolist() == [token_id for kept_ids in expected for token_id in kept_ids]
    assert ids.dtype == counts.dtype == torch.int32


def test_a_batch_with_sorted_supports_has_those_of_sampled_tokens_alone():
    lists = [list(row) for row in LISTS]
    lists[0][3] = [-1, 2]  # of a tool's answer, which nobody reads
    assert lists_of(with_support(example(), lists).with_sorted_support()) == [
        [sorted(kept_ids) for kept_ids in row] for row in LISTS
    ]
    assert example().with_sorted_support() is not None


def test_labels_have_the_ids_of_the_next_token_if_it_was_sampled():
    lists = [list(row) for row in LISTS]
    lists[0][3] = [1, 2]  # a tool's answer
    ids, counts = with_support(example(), lists).label_support()
    assert counts.tolist() == [[len(ids) for ids in (*row[1:], [])] for row in LISTS]
    assert ids.tolist() == [token for row in LISTS for tokens in row for token in tokens]
    assert example().label_support() is None


def test_files_and_lines_keep_them(tmp_path):
    batch = with_support(example())
    save_rollouts(batch, tmp_path / "file")
    assert identical(load_rollouts(tmp_path / "file"), batch)
    lines = list(to_json_lines(batch))
    assert json.loads(lines[1])["support"] == LISTS[1][:4]
    (read_batch,) = from_json_lines(lines, batch_size=3)
    assert lists_of(read_batch) == LISTS
    plain = to_json_lines(dataclasses.replace(batch, support_ids=None, support_counts=None))
    assert len(list(from_json_lines([*lines, *plain], batch_size=6))) == 2
    wrong = json.loads(lines[1]) | {"support": [[1]]}
    with pytest.raises(ValueError, match="line 1: support has 1 lists: expected 4, one for each token"):
        list(from_json_lines([json.dumps(wrong)], batch_size=1))


def test_slime_has_offsets_for_the_response_alone():
    batch = with_support(example(False))
    samples = to_slime(batch)
    assert samples[0]["rollout_top_p_token_ids"].tolist() == [13, 2, 38, 16]
    assert samples[0]["rollout_top_p_token_offsets"].tolist() == [0, 3, 3, 3, 4]
    assert lists_of(from_slime(samples, sampling=TRUNCATED)) == LISTS
    names = {"rollout_top_p_token_ids": "rollout_sampling_mask_ids"}  # miles
    names["rollout_top_p_token_offsets"] = "rollout_sampling_mask_offsets"
    renamed = [{names.get(name, name): value for name, value in sample.items()} for sample in samples]
    assert lists_of(from_slime(renamed, sampling=TRUNCATED)) == LISTS
    samples[0]["rollout_top_p_token_offsets"] = [0, 4]
    with pytest.raises(ValueError, match="rollout_top_p_token_offsets has 2 numbers: expected 5"):
        from_slime(samples, sampling=TRUNCATED)


def test_the_four_forms_are_one():
    expected = ([5, 6, 7], [2, 0, 1])
    for kept, more in (
        ([[5, 6], [], [7]], {}),
        ([5, 6, 7], {"offsets": [0, 2, 2, 3]}),
        (torch.tensor([5, 6, 7]), {"offsets": torch.tensor([0, 2, 2, 3])}),
        ([5, 6, 7], {"counts": [2, 0, 1]}),
    ):
        ids, counts = support_of(kept, **more)
        assert (ids.tolist(), counts.tolist()) == expected
        assert ids.dtype == counts.dtype == torch.int32


@pytest.mark.parametrize(
    ("kept", "more", "message"),
    [
        (7, {}, "the kept tokens are int: expected a list of token ids for each position"),
        ([[1], 2], {}, "the kept tokens of position 1 are 2: expected a list of token ids"),
        ([1.5], {"counts": [1]}, r"the kept tokens are torch.float32 \(1,\): expected a list of integers of 32 bits"),
        ([1, 2], {"counts": [1]}, "2 kept tokens, but their counts sum to 1, or .*: the record is damaged"),
        ([1, 2], {"offsets": [1, 2]}, r"the offsets of the kept tokens begin with \[1\]: expected 0"),
    ],
)
def test_other_forms_are_refused(kept, more, message):
    with pytest.raises(ValueError, match=message):
        support_of(kept, **more)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"support_counts": None}, "support_counts is None: give support_ids and support_counts"),
        ({"support_ids": torch.zeros(3, dtype=torch.int32)}, "support_ids has 3 ids, support_counts 11"),
        ({"support_ids": torch.zeros(11, 1, dtype=torch.int32)}, r"support_ids has shape \(11, 1\): expected a list"),
    ],
)
def test_a_damaged_record_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(with_support(example()), **change).validate()


def test_ids_that_cannot_be_right_are_refused():
    for ids, problem in (([1, 2, 38], "lacks the sampled token 13"), ([13, 39, 2], "has ids that are no tokens of")):
        batch = with_support(example(), [[[], [], ids, *LISTS[0][3:]], *LISTS[1:]])
        with pytest.raises(ValueError, match=f"the support of sample 7, token 2 {problem}"):
            batch.validate(vocab_size=39)


def test_truncated_sampling_is_accepted_with_them_alone():
    batch = with_support(example())
    batch.validate()
    for truncation in ({"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.1}):
        sampling = dataclasses.replace(HALF, **truncation)
        assert sampling.is_truncated
        without = dataclasses.replace(batch, sampling=sampling, support_ids=None, support_counts=None)
        without.validate(allow_truncated_sampling=True)
        with pytest.raises(ValueError, match="record the tokens that the engine kept"):
            without.validate()
    assert not HALF.is_truncated


def test_log_probs_of_zero_are_right_if_one_token_was_kept():
    batch = RolloutBatch.concatenate([example().rows([0]).at_length(24)])
    mask = (torch.arange(24) > 2).unsqueeze(0)
    batch = dataclasses.replace(batch, response_mask=mask, rollout_log_probs=torch.zeros(1, 24), sampling=TRUNCATED)
    sampled_ids = batch.tokens[mask].int()
    dataclasses.replace(batch, support_ids=sampled_ids, support_counts=mask.int()).validate()
    two = dataclasses.replace(batch, support_ids=sampled_ids.repeat_interleave(2), support_counts=2 * mask.int())
    with pytest.raises(ValueError, match=r"all rollout log-probs of sample 7 are 0\.0, at 21 sampled tokens"):
        two.validate()


def test_older_records_have_no_min_p():
    older = {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "log_probs_mode": "processed"}
    assert SamplingParams.from_dict(older) == HALF


def test_the_doctor_takes_log_probs_over_kept_tokens_for_untruncated():
    """The trainer's log-probs are over the same tokens, so top_p 0.8 is no fault."""
    assert Sampled.of_batch(with_support(example())).sampling == HALF
