"""The record of rollouts: its checks and its methods."""

import dataclasses
import math

import pytest
import torch

from megatron_rc.records.checks import TRAINER_LOG_PROBS
from megatron_rc.records.rollout import NO_EXPERT, RolloutBatch, SamplingParams
from tests.support.records import FIELDS, changed, example, identical, known


def test_a_good_batch_passes():
    batch = example()
    batch.validate(vocab_size=39)
    batch.to("cpu").validate()
    batch.rows([]).validate()
    dataclasses.replace(batch, sampling=SamplingParams(log_probs_mode="raw")).validate()
    dataclasses.replace(batch, sampling=SamplingParams(top_p=0.9, top_k=20)).validate(allow_truncated_sampling=True)
    changed(batch, "rollout_log_probs", 9e-5, (0, 2)).validate()
    for filler in (math.nan, math.inf, 1.0):
        changed(batch, "rollout_log_probs", filler, ~batch.response_mask).validate()
    changed(batch, "policy_versions", -1, ~batch.response_mask).validate()
    changed(batch, "sample_ids", 2**21 - 1, 0).validate()
    with pytest.raises(TypeError, match="rewards is list: expected a tensor"):
        dataclasses.replace(batch, rewards=[1.0, 2.0, 3.0]).validate()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", torch.zeros(3, dtype=torch.int64), r"tokens has shape \(3,\): expected \[sequences, length\]"),
        ("response_mask", torch.zeros(3, 8).long(), "response_mask is torch.int64: expected bool"),
        ("rollout_log_probs", torch.zeros(3, 8).bfloat16(), "rollout_log_probs is torch.bfloat16: expected float32 or"),
        ("sample_ids", torch.zeros(3, 1).long(), r"sample_ids has shape \(3, 1\): expected \(3,\), one for each row"),
        ("routed_experts", torch.zeros(3, 8, 2).int(), r"routed_experts has shape .* expected \(3, 8\) \+"),
        ("routed_experts", torch.zeros(3, 8, 2, 2).byte(), "routed_experts is torch.uint8: expected signed"),
        ("rewards", torch.zeros(3, device="meta"), r"rewards is on meta, tokens on cpu: move the batch with"),
    ],
)
def test_wrong_shapes_dtypes_and_devices_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(example(), **{name: value}).validate()


