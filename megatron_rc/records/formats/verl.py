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

_SCORES = ("token_level_scores", "rm_scores")  # names of the tokens' scores: the first that is there is read
# Fields that a DataProto has for the tokens of the response alone.
_RESPONSE_FIELDS = ("response_mask", "rollout_log_probs", "old_log_probs", "rm_scores")


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
    tokens, attention, prompt_width = _tokens(tensors)
    num_rows = len(tokens)
    response_attention = attention[:, prompt_width:]
    scores = _scores(tensors, response_attention.shape)

    # verl pads prompts on the left, so each row is moved to the left by its prompt's padding.
    length = attention.sum(dim=1)
    is_token = torch.arange(max(length.tolist(), default=0), device=tokens.device) < length.unsqueeze(1)
    padding_length = prompt_width - attention[:, :prompt_width].sum(dim=1)
    fields = {}
    for name, values in _columns(tensors, tokens, attention, prompt_width, scores).items():
        fields[name] = shifted(values, padding_length, is_token, FILLERS.get(name, 0))

    versions = _versions(non_tensors, policy_version, num_rows)
    groups = numbered(_non_tensor(non_tensors, "uid", num_rows))
    other_fields = {
        "policy_versions": versions.unsqueeze(1).expand(is_token.shape),
        "sample_ids": torch.arange(num_rows),
        "group_ids": torch.tensor(groups, dtype=torch.int64),
        "rewards": scores.double().sum(dim=1).float(),
        "finish_reasons": finish_reasons(response_attention.all(dim=1)),
    }
    for name, values in other_fields.items():
        fields[name] = values.contiguous().to(tokens.device)
    return RolloutBatch(**fields, sampling=sampling)


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
    if batch.turn_rewards is None:
        turn_rewards = torch.zeros_like(batch.rollout_log_probs)
    else:
        turn_rewards = torch.where(batch.response_mask, batch.turn_rewards, 0)

    # The prompt's end is at the same column in every row of a DataProto.
    prompt_width = _width(first, prompt_length, "prompt")
    response_width = _width(end - first, response_length, "response")
    offset = first - prompt_width
    source_column = torch.arange(prompt_width + response_width, device=first.device) + offset.unsqueeze(1)
    is_token = (source_column >= 0) & (source_column < end.unsqueeze(1))
    columns = {
        "input_ids": batch.tokens,
        "response_mask": batch.response_mask.long(),
        "rollout_log_probs": sampled_log_probs(batch),
        "routed_experts": batch.routed_experts,
        "old_log_probs": scored_log_probs(batch, "verl"),
        "rm_scores": turn_rewards,
    }
    fillers = {**FILLERS, "input_ids": pad_token_id}
    tensors = {}
    for name, values in columns.items():
        if values is not None:
            tensors[name] = shifted(values, offset, is_token, fillers.get(name, 0))
            if name in _RESPONSE_FIELDS:
                tensors[name] = tensors[name][:, prompt_width:].clone()
    tensors["prompts"] = tensors["input_ids"][:, :prompt_width].clone()
    tensors["responses"] = tensors["input_ids"][:, prompt_width:].clone()
    tensors["attention_mask"] = is_token.long()
    tensors["position_ids"] = (is_token.cumsum(dim=1) - 1).clamp(min=0)

    # The scores of a row sum to its reward: what the turns did not get is the last token's.
    final_reward = (batch.rewards.double() - turn_rewards.double().sum(dim=1)).to(batch.rewards.dtype)
    is_last = is_token & (source_column == (end - 1).unsqueeze(1))
    tensors["rm_scores"] = tensors["rm_scores"] + _at_last_token(final_reward, is_last[:, prompt_width:])
    return tensors, _non_tensors(batch)


def _at_last_token(rewards: Tensor, is_last: Tensor) -> Tensor:
    """Each response's reward at its last token, [n, r]; in the first column if there is no response.

    ``is_last``, [n, r] bool, marks the last token.
    """
    is_first_column = torch.arange(is_last.shape[1], device=is_last.device) == 0
    without_response = ~is_last.any(dim=1, keepdim=True)
    return torch.where(is_last | (without_response & is_first_column), rewards.unsqueeze(1), 0.0)


def _columns(
    tensors: Mapping[str, Any], tokens: Tensor, attention: Tensor, prompt_width: int, scores: Tensor
) -> dict[str, Tensor]:
    """The record's fields with a value for each token, by name, still in verl's columns: [n, p + r, ...].

    Where verl has values for the response alone, they are 0 at the prompt. ``scores``, [n, r], are the tokens' scores.
    """
    mask = _response_mask(tensors, attention[:, prompt_width:])
    remedy = "set actor_rollout_ref.rollout.calculate_log_probs=True in verl"
    log_probs = tensor_of(tensors, "rollout_log_probs", mask.shape, remedy)
    response_columns = {
        "response_mask": mask,
        "rollout_log_probs": log_probs,
        # In bypass mode verl writes the engine's log-probs.
        "old_log_probs": trainer_log_probs(tensors, "old_log_probs", mask.shape, mask, log_probs),
    }
    # A score at the last sampled token, or at a token that was not sampled, is part of the final reward.
    num_sampled_from_here = mask.flip(1).cumsum(dim=1).flip(1)
    turn_rewards = torch.where(mask & (num_sampled_from_here > 1), scores, 0).float()
    if turn_rewards.any():
        response_columns["turn_rewards"] = turn_rewards

    columns = {"tokens": tokens}
    for name, values in response_columns.items():
        if values is not None:
            columns[name] = pad(values, (prompt_width, 0))
    experts = experts_of(tensors, "routed_experts", tokens.shape)
    if experts is not None:
        columns["routed_experts"] = experts
    return columns


