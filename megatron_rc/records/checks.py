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
    """The form of one of the record's tensors."""

    per_token: bool  # True for [n, s], like ``tokens``; False for [n], or for a list of any length
    dtypes: tuple[torch.dtype, ...]  # the accepted ones
    words: str  # the dtypes in an error message
    more: int = 0  # number of further dimensions
    is_optional: bool = False
    is_list: bool = False  # [ids]: of any length


_LOG_PROBS = "float32 or float64, as half precision shifts the ratios by percents"
FIELDS = {
    "tokens": Field(True, _INTEGERS, "integers, for example int64"),
    "response_mask": Field(True, (torch.bool,), "bool"),
    "rollout_log_probs": Field(True, _FLOATS, _LOG_PROBS),
    "policy_versions": Field(True, _INTEGERS, "integers, for example int32"),
    "sample_ids": Field(False, _INTEGERS, "integers, for example int64"),
    "group_ids": Field(False, _INTEGERS, "integers, for example int64"),
    "rewards": Field(False, _FLOATS, "float32 or float64"),
    "finish_reasons": Field(False, _INTEGERS, "integers, for example int64"),
    "routed_experts": Field(True, _SIGNED, "signed integers, for example int32", more=2, is_optional=True),
    "support_ids": Field(False, _TOKEN_IDS, "int32 or int64", is_optional=True, is_list=True),
    "support_counts": Field(True, _SIGNED, "signed integers, for example int32", is_optional=True),
    "old_log_probs": Field(True, _FLOATS, _LOG_PROBS, is_optional=True),
    "log_probs": Field(True, _FLOATS, _LOG_PROBS, is_optional=True),
    "turn_rewards": Field(True, _FLOATS, "float32 or float64", is_optional=True),
    "rollout_ids": Field(False, _INTEGERS, "integers, for example int64", is_optional=True),
}
OPTIONAL = {name for name, field in FIELDS.items() if field.is_optional}
TRAINER_LOG_PROBS = ("old_log_probs", "log_probs")  # NaN at tokens that the trainer did not score


def check_structure(batch: Any) -> None:
    """Check shapes, dtypes and devices of all fields, not values; TypeError or ValueError names field and form."""
    for name, field in FIELDS.items():
        value = getattr(batch, name)
        if value is None and field.is_optional:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is {type(value).__name__}: expected a tensor")
        tokens, shape = batch.tokens, tuple(value.shape)
        if name == "tokens" and len(shape) != 2:
            raise ValueError(f"tokens has shape {shape}: expected [sequences, length]")
        _check_shape(name, field, shape, tuple(tokens.shape))
        if value.dtype not in field.dtypes:
            raise ValueError(f"{name} is {value.dtype}: expected {field.words}")
        if value.device != tokens.device:
            raise ValueError(f"{name} is on {value.device}, tokens on {tokens.device}: move the batch with to(device)")
    _check_support(batch)


