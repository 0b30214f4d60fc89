"""Nested tensors of verl's default trainer, padded as its ``DataProto`` pads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

_OF_RESPONSES = ("response_mask", "rollout_log_probs", "old_log_probs", "token_level_scores", "rm_scores")
_OF_SEQUENCES = ("input_ids", "routed_experts")


def padded(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields with a ``DataProto``'s padding and attention mask, from nested tensors of n rows of any length.

    Responses and fields of their length become [n, r + 1], padded on the right; prompts [n, p], padded on the left;
    attention_mask, input_ids and routed_experts [n, p + r + 1]. The last column of the responses is padding in every
    row, because the tensors do not tell which response reached the limit. If neither prompts nor responses are nested,
    the result is ``tensors``. ValueError names a field that has no rows, or rows of another length.
    """
    if not any(isinstance(value := tensors.get(name), Tensor) and value.is_nested for name in ("prompts", "responses")):
        return tensors
    prompts, responses = (_rows(tensors, name) for name in ("prompts", "responses"))
    if len(prompts) != len(responses):
        raise ValueError(f"prompts has {len(prompts)} rows and responses {len(responses)}: expected one each")
    before = [len(prompt) for prompt in prompts]
    after = [len(response) for response in responses]
    both = [sum(lengths) for lengths in zip(before, after, strict=True)]
    width, long = max(before), max(after) + 1
    starts = [width - length for length in before]
    out = {
        "prompts": _placed(prompts, starts, width),
        "responses": _placed(responses, [0] * len(after), long),
        "attention_mask": _placed([prompts[0].new_ones(length) for length in both], starts, width + long),
    }
    for names, lengths, places, columns in (
        (_OF_RESPONSES, after, [0] * len(after), long),
        (_OF_SEQUENCES, both, starts, width + long),
    ):
        for name in names:
            if tensors.get(name) is not None:
                out[name] = _placed(_rows(tensors, name, lengths), places, columns)
    return out


def _rows(tensors: Mapping[str, Any], name: str, lengths: Sequence[int] | None = None) -> Sequence[Tensor]:
    """The rows of a field, nested or plain."""
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
    """[n, width, ...]: each row from its start on, 0 elsewhere."""
    out = rows[0].new_zeros((len(rows), width, *rows[0].shape[1:]))
    for row, (values, start) in enumerate(zip(rows, starts, strict=True)):
        out[row, start : start + len(values)] = values
    return out