def _tokens(tensors: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Return tokens and attention mask (bool), each [n, p + r], and p.

    Raises:
        ValueError: the padding is not on the left of prompts and on the right of responses, or input_ids differ.
    """
    prompts = tensor_of(tensors, "prompts", (None, None))
    num_rows, prompt_width = prompts.shape
    tokens = torch.cat([prompts, tensor_of(tensors, "responses", (num_rows, None))], dim=1)
    remedy = "1 for tokens, 0 for padding"
    attention = tensor_of(tensors, "attention_mask", tuple(tokens.shape), remedy) != 0
    prompt = attention[:, :prompt_width]
    response = attention[:, prompt_width:]
    for rule, is_wrong in (
        ("prompts padded on the left", prompt[:, :-1] & ~prompt[:, 1:]),
        ("responses padded on the right", ~response[:, :-1] & response[:, 1:]),
    ):
        if is_wrong.any():
            raise ValueError(f"attention_mask of sequence {int(is_wrong.nonzero()[0, 0])}: expected {rule}")
    if tensors.get("input_ids") is not None:
        differs = (tensor_of(tensors, "input_ids", tuple(tokens.shape)) != tokens) & attention
        if differs.any():
            row, column = differs.nonzero()[0].tolist()
            raise ValueError(f"input_ids of sequence {row}, column {column} differ from prompts and responses")
    return tokens, attention, prompt_width


def _response_mask(tensors: Mapping[str, Any], attention: Tensor) -> Tensor:
    """Whether each token of the response was sampled, [n, r]; without a field, all tokens, as verl trains on them.

    ``attention``, [n, r], is the response's.
    """
    if tensors.get("response_mask") is None:
        return attention
    mask = flags_of(tensors, "response_mask", tuple(attention.shape))
    is_wrong = mask & ~attention
    if is_wrong.any():
        row = int(is_wrong.nonzero()[0, 0])
        raise ValueError(f"response_mask of sequence {row} has padding marked as sampled: expected 0 there")
    return mask


def _scores(tensors: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor:
    """The scores of the response's tokens, [n, r], whose sum is the reward; ValueError if there are none."""
    name = next((name for name in _SCORES if tensors.get(name) is not None), None)
    if name is None:
        raise ValueError(f"{' and '.join(_SCORES)} are missing: score the responses first")
    return tensor_of(tensors, name, shape)


def _versions(non_tensors: Mapping[str, Sequence[Any]], policy_version: int | None, rows: int) -> Tensor:
    """The oldest weight version of each response, [n] int32: the caller's, or that of the record, or 0."""
    name = "param_version_start"
    recorded: Sequence[Any] | None = None
    if policy_version is None and name in non_tensors:
        recorded = _non_tensor(non_tensors, name, rows)
    versions = []
    for row in range(rows):
        versions_of_row = [] if recorded is None else [recorded[row]]
        versions.append(version_of(policy_version, versions_of_row, row))
    return as_int32(name, torch.tensor(versions, dtype=torch.int64))


def _non_tensors(batch: RolloutBatch) -> dict[str, list[Any]]:
    """The lists for a ``non_tensor_batch``: the prompt's name, and the first and last weight version, of each row."""
    # A row without a sampled token has no version.
    versions = [versions_of_row or [0] for versions_of_row in versions_of(batch)]
    return {
        "uid": [str(group) for group in batch.group_ids.tolist()],
        "param_version_start": [versions_of_row[0] for versions_of_row in versions],
        "param_version_end": [versions_of_row[-1] for versions_of_row in versions],
    }


def _non_tensor(non_tensors: Mapping[str, Sequence[Any]], name: str, rows: int) -> Sequence[Any]:
    """A field of ``non_tensors``; ValueError if it is missing, or has not one entry for each of the rows."""
    if name not in non_tensors:
        raise ValueError(f"{name} is missing in non_tensors: verl's trainer sets it, equal for one prompt's responses")
    if len(non_tensors[name]) != rows:
        raise ValueError(f"{name} has {len(non_tensors[name])} entries: expected {rows}, one a sequence")
    return non_tensors[name]


def _width(lengths: Tensor, width: int | None, name: str) -> int:
    """Number of columns for the prompts or the responses of these ``lengths``: ``width``, or the longest's length.

    ``name`` is "prompt" or "response"; responses have at least one column. ValueError if one needs more than ``width``.
    """
    least = 1 if name == "response" else 0
    longest = max([*lengths.tolist(), least])
    if width is not None and longest > width:
        raise ValueError(f"{name}_length={width}: the longest {name} needs {longest}, make it at least that")
    return longest if width is None else width
