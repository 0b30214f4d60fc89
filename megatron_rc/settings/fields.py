"""Every setting of the correction, and the facts that follow from the settings.

``docs/design.md`` begins with the words and symbols that are used here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import Any, Literal

from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.settings.bounds import DEFAULT_WEIGHT_THRESHOLD, WeightBounds, read_weight_bounds
from megatron_rc.settings.criteria import CRITERIA, parse_criteria
from megatron_rc.settings.criterion import Criterion, Divergence, Need
from megatron_rc.settings.levels import LEVELS, WeightLevel
from megatron_rc.settings.staleness import StalenessScale, parse_staleness_scale


def _setting(default: Any, help_text: str, choices: tuple[str | None, ...] | None = None) -> Any:
    """Return a field with its help text, and with the values that it takes if they are a short list.

    A help text is for ``--help`` and for the documentation. It leaves out the default, unless that is None.
    """
    return field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True)
class CorrectionFields:
    """The fields of :class:`megatron_rc.RolloutCorrectionConfig`, and properties that follow from them.

    Properties that read a text, such as ``criteria``, are computed once; the config makes them all when it is made, so
    that a wrong text is an error then.
    """

    rollout_is: str | None = _setting(
        "sequence",
        "level of the importance weights: token; sequence (product of its ratios) or geometric (their mean); "
        "turn or turn_geometric, the same over a run of trained tokens; prefix (product up to the token); min_prefix "
        "(MinPRO); or none",
        choices=(None, *LEVELS),
    )
    rollout_is_threshold: float | str | None = _setting(
        None,
        f"bound on the importance weights: one ratio, or a pair lo_hi; default: {DEFAULT_WEIGHT_THRESHOLD}",
    )
    rollout_is_mode: Literal["truncate", "clamp", "mask"] | None = _setting(
        None,
        "treatment of weights out of bounds: truncate at the upper bound, clamp to both, or mask, which "
        "makes them 0 (IcePop); default: mask for a pair of bounds, else truncate",
        choices=(None, "truncate", "clamp", "mask"),
    )
    rollout_is_threshold_lower: float | None = _setting(
        None,
        "lower bound on the importance weights, a ratio, for the modes clamp and mask with "
        "one number u as --rollout-is-threshold; default: 1/u",
    )
    rollout_is_apply: bool = _setting(
        True,
        "multiply the loss by the importance weights; --no-rollout-is-apply only measures them and the veto",
    )
    rollout_is_batch_normalize: bool = _setting(
        False,
        "divide the importance weights by their mean over the global batch",
    )
    rollout_is_batch_normalize_scope: Literal["all", "accepted"] = _setting(
        "all",
        "tokens of the mean of --rollout-is-batch-normalize: all valid ones (all) or the accepted ones (accepted)",
        choices=("all", "accepted"),
    )
    rollout_rs: str | None = _setting(
        None,
        "comma list of rejection criteria, or none; a token must pass all of them: {criteria}; default: none",
    )
    rollout_rs_threshold: float | str | None = _setting(
        None,
        "bound for all criteria of --rollout-rs, or a comma list with one for each that takes a bound: for k1 a ratio "
        "u, which means [1/u, u], or a pair lo_hi; for opsm a margin of 0 or more; for the others an upper bound, in "
        "nats except for seq_mean_error; no default",
    )
    rollout_rs_threshold_lower: float | str | None = _setting(
        None,
        "lower bound for all k1 criteria of --rollout-rs whose bound is one number u, or a "
        "comma list with one for each, as ratios; default: 1/u",
    )
    rollout_token_veto_threshold: float | None = _setting(
        None,
        "reject sequences with a token whose ratio is below this; default: no veto",
    )
    rollout_staleness_scale: str | None = _setting(
        None,
        "factors of all bounds in nats by staleness in weight versions: 1:1.5,4:2 is 1.5 from a "
        "staleness of 1 on, 2 from 4 on; a whole sequence has its oldest token's staleness, and the veto has no "
        "factor; default: no factors",
    )
    rejection_denominator: Literal["accepted", "original"] = _setting(
        "accepted",
        "average the loss over the accepted tokens (accepted) or over all trained ones (original)",
        choices=("accepted", "original"),
    )
    bad_log_probs: Literal["error", "reject_token", "reject_sequence"] = _setting(
        "error",
        "effect of a NaN, infinite or positive log-prob: error, or the rejection of its token "
        "(reject_token) or of its sequence (reject_sequence)",
        choices=("error", "reject_token", "reject_sequence"),
    )
    metric_prefix: str = _setting(
        "rollout_corr/",
        "prefix of the names of all correction metrics; mismatch/ gives the names of the oldest dashboards",
    )
    proximal_interpolation: bool = _setting(
        False,
        "interpolate log π_old between the rollout's and the current log-probs, by weight "
        "version, instead of an extra forward pass",
    )
    bypass_mode: bool = _setting(
        False,
        "use the rollout's log-probs as the old policy's, without an extra forward pass",
    )
    # Objectives can be added, so that this field's choices are looked up when they are needed.
    loss_type: str = _setting("ppo_clip", "objective in bypass mode: {objectives}")
    # Results of translating another program's settings, and the settings that were dropped; never compared.
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    # The older spelling of loss_type="reinforce".
    use_policy_gradient: InitVar[bool | None] = None

    @cached_property
    def level(self) -> WeightLevel | None:
        """Level of the importance weights; None without weights."""
        return None if self.rollout_is is None else LEVELS[self.rollout_is]

    @cached_property
    def weight_bounds(self) -> WeightBounds:
        """Mode and bounds of the weights; without weights, those that weights would have by default."""
        return read_weight_bounds(self.rollout_is_threshold, self.rollout_is_mode, self.rollout_is_threshold_lower)

    @cached_property
    def criteria(self) -> tuple[Criterion, ...]:
        """Rejection criteria with their bounds; a token is accepted if all of them accept it."""
        return parse_criteria(self.rollout_rs, self.rollout_rs_threshold, self.rollout_rs_threshold_lower)

    @cached_property
    def staleness_scale(self) -> StalenessScale | None:
        """Factors of the bounds by staleness; None without ``rollout_staleness_scale``."""
        return parse_staleness_scale(self.rollout_staleness_scale)

    @cached_property
    def fingerprint(self) -> int:
        """A hash of all fields, below 2⁴⁸, by which ranks notice that their configs differ."""
        fields = repr(sorted(self.to_dict().items()))
        return int(hashlib.sha256(fields.encode()).hexdigest()[:12], 16)

    @property
    def is_mode(self) -> str:
        """Mode of ``weight_bounds``."""
        return self.weight_bounds.mode

    @property
    def is_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of ``weight_bounds``, ratios."""
        return self.weight_bounds.lower, self.weight_bounds.upper

    @property
    def is_log_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of ``weight_bounds``, in nats."""
        return self.weight_bounds.log_lower, self.weight_bounds.log_upper

    @property
    def weighs_tokens(self) -> bool:
        """True if tokens of one sequence may have different weights."""
        return self.level is not None and self.level.unit != "sequence"

    @property
    def weighs_single_tokens(self) -> bool:
        """True if the weight of a token is its own ratio."""
        return self.level is not None and self.level.unit == "token" and self.level.before is None

    @property
    def applies_weights(self) -> bool:
        """True if the loss is multiplied by the weights.

        False without weights, with ``rollout_is_apply=False``, and in bypass mode with an objective whose ratio is the
        correction, such as ``ppo_clip``: there the weights are only measured.
        """
        is_in_the_ratio = self.bypass_mode and not OBJECTIVES[self.loss_type].weighed_in_bypass
        return self.level is not None and self.rollout_is_apply and not is_in_the_ratio

    @property
    def may_weigh_nothing(self) -> bool:
        """True if accepted tokens may have weight 0: with the mode ``mask``."""
        return self.applies_weights and self.weight_bounds.mode == "mask"

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """Sums and extremes that the criteria use of each sequence beside Σ log ρ; each once."""
        needs = [need for criterion in self.criteria if criterion.unit != "turn" for need in criterion.needs]
        return tuple(need for need in dict.fromkeys(needs) if need.name != "log_ratio")

    @cached_property
    def divergences(self) -> tuple[Divergence, ...]:
        """Divergences of the criteria on tokens, sequences and prompts; each once."""
        of_criteria = [criterion.divergences for criterion in self.criteria if criterion.unit != "turn"]
        return tuple(dict.fromkeys(divergence for divergences in of_criteria for divergence in divergences))

    @property
    def needs_prompts(self) -> bool:
        """True if a criterion tests all responses of a prompt."""
        return any(criterion.unit == "prompt" for criterion in self.criteria)

    @property
    def needs_history(self) -> bool:
        """True for weights of prefixes or turns, and for criteria on turns: they look at neighbouring tokens."""
        if any(criterion.unit == "turn" for criterion in self.criteria):
            return True
        return self.level is not None and (self.level.unit == "turn" or self.level.before is not None)

    @property
    def corrects_in_loss(self) -> bool:
        """True if the correction is computed inside the loss, because it depends on π_θ."""
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

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, without ``notes``."""
        return {name: getattr(self, name) for name in FIELDS}


