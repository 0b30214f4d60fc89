"""What the formats of other programs share: batches from single sequences, checked fields, moved rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rc.records.rollout import FINISH_REASONS, NO_EXPERT, RolloutBatch, SamplingParams

FILLERS = {"routed_experts": NO_EXPERT}  # values of padding that are not 0, by field
_STOP = FINISH_REASONS.index("stop")
_LENGTH = FINISH_REASONS.index("length")


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

    Args:
        columns: the fields of :class:`RolloutBatch` with a value for each of the sequence's l tokens, [l, ...]; None
            for a field that is not recorded.
        sample_id: the number of the sequence.
        group_id: the number of its prompt.
        reward: its reward.
        finish_reason: one of :data:`FINISH_REASONS`.
        sampling: the sampling parameters.
        support: the tokens that the engine kept, (ids of all positions, their number at each position [l]).
        rollout_id: the number of the rollout that the sequence is a part of.
    """
    fields = {name: value.unsqueeze(0) for name, value in columns.items() if value is not None}
    if support is not None:
        support_ids, support_counts = support
        fields["support_ids"] = support_ids
        fields["support_counts"] = support_counts.unsqueeze(0)

    integers = {"sample_ids": sample_id, "group_ids": group_id, "finish_reasons": FINISH_REASONS.index(finish_reason)}
    if rollout_id is not None:
        integers["rollout_ids"] = rollout_id
    for name, integer in integers.items():
        fields[name] = torch.tensor([integer], device=fields["tokens"].device)
    fields["rewards"] = fields["rollout_log_probs"].new_tensor([reward])
    return RolloutBatch(**fields, sampling=sampling)


def as_int32(name: str, values: Tensor) -> Tensor:
    """The integers in four bytes; ValueError if one of them does not fit."""
    limits = torch.iinfo(torch.int32)
    if ((values < limits.min) | (values > limits.max)).any():
        raise ValueError(f"{name} has numbers beyond 32 bits, up to {int(values.abs().max())}: expected int32")
    return values.int()


