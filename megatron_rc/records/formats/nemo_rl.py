"""Rollouts as NeMo-RL's training batches and message logs; docs/rollouts.md has the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_rc.records.formats.rows import (
    FILLERS,
    as_int32,
    check_whole_rollouts,
    cut_off,
    experts_of,
    finish_reasons,
    flags_of,
    log_probs_of,
    numbered,
    sampled_log_probs,
    scored_log_probs,
    shifted,
    spans,
    tensor_of,
    trainer_log_probs,
)
from megatron_rc.records.rollout import NO_EXPERT, RolloutBatch, SamplingParams

# Names in the training batch first, then in the rollout's batch and in the JSON lines that NeMo-RL logs.
_NAMES = {
    "input_ids": ("input_ids", "token_ids"),
    "token_mask": ("token_mask", "token_loss_mask"),
    "sample_mask": ("sample_mask", "loss_multiplier", "sample_loss_mask"),
    "total_reward": ("total_reward", "rewards"),
}


def from_nemo_rl(
    batch: Mapping[str, Any],
    *,
    sampling: SamplingParams,
    policy_version: int | Sequence[int] = 0,
    group_ids: Sequence[int] | None = None,
) -> RolloutBatch:
    """The records, not validated, of a training batch, or of a rollout's batch with message logs.

    NeMo-RL's log-probs have one column for each column of ``input_ids``, for the token in that column.

    Args:
        batch: input_ids, generation_logprobs and token_mask [n, s], input_lengths [n]; or instead of these
            ``message_log``, n lists of messages. Also: sample_mask, total_reward [n]; optionally truncated [n],
            prev_logprobs [n, s], routed_experts [n, s, layers, top_k] and prompt_ids_for_adv. ``token_ids``,
            ``token_loss_mask``, ``loss_multiplier``, ``sample_loss_mask`` and ``rewards`` are other names that are
            read. Other keys are ignored.
        sampling: the sampling parameters, which the batch does not have.
        policy_version: version of the weights that sampled, which the batch does not have; one, or one a sequence.
            Default: 0, for a synchronous run.
        group_ids: [n]; default: equal prompts are one group, as in NeMo-RL.

    Raises:
        ValueError: names the field that is missing, has another shape, or does not fit a record.
    """
    fields = _own_names(batch)
    tokens = tensor_of(fields, "input_ids", (None, None), integers=True)
    rows, shape = len(tokens), tuple(tokens.shape)
    keep = _within(tensor_of(fields, "input_lengths", (rows,), integers=True), shape[1])
    mask = flags_of(fields, "token_mask", shape) & keep
    fields["policy_version"] = [policy_version] * rows if isinstance(policy_version, int) else policy_version
    fields["group_ids"] = _same_prompts(fields, tokens, mask, keep) if group_ids is None else group_ids
    return RolloutBatch(
        tokens=tokens.long(),
        response_mask=mask & _sample_mask(fields, rows).unsqueeze(1),
        sample_ids=torch.arange(rows, device=tokens.device),
        sampling=sampling,
        **_columns(fields, tokens, mask),
    )


def to_nemo_rl(batch: RolloutBatch, *, pad_token_id: int) -> dict[str, Tensor]:
    """The fields of a training batch that a rollout fills, for a ``BatchedDataDict``.

    Args:
        batch: the records; a sequence ends with its last sampled token.
        pad_token_id: fills sequences on the right.

    Raises:
        ValueError: old_log_probs lack some of the tokens, or rows are parts of one rollout.
    """
    check_whole_rollouts(batch, "NeMo-RL")
    first, end = spans(batch)
    keep = torch.arange(max(end.tolist(), default=0), device=end.device) < end.unsqueeze(1)
    start = torch.zeros_like(end)
    before = keep & (torch.arange(keep.shape[1], device=end.device) < first.unsqueeze(1))
    prompts = shifted(batch.tokens, start, before, pad_token_id)[:, : max(first.tolist(), default=0)]
    fields = {
        "input_ids": shifted(batch.tokens, start, keep, pad_token_id),
        "input_lengths": end.int(),
        "generation_logprobs": shifted(sampled_log_probs(batch), start, keep, 0),
        "token_mask": shifted(batch.response_mask.long(), start, keep, 0),
        "sample_mask": batch.response_mask.any(dim=1).float(),
        "total_reward": batch.rewards.clone(),
        "truncated": cut_off(batch),
        "prompt_ids_for_adv": prompts.clone(),
    }
    if batch.routed_experts is not None:
        fields["routed_experts"] = shifted(batch.routed_experts, start, keep, NO_EXPERT)
    old = scored_log_probs(batch, "NeMo-RL")
    if old is not None:
        fields["prev_logprobs"] = shifted(old, start, keep, 0)
    return fields


def _own_names(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with the names of a training batch, message logs flattened."""
    fields: dict[str, Any] = dict(batch.items())
    for own, names in _NAMES.items():
        fields[own] = next((batch[name] for name in names if batch.get(name) is not None), None)
    return fields | (_flatten(batch["message_log"]) if batch.get("message_log") is not None else {})


