"""Rollouts as verl's DataProto, with ``batch`` and ``non_tensor_batch``; docs/rollouts.md has the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rc.records.formats.nested import padded
from megatron_rc.records.formats.rows import (
    FILLERS,
    as_int32,
    check_whole_rollouts,
    experts_of,
    finish_reasons,
    flags_of,
    numbered,
    sampled_log_probs,
    scored_log_probs,
    shifted,
    spans,
    tensor_of,
    trainer_log_probs,
    version_of,
    versions_of,
)
from megatron_rc.records.rollout import RolloutBatch, SamplingParams

_SCORES = ("token_level_scores", "rm_scores")
_OF_RESPONSES = ("response_mask", "rollout_log_probs", "old_log_probs", "rm_scores")


def from_verl(
    tensors: Mapping[str, Any],
    non_tensors: Mapping[str, Sequence[Any]],
    *,
    sampling: SamplingParams,
    policy_version: int | None = None,
) -> RolloutBatch:
    """The records, not validated, of a ``DataProto``: its ``batch`` and its ``non_tensor_batch``.

    verl's log-probs have one column for each column of ``responses``, for the token in that column.

    Args:
        tensors: prompts [n, p], responses [n, r], attention_mask [n, p + r], rollout_log_probs [n, r],
            token_level_scores or rm_scores [n, r]; optionally response_mask and old_log_probs [n, r], input_ids
            [n, p + r] and routed_experts [n, p + r, layers, top_k]. Other keys are ignored. If prompts or responses are
            nested, as in verl's default trainer since 0.9, fields have a row a sequence, without padding and
            attention_mask.
        non_tensors: uid, one a sequence; optionally param_version_start.
        sampling: the sampling parameters, which a DataProto does not have.
        policy_version: version of the weights that sampled; default: ``param_version_start``, or 0 (a synchronous run).

    Raises:
        ValueError: names the field that is missing, has another shape, or is padded on the wrong side.
    """
    tensors = padded(dict(tensors.items()))  # a TensorDict has no `in`
    tokens, attention, width = _tokens(tensors)
    start, length = width - attention[:, :width].sum(dim=1), attention.sum(dim=1)
    keep = torch.arange(max(length.tolist(), default=0), device=tokens.device) < length.unsqueeze(1)
    scores = _scores(tensors, attention[:, width:].shape)
    columns = _columns(tensors, tokens, attention, width, scores)
    moved = {name: shifted(value, start, keep, FILLERS.get(name, 0)) for name, value in columns.items()}
    each = {
        "policy_versions": _versions(non_tensors, policy_version, len(tokens)).unsqueeze(1).expand(keep.shape),
        "sample_ids": torch.arange(len(tokens)),
        "group_ids": torch.tensor(numbered(_of_each(non_tensors, "uid", len(tokens))), dtype=torch.int64),
        "rewards": scores.double().sum(dim=1).float(),
        "finish_reasons": finish_reasons(attention[:, width:].all(dim=1)),
    }
    moved |= {name: value.contiguous().to(tokens.device) for name, value in each.items()}
    return RolloutBatch(**moved, sampling=sampling)


def to_verl(
    batch: RolloutBatch, *, pad_token_id: int, prompt_length: int | None = None, response_length: int | None = None
) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """The ``batch`` of a ``DataProto``, and lists for its ``non_tensor_batch``, ``numpy.array(..., dtype=object)``.

    The prompt is the tokens before the first sampled one; the response follows, up to the last sampled one.

    Args:
        batch: the records.
        pad_token_id: fills prompts on the left and responses on the right.
        prompt_length: columns for prompts; default: the longest prompt's.
        response_length: columns for responses; default: the longest response's, at least 1.

    Raises:
        ValueError: a prompt or a response does not fit, old_log_probs lack some of the tokens, or rows are parts of
            one rollout.
    """
    check_whole_rollouts(batch, "verl")
    first, end = spans(batch)
    early = torch.zeros_like(batch.rollout_log_probs) if batch.turn_rewards is None else batch.turn_rewards
    early = torch.where(batch.response_mask, early, 0)
    width = _width(first, prompt_length, "prompt")
    long = _width(end - first, response_length, "response")
    source = torch.arange(width + long, device=first.device) + (first - width).unsqueeze(1)
    keep = (source >= 0) & (source < end.unsqueeze(1))
    columns = {
        "input_ids": batch.tokens,
        "response_mask": batch.response_mask.long(),
        "rollout_log_probs": sampled_log_probs(batch),
        "routed_experts": batch.routed_experts,
        "old_log_probs": scored_log_probs(batch, "verl"),
        "rm_scores": early,
    }
    fillers = {**FILLERS, "input_ids": pad_token_id}
    tensors = {
        name: shifted(values, first - width, keep, fillers.get(name, 0))
        for name, values in columns.items()
        if values is not None
    }
    tensors |= {name: tensors[name][:, width:].clone() for name in _OF_RESPONSES if name in tensors}
    ids = tensors["input_ids"]
    tensors |= {"prompts": ids[:, :width].clone(), "responses": ids[:, width:].clone(), "attention_mask": keep.long()}
    tensors["position_ids"] = (keep.cumsum(dim=1) - 1).clamp(min=0)
    rest = (batch.rewards.double() - early.double().sum(dim=1)).to(batch.rewards.dtype)
    tensors["rm_scores"] = tensors["rm_scores"] + _at_end(
        rest, keep[:, width:] & (source[:, width:] == (end - 1).unsqueeze(1))
    )
    return tensors, _non_tensors(batch)


def _at_end(rewards: Tensor, last: Tensor) -> Tensor:
    """[n, r]: each reward at its response's last token, in the first column if there is no response."""
    last[:, 0] |= ~last.any(dim=1)
    return torch.where(last, rewards.unsqueeze(1), 0.0)