def spans(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Return the column of the first sampled token of every row, and that behind its last one, each [n] int64.

    In a row without a sampled token both are the number of columns: the row is all prompt, with its padding.
    """
    length = batch.tokens.shape[1]
    position = torch.arange(length, device=batch.tokens.device)
    first_or_length = torch.where(batch.response_mask, position, length)
    end_or_zero = torch.where(batch.response_mask, position + 1, 0)
    # One column more, because a batch without columns has no minimum.
    first = torch.nn.functional.pad(first_or_length, (0, 1), value=length).amin(dim=1)
    end = torch.nn.functional.pad(end_or_zero, (0, 1)).amax(dim=1)
    return first, torch.where(end == 0, length, end)


def shifted(values: Tensor, offset: Tensor, keep: Tensor, filler: float) -> Tensor:
    """Move every row by its own distance: out[i, t] = values[i, t + offset[i]] if ``keep[i, t]``, else the filler.

    Args:
        values: [n, s, ...].
        offset: [n], int64.
        keep: [n, width], bool; where True, t + offset[i] lies in [0, s).
        filler: the value of the cells that are not kept.

    Returns:
        [n, width, ...].
    """
    source_column = torch.arange(keep.shape[1], device=values.device) + offset.unsqueeze(1)
    source_row = torch.arange(len(values), device=values.device).unsqueeze(1).expand_as(source_column)
    out = values.new_full((*keep.shape, *values.shape[2:]), filler)
    out[keep] = values[source_row[keep], source_column[keep]]
    return out


def sampled_log_probs(batch: RolloutBatch) -> Tensor:
    """Log π_rollout [n, s], 0.0 at tokens that were not sampled."""
    return torch.where(batch.response_mask, batch.rollout_log_probs, 0.0)


def scored_log_probs(batch: RolloutBatch, program: str) -> Tensor | None:
    """Log π_old [n, s], 0.0 at tokens that were not sampled; None if the record has none.

    Raises:
        ValueError: the trainer scored only some of the sampled tokens, for which the ``program``, named in the
            sentence, has no place in its records.
    """
    if batch.old_log_probs is None:
        return None
    is_unscored = batch.response_mask & batch.old_log_probs.isnan()
    if is_unscored.any():
        sample = int(batch.sample_ids[is_unscored.any(dim=1)][0])
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
    """A field of log π_old in another program's record; None if the trainer did not score its tokens.

    Args:
        fields: the record's fields.
        name: the field's name.
        shape: the shape that it must have.
        mask: whether each token was sampled.
        unscored: what the program writes in place of log-probs that the trainer did not compute. A field with it at
            all sampled tokens is as good as missing.
    """
    if fields.get(name) is None:
        return None
    log_probs = tensor_of(fields, name, shape)
    return None if are_unscored(log_probs, mask, unscored) else log_probs


def are_unscored(log_probs: Tensor, mask: Tensor, unscored: Tensor | float) -> bool:
    """Whether all sampled tokens have what a program writes in place of the trainer's log-probs.

    NeMo-RL writes 0 with ``force_on_policy_ratio``; verl copies the engine's log-probs in bypass mode. False for a
    batch without a sampled token.
    """
    return bool(mask.any()) and bool((log_probs == unscored)[mask].all())


def versions_of(batch: RolloutBatch) -> list[list[int]]:
    """The different weight versions that sampled each sequence, ascending; empty without a sampled token."""
    rows = zip(batch.policy_versions, batch.response_mask, strict=True)
    return [versions[is_sampled].unique().tolist() for versions, is_sampled in rows]


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

    Args:
        fields: the record's fields.
        name: the field's name.
        shape: the shape that it must have; None for a dimension of any size.
        remedy: the end of the error's sentence if the field is missing.
        integers: refuse other dtypes; an empty list passes.

    Raises:
        ValueError: the field is missing or does not fit.
    """
    if fields.get(name) is None:
        raise ValueError(f"{name} is missing" + (f": {remedy}" if remedy else ""))
    expected = str(tuple(shape)).replace("None", "any")
    try:
        value = torch.as_tensor(fields[name])
    except (TypeError, ValueError, RuntimeError) as problem:
        raise ValueError(f"{name} is no tensor of shape {expected}: {problem}") from None
    sizes = zip(shape, value.shape, strict=False)
    if value.dim() != len(shape) or any(expected_size not in (None, size) for expected_size, size in sizes):
        raise ValueError(f"{name} has shape {tuple(value.shape)}: expected {expected}")
    if integers and (value.is_floating_point() or value.is_complex()) and value.numel():
        raise ValueError(f"{name} is {value.dtype}: expected integers")
    return value


def flags_of(fields: Mapping[str, Any], name: str, shape: Sequence[int | None]) -> Tensor:
    """A field as a bool mask; ValueError for values other than 0 and 1."""
    value = tensor_of(fields, name, shape)
    is_wrong = (value != 0) & (value != 1)
    if is_wrong.any():
        raise ValueError(f"{name} has {value[is_wrong][0].item()}: expected 0 or 1 throughout, no weights")
    return value != 0


def log_probs_of(fields: Mapping[str, Any], name: str, shape: Sequence[int | None], remedy: str = "") -> Tensor:
    """A field of log-probs, as :func:`tensor_of`; ValueError for half precision, which a wider dtype would hide."""
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
    """Indices into :data:`FINISH_REASONS`, [n]: ``length`` if cut off at the limit, else ``stop``.

    For programs that record nothing else about the end of a response.
    """
    return torch.where(is_cut_off, _LENGTH, _STOP)


def cut_off(batch: RolloutBatch) -> Tensor:
    """Whether each response was cut off at the limit, [n] bool: the inverse of :func:`finish_reasons`."""
    return batch.finish_reasons == _LENGTH


def version_of(policy_version: int | None, recorded: Iterable[Any], sample: int) -> int:
    """The weight version of a sequence: the caller's, or the oldest in its record; 0 if the record has none.

    Args:
        policy_version: the caller's version, or None.
        recorded: the record's versions, as numbers or as text.
        sample: number of the sequence, for the error.

    Raises:
        ValueError: a version is no integer, or does not fit 32 bits.
    """
    versions = list(recorded) if policy_version is None else [policy_version]
    try:
        # A record without versions is of a synchronous run, whose weights have one version.
        version = min(map(int, versions), default=0)
        if any(not isinstance(value, str) and int(value) != value for value in versions):
            raise ValueError("a fraction")
    except (OverflowError, TypeError, ValueError):
        raise ValueError(
            f"sequence {sample} has the weight versions {versions!r}: pass policy_version instead, an integer"
        ) from None
    if abs(version) >= 2**31:
        raise ValueError(
            f"sequence {sample} has the weight version {version}, beyond 32 bits: pass the number of the weight update "
            "as policy_version instead"
        )
    return version
