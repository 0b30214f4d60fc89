"""Checks of the configuration and the tensors that a program passes to its adaptor, and their correction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rc.batch.chain import correct_rollouts
from megatron_rc.batch.result import CorrectionResult
from megatron_rc.numerics import k3
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig, wrong_config
from megatron_rc.settings.criteria import CRITERIA
from megatron_rc.settings.criterion import Criterion

MEASURED = ("kl", "k3_kl", "rollout_rs_masked_fraction", "rollout_is_mean")


def checked_tensor(name: str, value: object, shape: tuple[int, ...] | None = None, place: str = "") -> Tensor:
    """The value, a plain tensor of this shape; None stands for any [rows, tokens].

    ValueError, with the program's ``name`` for it, if it is no tensor, is nested, or has another shape. ``place`` ends
    the message, as in `` on CP rank 0 of 2``.
    """
    expected = f"{'[rows, tokens]' if shape is None else shape}{place}"
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {type(value).__name__}: expected a tensor of shape {expected}")
    if value.is_nested:
        raise ValueError(f"{name} is a nested tensor: expected it padded to shape {expected}")
    if value.dim() != 2 if shape is None else tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: expected {expected}")
    return value


def corrected(
    train: Tensor,
    rollout: Tensor,
    mask: Tensor,
    config: RolloutCorrectionConfig,
    layout: SequenceLayout | None = None,
    **more: Any,
) -> tuple[CorrectionResult, Tensor | None, Tensor]:
    """(result, weights or None, accepted tokens) of the correction of n sequences, with its data checked."""
    ids = torch.arange(len(mask) if layout is None else layout.num_sequences, device=mask.device)
    result = correct_rollouts(train, rollout, mask, config, layout, sequence_ids=ids, **more)
    result.check()
    assert isinstance(result.mask, Tensor)
    assert result.weights is None or isinstance(result.weights, Tensor)
    return result, result.weights, result.mask


def measured(
    prefix: str, log_ratio: Tensor, mask: Tensor, accepted: Tensor, weights: Tensor | None
) -> dict[str, Tensor]:
    """Values of each token whose mean over the mask is a metric, by the metric's name; finite and like the mask.

    ``MEASURED`` has the names without the prefix; the last one is absent without weights.
    """
    log_ratio = torch.where(mask & log_ratio.isfinite(), log_ratio, torch.zeros_like(log_ratio))
    values = [-log_ratio, k3(log_ratio), (mask & ~accepted).float(), *([] if weights is None else [weights])]
    return {f"{prefix}{name}": value for name, value in zip(MEASURED, values, strict=False)}


def check_micro_batch_config(config: RolloutCorrectionConfig, program: str) -> None:
    """Raise ValueError for a setting that needs more than the tokens of one micro-batch; ``program`` is its caller."""
    call = f"{program} calls for one micro-batch at a time"
    refuse(
        config,
        bypass_mode=f"{program} computes its loss's ratio itself",
        proximal_interpolation=f"{program} computes its loss's ratio itself",
        rollout_is_batch_normalize=f"{call}, and the mean of the weights needs the global batch",
        rollout_staleness_scale=f"{call}, and it passes no weight versions",
    )
    refuse_criteria(config, program)
    if config.rejects and config.rejection_denominator != "original":
        raise ValueError(
            f"rejection_denominator={config.rejection_denominator!r}: {program} divides its loss by the tokens before "
            "rejection: set rejection_denominator='original'"
        )


def refuse(config: RolloutCorrectionConfig, **reasons: str) -> None:
    """Raise ValueError for the first of these settings that is on, with the reason why the program cannot serve it.

    So does ``config`` that is no configuration.
    """
    if not isinstance(config, RolloutCorrectionConfig):
        raise wrong_config(config)
    for name, reason in reasons.items():
        if getattr(config, name):
            raise ValueError(f"{name}={getattr(config, name)!r}: {reason}: drop it")


def refuse_criteria(config: RolloutCorrectionConfig, program: str) -> None:
    """Raise ValueError for a criterion that needs prompts or advantages, which the program does not pass."""
    for criterion in config.criteria:
        if not _is_of_tokens_alone(criterion):
            needed = "advantages" if criterion.only_negative else "prompts"
            own = ", ".join(name for name, one in CRITERIA.items() if _is_of_tokens_alone(one))
            raise ValueError(
                f"rollout_rs={criterion.name!r} needs {needed}, which {program} does not pass: use one of {own}"
            )


def _is_of_tokens_alone(criterion: Criterion) -> bool:
    return criterion.unit != "prompt" and not criterion.only_negative
