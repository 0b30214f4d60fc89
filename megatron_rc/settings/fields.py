"""Every setting of the correction, and what follows from the settings together.

``docs/design.md`` begins with the words and symbols that are used here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal

from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.settings.criterion import Criterion, Divergence, Need
from megatron_rc.settings.staleness import StalenessScale


@dataclass(frozen=True)
class CorrectionFields:
    """The fields of :class:`megatron_rc.RolloutCorrectionConfig`, which checks them and fills in what is derived.

    Attributes:
        rollout_is: level of the importance weights: ``token``, ``sequence`` (product of a sequence's ratios),
            ``geometric`` (their geometric mean), or ``None`` for no weights.
        rollout_is_threshold: bound on the weights: u, or ``"lo_hi"``. Not given: 2.0 where weights are on.
        rollout_is_mode: ``truncate`` min(w, u); ``clamp`` to [lo, u]; ``mask`` (IcePop) 0 outside [lo, u]. Not given:
            ``mask`` for ``"lo_hi"``, else ``truncate``. One number u with ``clamp`` or ``mask`` means [1/u, u].
        rollout_is_threshold_lower: lo, where the threshold is one number and the mode uses it.
        rollout_is_apply: False: the weights are measured with their level, mode and bounds, and applied to nothing.
        rollout_is_batch_normalize: divide the bounded weights by their mean over the global batch.
        rollout_is_batch_normalize_scope: that mean runs over ``all`` valid tokens or the ``accepted`` ones.
        rollout_rs: rejection criteria, a comma list of names from ``megatron_rc.settings.criteria``; all must
            accept.
        rollout_rs_threshold: one bound for all criteria or a comma list with one for each that takes one. k1:
            ``"lo_hi"`` bounds ρ, one number u means [1/u, u]; the others: one upper bound; ``opsm``: δ >= 0.
        rollout_rs_threshold_lower: lower bounds of the k1 criteria that were given one number: one, or one for each.
        rollout_token_veto_threshold: a sequence with any valid token of ρ below this is rejected.
        rollout_staleness_scale: bounds by staleness, ``"1:1.5,4:2"``: in nats, times 1.5 where the weights that sampled
            are 1 to 3 versions old, times 2 from 4 on. Holds for the weights' bounds and those of ``rollout_rs``: of
            single tokens by their own version, of whole sequences by their oldest one. The veto stays as it is.
        rejection_denominator: which tokens the loss is averaged over: the ``accepted`` ones, or the ``original`` ones,
            rejected tokens among them.
        bad_log_probs: what a NaN, infinite or positive log-prob at a trained position does: ``error``, or it is counted
            and the token (``reject_token``) or its sequence (``reject_sequence``) is rejected.
        metric_prefix: in front of every metric's name. ``mismatch/`` gives the names of the oldest dashboards.
        proximal_interpolation: decoupled, without the forward-only pass: log π_old lies between log π_rollout and log
            π_θ, by the distance of their versions (``megatron_rc.loss.proximal``); the correction is
            computed inside the loss, one mini-batch at a time. Exact in the first update after a rollout, and needs
            the versions.
        bypass_mode: π_old := π_rollout; the correction is computed inside the loss from π_θ.
        loss_type: the objective in bypass mode, one of ``megatron_rc.loss.objectives``: ``ppo_clip``, ``gspo`` or
            ``cispo`` (the ratio is the correction: weights are measured, not applied), or ``reinforce``.
        notes: what a foreign configuration was translated into, and what of it was dropped; no part of the config.

    Args:
        use_policy_gradient: the older spelling of ``loss_type="reinforce"``.
    """

    rollout_is: Literal["token", "sequence", "geometric"] | None = "sequence"
    rollout_is_threshold: float | str | None = None
    rollout_is_mode: Literal["truncate", "clamp", "mask"] | None = None
    rollout_is_threshold_lower: float | None = None
    rollout_is_apply: bool = True
    rollout_is_batch_normalize: bool = False
    rollout_is_batch_normalize_scope: Literal["all", "accepted"] = "all"
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = None
    rollout_rs_threshold_lower: float | str | None = None
    rollout_token_veto_threshold: float | None = None
    rollout_staleness_scale: str | None = None
    rejection_denominator: Literal["accepted", "original"] = "accepted"
    bad_log_probs: Literal["error", "reject_token", "reject_sequence"] = "error"
    metric_prefix: str = "rollout_corr/"
    proximal_interpolation: bool = False
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    use_policy_gradient: InitVar[bool | None] = None
    # Derived from the fields above, once.
    is_mode: str = field(init=False, compare=False, repr=False)
    is_bounds: tuple[float, float] = field(init=False, compare=False, repr=False)
    criteria: tuple[Criterion, ...] = field(init=False, compare=False, repr=False)
    needs: tuple[Need, ...] = field(init=False, compare=False, repr=False)
    divergences: tuple[Divergence, ...] = field(init=False, compare=False, repr=False)
    staleness_scale: StalenessScale | None = field(init=False, compare=False, repr=False)

    @property
    def corrects_in_loss(self) -> bool:
        """True where the correction needs π_θ and so has to wait for the loss."""
        return self.bypass_mode or self.proximal_interpolation

    @property
    def needs_prompts(self) -> bool:
        """True where a criterion looks at all responses of a prompt."""
        return any(criterion.unit == "prompt" for criterion in self.criteria)

    @property
    def rejects(self) -> bool:
        """True where some valid token may be rejected, errors aside."""
        return bool(self.criteria) or self.rejects_without_criteria

    @property
    def rejects_sequences(self) -> bool:
        """True where something may reject a whole sequence."""
        vetoes = self.rollout_token_veto_threshold is not None or self.bad_log_probs == "reject_sequence"
        return vetoes or any(criterion.unit != "token" for criterion in self.criteria)

    @property
    def rejects_without_criteria(self) -> bool:
        """True where the veto or bad log-probs may reject."""
        return self.rollout_token_veto_threshold is not None or self.bad_log_probs != "error"

    @property
    def applies_weights(self) -> bool:
        """True where the loss is multiplied by the weights: not in bypass ``ppo_clip``, whose ratio holds them."""
        in_the_ratio = self.bypass_mode and not OBJECTIVES[self.loss_type].weighed_in_bypass
        return self.rollout_is is not None and self.rollout_is_apply and not in_the_ratio

    @property
    def may_weigh_nothing(self) -> bool:
        """True where accepted tokens may be multiplied by 0: with the mode ``mask``."""
        return self.applies_weights and self.is_mode == "mask"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; ``from_dict`` takes it back."""
        return {name: getattr(self, name) for name in FIELDS}


FIELDS = tuple(item.name for item in dataclasses.fields(CorrectionFields) if item.init and item.name != "notes")
DEFAULTS = {item.name: item.default for item in dataclasses.fields(CorrectionFields) if item.name in FIELDS}
SWITCHES = tuple(name for name, value in DEFAULTS.items() if isinstance(value, bool))
