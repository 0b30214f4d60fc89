"""Rollout batches from and to single sequences, the records of other programs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rc.records.rollout import FINISH_REASONS, NO_EXPERT, RolloutBatch, SamplingParams

FILLERS = {"routed_experts": NO_EXPERT}  # values of padding that are not 0, by field
_STOP, _LENGTH = FINISH_REASONS.index("stop"), FINISH_REASONS.index("length")


def one_sequence(
    columns: Mapping[str, Tensor | None],
    *,
    sample_id: int,
    group_id: int,
    reward: float,
    finish_reason: str,
    sampling: SamplingParams,
    support: tuple[Tensor, Tensor] | None = None,
    rollout_id: int | None = None,
) -> RolloutBatch:
    """A batch of one sequence without padding.

    ``columns`` are the fields of :class:`RolloutBatch` for each of its l tokens, [l, ...], None for one that is not
    recorded; ``support`` the kept tokens and their number [l] at each position.
    """
    held = {name: value.unsqueeze(0) for name, value in columns.items() if value is not None}
    if support is not None:
        held |= {"support_ids": support[0], "support_counts": support[1].unsqueeze(0)}
    numbers = {"sample_ids": sample_id, "group_ids": group_id, "finish_reasons": FINISH_REASONS.index(finish_reason)}
    if rollout_id is not None:
        numbers["rollout_ids"] = rollout_id
    held |= {name: torch.tensor([value], device=held["tokens"].device) for name, value in numbers.items()}
    return RolloutBatch(**held, rewards=held["rollout_log_probs"].new_tensor([reward]), sampling=sampling)


def as_int32(name: str, values: Tensor) -> Tensor:
    """The integers in four bytes; ValueError if one of them does not fit."""
    limits = torch.iinfo(torch.int32)
    if ((values < limits.min) | (values > limits.max)).any():
        raise ValueError(f"{name} has numbers beyond 32 bits, up to {int(values.abs().max())}: expected int32")
    return values.int()


def spans(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """First sampled token of every row, and the end after its last one, each [n] int64.

    In a row without a sampled token both are the length: the row is all prompt, with its padding.
    """
    length = batch.tokens.shape[1]
    position = torch.arange(length, device=batch.tokens.device)
    nowhere = ~batch.response_mask
    first = torch.nn.functional.pad(torch.where(nowhere, length, position), (0, 1), value=length).amin(dim=1)
    end = torch.nn.functional.pad(torch.where(nowhere, 0, position + 1), (0, 1)).amax(dim=1)
    return first, torch.where(end == 0, length, end)


def shifted(values: Tensor, offset: Tensor, keep: Tensor, filler: float) -> Tensor:
    """Every row moved by its own distance: out[i, t] = values[i, t + offset[i]] if ``keep[i, t]``, else the filler.

    From ``values`` [n, s, ...], ``offset`` [n] int64 and ``keep`` [n, width] bool to [n, width, ...]. For True in
    ``keep``, t + offset[i] lies in [0, s).
    """
    column = torch.arange(keep.shape[1], device=values.device) + offset.unsqueeze(1)
    row = torch.arange(len(values), device=values.device).unsqueeze(1)
    out = values.new_full((*keep.shape, *values.shape[2:]), filler)
    out[keep] = values[row.expand_as(column)[keep], column[keep]]
    return out


def sampled_log_probs(batch: RolloutBatch) -> Tensor:
    """Log π_rollout [n, s], 0.0 at tokens that were not sampled."""
    return torch.where(batch.response_mask, batch.rollout_log_probs, 0.0)


def scored_log_probs(batch: RolloutBatch, program: str) -> Tensor | None:
    """Log π_old [n, s], 0.0 at tokens that were not sampled; None if the record has none.

    ValueError if the trainer scored only some of the sampled tokens: the program's records have no place for that.
    """
    if batch.old_log_probs is None:
        return None
    bad = batch.response_mask & batch.old_log_probs.isnan()
    if bad.any():
        sample = int(batch.sample_ids[bad.any(dim=1)][0])
        raise ValueError(
            f"sample {sample} has tokens without old_log_probs (NaN), which {program} does not have: keep other "
            "rows, or set old_log_probs to None"
        )
    return torch.where(batch.response_mask, batch.old_log_probs, 0.0)


def check_whole_rollouts(batch: RolloutBatch, program: str) -> None:
    """Raise ValueError if rows are parts of one rollout, which the program's records cannot say."""
    if batch.has_split_rollouts:
        raise ValueError(
            f"rollout_ids: rows of this batch are parts of one rollout, and {program} has no field for it: it would "
            "count each row as a response. Set rollout_ids to None if that is what you want"
        )


