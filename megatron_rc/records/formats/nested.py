"""Nested tensors of verl's default trainer, padded as its ``DataProto`` pads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

# Fields with a value for each token of the response, and for each token of prompt and response.
_RESPONSE_FIELDS = ("response_mask", "rollout_log_probs", "old_log_probs", "token_level_scores", "rm_scores")
_SEQUENCE_FIELDS = ("input_ids", "routed_experts")


def padded(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Pad nested tensors of n rows of any length as a ``DataProto`` is padded, and make its attention mask.

    Args:
        tensors: prompts, responses, and fields with a value for each token, by name.

    Returns:
        The prompts, [n, p], padded on the left; the responses and the fields of their length, [n, r + 1], padded on the
        right; attention_mask, input_ids and routed_experts, [n, p + r + 1]. The last column of the responses is padding
        in every row, because the tensors do not tell which response reached the limit. ``tensors`` itself if neither
        prompts nor responses are nested.

    Raises:
        ValueError: names a field that has no rows, or rows of another length.
    """
    if not _is_nested(tensors.get("prompts")) and not _is_nested(tensors.get("responses")):
        return tensors

    prompts = _rows(tensors, "prompts")
    responses = _rows(tensors, "responses")
    if len(prompts) != len(responses):
        raise ValueError(f"prompts has {len(prompts)} rows and responses {len(responses)}: expected one each")
    prompt_lengths = [len(prompt) for prompt in prompts]
    response_lengths = [len(response) for response in responses]
    total_lengths = [sum(lengths) for lengths in zip(prompt_lengths, response_lengths, strict=True)]

    prompt_width = max(prompt_lengths)
    response_width = max(response_lengths) + 1
    total_width = prompt_width + response_width
    prompt_starts = [prompt_width - length for length in prompt_lengths]
    response_starts = [0] * len(responses)
    ones = [prompts[0].new_ones(length) for length in total_lengths]
    out = {
        "prompts": _placed(prompts, prompt_starts, prompt_width),
        "responses": _placed(responses, response_starts, response_width),
        "attention_mask": _placed(ones, prompt_starts, total_width),
    }
    for name in _RESPONSE_FIELDS:
        if tensors.get(name) is not None:
            out[name] = _placed(_rows(tensors, name, response_lengths), response_starts, response_width)
    for name in _SEQUENCE_FIELDS:
        if tensors.get(name) is not None:
            out[name] = _placed(_rows(tensors, name, total_lengths), prompt_starts, total_width)
    return out


def _is_nested(value: Any) -> bool:
    """Return whether a field is a nested tensor: a row for each sequence, of its own length."""
    return isinstance(value, Tensor) and value.is_nested


def _rows(tensors: Mapping[str, Any], name: str, lengths: Sequence[int] | None = None) -> Sequence[Tensor]:
    """The rows of a field, nested or plain, one for each sequence.

    Raises:
        ValueError: the field has no rows, or not one with each of ``lengths``, which is checked if it is not None.
    """
    value = tensors.get(name)
    if not isinstance(value, Tensor) or not (value.is_nested or value.dim() > 1):
        raise ValueError(f"{name} is {type(value).__name__}: expected a nested tensor, a row a sequence")
    rows = value.unbind()
    if not rows:
        raise ValueError(f"{name} has no rows: expected one a sequence")
    if lengths is None:
        return rows
    if len(rows) != len(lengths):
        raise ValueError(f"{name} has {len(rows)} rows: expected {len(lengths)}, one a sequence")
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if len(row) != length:
            raise ValueError(f"{name} has {len(row)} tokens in sequence {index}: expected {length}")
    return rows


def _placed(rows: Sequence[Tensor], starts: Sequence[int], width: int) -> Tensor:
    """One tensor, [n, width, ...], with each row from its start on, and 0 elsewhere."""
    out = rows[0].new_zeros((len(rows), width, *rows[0].shape[1:]))
    for row, (values, start) in enumerate(zip(rows, starts, strict=True)):
        out[row, start : start + len(values)] = values
    return out