def _columns(
    tensors: Mapping[str, Any], tokens: Tensor, attention: Tensor, width: int, scores: Tensor
) -> dict[str, Tensor]:
    """The record's fields of tokens in verl's columns, [n, p + r, ...], 0 at prompts if verl has no values there."""
    mask = _response_mask(tensors, attention[:, width:])
    remedy = "set actor_rollout_ref.rollout.calculate_log_probs=True in verl"
    log_probs = tensor_of(tensors, "rollout_log_probs", mask.shape, remedy)
    found = {
        "response_mask": mask,
        "rollout_log_probs": log_probs,
        # In bypass mode verl writes the engine's log-probs.
        "old_log_probs": trainer_log_probs(tensors, "old_log_probs", mask.shape, mask, log_probs),
    }
    # A score at the last sampled token, or at a token that was not sampled, belongs to the rest of the reward.
    early = torch.where(mask & (mask.flip(1).cumsum(dim=1).flip(1) > 1), scores, 0).float()
    found["turn_rewards"] = early if early.any() else None
    known = {name: pad(value, (width, 0)) for name, value in found.items() if value is not None}
    experts = experts_of(tensors, "routed_experts", tokens.shape)
    return {"tokens": tokens, **known, **({} if experts is None else {"routed_experts": experts})}


def _tokens(tensors: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Tokens and attention mask, each [n, p + r], and p."""
    prompts = tensor_of(tensors, "prompts", (None, None))
    rows, width = prompts.shape
    tokens = torch.cat([prompts, tensor_of(tensors, "responses", (rows, None))], dim=1)
    remedy = "1 for tokens, 0 for padding"
    attention = tensor_of(tensors, "attention_mask", tuple(tokens.shape), remedy) != 0
    prompt, response = attention[:, :width], attention[:, width:]
    for name, wrong in (
        ("prompts padded on the left", prompt[:, :-1] & ~prompt[:, 1:]),
        ("responses padded on the right", ~response[:, :-1] & response[:, 1:]),
    ):
        if wrong.any():
            raise ValueError(f"attention_mask of sequence {int(wrong.nonzero()[0, 0])}: expected {name}")
    if tensors.get("input_ids") is not None:
        other = (tensor_of(tensors, "input_ids", tuple(tokens.shape)) != tokens) & attention
        if other.any():
            row, column = (int(index) for index in other.nonzero()[0])
            raise ValueError(f"input_ids of sequence {row}, column {column} differ from prompts and responses")
    return tokens, attention, width


def _response_mask(tensors: Mapping[str, Any], attention: Tensor) -> Tensor:
    """[n, r]; without a field, verl trains on every token of the response."""
    if tensors.get("response_mask") is None:
        return attention
    mask = flags_of(tensors, "response_mask", tuple(attention.shape))
    if (mask & ~attention).any():
        row = int((mask & ~attention).nonzero()[0, 0])
        raise ValueError(f"response_mask of sequence {row} has padding marked as sampled: expected 0 there")
    return mask


def _scores(tensors: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor:
    """[n, r]: the scores of the tokens, whose sum is the reward."""
    name = next((name for name in _SCORES if tensors.get(name) is not None), None)
    if name is None:
        raise ValueError(f"{' and '.join(_SCORES)} are missing: score the responses first")
    return tensor_of(tensors, name, shape)


def _versions(non_tensors: Mapping[str, Sequence[Any]], policy_version: int | None, rows: int) -> Tensor:
    """[n] int32: each response's oldest weight version."""
    name = "param_version_start"
    found = _of_each(non_tensors, name, rows) if policy_version is None and name in non_tensors else None
    each = [version_of(policy_version, [] if found is None else [found[row]], row) for row in range(rows)]
    return as_int32(name, torch.tensor(each, dtype=torch.int64))


def _non_tensors(batch: RolloutBatch) -> dict[str, list[Any]]:
    versions = [found or [0] for found in versions_of(batch)]
    return {
        "uid": [str(group) for group in batch.group_ids.tolist()],
        "param_version_start": [found[0] for found in versions],
        "param_version_end": [found[-1] for found in versions],
    }


def _of_each(non_tensors: Mapping[str, Sequence[Any]], name: str, rows: int) -> Sequence[Any]:
    if name not in non_tensors:
        raise ValueError(f"{name} is missing in non_tensors: verl's trainer sets it, equal for one prompt's responses")
    if len(non_tensors[name]) != rows:
        raise ValueError(f"{name} has {len(non_tensors[name])} entries: expected {rows}, one a sequence")
    return non_tensors[name]


def _width(lengths: Tensor, wanted: int | None, name: str) -> int:
    longest = max([*lengths.tolist(), int(name == "response")], default=0)
    if wanted is not None and longest > wanted:
        raise ValueError(f"{name}_length={wanted}: the longest {name} needs {longest}, make it at least that")
    return longest if wanted is None else wanted