def trainer_log_probs(
    fields: Mapping[str, Any], name: str, shape: Sequence[int | None], mask: Tensor, unscored: Tensor | float
) -> Tensor | None:
    """A field of log π_old; None if it is missing, or is ``unscored`` (the program's filler) at all sampled tokens."""
    if fields.get(name) is None:
        return None
    found = tensor_of(fields, name, shape)
    return None if mask.any() and (found == unscored)[mask].all() else found


def versions_of(batch: RolloutBatch) -> list[list[int]]:
    """The different weight versions that sampled each sequence, ascending; empty without a sampled token."""
    rows = zip(batch.policy_versions, batch.response_mask, strict=True)
    return [versions[mask].unique().tolist() for versions, mask in rows]


def numbered(keys: Iterable[Hashable]) -> list[int]:
    """The keys as numbers: 0 for the first key and keys equal to it, 1 for the next new one, and so on."""
    numbers: dict[Hashable, int] = {}
    try:
        return [numbers.setdefault(key, len(numbers)) for key in keys]
    except TypeError as problem:
        raise ValueError(f"the names of the samples' prompts cannot be compared: {problem}") from None


def tensor_of(
    fields: Mapping[str, Any], name: str, shape: Sequence[int | None], remedy: str = "", *, integers: bool = False
) -> Tensor:
    """A field of another program's record as a tensor, from a tensor or nested lists, with its shape checked.

    ``shape`` has None for dimensions of any size; ``integers`` refuses other dtypes (an empty list passes). ValueError
    if it is missing, with the ``remedy``, or does not fit.
    """
    if fields.get(name) is None:
        raise ValueError(f"{name} is missing" + (f": {remedy}" if remedy else ""))
    expected = str(tuple(shape)).replace("None", "any")
    try:
        value = torch.as_tensor(fields[name])
    except (TypeError, ValueError, RuntimeError) as problem:
        raise ValueError(f"{name} is no tensor of shape {expected}: {problem}") from None
    sizes = zip(shape, value.shape, strict=False)
    if value.dim() != len(shape) or any(want not in (None, got) for want, got in sizes):
        raise ValueError(f"{name} has shape {tuple(value.shape)}: expected {expected}")
    if integers and (value.is_floating_point() or value.is_complex()) and value.numel():
        raise ValueError(f"{name} is {value.dtype}: expected integers")
    return value


def flags_of(fields: Mapping[str, Any], name: str, shape: Sequence[int | None]) -> Tensor:
    """A field as a bool mask; ValueError for values other than 0 and 1."""
    value = tensor_of(fields, name, shape)
    odd = (value != 0) & (value != 1)
    if odd.any():
        raise ValueError(f"{name} has {value[odd][0].item()}: expected 0 or 1 throughout, no weights")
    return value != 0


def log_probs_of(fields: Mapping[str, Any], name: str, shape: Sequence[int | None], remedy: str = "") -> Tensor:
    """A field of log-probs; ValueError for half precision, which a wider dtype would hide."""
    value = tensor_of(fields, name, shape, remedy)
    if value.is_floating_point() and torch.finfo(value.dtype).bits < 32:
        raise ValueError(f"{name} is {value.dtype}, which shifts the ratios by percents: expected float32 or float64")
    return value


def experts_of(fields: Mapping[str, Any], name: str, shape: Sequence[int | None]) -> Tensor | None:
    """A field of routed experts, [*shape, layers, top_k] int32; None if it is missing."""
    if fields.get(name) is None:
        return None
    return as_int32(name, tensor_of(fields, name, (*shape, None, None), integers=True))


def finish_reasons(is_cut_off: Tensor) -> Tensor:
    """[n]: ``length`` if the limit was reached, else ``stop``: for programs that know no more."""
    return torch.where(is_cut_off, _LENGTH, _STOP)


def cut_off(batch: RolloutBatch) -> Tensor:
    """[n] bool: whether the limit was reached, the inverse of :func:`finish_reasons`."""
    return batch.finish_reasons == _LENGTH


def version_of(policy_version: int | None, found: Iterable[Any], sample: int) -> int:
    """The weight version of a sequence: the caller's, or the oldest in its record; 0 if the record has none.

    ``found`` are the record's versions, as numbers or as text; ValueError names the ``sample`` if one is no integer, or
    does not fit 32 bits.
    """
    found = list(found) if policy_version is None else [policy_version]
    try:
        # A record without versions is of a synchronous run, whose weights have one version.
        version = min(map(int, found), default=0)
        if any(not isinstance(one, str) and int(one) != one for one in found):
            raise ValueError("a fraction")
    except (OverflowError, TypeError, ValueError):
        raise ValueError(
            f"sequence {sample} has the weight versions {found!r}: pass policy_version instead, an integer"
        ) from None
    if abs(version) >= 2**31:
        raise ValueError(
            f"sequence {sample} has the weight version {version}, beyond 32 bits: pass the number of the weight update "
            "as policy_version instead"
        )
    return version