def _check_shape(name: str, field: Field, shape: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    if field.is_list:
        if len(shape) != 1:
            raise ValueError(f"{name} has shape {shape}: expected a list")
        return
    shared = tokens if field.per_token else tokens[:1]
    if shape[: len(shared)] != shared or len(shape) != len(shared) + field.more:
        expected = f"{shared} + (layers, top_k)" if field.more else f"{shared}"
        ending = "as tokens" if field.per_token else "one for each row of tokens"
        raise ValueError(f"{name} has shape {shape}: expected {expected}, {ending}")


def _check_support(batch: Any) -> None:
    """Check that ids and counts of the supports belong together."""
    ids, counts = batch.support_ids, batch.support_counts
    if (ids is None) != (counts is None):
        raise ValueError(f"support_{'ids' if ids is None else 'counts'} is None: give support_ids and support_counts")
    if counts is not None and ((counts < 0).any() or int(counts.sum()) != len(ids)):
        raise ValueError(f"support_ids has {len(ids)} ids, support_counts {int(counts.sum())}: give one record's")


def check_values(
    columns: Mapping[str, Tensor], top_k: int, vocab_size: int | None, *, allow_bad_log_probs: bool = False
) -> None:
    """Check the values in a batch whose structure is right; ValueError names the field, the sample and the position.

    ``top_k`` is the sampling's: with 1 every log-prob is 0. Token ids must be below ``vocab_size``, if it is given.
    With ``allow_bad_log_probs`` log-probs at sampled tokens are not checked.
    """
    _check_ids(columns)
    ids, tokens, versions = columns["sample_ids"], columns["tokens"], columns["policy_versions"]
    mask, values = columns["response_mask"], columns["rollout_log_probs"]
    first = mask[:, :1].any(dim=1)
    _refuse(ids, first, "{}: its first token is marked as sampled, but nothing stands before it")
    _refuse(ids, tokens < 0, "the token id of {} is {}: expected 0 or more, padding included", tokens)
    if vocab_size is not None:
        expected = f"expected less than the vocabulary's {vocab_size}, padding included"
        _refuse(ids, tokens >= vocab_size, "the token id of {} is {}: " + expected, tokens)
    bad = mask & ~(values.isfinite() & (values <= POSITIVE_LIMIT))
    if not allow_bad_log_probs:
        _refuse(ids, bad, "the rollout log-prob of {} is {}: expected a finite number of at most 0", values)
    for name in TRAINER_LOG_PROBS:
        scored = columns.get(name)
        if scored is not None and not allow_bad_log_probs:
            expected = ": expected a finite number of at most 0, or NaN if the trainer did not score the token"
            bad = mask & ((scored > POSITIVE_LIMIT) | scored.isinf())
            _refuse(ids, bad, name + " of {} is {}" + expected, scored)
    early = columns.get("turn_rewards")
    if early is not None:
        _refuse(ids, mask & ~early.isfinite(), "the turn reward of {} is {}: expected a finite number", early)
    _refuse(ids, mask & (versions < 0), "the policy version of {} is {}: expected 0 or more", versions)
    _check_kept(columns, vocab_size)
    _check_fillers(columns, top_k)


def _check_kept(columns: Mapping[str, Tensor], vocab_size: int | None) -> None:
    """Check that every sampled token is among the tokens that the engine kept, and that these are token ids."""
    kept, counts = columns.get("support_ids"), columns.get("support_counts")
    if kept is None or counts is None:
        return
    ids, tokens, mask = columns["sample_ids"], columns["tokens"], columns["response_mask"]
    owner = owners_of(counts)
    has_wrong, has_own = (torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device) for _ in range(2))
    has_wrong[owner[kept < 0 if vocab_size is None else (kept < 0) | (kept >= vocab_size)]] = True
    has_own[owner[kept == tokens.flatten()[owner]]] = True
    has_wrong, has_own = has_wrong.view_as(mask), has_own.view_as(mask)
    _refuse(ids, mask & has_wrong, "the support of {} has ids that are no tokens of the vocabulary", tokens)
    missing = mask & (counts > 0) & ~has_own
    _refuse(ids, missing, "the support of {} lacks the sampled token {}: it is another token's, or cut short", tokens)


def _check_ids(columns: Mapping[str, Tensor]) -> None:
    ids, number = columns["sample_ids"], len(FINISH_REASONS)
    bad = (ids < 0) | (ids.long() >= NUM_SEQUENCE_IDS)
    expected = f"expected 0 to {NUM_SEQUENCE_IDS - 1}: number the samples of a rollout batch from 0"
    _refuse(ids, bad, "sample_ids has {1}: " + expected, ids)
    known, counts = ids.unique(return_counts=True)
    if (counts > 1).any():
        shared = int(known[counts > 1][0])
        raise ValueError(f"sample_ids must be unique: {int(counts[known == shared])} sequences have {shared}")
    groups, rewards, reasons = columns["group_ids"], columns["rewards"], columns["finish_reasons"]
    _refuse(ids, groups < 0, "the group id of {} is {}: expected 0 or more", groups)
    _refuse(ids, ~rewards.isfinite(), "the reward of {} is {}: expected a finite number", rewards)
    meaning = ", ".join(f"{index} ({name})" for index, name in enumerate(FINISH_REASONS))
    _refuse(ids, (reasons < 0) | (reasons >= number), "the finish reason of {} is {}: expected " + meaning, reasons)


def _check_fillers(columns: Mapping[str, Tensor], top_k: int) -> None:
    """Refuse log-probs of exactly 0 throughout: the engine was not asked for them, or the field was never filled."""
    if top_k == 1:
        return  # the only token that can be sampled has probability 1
    mask = columns["response_mask"]
    if "support_counts" in columns:
        mask = mask & (columns["support_counts"] != 1)  # the only token that was kept has probability 1
    count = mask.sum(dim=1)
    empty = ~(mask & (columns["rollout_log_probs"] != 0)).any(dim=1) & (count > 0)
    # In a short response all log-probs may be 0; in more sampled tokens than the limit they may not.
    everywhere = bool(empty[count > 0].all()) and int(count.sum()) > MAX_ZERO_LOG_PROBS
    bad = empty if everywhere else empty & (count > MAX_ZERO_LOG_PROBS)
    _refuse(
        columns["sample_ids"],
        bad,
        "all rollout log-probs of {} are 0.0, at {} sampled tokens: the engine returned none, ask it for log-probs",
        count,
    )


def _refuse(sample_ids: Tensor, bad: Tensor, message: str, values: Tensor | None = None) -> None:
    """Raise ValueError for the first True of ``bad``, [n] or [n, s]; the message has slots for place and value."""
    if not bad.any():
        return
    first = tuple(int(index) for index in bad.nonzero()[0])
    place = f"sample {int(sample_ids[first[0]])}" + (f", token {first[1]}" if len(first) > 1 else "")
    raise ValueError(message.format(place, None if values is None else values[first].item()))
