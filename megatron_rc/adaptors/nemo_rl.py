"""For NeMo-RL: its clipped policy loss, corrected, behind the same protocol.

Arguments and answers are those of NeMo-RL of 22 August 2026 (commit 7ea279a): ``LossFunction`` in
``nemo_rl/algorithms/loss/interfaces.py`` and ``ClippedPGLossFn`` beside it. The page is docs/adaptors.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_rc.adaptors.settings import check_micro_batch_config
from megatron_rc.adaptors.tensors import checked_tensor
from megatron_rc.batch.api import correct_rollouts
from megatron_rc.numerics import k3
from megatron_rc.settings.config import RolloutCorrectionConfig

_MEASURED = ("kl", "k3_kl", "rollout_rs_masked_fraction", "rollout_is_mean")


class CorrectedLoss:
    """NeMo-RL's ``ClippedPGLossFn`` on weighted advantages and the accepted tokens alone.

    The loss of a token is a multiple of its advantage, so that weighing the advantage weighs the loss, clipped or not.
    Everything else is NeMo-RL's: ratio, clipping, KL penalty and what the sums are divided by. Whatever it reads of a
    loss function (``loss_type``, ``input_type``, …) is that of the wrapped one.

    Args:
        loss_fn: with ``use_importance_sampling_correction`` off, which would weigh a second time.
        config: what to correct. NeMo-RL divides by the tokens, or sequences, that it counted before: a configuration
            with rejection says ``rejection_denominator="original"``.
        allow_zero_log_probs: as :func:`megatron_rc.correct_rollouts` has it.

    Raises:
        ValueError: a loss that corrects already; a setting that a micro-batch alone cannot have; rejection of single
            tokens beside a mean over sequences, whose lengths it would change.
    """

    def __init__(self, loss_fn: Any, config: RolloutCorrectionConfig, *, allow_zero_log_probs: bool = False) -> None:
        check_micro_batch_config(config, "NeMo-RL")
        if getattr(loss_fn, "use_importance_sampling_correction", False):
            raise ValueError(
                "use_importance_sampling_correction=True: NeMo-RL's loss has weights of its own: make it with False"
            )
        kind = getattr(loss_fn, "loss_type", None)
        if kind is None:
            raise ValueError(f"loss_fn is a {type(loss_fn).__name__} without loss_type: pass NeMo-RL's ClippedPGLossFn")
        self.by_token = getattr(kind, "value", kind) == "token_level"
        tokens = [one.name for one in config.criteria if one.unit == "token"]
        tokens += ["bad_log_probs='reject_token'"] * (config.bad_log_probs == "reject_token")
        if tokens and not self.by_token:
            raise ValueError(
                f"{tokens[0]} rejects single tokens, and token_level_loss=False divides by the tokens of each sequence "
                "that are left: use a criterion of sequences, or token_level_loss=True"
            )
        self.loss_fn = loss_fn
        self.config = config
        self.allow_zero_log_probs = allow_zero_log_probs

    def __getattr__(self, name: str) -> Any:
        """Whatever NeMo-RL reads of the wrapped loss."""
        if name == "loss_fn":  # not there yet, while a copy is made
            raise AttributeError(name)
        return getattr(self.loss_fn, name)

    @property
    def metric_normalizations(self) -> dict[str, Any]:
        """What NeMo-RL's metrics were divided by; those of the correction by the tokens."""
        known = dict(getattr(self.loss_fn, "metric_normalizations", {}))
        by_tokens = known.get("probs_ratio")
        own = {} if by_tokens is None else {f"{self.config.metric_prefix}{name}": by_tokens for name in _MEASURED}
        return {**known, **own}

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """The corrected loss of one micro-batch of whole sequences, as NeMo-RL calls it.

        Args:
            next_token_logprobs: [b, s - 1] log π_θ; differentiated.
            data: token_mask, prev_logprobs, generation_logprobs and advantages [b, s], of which column 0 is not looked
                at, and sample_mask [b]; masks of any dtype. Not changed.
            global_valid_seqs: sequences of the global batch.
            global_valid_toks: tokens of the global batch.

        Returns:
            (loss, metrics); the correction's add up over micro-batches, as NeMo-RL adds up its own.

        Collectives: none: NeMo-RL hands over whole sequences on every context-parallel rank.

        Raises:
            ValueError: a key that is missing or of another shape; bad log-probs at tokens that train.
        """
        if not hasattr(data, "get"):
            raise ValueError(f"data is {type(data).__name__}: expected NeMo-RL's BatchedDataDict")
        rows, columns = checked_tensor("next_token_logprobs", next_token_logprobs).shape
        shape = (rows, columns + 1)
        current = next_token_logprobs.detach()
        advantages = _entry(data, "advantages", shape)
        rollout = _entry(data, "generation_logprobs", shape)
        on_policy = getattr(self.loss_fn, "force_on_policy_ratio", False)
        old = torch.nn.functional.pad(current, (1, 0)) if on_policy else _entry(data, "prev_logprobs", shape)
        mask = (_entry(data, "token_mask", shape) != 0) & (_entry(data, "sample_mask", shape[:1]) != 0).unsqueeze(1)
        mask = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:]], dim=1)
        weights, accepted = self._corrected(old, rollout, mask)
        changed = {"advantages": advantages if weights is None else advantages * weights.to(advantages.dtype)}
        changed |= self._rejected(data, mask, accepted)
        if self.config.bad_log_probs != "error":  # a NaN times 0 is NaN
            filler = torch.nn.functional.pad(current, (1, 0))
            bad = mask & ~accepted
            changed |= {} if on_policy else {"prev_logprobs": torch.where(bad, filler.to(old.dtype), old)}
            changed["generation_logprobs"] = torch.where(bad, filler.to(rollout.dtype), rollout)
        loss, metrics = self.loss_fn(
            next_token_logprobs=next_token_logprobs,
            data=type(data)({**data, **changed}),
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
        )
        return loss, {**metrics, **self._measured(old - rollout, mask, accepted, weights, global_valid_toks)}

    def _corrected(self, old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor | None, Tensor]:
        result = correct_rollouts(
            old,
            rollout,
            mask,
            self.config,
            sequence_ids=torch.arange(len(mask), device=mask.device),
            allow_zero_log_probs=self.allow_zero_log_probs,
        )
        result.check()
        assert isinstance(result.mask, Tensor)
        assert result.weights is None or isinstance(result.weights, Tensor)
        return result.weights, result.mask

    def _rejected(self, data: Mapping[str, Any], mask: Tensor, accepted: Tensor) -> dict[str, Tensor]:
        """The masks without what is rejected: of tokens, or of sequences where the loss is a mean over those."""
        if not self.config.rejects:
            return {}
        if self.by_token:
            tokens = data["token_mask"]
            return {"token_mask": torch.where(mask & ~accepted, torch.zeros_like(tokens), tokens)}
        samples = data["sample_mask"]
        return {"sample_mask": torch.where(accepted.any(1), samples, torch.zeros_like(samples))}

    def _measured(
        self, log_ratio: Tensor, mask: Tensor, accepted: Tensor, weights: Tensor | None, tokens: Tensor
    ) -> dict[str, float]:
        good = mask & log_ratio.isfinite()
        log_ratio = torch.where(good, log_ratio, torch.zeros_like(log_ratio))
        values = [-log_ratio, k3(log_ratio), mask & ~accepted, *([] if weights is None else [weights])]
        sums = torch.stack([value.sum(dtype=torch.float64) for value in values]) / torch.as_tensor(tokens).clamp(min=1)
        names = [f"{self.config.metric_prefix}{name}" for name in _MEASURED[: len(values)]]
        return dict(zip(names, sums.tolist(), strict=True))


def _entry(data: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of NeMo-RL's batch."""
    value = data.get(name)
    if value is None:
        raise ValueError(f"{name} is missing in the data: NeMo-RL's trainer sets it for its policy loss")
    return checked_tensor(name, value, shape)
