"""verl: the correction of a batch on its driver, and a policy loss for its workers (Megatron's and FSDP's).

Arguments and results follow verl 0.9.1: ``verl/trainer/ppo/rollout_corr_helper.py`` and the registry in
``verl/trainer/ppo/core_algos.py``. See docs/adaptors.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rc.adaptors.shared import checked_tensor, corrected, refuse, refuse_criteria
from megatron_rc.loss.aggregation import AGGREGATIONS, loss_sum
from megatron_rc.loss.metrics import SUMS, LossStatistics
from megatron_rc.loss.objectives import SAPO_TEMPERATURES, Objective, objective_of
from megatron_rc.loss.policy import policy_loss
from megatron_rc.numerics import is_log_prob
from megatron_rc.parallel.arguments import check_number, one_of
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.records.formats.rows import numbered
from megatron_rc.settings.config import RolloutCorrectionConfig


class VerlCorrection:
    """The correction for verl: ``add_to_batch`` on its driver, and ``policy_loss`` in its workers.

    The driver and each worker make an object with the same arguments. In decoupled mode ``add_to_batch`` replaces
    verl's ``compute_rollout_correction_and_add_to_batch``; ``policy_loss`` applies the weights that ``add_to_batch``
    has put into the batch. In bypass mode verl's driver corrects nothing, and ``policy_loss`` replaces the loss
    ``bypass_mode`` in verl's registry.

    Args:
        config: the correction's settings. Default: verl's ``algorithm.rollout_correction``, with verl's meaning.
        algorithm: the objective in decoupled mode. In bypass mode the settings' ``loss_type`` names it.
        allow_zero_log_probs: accept rollout log-probs that are all 0; see :func:`megatron_rc.correct_rollouts`.

    Raises:
        ValueError: a setting that verl's calls cannot serve, with the remedy.
    """

    def __init__(
        self,
        config: RolloutCorrectionConfig | None = None,
        *,
        algorithm: str = "ppo_clip",
        allow_zero_log_probs: bool = False,
    ) -> None:
        if config is not None:
            _check(config)
        objective_of(algorithm)
        self.config = config
        self.algorithm = algorithm
        self.allow_zero_log_probs = allow_zero_log_probs

    def add_to_batch(self, batch: Any, rollout_corr_config: Any = None) -> tuple[Any, dict[str, float]]:
        """Correct the rollout batch, on the driver, before advantages are computed.

        Args:
            batch: a ``DataProto``. Its ``batch`` holds old_log_probs, rollout_log_probs and response_mask [n, r], the
                mask of any dtype; its ``non_tensor_batch`` holds ``uid``, if a criterion needs prompts.
            rollout_corr_config: ``algorithm.rollout_correction``; read if no config was given.

        Returns:
            (batch, the metrics that docs/metrics.md describes). In the batch, ``response_mask`` is now 0 at rejected
            tokens, so that verl divides its loss by the accepted ones. ``rollout_is_weights`` is added if weights are
            applied.

        Raises:
            ValueError: a field is missing or has another shape; bad log-probs at trained tokens.
        """
        config = self._config(rollout_corr_config)
        if config.corrects_in_loss:
            raise ValueError("bypass_mode=True corrects in the loss: register policy_loss as 'bypass_mode' instead")
        tensors = batch.batch
        mask = _field(tensors, "response_mask", None)
        old = _field(tensors, "old_log_probs", mask.shape)
        rollout = _field(tensors, "rollout_log_probs", mask.shape)
        prompts: dict[str, Any] = {}
        if config.needs_prompts:
            prompts["group_ids"] = _prompts(batch, len(mask)).to(mask.device)
            prompts["num_groups"] = len(mask)  # at most one prompt for each response
        result, weights, accepted = corrected(
            old, rollout, mask != 0, config, allow_zero_log_probs=self.allow_zero_log_probs, **prompts
        )
        tensors["response_mask"] = torch.where(accepted, mask, torch.zeros_like(mask))
        if weights is not None:
            tensors["rollout_is_weights"] = weights
        return batch, result.metrics()

    def policy_loss(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss and the metrics of a micro-batch of whole responses; verl's workers call it by its registry.

        The loss is 0-D and scaled as verl's ``agg_loss`` scales it.

        Args:
            old_log_prob: [b, r] log π_old; in bypass mode log π_rollout.
            log_prob: [b, r] log π_θ; differentiated.
            advantages: [b, r].
            response_mask: [b, r] of any dtype; 0 for tokens that are not trained or are already rejected.
            loss_agg_mode: an aggregation; verl's names of them are also ``megatron_rc``'s.
            config: the actor's configuration: clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c, tau_pos,
                tau_neg, and ``global_batch_info`` with the denominators of verl's losses.
            rollout_is_weights: [b, r], the weights from ``add_to_batch``; ignored in bypass mode.

        Collectives: none, because verl passes whole responses on every context-parallel rank.

        Raises:
            ValueError: shapes or settings that do not fit; in bypass mode bad log-probs.
        """
        tensors = {"old_log_prob": old_log_prob, "advantages": advantages, "response_mask": response_mask}
        if rollout_is_weights is not None:
            tensors["rollout_is_weights"] = rollout_is_weights
        for name, tensor in tensors.items():
            checked_tensor(name, tensor, tuple(log_prob.shape))

        # In bypass mode verl copies algorithm.rollout_correction to this place in the actor's configuration.
        copied_settings = (config.get("policy_loss", None) or {}).get("rollout_correction", None)
        correction_config = self._config(copied_settings)
        mask = response_mask != 0
        if correction_config.bypass_mode:
            algorithm = correction_config.loss_type
            valid, accepted, weights, metrics = self._correct_in_loss(
                correction_config, log_prob.detach(), old_log_prob, mask, advantages
            )
        else:
            # add_to_batch has corrected on the driver: rejected tokens are no longer in the mask.
            algorithm = self.algorithm
            valid = mask
            accepted = mask
            weights = rollout_is_weights
            metrics = {}

        bounds = _bounds(config, objective_of(algorithm))
        losses = policy_loss(log_prob, old_log_prob, advantages, valid, algorithm=algorithm, weights=weights, **bounds)
        loss = _aggregated(losses.per_token, accepted, loss_agg_mode, config.get("global_batch_info", None) or {})
        return loss.to(log_prob.dtype), {**_actor_metrics(losses.statistics), **metrics}

    def _correct_in_loss(
        self, config: RolloutCorrectionConfig, train: Tensor, rollout: Tensor, mask: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, float]]:
        """Correct a micro-batch in bypass mode.

        Args:
            config: the correction's settings.
            train: [b, r] log π_θ, detached.
            rollout: [b, r] log π_rollout.
            mask: [b, r] bool, the trained tokens.
            advantages: [b, r].

        Returns:
            (valid, accepted, weights, metrics). ``valid``, [b, r] bool, are the trained tokens with a usable log π_θ
            and a usable log π_rollout; rejected ones are included, because ``accepted`` masks the loss later.
            ``accepted``, [b, r] bool, are the trained tokens that are not rejected. The weights are None if the loss is
            not multiplied by them.
        """
        result, weights, accepted = corrected(
            train, rollout, mask, config, advantages=advantages, allow_zero_log_probs=self.allow_zero_log_probs
        )
        # A NaN or infinite log-prob must not reach a gradient.
        valid = mask & is_log_prob(rollout) & is_log_prob(train)
        # With an objective such as ppo_clip the ratio π_θ/π_rollout corrects already: the weights are only measured.
        applied_weights = weights if config.applies_weights else None
        return valid, accepted, applied_weights, result.metrics()

    def _config(self, verl_settings: Any) -> RolloutCorrectionConfig:
        """Return the configuration that was passed, else the one that verl's settings describe at the first call."""
        if self.config is None:
            if not isinstance(verl_settings, Mapping):
                raise ValueError(
                    f"algorithm.rollout_correction is {verl_settings!r}: expected verl's settings, or pass a "
                    "RolloutCorrectionConfig to VerlCorrection"
                )
            # Names that begin with an underscore, such as _target_, are Hydra's, not settings.
            settings = {name: value for name, value in verl_settings.items() if not str(name).startswith("_")}
            config = RolloutCorrectionConfig.from_dict(settings, dialect="verl")
            _check(config)
            self.config = config
        return self.config


