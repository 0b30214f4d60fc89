"""Records of rollouts: an example by hand, random valid ones, and their comparison."""

import dataclasses
import math

import torch
from hypothesis import strategies as st

from megatron_rc.records.checks import FIELDS as RECORD
from megatron_rc.records.checks import TRAINER_LOG_PROBS
from megatron_rc.records.rollout import RolloutBatch, SamplingParams

HALF = SamplingParams(temperature=0.5)


FIELDS = tuple(field.name for field in dataclasses.fields(RolloutBatch))


def example(experts=True):
    """Two responses to one prompt and one to another, the first with a hole for a tool's answer.

    All numbers differ, so that a shift or swap shows: sampled token t of sequence i has log-prob -(i + t/16), exact in
    float32.
    """
    tokens = torch.tensor(
        [[11, 12, 13, 14, 15, 16, 0, 0], [11, 12, 24, 25, 0, 0, 0, 0], [31, 32, 33, 34, 35, 36, 37, 38]]
    )
    mask = torch.tensor([[0, 0, 1, 0, 0, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]]).bool()
    log_probs = -(torch.arange(3).unsqueeze(1) + torch.arange(8) / 16)
    routes = torch.arange(3 * 8 * 2 * 2, dtype=torch.int32).view(3, 8, 2, 2)
    return RolloutBatch(
        tokens=tokens,
        response_mask=mask,
        rollout_log_probs=torch.where(mask, log_probs, 0.0),
        policy_versions=torch.where(mask, torch.tensor([[4], [5], [6]]), 0).int(),
        sample_ids=torch.tensor([7, 5, 9]),
        group_ids=torch.tensor([3, 3, 1]),
        rewards=torch.tensor([0.5, -1.0, 0.1]),
        finish_reasons=torch.tensor([0, 1, 2]),
        sampling=HALF,
        routed_experts=routes if experts else None,
    )


def changed(batch, name, value, at=...):
    tensor = getattr(batch, name).clone()
    tensor[at] = value
    return dataclasses.replace(batch, **{name: tensor})


def known(batch):
    """The batch with fillers at all values that some format loses.

    These are values after a sequence's last sampled token, and log-probs and versions of unsampled tokens.
    """
    position = torch.arange(batch.tokens.shape[1])
    end_of_sampled = (batch.response_mask * (position + 1)).amax(dim=1, keepdim=True)
    has_no_sampled = ~batch.response_mask.any(dim=1, keepdim=True)
    used = (position < end_of_sampled) | has_no_sampled
    routes = batch.routed_experts
    scored = {
        name: torch.where(batch.response_mask, getattr(batch, name), 0.0)
        for name in TRAINER_LOG_PROBS
        if getattr(batch, name) is not None
    }
    return dataclasses.replace(
        batch,
        **scored,
        tokens=torch.where(used, batch.tokens, 0),
        rollout_log_probs=torch.where(batch.response_mask, batch.rollout_log_probs, 0.0),
        policy_versions=torch.where(batch.response_mask, batch.policy_versions, 0),
        routed_experts=None if routes is None else torch.where(used[..., None, None], routes, -1),
    )


def cut(batch):
    """The record without columns that are padding in every sequence."""
    sampled_columns = batch.response_mask.any(dim=0).nonzero()
    width = batch.tokens.shape[1]
    # A sequence without a sampled token may use all its columns.
    if batch.response_mask.any(dim=1).all() and len(sampled_columns):
        width = int(sampled_columns[-1]) + 1
    return dataclasses.replace(
        batch, **{name: value[:, :width] for name, value in batch.tensors().items() if RECORD[name].per_token}
    )


@st.composite
def batches(draw, ordinary=False):
    """A random valid record; ``ordinary`` ones sample a token of each sequence, and not its first token."""
    rows = draw(st.integers(1, 4))
    length = draw(st.integers(2, 7))
    integers = st.integers(0, 2**40)

    def tensor(elements, *shape, dtype):
        size = math.prod(shape)
        return torch.tensor(draw(st.lists(elements, min_size=size, max_size=size)), dtype=dtype).view(shape)

    mask = tensor(st.booleans(), rows, length, dtype=torch.bool)
    mask[:, 0] = False
    if ordinary:
        mask[:, -1] |= ~mask.any(dim=1)
    log_probs = tensor(st.floats(-50, -(2.0**-20), width=32), rows, length, dtype=torch.float32)
    numbers = draw(st.lists(st.integers(0, 2**21 - 1), min_size=rows, max_size=rows, unique=True))
    experts = draw(st.booleans())
    scored = {name: log_probs / 2 for name in TRAINER_LOG_PROBS if draw(st.booleans())}
    if ordinary:
        scored.pop("log_probs", None)  # no other program has these
    elif "old_log_probs" in scored and draw(st.booleans()):
        scored["old_log_probs"] = torch.where(mask & (log_probs < -1), torch.nan, scored["old_log_probs"])
    return RolloutBatch(
        tokens=tensor(integers, rows, length, dtype=torch.int64),
        response_mask=mask,
        rollout_log_probs=log_probs,
        policy_versions=tensor(st.integers(0, 2**31 - 1), rows, length, dtype=torch.int32),
        sample_ids=torch.tensor(numbers),
        group_ids=tensor(st.integers(0, 3), rows, dtype=torch.int64),
        rewards=tensor(st.floats(-100, 100, width=32).map(lambda value: value + 0.0), rows, dtype=torch.float32),
        finish_reasons=tensor(st.integers(0, 2), rows, dtype=torch.int64),
        sampling=SamplingParams(draw(st.floats(0.25, 4))),
        routed_experts=tensor(st.integers(-1, 200), rows, length, 2, 1, dtype=torch.int32) if experts else None,
        rollout_ids=None if ordinary else draw(st.none() | st.just(torch.arange(rows) // 2)),
        **scored,
    )


def identical(batch, expected):
    """Return whether all fields have the same dtypes, shapes and bits, NaN included; devices may differ."""
    tensors = batch.tensors()
    expected_tensors = expected.tensors()
    return (
        batch.sampling == expected.sampling
        and tensors.keys() == expected_tensors.keys()
        and all(_same_bits(value, expected_tensors[name]) for name, value in tensors.items())
    )


def _same_bits(tensor, expected):
    if tensor.dtype != expected.dtype or tensor.shape != expected.shape:
        return False
    return torch.equal(_bytes_of(tensor), _bytes_of(expected))


def _bytes_of(tensor):
    return tensor.cpu().contiguous().flatten().view(torch.uint8)
