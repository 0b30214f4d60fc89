"""Every setting of the correction, and the properties that follow from several of them.

``docs/design.md`` begins with the words and symbols that are used here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal

from megatron_rc.settings.criterion import Criterion, Divergence, Need
from megatron_rc.settings.levels import WeightLevel
from megatron_rc.settings.staleness import StalenessScale


@dataclass(frozen=True)
class CorrectionFields:
    """The fields of :class:`megatron_rc.RolloutCorrectionConfig`, which checks them and computes the derived ones.

    Attributes:
        rollout_is: level of the importance weights, a name from ``megatron_rc.settings.levels``: ``token``,
            ``sequence`` (product of a sequence's ratios), ``geometric`` (their geometric mean), ``turn`` and
            ``turn_geometric`` (the same over a turn), ``prefix`` (product of the ratios up to the token),
            ``min_prefix`` (MinPRO), or ``None`` for no weights.
        rollout_is_threshold: bound on the weights: u, or ``"lo_hi"``. None: 2.0.
        rollout_is_mode: ``truncate`` min(w, u); ``clamp`` to [lo, u]; ``mask`` (IcePop) 0 outside [lo, u]. None:
            ``mask`` for ``"lo_hi"``, else ``truncate``. One number u with ``clamp`` or ``mask`` means [1/u, u].
        rollout_is_threshold_lower: lo, if the threshold is one number and the mode is ``clamp`` or ``mask``.
        rollout_is_apply: False: measure the weights with their level, mode and bounds, and the veto, and apply neither.
        rollout_is_batch_normalize: divide the bounded weights by their mean over the global batch.
        rollout_is_batch_normalize_scope: tokens of that mean: ``all`` valid ones or the ``accepted`` ones.
        rollout_rs: rejection criteria, a comma list of names from ``megatron_rc.settings.criteria``; all must accept.
        rollout_rs_threshold: one bound for all criteria, or a comma list with one for each criterion with a bound. k1:
            ``"lo_hi"`` bounds ρ, one number u means [1/u, u]; ``opsm``: δ >= 0; others: one upper bound.
        rollout_rs_threshold_lower: lower bounds of k1 criteria whose bound is one number: one, or one for each.
        rollout_token_veto_threshold: reject a sequence if ρ of any of its valid tokens is below this.
        rollout_staleness_scale: factors of bounds in nats by staleness: ``"1:1.5,4:2"`` is 1.5 for weights that are 1
            to 3 versions old, 2 from 4 on. They apply to the weights' bounds and ``rollout_rs``; a token has its own
            staleness, a whole sequence its oldest token's. The veto does not change.
        rejection_denominator: tokens that the loss is averaged over: the ``accepted`` ones, or the ``original`` ones,
            which include rejected tokens.
        bad_log_probs: effect of a NaN, infinite or positive log-prob at a trained position: ``error``, or it is counted
            and its token (``reject_token``) or sequence (``reject_sequence``) is rejected.
        metric_prefix: prefix of the metrics' names. ``mismatch/`` gives the names of the oldest dashboards.
        proximal_interpolation: decoupled without the forward-only pass: log π_old is interpolated between log π_rollout
            and log π_θ by weight version (``megatron_rc.loss.proximal``). The correction is computed inside the
            loss, one mini-batch at a time. Exact in the first update after a rollout; needs the versions.
        bypass_mode: π_old := π_rollout; the correction is computed inside the loss from π_θ.
        loss_type: the objective in bypass mode, from ``megatron_rc.loss.objectives``: ``reinforce``, or one whose
            ratio is the correction (weights are measured, not applied): ``ppo_clip``, ``gspo``, ``cispo``,
            ``dppo_tv``, ``dppo_kl``, ``cppo``, ``sapo``, ``gmpo``.
        notes: results of translating another program's settings, and settings that were dropped; not compared.

    Args:
        use_policy_gradient: the older spelling of ``loss_type="reinforce"``.
    """

    rollout_is: str | None = "sequence"
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
    # Derived from the fields above, once, by the config.
    level: WeightLevel | None = field(init=False, compare=False, repr=False)  # of the weights; None without weights
    weighs_tokens: bool = field(init=False, compare=False, repr=False)  # tokens of one sequence have different weights
    # The loss is multiplied by the weights: not in bypass ``ppo_clip``, whose ratio is the correction.
    applies_weights: bool = field(init=False, compare=False, repr=False)
    is_mode: str = field(init=False, compare=False, repr=False)
    is_bounds: tuple[float, float] = field(init=False, compare=False, repr=False)  # of the weights
    is_log_bounds: tuple[float, float] = field(init=False, compare=False, repr=False)  # the same in nats
    criteria: tuple[Criterion, ...] = field(init=False, compare=False, repr=False)
    # The sums and extremes that the criteria need of each sequence beside Σ log ρ, and all divergences; each once.
    needs: tuple[Need, ...] = field(init=False, compare=False, repr=False)
    divergences: tuple[Divergence, ...] = field(init=False, compare=False, repr=False)
    needs_prompts: bool = field(init=False, compare=False, repr=False)  # a criterion tests all responses of a prompt
    needs_history: bool = field(init=False, compare=False, repr=False)  # weights of prefixes or turns, tests of turns
    staleness_scale: StalenessScale | None = field(init=False, compare=False, repr=False)
    # Below 2⁴⁸; two configs share it only if all their fields are equal (or by a rare chance).
    fingerprint: int = field(init=False, compare=False, repr=False)

    @property
    def weighs_single_tokens(self) -> bool:
        """True if the weight of a token is its own ratio."""
        return self.level is not None and self.level.unit == "token" and self.level.before is None

    @property
    def corrects_in_loss(self) -> bool:
        """True if the correction is computed inside the loss."""
        return self.bypass_mode or self.proximal_interpolation

    @property
    def rejects(self) -> bool:
        """True if a valid token may be rejected."""
        return bool(self.criteria) or self.rejects_without_criteria

    @property
    def rejects_without_criteria(self) -> bool:
        """True if the veto or bad log-probs may reject."""
        return self.rejecting_veto is not None or self.bad_log_probs != "error"

    @property
    def rejecting_veto(self) -> float | None:
        """The veto's threshold; None without a veto, and with ``rollout_is_apply=False``, which only measures it."""
        return self.rollout_token_veto_threshold if self.rollout_is_apply else None

    @property
    def may_weigh_nothing(self) -> bool:
        """True if accepted tokens may have weight 0: with the mode ``mask``."""
        return self.applies_weights and self.is_mode == "mask"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for ``from_dict``."""
        return {name: getattr(self, name) for name in FIELDS}


FIELDS = tuple(item.name for item in dataclasses.fields(CorrectionFields) if item.init and item.name != "notes")
DEFAULTS = {item.name: item.default for item in dataclasses.fields(CorrectionFields) if item.name in FIELDS}
SWITCHES = tuple(name for name, value in DEFAULTS.items() if isinstance(value, bool))