def _check(config: RolloutCorrectionConfig) -> None:
    """Raise ValueError for settings that verl's calls cannot serve."""
    no_versions = "verl's batch has no weight versions"
    refuse(config, proximal_interpolation=no_versions, rollout_staleness_scale=no_versions)
    if config.bypass_mode:
        reason = "the mean of the weights needs the global batch, and verl's bypass mode sees one micro-batch at a time"
        refuse(config, rollout_is_batch_normalize=reason)
    elif config.rejection_denominator != "accepted":
        raise ValueError(
            f"rejection_denominator={config.rejection_denominator!r}: verl counts its losses' denominators itself: "
            "leave it out"
        )
    for criterion in config.criteria:
        if criterion.only_negative and not config.bypass_mode:
            raise ValueError(f"rollout_rs={criterion.name!r}: verl computes advantages after this call: leave it out")
        if criterion.unit == "prompt" and config.bypass_mode:
            refuse_criteria(config, "verl in bypass mode")


def _field(tensors: Any, name: str, shape: Sequence[int] | None) -> Tensor:
    """Return a tensor of verl's batch; ValueError if it is missing or not of ``shape`` (None: any [n, r])."""
    value = tensors.get(name, None)
    if value is None:
        remedy = "verl sets it before the correction"
        if name == "rollout_log_probs":
            remedy = "set actor_rollout_ref.rollout.calculate_log_probs=True in verl"
        raise ValueError(f"{name} is missing in the batch: {remedy}")
    return checked_tensor(name, value, None if shape is None else tuple(shape))