def _columns(fields: Mapping[str, Any], tokens: Tensor, mask: Tensor) -> dict[str, Any]:
    """The record's other fields, by name."""
    rows, shape = len(tokens), tuple(tokens.shape)
    versions, groups = (
        tensor_of(fields, name, (rows,), integers=True).to(tokens.device) for name in ("policy_version", "group_ids")
    )
    none = tokens.new_zeros(rows, dtype=torch.bool)
    truncated = none if fields.get("truncated") is None else tensor_of(fields, "truncated", (rows,)) != 0
    return {
        "rollout_log_probs": tensor_of(fields, "generation_logprobs", shape),
        "policy_versions": as_int32("policy_version", versions).unsqueeze(1).expand(shape).contiguous(),
        "group_ids": groups.long(),
        "rewards": tensor_of(fields, "total_reward", (rows,), "score the responses first").float(),
        "finish_reasons": finish_reasons(truncated),
        "routed_experts": experts_of(fields, "routed_experts", shape),
        # With force_on_policy_ratio NeMo-RL writes zeros.
        "old_log_probs": trainer_log_probs(fields, "prev_logprobs", shape, mask, 0),
    }


def _flatten(logs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Tensor]:
    """The fields of a training batch from each sequence's messages, padded on the right."""
    rows = [[_message(message, row, index) for index, message in enumerate(log)] for row, log in enumerate(logs)]
    rows = [[message for message in row if message] for row in rows]
    known = next((message["routed_experts"] for row in rows for message in row if "routed_experts" in message), None)
    names = ["input_ids", "generation_logprobs", "token_mask"]
    if known is not None:
        names.append("routed_experts")
        for message in (message for row in rows for message in row):
            message.setdefault(
                "routed_experts", known.new_full((len(message["input_ids"]), *known.shape[1:]), NO_EXPERT)
            )
    for row, messages in enumerate(rows):
        if not messages:
            raise ValueError(f"message_log of sequence {row} has no message with token_ids")
    whole = {name: [torch.cat([message[name] for message in row]) for row in rows] for name in names}
    flat = {name: pad_sequence(values, True, FILLERS.get(name, 0)) for name, values in whole.items()}
    return flat | {"input_lengths": torch.tensor([len(value) for value in whole["input_ids"]])}


def _message(message: Mapping[str, Any], row: int, index: int) -> dict[str, Tensor]:
    """Tokens, log-probs, mask and routes of one message; empty if it has no tokens."""
    if message.get("token_ids") is None:
        return {}
    try:
        tokens = tensor_of(message, "token_ids", (None,), integers=True)
        number, generated = len(tokens), message.get("generation_logprobs") is not None
        mask = torch.full((number,), generated and message.get("role") == "assistant")
        if message.get("token_loss_mask") is not None:
            mask = flags_of(message, "token_loss_mask", (number,))
        if mask.any() and not generated:
            raise ValueError("generation_logprobs are missing, but token_loss_mask trains on it")
        own = {"input_ids": tokens, "token_mask": mask, "generation_logprobs": torch.zeros(number)}
        if generated:
            own["generation_logprobs"] = log_probs_of(message, "generation_logprobs", (number,))
        experts = experts_of(message, "routed_experts", (number,))
        if experts is not None:
            own["routed_experts"] = experts
    except ValueError as problem:
        raise ValueError(f"message {index} of sequence {row}: {problem}") from None
    return own


def _within(lengths: Tensor, width: int) -> Tensor:
    """[n, width] bool, True up to each length."""
    wrong = (lengths < 0) | (lengths > width)
    if wrong.any():
        row = int(wrong.nonzero()[0, 0])
        raise ValueError(f"input_lengths of sequence {row} is {int(lengths[row])}: expected 0 to {width}")
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)


def _sample_mask(fields: Mapping[str, Any], rows: int) -> Tensor:
    """[n] bool; weights between 0 and 1 belong to an objective, not to a record."""
    mask = tensor_of(fields, "sample_mask", (rows,))
    odd = (mask != 0) & (mask != 1)
    if odd.any():
        row = int(odd.nonzero()[0, 0])
        raise ValueError(f"sample_mask of sequence {row} is {mask[row].item()}: expected 0 or 1, no weights")
    return mask != 0


def _same_prompts(fields: Mapping[str, Any], tokens: Tensor, mask: Tensor, keep: Tensor) -> list[int]:
    """A number for each sequence, equal for equal prompts: the tokens before the first sampled one."""
    if fields.get("prompt_ids_for_adv") is not None:
        prompts = tensor_of(fields, "prompt_ids_for_adv", (len(tokens), None)).tolist()
        return numbered(tuple(prompt) for prompt in prompts)
    before = keep & (mask.cumsum(dim=1) == 0)
    return numbered(tuple(row[known].tolist()) for row, known in zip(tokens, before, strict=True))
