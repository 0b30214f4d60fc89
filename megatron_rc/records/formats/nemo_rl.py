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

# Names in the training batch, and each field's other names: in the rollout's batch and in the lines that NeMo-RL logs.
_OTHER_NAMES = {
    "input_ids": ("token_ids",),
    "token_mask": ("token_loss_mask",),
    "sample_mask": ("loss_multiplier", "sample_loss_mask"),
    "total_reward": ("rewards",),
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
    fields = _with_training_names(batch)
    tokens = tensor_of(fields, "input_ids", (None, None), integers=True)
    num_rows, width = tokens.shape
    is_token = _before_lengths(tensor_of(fields, "input_lengths", (num_rows,), integers=True), width)
    mask = flags_of(fields, "token_mask", (num_rows, width)) & is_token
    fields["policy_version"] = [policy_version] * num_rows if isinstance(policy_version, int) else policy_version
    fields["group_ids"] = _prompt_numbers(fields, tokens, mask, is_token) if group_ids is None else group_ids
    return RolloutBatch(
        tokens=tokens.long(),
        response_mask=mask & _sample_mask(fields, num_rows).unsqueeze(1),
        sample_ids=torch.arange(num_rows, device=tokens.device),
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
    column = torch.arange(max(end.tolist(), default=0), device=end.device)
    is_token = column < end.unsqueeze(1)
    is_prompt = is_token & (column < first.unsqueeze(1))
    no_shift = torch.zeros_like(end)
    prompts = shifted(batch.tokens, no_shift, is_prompt, pad_token_id)[:, : max(first.tolist(), default=0)]
    fields = {
        "input_ids": shifted(batch.tokens, no_shift, is_token, pad_token_id),
        "input_lengths": end.int(),
        "generation_logprobs": shifted(sampled_log_probs(batch), no_shift, is_token, 0),
        "token_mask": shifted(batch.response_mask.long(), no_shift, is_token, 0),
        "sample_mask": batch.response_mask.any(dim=1).float(),
        "total_reward": batch.rewards.clone(),
        "truncated": cut_off(batch),
        "prompt_ids_for_adv": prompts.clone(),
    }
    if batch.routed_experts is not None:
        fields["routed_experts"] = shifted(batch.routed_experts, no_shift, is_token, NO_EXPERT)
    old_log_probs = scored_log_probs(batch, "NeMo-RL")
    if old_log_probs is not None:
        fields["prev_logprobs"] = shifted(old_log_probs, no_shift, is_token, 0)
    return fields


def _with_training_names(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch's fields under the names of a training batch; message logs as the fields that they stand for."""
    fields: dict[str, Any] = dict(batch.items())
    for training_name, other_names in _OTHER_NAMES.items():
        names = (training_name, *other_names)
        fields[training_name] = next((batch[name] for name in names if batch.get(name) is not None), None)
    if batch.get("message_log") is not None:
        fields |= _flatten(batch["message_log"])
    return fields


def _columns(fields: Mapping[str, Any], tokens: Tensor, mask: Tensor) -> dict[str, Any]:
    """The record's fields but tokens, mask and sample ids, by name; ``fields`` has the names of a training batch."""
    num_rows = len(tokens)
    shape = tuple(tokens.shape)
    versions = tensor_of(fields, "policy_version", (num_rows,), integers=True).to(tokens.device)
    groups = tensor_of(fields, "group_ids", (num_rows,), integers=True).to(tokens.device)
    if fields.get("truncated") is None:
        is_truncated = tokens.new_zeros(num_rows, dtype=torch.bool)
    else:
        is_truncated = tensor_of(fields, "truncated", (num_rows,)) != 0
    return {
        "rollout_log_probs": tensor_of(fields, "generation_logprobs", shape),
        "policy_versions": as_int32("policy_version", versions).unsqueeze(1).expand(shape).contiguous(),
        "group_ids": groups.long(),
        "rewards": tensor_of(fields, "total_reward", (num_rows,), "score the responses first").float(),
        "finish_reasons": finish_reasons(is_truncated),
        "routed_experts": experts_of(fields, "routed_experts", shape),
        # With force_on_policy_ratio NeMo-RL writes zeros.
        "old_log_probs": trainer_log_probs(fields, "prev_logprobs", shape, mask, 0),
    }


def _flatten(logs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Tensor]:
    """The fields of a training batch from each sequence's messages, padded on the right."""
    sequences = []
    for row, log in enumerate(logs):
        messages = [_message(message, row, index) for index, message in enumerate(log)]
        sequences.append([message for message in messages if message])

    names = ["input_ids", "generation_logprobs", "token_mask"]
    all_messages = [message for messages in sequences for message in messages]
    experts = next((message["routed_experts"] for message in all_messages if "routed_experts" in message), None)
    if experts is not None:
        # Messages that the model did not write may lack routes.
        names.append("routed_experts")
        for message in all_messages:
            shape = (len(message["input_ids"]), *experts.shape[1:])
            message.setdefault("routed_experts", experts.new_full(shape, NO_EXPERT))
    for row, messages in enumerate(sequences):
        if not messages:
            raise ValueError(f"message_log of sequence {row} has no message with token_ids")

    fields = {}
    for name in names:
        values = [torch.cat([message[name] for message in messages]) for messages in sequences]
        fields[name] = pad_sequence(values, batch_first=True, padding_value=FILLERS.get(name, 0))
    lengths = [sum(len(message["input_ids"]) for message in messages) for messages in sequences]
    return fields | {"input_lengths": torch.tensor(lengths)}


def _message(message: Mapping[str, Any], row: int, index: int) -> dict[str, Tensor]:
    """The fields of a training batch of one message, [tokens, ...] each; empty if it has no tokens.

    ``row`` and ``index`` are the numbers of the sequence and of the message, for the error.
    """
    if message.get("token_ids") is None:
        return {}
    try:
        tokens = tensor_of(message, "token_ids", (None,), integers=True)
        num_tokens = len(tokens)
        has_log_probs = message.get("generation_logprobs") is not None
        if message.get("token_loss_mask") is not None:
            mask = flags_of(message, "token_loss_mask", (num_tokens,))
        else:
            mask = torch.full((num_tokens,), has_log_probs and message.get("role") == "assistant")
        if mask.any() and not has_log_probs:
            raise ValueError("generation_logprobs are missing, but token_loss_mask trains on it")

        fields = {"input_ids": tokens, "token_mask": mask, "generation_logprobs": torch.zeros(num_tokens)}
        if has_log_probs:
            fields["generation_logprobs"] = log_probs_of(message, "generation_logprobs", (num_tokens,))
        experts = experts_of(message, "routed_experts", (num_tokens,))
        if experts is not None:
            fields["routed_experts"] = experts
    except ValueError as problem:
        raise ValueError(f"message {index} of sequence {row}: {problem}") from None
    return fields


def _before_lengths(lengths: Tensor, width: int) -> Tensor:
    """Whether each column lies before its row's length, [n, width] bool; ValueError for a length out of range."""
    is_wrong = (lengths < 0) | (lengths > width)
    if is_wrong.any():
        row = int(is_wrong.nonzero()[0, 0])
        raise ValueError(f"input_lengths of sequence {row} is {int(lengths[row])}: expected 0 to {width}")
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)


def _sample_mask(fields: Mapping[str, Any], rows: int) -> Tensor:
    """Whether each sequence counts, [n] bool; ValueError for weights, which belong to an objective, not to a record."""
    mask = tensor_of(fields, "sample_mask", (rows,))
    is_wrong = (mask != 0) & (mask != 1)
    if is_wrong.any():
        row = int(is_wrong.nonzero()[0, 0])
        raise ValueError(f"sample_mask of sequence {row} is {mask[row].item()}: expected 0 or 1, no weights")
    return mask != 0


def _prompt_numbers(fields: Mapping[str, Any], tokens: Tensor, mask: Tensor, is_token: Tensor) -> list[int]:
    """A number for each sequence, equal for equal prompts: the tokens before the first one in ``mask``, [n, s]."""
    if fields.get("prompt_ids_for_adv") is not None:
        prompts = tensor_of(fields, "prompt_ids_for_adv", (len(tokens), None)).tolist()
        return numbered(tuple(prompt) for prompt in prompts)
    is_prompt = is_token & (mask.cumsum(dim=1) == 0)
    return numbered(tuple(row[columns].tolist()) for row, columns in zip(tokens, is_prompt, strict=True))