_SETTINGS = {item.name: item for item in dataclasses.fields(CorrectionFields) if "help" in item.metadata}
FIELDS = tuple(_SETTINGS)
DEFAULTS = {name: setting.default for name, setting in _SETTINGS.items()}
SWITCHES = tuple(name for name, default in DEFAULTS.items() if isinstance(default, bool))


def choices_of(name: str) -> tuple[str | None, ...] | None:
    """Return the values that a field takes; None if they are no short list."""
    if name == "loss_type":
        return tuple(OBJECTIVES)
    choices: tuple[str | None, ...] | None = _SETTINGS[name].metadata["choices"]
    return choices


def help_of(name: str) -> str:
    """Return the help text of a field, with its default."""
    setting = _SETTINGS[name]
    text: str = setting.metadata["help"].format(criteria=", ".join(CRITERIA), objectives=", ".join(OBJECTIVES))
    return with_default(text, setting.default)


def with_default(text: str, default: object) -> str:
    """Return a help text with the default; a default of None is in the text already."""
    if default is None:
        return text
    if isinstance(default, bool):
        default = "yes" if default else "no"
    return f"{text}; default: {default}"


CorrectionFields.__doc__ = f"{CorrectionFields.__doc__}\n    Attributes:\n" + "\n".join(
    f"        {name}: {help_of(name)}" for name in FIELDS
)
