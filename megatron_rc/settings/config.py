"""What the user asks the correction to do: one frozen, validated record."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import re
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.settings.bounds import one_of, ordered, positive, ratio_bounds
from megatron_rc.settings.criteria import Criterion, Divergence, Need, parse_criteria
from megatron_rc.settings.presets import PRESETS, RELEASES, Presets
from megatron_rc.settings.staleness import StalenessScale, parse_staleness_scale

DEFAULT_IS_THRESHOLD = 2.0
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "rollout_is": (None, "token", "sequence", "geometric"),
    "rollout_is_mode": (None, "truncate", "clamp", "mask"),
    "rollout_is_batch_normalize_scope": ("all", "accepted"),
    "rejection_denominator": ("accepted", "original"),
    "bad_log_probs": ("error", "reject_token", "reject_sequence"),
}
_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_log = logging.getLogger("megatron_rc")


@dataclass(frozen=True)
class RolloutCorrectionConfig(Presets):
    """Importance sampling and rejection between the policy that sampled and the one that trains.

    ρ = π_train / π_rollout; π_train is π_old, or π_θ in bypass mode. Metrics only: ``rollout_is=None``, no criterion.

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
        rollout_rs: rejection criteria, a comma list of names from :mod:`megatron_rc.settings.criteria`; all must
            accept.
        rollout_rs_threshold: one bound for all criteria or a comma list with one for each that takes one. k1:
            ``"lo_hi"`` bounds ρ, one number u means [1/u, u]; k2 and k3: one upper bound, in nats; ``opsm``: δ >= 0.
        rollout_rs_threshold_lower: lower bounds of the k1 criteria that were given one number: one, or one for each.
        rollout_token_veto_threshold: a sequence with any valid token of ρ below this is rejected.
        rollout_staleness_scale: bounds by staleness, ``"1:1.5,4:2"``: in nats, times 1.5 where the weights that sampled
            are 1 to 3 versions old, times 2 from 4 on. Holds for the weights' bounds and those of ``rollout_rs``: of
            single tokens by their own version, of whole sequences by their oldest one. The veto stays as it is.
        rejection_denominator: which tokens the loss is averaged over: the ``accepted`` ones, or all that were there
            ``original``-ly.
        bad_log_probs: what a NaN, infinite or positive log-prob at a valid position does: ``error``, or it is counted
            and the token (``reject_token``) or its sequence (``reject_sequence``) is rejected.
        metric_prefix: in front of every metric's name. ``mismatch/`` gives the names of the oldest dashboards.
        proximal_interpolation: decoupled, without the forward-only pass: log π_old lies between log π_rollout and log
            π_θ, by the distance of their versions (:mod:`megatron_rc.correction.proximal`); the correction is
            computed inside the loss, one mini-batch at a time. Exact in the first update after a rollout, and needs
            the versions.
        bypass_mode: π_old := π_rollout; the correction is computed inside the loss from π_θ.
        loss_type: the objective in bypass mode, one of :mod:`megatron_rc.loss.objectives`: ``ppo_clip``, ``gspo`` or
            ``cispo`` (the ratio is the correction: weights are measured, not applied), or ``reinforce``.
        notes: what a foreign configuration was translated into, and what of it was dropped; no part of the config.

    Args:
        use_policy_gradient: the older spelling of ``loss_type="reinforce"``.

    Raises:
        ValueError: at construction: names the field, the value and the remedy.
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

    def __post_init__(self, use_policy_gradient: bool | None) -> None:
        for name, allowed in _CHOICES.items():
            one_of(name, getattr(self, name), allowed)
        one_of("loss_type", self.loss_type, tuple(OBJECTIVES))
        for name in ("rollout_is_apply", "rollout_is_batch_normalize", "proximal_interpolation", "bypass_mode"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false")
        if not isinstance(self.metric_prefix, str):
            raise ValueError(f"metric_prefix={self.metric_prefix!r} must be a text, for example 'rollout_corr/'")
        if self.rollout_token_veto_threshold is not None:
            positive("rollout_token_veto_threshold", self.rollout_token_veto_threshold)
        self._take_policy_gradient(use_policy_gradient)
        self._check_weights()
        mode, bounds = self._weight_bounds()
        criteria = parse_criteria(self.rollout_rs, self.rollout_rs_threshold, self.rollout_rs_threshold_lower)
        scale = parse_staleness_scale(self.rollout_staleness_scale)
        derived = {
            "is_mode": mode,
            "is_bounds": bounds,
            "criteria": criteria,
            # What all criteria need of the tokens of each sequence, and look at in a token; each once.
            "needs": tuple(dict.fromkeys(need for criterion in criteria for need in criterion.needs)),
            "divergences": tuple(dict.fromkeys(one for criterion in criteria for one in criterion.divergences)),
            "staleness_scale": scale,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._check_scale()
        if criteria and all(one.follows_others for one in criteria) and not self._rejects_without_criteria:
            raise ValueError(
                f"rollout_rs={self.rollout_rs!r} looks at what other criteria reject: name at least one more"
            )
        self._check_mode()

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
        return bool(self.criteria) or self._rejects_without_criteria

    @property
    def rejects_sequences(self) -> bool:
        """True where something may reject a whole sequence."""
        vetoes = self.rollout_token_veto_threshold is not None or self.bad_log_probs == "reject_sequence"
        return vetoes or any(criterion.unit != "token" for criterion in self.criteria)

    @property
    def _rejects_without_criteria(self) -> bool:
        return self.rollout_token_veto_threshold is not None or self.bad_log_probs != "error"

    @property
    def applies_weights(self) -> bool:
        """True where the loss is multiplied by the weights: not in bypass ``ppo_clip``, whose ratio holds them."""
        in_the_ratio = self.bypass_mode and not OBJECTIVES[self.loss_type].weighed_in_bypass
        return self.rollout_is is not None and self.rollout_is_apply and not in_the_ratio

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; ``from_dict`` takes it back."""
        return {name: getattr(self, name) for name in FIELDS}

    def describe(self) -> str:
        """The config in words and as flags, one fact a line; what a translation did comes last."""
        from megatron_rc.settings.description import describe

        return describe(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], dialect: str = "megatron_rc") -> RolloutCorrectionConfig:
        """A config from fields by name.

        Args:
            fields: the names and values, as the dialect spells them.
            dialect: whose they are: ``megatron_rc``, ``verl``, ``verl-2025-11``, ``verl-2025-10``, ``slime`` or
                ``nemo-rl``; :mod:`megatron_rc.settings.dialects` says how each is read. What a foreign program
                would have ignored is dropped, and ``notes`` (also logged) say so.

        Raises:
            ValueError: an unknown field or dialect, or a value that a field does not take.
        """
        if dialect != "megatron_rc":
            from megatron_rc.settings.dialects import translate

            own, notes = translate(fields, dialect)
            for note in notes:
                _log.info("%s", note)
            return cls(**own, notes=tuple(notes))
        known = (*FIELDS, "use_policy_gradient")
        for name in fields:
            if name not in known:
                raise ValueError(f"unknown field {name!r} of the rollout correction: known are {', '.join(known)}")
        return cls(**fields)

    @classmethod
    def from_yaml(cls, path: str | Path, dialect: str = "megatron_rc") -> RolloutCorrectionConfig:
        """A config from a YAML file of fields by name; ``dialect`` as in :meth:`from_dict`.

        Raises:
            ValueError: the file holds no mapping, or a field is wrong.
            OSError: the file cannot be read.
        """
        return cls.from_dict(_read_yaml(Path(path)), dialect)

    def _take_policy_gradient(self, use_policy_gradient: bool | None) -> None:
        if use_policy_gradient is None:
            return
        if not isinstance(use_policy_gradient, bool):
            raise ValueError(f"use_policy_gradient={use_policy_gradient!r} must be true or false")
        if not use_policy_gradient and self.loss_type == "reinforce":
            raise ValueError("use_policy_gradient=False contradicts loss_type='reinforce': drop use_policy_gradient")
        if use_policy_gradient:
            if self.loss_type not in ("ppo_clip", "reinforce"):
                raise ValueError(
                    f"use_policy_gradient=True contradicts loss_type={self.loss_type!r}: drop use_policy_gradient"
                )
            object.__setattr__(self, "loss_type", "reinforce")

    def _check_weights(self) -> None:
        """Settings of the weights that would do nothing."""
        if self.rollout_is is None:
            for name in ("rollout_is_threshold", "rollout_is_threshold_lower", "rollout_is_mode"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} does nothing without rollout_is: set rollout_is to token, "
                        f"sequence or geometric, or drop {name}"
                    )
            if not self.rollout_is_apply:
                raise ValueError(
                    "rollout_is_apply=False does nothing without rollout_is, whose weights it would only measure: set "
                    "rollout_is, or drop this"
                )
            if self.rollout_is_batch_normalize:
                raise ValueError(
                    "rollout_is_batch_normalize=True does nothing without rollout_is: set rollout_is, or drop this"
                )
        if self.rollout_is_batch_normalize and not self.rollout_is_apply:
            raise ValueError(
                "rollout_is_batch_normalize=True does nothing with rollout_is_apply=False: only weights that are "
                "applied are normalised; drop one of them"
            )
        if self.rollout_is_batch_normalize_scope != "all" and not self.rollout_is_batch_normalize:
            raise ValueError(
                f"rollout_is_batch_normalize_scope={self.rollout_is_batch_normalize_scope!r} does nothing without "
                "rollout_is_batch_normalize: set that too, or drop the scope"
            )

    def _weight_bounds(self) -> tuple[str, tuple[float, float]]:
        """(mode, (lower, upper)); with ``truncate`` the lower bound, 1/u, is for metrics alone."""
        given = self.rollout_is_threshold
        bounds = ratio_bounds("rollout_is_threshold", DEFAULT_IS_THRESHOLD if given is None else given)
        lower = self.rollout_is_threshold_lower
        if isinstance(bounds, tuple):
            if self.rollout_is_mode == "truncate":
                raise ValueError(
                    f"rollout_is_threshold={given!r} has a lower bound that rollout_is_mode='truncate' does not use: "
                    "give one number, or the mode mask or clamp"
                )
            if lower is not None:
                raise ValueError(
                    f"rollout_is_threshold={given!r} has a lower bound already: drop rollout_is_threshold_lower="
                    f"{lower!r}"
                )
            return self.rollout_is_mode or "mask", bounds
        mode = self.rollout_is_mode or "truncate"
        if mode == "truncate":
            if lower is not None:
                raise ValueError(
                    f"rollout_is_threshold_lower={lower!r} does nothing with rollout_is_mode='truncate': set the mode "
                    "to mask or clamp, or drop it"
                )
            return mode, (min(1 / bounds, bounds), bounds)
        low = 1 / bounds if lower is None else lower
        positive("rollout_is_threshold_lower", low)
        ordered("rollout_is_threshold", bounds, low, bounds)
        return mode, (low, bounds)

    def _check_scale(self) -> None:
        if self.staleness_scale is None:
            return
        given = f"rollout_staleness_scale={self.rollout_staleness_scale!r}"
        if self.rollout_is is None and not any(criterion.bounds.takes_threshold for criterion in self.criteria):
            raise ValueError(
                f"{given} does nothing without bounds: set rollout_is, or a criterion in rollout_rs that takes a bound"
            )
        for criterion in self.criteria:
            if criterion.unit == "prompt" and criterion.bounds.takes_threshold:
                raise ValueError(
                    f"{given}: {criterion.name} looks at all responses of a prompt, which differ in staleness: use a "
                    "criterion of tokens or sequences, or drop the scale"
                )

    def _check_mode(self) -> None:
        if self.proximal_interpolation and self.bypass_mode:
            raise ValueError(
                "proximal_interpolation=True contradicts bypass_mode=True, which takes π_rollout for the proximal "
                "policy: set one of them"
            )
        if self.corrects_in_loss and self.needs_prompts:
            names = ", ".join(criterion.name for criterion in self.criteria if criterion.unit == "prompt")
            mode = "bypass_mode" if self.bypass_mode else "proximal_interpolation"
            raise ValueError(
                f"rollout_rs={names} needs all responses of a prompt before the loss, which {mode} does not have: "
                f"use decoupled mode ({mode}=False), or drop it"
            )
        if not self.bypass_mode:
            if self.loss_type != "ppo_clip":
                raise ValueError(
                    f"loss_type={self.loss_type!r} names the objective of bypass mode: set bypass_mode=True, or drop it"
                )
            return
        if self.rollout_is is not None and not self.applies_weights:
            if self.rollout_is_batch_normalize:
                raise ValueError(
                    f"rollout_is_batch_normalize=True does nothing with bypass_mode and loss_type={self.loss_type!r}, "
                    f"which applies no weights: drop it, or use {_weighed_objectives()}"
                )
            if not self.rollout_is_apply:
                return
            _log.warning(
                "rollout_is=%s with bypass_mode and loss_type=%s: the weights are measured, not applied; the ratio "
                "π_θ/π_rollout is the correction",
                self.rollout_is,
                self.loss_type,
            )


def _weighed_objectives() -> str:
    names = [repr(name) for name, objective in OBJECTIVES.items() if objective.weighed_in_bypass]
    return f"loss_type={' or '.join(names)}"


FIELDS = tuple(item.name for item in dataclasses.fields(RolloutCorrectionConfig) if item.init and item.name != "notes")


def preset(name: str, release: str | None = None) -> RolloutCorrectionConfig:
    """The preset of this name, in the numbers of a release; default: the newest (:mod:`megatron_rc.settings.presets`).

    Raises:
        ValueError: no such preset or release.
    """
    one_of("preset", name, PRESETS)
    make = getattr(RolloutCorrectionConfig, name)
    if release is not None:
        one_of("release", release, RELEASES)
        if "release" in inspect.signature(make).parameters:
            make = functools.partial(make, release=release)
    config: RolloutCorrectionConfig = make()
    return config


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    text = path.read_text(encoding="utf-8")
    try:
        fields, written = yaml.safe_load(text), yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: expected lines of `field: value`, got {type(fields).__name__}")
    return _as_written(fields, written)


def _as_written(fields: dict[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Undo what YAML 1.1 does to numbers at any depth: 0.5_2 and 1:0.8 are pairs, not 0.52 and 60.8, 1e-4 a number."""
    for name, value in fields.items():
        text = written.get(name)
        if isinstance(value, dict) and isinstance(text, dict):
            _as_written(value, text)
        elif isinstance(value, (int, float)) and isinstance(text, str) and re.search("[_:]", text):
            fields[name] = text
        elif isinstance(value, str) and _SCIENTIFIC.fullmatch(value):
            fields[name] = float(value)
    return fields