def _prompts(batch: Any, rows: int) -> Tensor:
    """Number the prompts by the batch's ``uid``: the prompt of each response, [n] int64.

    ValueError unless ``uid`` has ``rows`` entries, one for each response.
    """
    uids = batch.non_tensor_batch.get("uid")
    num_uids = 0 if uids is None else len(uids)
    if uids is None or num_uids != rows:
        raise ValueError(f"uid of the batch has {num_uids} entries: expected {rows}, one each")
    return torch.tensor(numbered(uids), dtype=torch.int64)


def _bounds(config: Any, objective: Objective) -> dict[str, Any]:
    """Return the objective's bounds and temperatures, as arguments of ``policy_loss``, from the actor's configuration.

    verl's default for clip_ratio_c is 3.
    """
    bounds: dict[str, Any] = {}
    for name, verl_name in (("clip_low", "clip_ratio_low"), ("clip_high", "clip_ratio_high")):
        # verl's clip_ratio holds for both bounds, except for one that has a value under its own name.
        bounds[name] = _number(config, "clip_ratio" if config.get(verl_name, None) is None else verl_name)
    if objective.takes_dual_clip:
        bounds["dual_clip"] = _number(config, "clip_ratio_c", 3.0)
        if bounds["dual_clip"] <= 1:
            raise ValueError(f"clip_ratio_c={bounds['dual_clip']!r} of the actor's configuration must be above 1")
    if objective.takes_temperatures:
        for name, default in zip(("tau_pos", "tau_neg"), SAPO_TEMPERATURES, strict=True):
            bounds[name] = _number(config, name, default)
    return bounds


def _number(config: Any, name: str, default: float | None = None) -> float:
    """Return a number of the actor's configuration; ValueError unless it is finite and not negative."""
    value: float = config.get(name, default)
    expected = "of the actor's configuration must be a finite number, 0 or more"
    check_number(name, value, lambda x: 0 <= x < torch.inf, expected)
    return value


def _aggregated(per_token: Tensor, mask: Tensor, mode: str, info: Mapping[str, Any]) -> Tensor:
    """Return the loss of a micro-batch, 0-D, as verl's ``agg_loss`` does: Σ m'ℓ, divided by verl's denominators.

    It is multiplied by the data-parallel size, because verl's engines average gradients over the ranks.

    Args:
        per_token: [b, r] the loss ℓ of each token.
        mask: [b, r] bool m', the accepted tokens.
        mode: an aggregation.
        info: verl's ``global_batch_info`` with dp_size, batch_num_tokens, global_batch_size and loss_scale_factor. A
            number that is missing is taken from the micro-batch.

    Raises:
        ValueError: an unknown mode, or a missing denominator with a dp_size above 1.
    """
    one_of("loss_agg_mode", mode, AGGREGATIONS)
    lengths = mask.sum(1, dtype=torch.float64)
    total = loss_sum(per_token, mask, mode, lengths, SequenceLayout.padded(*per_token.shape))
    dp_size = info.get("dp_size") or 1
    if mode == "token-sum":
        return total * dp_size

    name = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
    if info.get(name) is not None:
        denominator = torch.as_tensor(info[name])
    elif dp_size > 1:
        raise ValueError(
            f"{name} is missing in global_batch_info: loss_agg_mode={mode!r} needs it with dp_size={dp_size}"
        )
    else:
        denominator = lengths.sum() if mode == "token-mean" else (lengths > 0).sum()
    total = total / denominator.clamp(min=1) * dp_size
    if mode == "seq-mean-token-sum-norm":
        total = total / (info.get("loss_scale_factor") or per_token.shape[1])
    return total


def _actor_metrics(statistics: LossStatistics) -> dict[str, float]:
    """Return the three metrics that verl's own losses report, as means over the micro-batch's tokens."""
    sums = dict(zip(SUMS, statistics.sums.tolist(), strict=True))
    num_tokens = max(sums["tokens"], 1)
    return {
        "actor/pg_clipfrac": (sums["clipped_low"] + sums["clipped_high"]) / num_tokens,
        "actor/ppo_kl": -sums["log_ratio"] / num_tokens,
        "actor/pg_clipfrac_lower": sums["dual_clipped"] / num_tokens,
    }
