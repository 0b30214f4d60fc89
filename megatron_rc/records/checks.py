"""Checks of a rollout batch: its fields, their shapes and dtypes, and the values that an engine may report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rc.numerics import MAX_ZERO_LOG_PROBS, NUM_SEQUENCE_IDS, POSITIVE_LIMIT
from megatron_rc.records.support import owners_of

FINISH_REASONS = ("stop", "length", "abort")

_TOKEN_IDS = (torch.int64, torch.int32)  # a vocabulary's size must fit the dtype
_SIGNED = (*_TOKEN_IDS, torch.int16, torch.int8)
_INTEGERS = (*_SIGNED, torch.uint8)
_FLOATS = (torch.float32, torch.float64)


class Field(NamedTuple):
    """The form of one of the record's tensors: its dimensions and dtypes."""

    per_token: bool  # True for [n, s], like ``tokens``; False for [n], or for a list of any length
    dtypes: tuple[torch.dtype, ...]  # the accepted ones
    dtype_names: str  # the dtypes in an error message
    num_further_dims: int = 0  # dimensions behind those of ``per_token``
    is_optional: bool = False  # may be None
    is_list: bool = False  # [ids], of any length


_LOG_PROB_DTYPES = "float32 or float64, as half precision shifts the ratios by percents"
_PER_SEQUENCE_INTEGERS = Field(per_token=False, dtypes=_INTEGERS, dtype_names="integers, for example int64")
FIELDS = {
    "tokens": Field(per_token=True, dtypes=_INTEGERS, dtype_names="integers, for example int64"),
    "response_mask": Field(per_token=True, dtypes=(torch.bool,), dtype_names="bool"),
    "rollout_log_probs": Field(per_token=True, dtypes=_FLOATS, dtype_names=_LOG_PROB_DTYPES),
    "policy_versions": Field(per_token=True, dtypes=_INTEGERS, dtype_names="integers, for example int32"),
    "sample_ids": _PER_SEQUENCE_INTEGERS,
    "group_ids": _PER_SEQUENCE_INTEGERS,
    "rewards": Field(per_token=False, dtypes=_FLOATS, dtype_names="float32 or float64"),
    "finish_reasons": _PER_SEQUENCE_INTEGERS,
    "routed_experts": Field(
        per_token=True,
        dtypes=_SIGNED,  # -1: not known
        dtype_names="signed integers, for example int32",
        num_further_dims=2,  # layers, top_k
        is_optional=True,
    ),
    "support_ids": Field(
        per_token=False, dtypes=_TOKEN_IDS, dtype_names="int32 or int64", is_optional=True, is_list=True
    ),
    "support_counts": Field(
        per_token=True, dtypes=_SIGNED, dtype_names="signed integers, for example int32", is_optional=True
    ),
    "old_log_probs": Field(per_token=True, dtypes=_FLOATS, dtype_names=_LOG_PROB_DTYPES, is_optional=True),
    "log_probs": Field(per_token=True, dtypes=_FLOATS, dtype_names=_LOG_PROB_DTYPES, is_optional=True),
    "turn_rewards": Field(per_token=True, dtypes=_FLOATS, dtype_names="float32 or float64", is_optional=True),
    "rollout_ids": _PER_SEQUENCE_INTEGERS._replace(is_optional=True),
}
OPTIONAL = {name for name, field in FIELDS.items() if field.is_optional}
TRAINER_LOG_PROBS = ("old_log_probs", "log_probs")  # NaN at tokens that the trainer did not score


def check_structure(batch: Any) -> None:
    """Check shapes, dtypes and devices of a RolloutBatch's fields, not their values.

    Raises:
        TypeError: a field is no tensor.
        ValueError: another shape, dtype or device than expected; names the field and the expected form.
    """
    tokens = batch.tokens
    for name, field in FIELDS.items():
        value = getattr(batch, name)
        if value is None and field.is_optional:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is {type(value).__name__}: expected a tensor")
        shape = tuple(value.shape)
        # The first field: all others are compared with its shape.
        if name == "tokens" and len(shape) != 2:
            raise ValueError(f"tokens has shape {shape}: expected [sequences, length]")
        _check_shape(name, field, shape, tuple(tokens.shape))
        if value.dtype not in field.dtypes:
            raise ValueError(f"{name} is {value.dtype}: expected {field.dtype_names}")
        if value.device != tokens.device:
            raise ValueError(f"{name} is on {value.device}, tokens on {tokens.device}: move the batch with to(device)")
    _check_support(batch)


