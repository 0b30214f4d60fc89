"""NeMo-RL: its clipped policy loss with the correction, behind the same protocol.

Arguments and results follow NeMo-RL of 22 August 2026 (commit 7ea279a): ``LossFunction`` in
``nemo_rl/algorithms/loss/interfaces.py`` and ``ClippedPGLossFn`` in the same folder. See docs/adaptors.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rc.adaptors.shared import (
    TOKEN_METRICS,
    check_micro_batch_config,
    checked_tensor,
    corrected,
    token_metrics,
)
from megatron_rc.settings.config import RolloutCorrectionConfig


class CorrectedLoss:
    """NeMo-RL's ``ClippedPGLossFn``, called with weighted advantages and a mask of the accepted tokens.

    The loss of a token is a multiple of its advantage, clipped or not, so a weighted advantage weights the loss. Ratio,
    clipping, KL penalty and denominators stay NeMo-RL's. All other attributes (``loss_type``, ``input_type``, …) are
    the wrapped loss's.

    Args:
        loss_fn: NeMo-RL's loss, with ``use_importance_sampling_correction`` off: it would apply weights twice.
        config: the correction's settings. NeMo-RL divides by the tokens or sequences before rejection, so that
            rejection needs ``rejection_denominator="original"``.
        allow_zero_log_probs: accept rollout log-probs that are all 0; see :func:`megatron_rc.correct_rollouts`.

    Raises:
        ValueError: a loss with a correction of its own; a setting that one micro-batch cannot serve; rejection of
            single tokens with a mean over sequences, whose lengths it would change.
    """

    def __init__(self, loss_fn: Any, config: RolloutCorrectionConfig, *, allow_zero_log_probs: bool = False) -> None:
        check_micro_batch_config(config, "NeMo-RL")
        if getattr(loss_fn, "use_importance_sampling_correction", False):
            raise ValueError(
                "use_importance_sampling_correction=True applies NeMo-RL's own weights: make loss_fn with it False"
            )
        loss_type = getattr(loss_fn, "loss_type", None)
        if loss_type is None:
            raise ValueError(f"loss_fn is a {type(loss_fn).__name__} without loss_type: pass NeMo-RL's ClippedPGLossFn")
        # NeMo-RL's loss_type is an enum; a plain string is accepted too.
        self.by_token = getattr(loss_type, "value", loss_type) == "token_level"
        token_rejections = [criterion.name for criterion in config.criteria if criterion.of_tokens]
        if config.bad_log_probs == "reject_token":
            token_rejections.append("bad_log_probs='reject_token'")
        if token_rejections and not self.by_token:
            raise ValueError(
                f"{token_rejections[0]} rejects single tokens or turns, and token_level_loss=False divides by each "
                "sequence's remaining tokens: use a criterion of sequences, or token_level_loss=True"
            )
        self.loss_fn = loss_fn
        self.on_policy = bool(getattr(loss_fn, "force_on_policy_ratio", False))  # it takes log π_θ for log π_old
        self.config = config
        self.allow_zero_log_probs = allow_zero_log_probs

    def __getattr__(self, name: str) -> Any:
        """An attribute of the wrapped loss."""
        if name == "loss_fn":  # not set yet while a copy is made
            raise AttributeError(name)
        return getattr(self.loss_fn, name)

    @property
    def metric_normalizations(self) -> dict[str, Any]:
        """NeMo-RL's normalisations of its metrics, and the tokens for the correction's metrics."""
        normalizations = dict(getattr(self.loss_fn, "metric_normalizations", {}))
        # The normalisation by tokens, from a metric of NeMo-RL's own that has it.
        by_tokens = normalizations.get("probs_ratio")
        if by_tokens is not None:
            normalizations |= {f"{self.config.metric_prefix}{name}": by_tokens for name in TOKEN_METRICS}
        return normalizations

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Corrected loss and metrics, which add up, of one micro-batch of whole sequences, as NeMo-RL calls it.

        Args:
            next_token_logprobs: [b, s - 1] log π_θ; differentiated.
            data: token_mask, prev_logprobs, generation_logprobs and advantages [b, s], of which column 0 is ignored,
                and sample_mask [b]; masks of any dtype. Not changed.
            global_valid_seqs: sequences of the global batch.
            global_valid_toks: tokens of the global batch.

        Collectives: none: NeMo-RL hands over whole sequences on every context-parallel rank.

        Raises:
            ValueError: a key is missing or has another shape; bad log-probs at trained tokens.
        """
        # The data have one column more, in front: the first token has no log-prob.
        current = pad(checked_tensor("next_token_logprobs", next_token_logprobs).detach(), (1, 0))
        shape = tuple(current.shape)
        old = current if self.on_policy else _entry(data, "prev_logprobs", shape)
        rollout = _entry(data, "generation_logprobs", shape)
        mask = _trained(data, shape)
        advantages = _entry(data, "advantages", shape)
        _, weights, accepted = corrected(
            old, rollout, mask, self.config, allow_zero_log_probs=self.allow_zero_log_probs
        )
        weighted = advantages if weights is None else advantages * weights.to(advantages.dtype)
        changed = {"advantages": weighted}
        changed |= self._masks_after_rejection(data, mask, accepted)
        changed |= self._finite_log_probs(data, accepted | ~mask, current)
        loss, metrics = self.loss_fn(
            next_token_logprobs=next_token_logprobs,
            data=type(data)({**data, **changed}),
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
        )
        correction_metrics = self._metrics(old - rollout, mask, accepted, weights, global_valid_toks)
        return loss, {**metrics, **correction_metrics}

    def _finite_log_probs(self, data: Mapping[str, Any], is_not_rejected: Tensor, current: Tensor) -> dict[str, Tensor]:
        """The data's log-probs, by name, with log π_θ at rejected tokens: NaN there would reach the loss as NaN · 0.

        Empty if no log-prob may be NaN.
        """
        if self.config.bad_log_probs == "error":
            return {}
        names = ["generation_logprobs"]
        if not self.on_policy:
            names.append("prev_logprobs")
        return {name: torch.where(is_not_rejected, data[name], current.to(data[name].dtype)) for name in names}

    def _masks_after_rejection(self, data: Mapping[str, Any], mask: Tensor, accepted: Tensor) -> dict[str, Tensor]:
        """The data's mask, by name, without the rejected tokens, or without rejected sequences.

        A loss that is a mean over sequences needs the second: it divides by the sequences of ``sample_mask``. Empty if
        the settings reject nothing.
        """
        if not self.config.rejects:
            return {}
        if self.by_token:
            tokens = data["token_mask"]
            return {"token_mask": torch.where(mask & ~accepted, torch.zeros_like(tokens), tokens)}
        samples = data["sample_mask"]
        return {"sample_mask": torch.where(accepted.any(1), samples, torch.zeros_like(samples))}

    def _metrics(
        self, log_ratio: Tensor, mask: Tensor, accepted: Tensor, weights: Tensor | None, global_tokens: Tensor
    ) -> dict[str, float]:
        """The micro-batch's part of each correction metric: NeMo-RL adds the parts of all micro-batches and ranks."""
        values = token_metrics(self.config.metric_prefix, log_ratio, mask, accepted, weights)
        sums = torch.stack([value.sum(dtype=torch.float64) for value in values.values()])
        parts = (sums / torch.as_tensor(global_tokens).clamp(min=1)).tolist()
        return dict(zip(values, parts, strict=True))


def _trained(data: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor:
    """The tokens that are trained, [b, s] bool; False in column 0."""
    token_mask = _entry(data, "token_mask", shape) != 0
    sample_mask = _entry(data, "sample_mask", shape[:1]) != 0
    mask = token_mask & sample_mask.unsqueeze(1)
    return torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:]], dim=1)


def _entry(data: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of NeMo-RL's batch, with its shape checked."""
    value = data.get(name)
    if value is None:
        raise ValueError(f"{name} is missing in the data: NeMo-RL's trainer sets it for its policy loss")
    return checked_tensor(name, value, shape)