@pytest.mark.parametrize(
    ("name", "value", "at", "message"),
    [
        ("response_mask", True, (1, 0), "sample 5: its first token is marked as sampled, but nothing stands before it"),
        ("tokens", -1, (2, 3), "the token id of sample 9, token 3 is -1: expected 0 or more, padding included"),
        ("tokens", 39, (1, 1), "the token id of sample 5, token 1 is 39: expected less than the vocabulary's 39"),
        ("rollout_log_probs", math.nan, (0, 5), "the rollout log-prob of sample 7, token 5 is nan: expected a finite"),
        ("rollout_log_probs", 2e-4, (1, 3), r"sample 5, token 3 is 0\.00019"),
        ("policy_versions", -1, (1, 2), "the policy version of sample 5, token 2 is -1: expected 0 or more"),
        ("sample_ids", 5, 2, "sample_ids must be unique: 2 .* 5"),
        ("sample_ids", 2**21, 1, "sample_ids has 2097152: expected 0 to 2097151: number the samples"),
        ("group_ids", -2, 0, "the group id of sample 7 is -2: expected 0 or more"),
        ("rewards", math.nan, 1, "the reward of sample 5 is nan: expected a finite number"),
        ("finish_reasons", 3, 0, r"the finish reason of sample 7 is 3: expected 0 \(stop\), 1 \(length\), 2 \(abort\)"),
    ],
)
def test_wrong_values_are_refused_by_sample_and_position(name, value, at, message):
    with pytest.raises(ValueError, match=message):
        changed(example(), name, value, at).validate(vocab_size=39)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0 "),
        ({"temperature": "1"}, "temperature='1' "),
        ({"top_p": 1.5}, "top_p=1.5 "),
        ({"top_k": -1}, "top_k=-1 "),
        ({"min_p": 1}, "min_p=1 "),
        ({"log_probs_mode": "raw_logprobs"}, "log_probs_mode='raw_logprobs' "),
        ({"log_probs_mode": "raw", "temperature": 0.6}, r"log-probs are raw .* at temperature 0.6"),
    ],
)
def test_wrong_sampling_is_refused(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(example(), sampling=SamplingParams(**change)).validate()


def zeros(length, rows=(0,), top_k=0):
    """Two sequences of ``length`` sampled tokens; log-probs are 0.0 in ``rows``."""
    batch = dataclasses.replace(example(False).rows([0, 1]), sampling=SamplingParams(top_k=top_k))
    shape = (2, length + 1)
    mask = torch.arange(length + 1).expand(2, -1) > 0
    log_probs = torch.full(shape, -0.1)
    log_probs[list(rows)] = 0.0
    return dataclasses.replace(
        batch,
        tokens=torch.ones(shape, dtype=torch.int64),
        response_mask=mask,
        rollout_log_probs=log_probs,
        policy_versions=torch.zeros(shape, dtype=torch.int32),
    )


def test_fillers_in_place_of_log_probs_are_refused_and_certain_tokens_are_none():
    zeros(8, rows=[1]).validate()
    zeros(4, rows=[0, 1]).validate()
    changed(zeros(9, rows=[0, 1]), "rollout_log_probs", -1e-7, (slice(None), 3)).validate()
    zeros(9, rows=[0, 1], top_k=1).validate(allow_truncated_sampling=True)
    changed(zeros(9), "response_mask", False, 0).validate()
    with pytest.raises(
        ValueError, match=r"all rollout log-probs of sample 5 are 0\.0, at 9 sampled tokens: the engine"
    ):
        zeros(9, rows=[1]).validate()
    with pytest.raises(ValueError, match=r"sample 7 are 0\.0, at 5 sampled tokens"):
        zeros(5, rows=[0, 1]).validate()


def test_log_probs_that_a_correction_rejects_can_be_allowed():
    batch = example()
    for value in (math.nan, math.inf, -math.inf, 0.5):
        batch.rollout_log_probs[0, 2] = value
        with pytest.raises(ValueError, match="the rollout log-prob of sample 7, token 2 is"):
            batch.validate()
        batch.validate(allow_bad_log_probs=True)
    batch.policy_versions[0, 2] = -1
    with pytest.raises(ValueError, match="the policy version of sample 7"):
        batch.validate(allow_bad_log_probs=True)


@pytest.mark.parametrize("name", TRAINER_LOG_PROBS)
def test_the_trainers_log_probs_may_lack_tokens_and_nothing_else(name):
    batch = dataclasses.replace(example(), **{name: torch.where(example().response_mask, -0.5, torch.inf)})
    changed(batch, name, math.nan, (0, 2)).validate()
    for value in (math.inf, -math.inf, 0.5):
        bad = changed(batch, name, value, (0, 2))
        with pytest.raises(ValueError, match=rf"^{name} of sample 7, token 2 is .*: expected a finite number of at mo"):
            bad.validate()
        bad.validate(allow_bad_log_probs=True)


def test_batches_that_the_trainer_did_not_score_join_those_that_it_did():
    batch = example()
    scored = dataclasses.replace(batch, old_log_probs=batch.rollout_log_probs / 2)
    joined = RolloutBatch.concatenate([scored.rows([0]), batch.rows([1, 2])])
    assert torch.equal(joined.old_log_probs[0], scored.old_log_probs[0])
    assert joined.old_log_probs[1:].isnan().all()
    assert joined.log_probs is None
    joined.validate()


def test_rewards_of_turns_are_numbers_and_join_batches_without():
    batch = dataclasses.replace(example(), turn_rewards=torch.full_like(example().rollout_log_probs, 0.25))
    changed(batch, "turn_rewards", math.nan, (0, 0)).validate()  # no sampled token
    with pytest.raises(ValueError, match=r"^the turn reward of sample 7, token 2 is nan: expected a finite number"):
        changed(batch, "turn_rewards", math.nan, (0, 2)).validate()
    joined = RolloutBatch.concatenate([batch.rows([0]), example().rows([1, 2])])
    assert joined.turn_rewards.tolist()[1:] == torch.zeros(2, batch.tokens.shape[1]).tolist()
    labels = batch.label_turn_rewards()
    assert torch.equal(labels, torch.where(batch.label_aligned()[1], 0.25, 0))
    assert example().label_turn_rewards() is None


def test_rows_of_one_rollout_are_told_from_others():
    assert not example().has_split_rollouts
    # A number that comes again for another prompt is another rollout.
    assert not dataclasses.replace(example(), rollout_ids=torch.tensor([4, 5, 4])).has_split_rollouts
    split = dataclasses.replace(example(), rollout_ids=torch.tensor([4, 4, 6]))
    assert split.has_split_rollouts
    split.validate()
    assert not split.rows([1, 2]).has_split_rollouts
    joined = RolloutBatch.concatenate([example().rows([2]), split, example().rows([0, 1])])
    assert joined.rollout_ids.tolist() == [7, 4, 4, 6, 8, 9]
    assert RolloutBatch.concatenate([example(), example()]).rollout_ids is None


# Uses of a batch


def test_label_alignment_shifts_whole_sequences():
    batch = example()
    labels, mask, log_probs = batch.label_aligned()
    assert labels[0].tolist() == [12, 13, 14, 15, 16, 0, 0, 0]
    assert mask[0].nonzero().flatten().tolist() == [1, 4]
    assert log_probs[2].tolist() == [0, 0, 0, 0, -2 - 5 / 16, -2 - 6 / 16, -2 - 7 / 16, 0]


def test_rows_are_taken_in_any_way():
    batch = example()
    assert batch.num_sequences == 3
    for index in ([2, 0], torch.tensor([2, 0])):
        some = batch.rows(index)
        assert some.sample_ids.tolist() == [9, 7]
        assert torch.equal(some.routed_experts, batch.routed_experts[[2, 0]])
    assert identical(batch.rows(slice(1, 3)), batch.rows(torch.tensor([False, True, True])))
    assert identical(batch.rows(slice(None)), batch)
    with pytest.raises(IndexError):
        batch.rows([3])


def test_only_padding_is_cut_off():
    batch = example().rows([0, 1])
    again = batch.at_length(6).at_length(8)
    assert torch.equal(again.routed_experts[:, :6], batch.routed_experts[:, :6])
    assert (again.routed_experts[:, 6:] == NO_EXPERT).all()
    assert identical(dataclasses.replace(again, routed_experts=batch.routed_experts), batch)
    assert batch.at_length(9, pad_token_id=99).tokens[:, 8].tolist() == [99, 99]
    with pytest.raises(ValueError, match=r"sample 7 has sampled tokens .* first 5"):
        batch.at_length(5)


def test_concatenation_pads_to_the_longest():
    batch = example()
    short = dataclasses.replace(
        batch.rows([1]), **{name: getattr(batch, name)[1:2, :4] for name in (*FIELDS[:4], "routed_experts")}
    )
    joined = RolloutBatch.concatenate([short, batch.rows([0, 2])], pad_token_id=99)
    assert joined.tokens[0].tolist() == [11, 12, 24, 25, 99, 99, 99, 99]
    assert joined.routed_experts[0, 4:].eq(-1).all()
    assert identical(known(joined), known(batch.rows([1, 0, 2])))
    joined.validate(vocab_size=100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": SamplingParams()}, "batches were sampled differently, .*temperature=0.5.* keep them apart"),
        ({"routed_experts": torch.zeros(3, 8, 2, 3).int()}, r"\[.., 2, 2\] and \[.., 2, 3\]"),
    ],
)
def test_batches_that_do_not_go_together_stay_apart(changes, message):
    with pytest.raises(ValueError, match=message):
        RolloutBatch.concatenate([example(), dataclasses.replace(example(), **changes)])
    with pytest.raises(ValueError, match="batches is empty"):
        RolloutBatch.concatenate([])
