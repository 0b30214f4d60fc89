"""Checks of the settings and tensors that another trainer passes to its adaptor, and the call of the correction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rc.batch.chain import CorrectionResult, correct_rollouts
from megatron_rc.numerics import k3
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig, wrong_config
from megatron_rc.settings.criteria import CRITERIA
from megatron_rc.settings.criterion import Criterion

# Names, without prefix, of the metrics that ``token_metrics`` gives, in its order; the last one needs weights.
TOKEN_METRICS = ("kl", "k3_kl", "rollout_rs_masked_fraction", "rollout_is_mean")


def checked_tensor(name: str, value: object, shape: tuple[int, ...] | None = None, place: str = "") -> Tensor:
    """Return the value if it is a plain tensor of the expected shape, else raise ValueError.

    Args:
        name: the trainer's name for the value.
        value: the value that the trainer passed.
        shape: the expected shape. Default: any [rows, tokens].
        place: text at the end of the message, for example `` on CP rank 0 of 2``.

    Raises:
        ValueError: the value is no tensor, is nested, or has another shape.
    """
    expected = f"[rows, tokens]{place}" if shape is None else f"{shape}{place}"
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {type(value).__name__}: expected a tensor of shape {expected}")
    if value.is_nested:
        raise ValueError(f"{name} is a nested tensor: expected it padded to shape {expected}")
    has_shape = value.dim() == 2 if shape is None else tuple(value.shape) == shape
    if not has_shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: expected {expected}")
    return value


def corrected(
    train: Tensor,
    rollout: Tensor,
    mask: Tensor,
    config: RolloutCorrectionConfig,
    layout: SequenceLayout | None = None,
    **further_arguments: Any,
) -> tuple[CorrectionResult, Tensor | None, Tensor]:
    """Correct n sequences, and raise ValueError for bad data in them.

    Args:
        train: log π_train of each token, in nats; of the layout's local shape, [n, s] without a layout.
        rollout: log π_rollout, like ``train``.
        mask: bool, like ``train``, True for trained tokens.
        config: the correction's settings.
        layout: the cut of the sequences over CP ranks. Default: whole sequences.
        further_arguments: of :func:`~megatron_rc.correct_rollouts`.

    Returns:
        (result, weights or None, accepted tokens); the last two are like ``train``.

    Collectives: those of :func:`~megatron_rc.correct_rollouts`.
    """
    num_sequences = len(mask) if layout is None else layout.num_sequences
    sequence_ids = torch.arange(num_sequences, device=mask.device)
    result = correct_rollouts(train, rollout, mask, config, layout, sequence_ids=sequence_ids, **further_arguments)
    result.check()
    # Single tensors, not lists with one for each micro-batch, because single tensors were passed.
    assert isinstance(result.mask, Tensor)
    assert result.weights is None or isinstance(result.weights, Tensor)
    return result, result.weights, result.mask


def token_metrics(
    prefix: str, log_ratio: Tensor, mask: Tensor, accepted: Tensor, weights: Tensor | None
) -> dict[str, Tensor]:
    """Return the metrics of ``TOKEN_METRICS`` as one value for each token, for a trainer that averages them itself.

    A metric is the mean of its values over the tokens of ``mask``.

    Args:
        prefix: put before the metrics' names.
        log_ratio: log π_train - log π_rollout of each token, of any shape; ignored outside the mask.
        mask: bool, the trained tokens.
        accepted: bool, the trained tokens that are not rejected.
        weights: the applied weights. None: the metric of the weights is left out.

    Returns:
        Values by metric name (with the prefix): like the mask, all finite.
    """
    # Rejected tokens may have NaN or infinite log-probs: one of them would make the whole mean NaN or infinite.
    log_ratio = torch.where(mask & log_ratio.isfinite(), log_ratio, torch.zeros_like(log_ratio))
    values = [-log_ratio, k3(log_ratio), (mask & ~accepted).float()]
    if weights is not None:
        values.append(weights)
    # Not strict: without weights the last name has no values.
    return {f"{prefix}{name}": value for name, value in zip(TOKEN_METRICS, values, strict=False)}


def check_micro_batch_config(config: RolloutCorrectionConfig, program: str) -> None:
    """Raise ValueError for a setting that the log-probs and the mask of one micro-batch are not enough for.

    ``program`` is the name of the trainer that calls the adaptor for one micro-batch at a time.
    """
    computes_ratio = f"{program} computes its loss's ratio itself"
    calls_by_micro_batch = f"{program} calls for one micro-batch at a time"
    refuse(
        config,
        bypass_mode=computes_ratio,
        proximal_interpolation=computes_ratio,
        rollout_is_batch_normalize=f"{calls_by_micro_batch}, and the mean of the weights needs the global batch",
        rollout_staleness_scale=f"{calls_by_micro_batch}, and it passes no weight versions",
    )
    refuse_criteria(config, program)
    if config.rejects and config.rejection_denominator != "original":
        raise ValueError(
            f"rejection_denominator={config.rejection_denominator!r}: {program} divides its loss by the tokens before "
            "rejection: set rejection_denominator='original'"
        )


def refuse(config: RolloutCorrectionConfig, **reasons: str) -> None:
    """Raise ValueError if one of the settings named by ``reasons`` is switched on, or ``config`` has a wrong type.

    ``reasons`` maps a setting's name to the reason why the trainer cannot serve it, for the message.
    """
    if not isinstance(config, RolloutCorrectionConfig):
        raise wrong_config(config)
    for name, reason in reasons.items():
        if getattr(config, name):
            raise ValueError(f"{name}={getattr(config, name)!r}: {reason}: drop it")


def refuse_criteria(config: RolloutCorrectionConfig, program: str) -> None:
    """Raise ValueError for a criterion that needs prompts or advantages, which the program does not pass."""
    for criterion in config.criteria:
        if not _needs_log_probs_alone(criterion):
            needed = "advantages" if criterion.only_negative else "prompts"
            choices = ", ".join(name for name, choice in CRITERIA.items() if _needs_log_probs_alone(choice))
            raise ValueError(
                f"rollout_rs={criterion.name!r} needs {needed}, which {program} does not pass: use one of {choices}"
            )


def _needs_log_probs_alone(criterion: Criterion) -> bool:
    """Return True if a criterion needs neither prompts nor advantages, but only log-probs."""
    return criterion.unit != "prompt" and not criterion.only_negative