def _check_shape(name: str, field: Field, shape: tuple[int, ...], tokens_shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a field has its shape beside ``tokens_shape``, [n, s]."""
    if field.is_list:
        if len(shape) != 1:
            raise ValueError(f"{name} has shape {shape}: expected a list")
        return

    leading = tokens_shape if field.per_token else tokens_shape[:1]
    if shape[: len(leading)] != leading or len(shape) != len(leading) + field.num_further_dims:
        expected = f"{leading} + (layers, top_k)" if field.num_further_dims else f"{leading}"
        reason = "as tokens" if field.per_token else "one for each row of tokens"
        raise ValueError(f"{name} has shape {shape}: expected {expected}, {reason}")


def _check_support(batch: Any) -> None:
    """Raise ValueError unless the lists of kept tokens and their counts belong together, or both are None."""
    ids = batch.support_ids
    counts = batch.support_counts
    if (ids is None) != (counts is None):
        missing = "support_ids" if ids is None else "support_counts"
        raise ValueError(f"{missing} is None: give support_ids and support_counts")
    if counts is not None and ((counts < 0).any() or int(counts.sum()) != len(ids)):
        raise ValueError(f"support_ids has {len(ids)} ids, support_counts {int(counts.sum())}: give one record's")


def check_values(
    columns: Mapping[str, Tensor], top_k: int, vocab_size: int | None, *, allow_bad_log_probs: bool = False
) -> None:
    """Check the values in a batch whose structure is right.

    Args:
        columns: the batch's tensors, by field name.
        top_k: the sampling's top_k; with 1 every log-prob is 0.
        vocab_size: token ids must be below it; None: not checked.
        allow_bad_log_probs: do not check log-probs at sampled tokens.

    Raises:
        ValueError: names the field, the sample and the position of the first wrong value.
    """
    _check_sequences(columns)
    sample_ids = columns["sample_ids"]
    tokens = columns["tokens"]
    mask = columns["response_mask"]
    has_sampled_first = mask[:, :1].any(dim=1)
    _refuse(sample_ids, has_sampled_first, "{}: its first token is marked as sampled, but nothing stands before it")
    _refuse(sample_ids, tokens < 0, "the token id of {} is {}: expected 0 or more, padding included", tokens)
    if vocab_size is not None:
        expected = f"expected less than the vocabulary's {vocab_size}, padding included"
        _refuse(sample_ids, tokens >= vocab_size, "the token id of {} is {}: " + expected, tokens)

    if not allow_bad_log_probs:
        _check_log_probs(columns)
    turn_rewards = columns.get("turn_rewards")
    if turn_rewards is not None:
        is_bad = mask & ~turn_rewards.isfinite()
        _refuse(sample_ids, is_bad, "the turn reward of {} is {}: expected a finite number", turn_rewards)
    versions = columns["policy_versions"]
    _refuse(sample_ids, mask & (versions < 0), "the policy version of {} is {}: expected 0 or more", versions)
    _check_kept_tokens(columns, vocab_size)
    _check_fillers(columns, top_k)


def _check_log_probs(columns: Mapping[str, Tensor]) -> None:
    """Refuse log-probs of sampled tokens that are infinite or positive; of the engine also NaN."""
    sample_ids = columns["sample_ids"]
    mask = columns["response_mask"]
    log_probs = columns["rollout_log_probs"]
    is_bad = mask & ~(log_probs.isfinite() & (log_probs <= POSITIVE_LIMIT))
    _refuse(sample_ids, is_bad, "the rollout log-prob of {} is {}: expected a finite number of at most 0", log_probs)
    for name in TRAINER_LOG_PROBS:
        log_probs_of_trainer = columns.get(name)
        if log_probs_of_trainer is None:
            continue
        is_bad = mask & ((log_probs_of_trainer > POSITIVE_LIMIT) | log_probs_of_trainer.isinf())
        expected = "expected a finite number of at most 0, or NaN if the trainer did not score the token"
        _refuse(sample_ids, is_bad, name + " of {} is {}: " + expected, log_probs_of_trainer)


def _check_kept_tokens(columns: Mapping[str, Tensor], vocab_size: int | None) -> None:
    """Check that every sampled token is among the tokens that the engine kept, and that these are token ids."""
    kept_ids = columns.get("support_ids")
    counts = columns.get("support_counts")
    if kept_ids is None or counts is None:
        return
    sample_ids = columns["sample_ids"]
    tokens = columns["tokens"]
    mask = columns["response_mask"]

    position = owners_of(counts)  # of each kept id, in the flattened batch
    is_outside = kept_ids < 0
    if vocab_size is not None:
        is_outside |= kept_ids >= vocab_size
    has_outside = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    has_outside[position[is_outside]] = True
    has_outside = has_outside.view_as(mask)
    _refuse(sample_ids, mask & has_outside, "the support of {} has ids that are no tokens of the vocabulary", tokens)

    is_sampled = kept_ids == tokens.flatten()[position]
    has_sampled = torch.zeros_like(mask).flatten()
    has_sampled[position[is_sampled]] = True
    has_sampled = has_sampled.view_as(mask)
    _refuse(
        sample_ids,
        mask & (counts > 0) & ~has_sampled,
        "the support of {} lacks the sampled token {}: it is another token's, or cut short",
        tokens,
    )


def _check_sequences(columns: Mapping[str, Tensor]) -> None:
    """Check the fields with one value a sequence: sample and group ids, rewards and finish reasons."""
    sample_ids = columns["sample_ids"]
    is_bad = (sample_ids < 0) | (sample_ids.long() >= NUM_SEQUENCE_IDS)
    expected = f"expected 0 to {NUM_SEQUENCE_IDS - 1}: number the samples of a rollout batch from 0"
    _refuse(sample_ids, is_bad, "sample_ids has {1}: " + expected, sample_ids)
    distinct_ids, counts = sample_ids.unique(return_counts=True)
    if (counts > 1).any():
        index = int((counts > 1).nonzero()[0])
        raise ValueError(f"sample_ids must be unique: {counts[index]} sequences have {distinct_ids[index]}")

    group_ids = columns["group_ids"]
    _refuse(sample_ids, group_ids < 0, "the group id of {} is {}: expected 0 or more", group_ids)
    rewards = columns["rewards"]
    _refuse(sample_ids, ~rewards.isfinite(), "the reward of {} is {}: expected a finite number", rewards)
    reasons = columns["finish_reasons"]
    is_bad = (reasons < 0) | (reasons >= len(FINISH_REASONS))
    meaning = ", ".join(f"{index} ({name})" for index, name in enumerate(FINISH_REASONS))
    _refuse(sample_ids, is_bad, "the finish reason of {} is {}: expected " + meaning, reasons)


def _check_fillers(columns: Mapping[str, Tensor], top_k: int) -> None:
    """Refuse log-probs of exactly 0 throughout: the engine was not asked for them, or the field was never filled."""
    if top_k == 1:
        return  # the only token that can be sampled has probability 1
    mask = columns["response_mask"]
    if "support_counts" in columns:
        mask = mask & (columns["support_counts"] != 1)  # the only token that was kept has probability 1
    num_sampled = mask.sum(dim=1)
    has_other = (mask & (columns["rollout_log_probs"] != 0)).any(dim=1)
    is_filled = ~has_other & (num_sampled > 0)

    # In a short response all log-probs may be 0; in more sampled tokens than the limit they may not. The limit is for
    # the whole batch if all its sequences are like this, else for each sequence.
    all_are_filled = bool(is_filled[num_sampled > 0].all())
    if not (all_are_filled and int(num_sampled.sum()) > MAX_ZERO_LOG_PROBS):
        is_filled &= num_sampled > MAX_ZERO_LOG_PROBS
    _refuse(
        columns["sample_ids"],
        is_filled,
        "all rollout log-probs of {} are 0.0, at {} sampled tokens: the engine returned none, ask it for log-probs",
        num_sampled,
    )


def _refuse(sample_ids: Tensor, is_bad: Tensor, message: str, values: Tensor | None = None) -> None:
    """Raise ValueError for the first True of ``is_bad``, [n] or [n, s]; do nothing if there is none.

    ``message`` has slots for the place ("sample 7, token 2") and for the number that ``values``, like ``is_bad``, has
    there.
    """
    if not is_bad.any():
        return
    index = tuple(int(number) for number in is_bad.nonzero()[0])
    location = f"sample {int(sample_ids[index[0]])}"
    if len(index) > 1:
        location += f", token {index[1]}"
    value = None if values is None else values[index].item()
    raise ValueError(message.format(location, value))
