"""A preset and its thresholds for some facts, and the effect of corrections on a recorded batch."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rc import RolloutCorrectionConfig
from megatron_rc.doctor.facts import Facts
from megatron_rc.doctor.programs import SETTINGS_OF
from megatron_rc.doctor.rules import FAR, REPAIR, Verdict
from megatron_rc.doctor.sampled import Sampled
from megatron_rc.doctor.series import K3
from megatron_rc.measures.header import REWARD_SIGNS

UPPER_BOUNDS = (1.5, 2.0, 3.0, 5.0)
EXP_LIMIT = 20.0  # nats; larger log-ratios are clamped
# The usual corrections, for comparison with the chosen one.
_OTHERS = (
    "decoupled_token_is",
    "decoupled_token_icepop",
    "decoupled_token_kpop",
    "decoupled_seq_is",
    "decoupled_geo_rs",
    "decoupled_k3_rs",
)
KEPT = 0.95  # share of the sequences that the proposed geometric bound accepts


@dataclass(frozen=True)
class Choice:
    """A preset, its arguments, and the reason for it."""

    preset: str
    why: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def config(self) -> RolloutCorrectionConfig:
        """The config of this preset."""
        made: RolloutCorrectionConfig = getattr(RolloutCorrectionConfig, self.preset)(**self.arguments)
        return made

    def settings(self, program: str) -> list[str]:
        """Lines to copy into a program's settings; our flags for a program without a table of them."""
        lines = SETTINGS_OF.get(program, {}).get(self.preset)
        if lines is None:
            return [self.flags()]
        lower, _, upper = str(self.arguments.get("rs_threshold", "1_1")).partition("_")
        numbers = {
            "upper": self.arguments.get("threshold", self.arguments.get("is_threshold")),
            "lower_mean": lower,
            "upper_mean": upper,
            "inverse_lower_mean": f"{1 / float(upper):.6g}",
            "inverse_upper_mean": f"{1 / float(lower):.6g}",
        }
        return [line.format_map(numbers) for line in lines]

    def flags(self) -> str:
        """Flags of the launcher."""
        names = {
            "threshold": "rollout-is-threshold",
            "is_threshold": "rollout-is-threshold",
            "rs_threshold": "rollout-rs-threshold",
        }
        bounds = [f"--{names[name]} {value}" for name, value in self.arguments.items()]
        return " ".join([f"--rollout-correction-preset {self.preset}", *bounds])


@dataclass(frozen=True)
class Effect:
    """Effect of a correction on a batch; without weights ``mean_weight`` is 1."""

    choice: Choice
    eff_sample_size: float  # (Σ w)² / (n Σ w²) over all n tokens that could count, with w = 0 for rejected ones
    mean_weight: float  # mean of the bounded weights
    rejected_tokens: float  # share of the tokens
    rejected_sequences: float  # share of sequences with a rejected token
    rejected_by_reward: dict[str, float]  # share of the tokens, for each sign of the reward


def choose(facts: Facts, verdicts: Sequence[Verdict], sampled: Sampled | None = None) -> Choice | None:
    """The preset for these facts; None if too few are known."""
    names = {verdict.rule.name for verdict in verdicts}
    broken = next((verdict.rule for verdict in verdicts if verdict.rule.kind == REPAIR), None)
    if broken is not None:
        why = f"repair this first ({broken.title}): no correction can replace the repair. Until then only measure"
        return Choice("disabled", why)
    if not facts.has("k3_kl"):
        return None
    if facts["k3_kl"] > FAR:
        why = "these are two different policies, and no weights can replace the repair. Until then only measure"
        return Choice("disabled", why)
    if "tails" in names:
        why = "the few tokens that are far off get weight 0, the others keep their ratio"
        return Choice("decoupled_token_icepop", why)
    return _for_noise(facts, names, None if sampled is None else geometric_bound(sampled))


def _for_noise(facts: Facts, rule_names: Set[str], geometric_bounds: str | None) -> Choice:
    """The preset for policies that differ by noise, or not at all.

    ``rule_names`` are the rules that hold; ``geometric_bounds`` are those of :func:`geometric_bound`, None without a
    recorded batch.
    """
    upper = _token_bound(facts, rule_names)
    # Both rules find weights that are products over whole responses, or may be.
    has_long_products = not rule_names.isdisjoint(("long_products", "mean_weight"))
    if facts["k3_kl"] <= K3 and not has_long_products:
        why = f"k3 is at most {K3}: these weights change almost nothing now, and bound later ratios"
        return Choice("decoupled_token_is", why, {"threshold": upper})
    if facts["sequence_eff_sample_size"] >= 0.5 and not has_long_products:
        why = f"sequence weights are unbiased, and leave {facts['sequence_eff_sample_size']:.0%} of the batch"
        return Choice("decoupled_seq_is", why, {"threshold": 2.0})
    if geometric_bounds is None:
        why = "token weights do not depend on the length; bounds for whole sequences need a recorded batch"
        return Choice("decoupled_token_is", why, {"threshold": upper})
    why = "sequence weights would leave too little of the batch: use token weights, and reject the farthest sequences"
    return Choice("decoupled_geo_rs_token_tis", why, {"is_threshold": upper, "rs_threshold": geometric_bounds})


def _token_bound(facts: Facts, names: Set[str]) -> float:
    """The smallest of the usual upper bounds that truncates at most 1 % of the tokens.

    For weights that vary too much it lies below the run's own bound, and is the smallest if that is not known.
    """
    top = facts["log_ratio_p99"]
    lowest = 2.0 if math.isnan(top) else math.exp(min(top, 5.0))
    bound = next((bound for bound in UPPER_BOUNDS if bound >= lowest), UPPER_BOUNDS[-1])
    if "wide_weights" in names:
        smaller = [bound for bound in UPPER_BOUNDS if bound < facts["upper_bound"]]
        bound = min(bound, max(smaller, default=UPPER_BOUNDS[0]))
    return bound


def geometric_bound(sampled: Sampled) -> str | None:
    """Bounds on the geometric mean of ρ that accept a share ``KEPT`` of the sequences."""
    means = mean_log_ratios(sampled)
    if means is None or not len(means):
        return None
    width = min(float(means.abs().quantile(KEPT, interpolation="higher")), EXP_LIMIT)
    # Two significant digits of the width, rounded outwards.
    digits = max(3, 1 - math.floor(math.log10(max(width, 1e-6))))
    upper = math.ceil(math.exp(width) * 10**digits) / 10**digits
    lower = math.floor(math.exp(-width) * 10**digits) / 10**digits
    return f"{lower:.{digits}f}_{upper:.{digits}f}"


def mean_log_ratios(sampled: Sampled) -> torch.Tensor | None:
    """[n'] float64: mean log ρ of each sequence that has a usable token."""
    if sampled.old_log_probs is None:
        return None
    mask = sampled.usable()
    log_ratio = torch.where(mask, sampled.old_log_probs.double() - sampled.rollout_log_probs.double(), 0.0)
    counts = mask.sum(dim=1)
    return (log_ratio.sum(dim=1) / counts.clamp(min=1))[counts > 0]


def candidates(choice: Choice) -> list[Choice]:
    """The chosen preset, then the usual others for comparison."""
    choices = [choice]
    for usual in (Choice(name, "") for name in _OTHERS):
        if all(usual.config() != earlier.config() for earlier in choices):
            choices.append(usual)
    return choices


def effect(choice: Choice, sampled: Sampled) -> Effect:
    """Try a correction on a batch with log-probs of the trainer."""
    fields = choice.config().to_dict() | {"bad_log_probs": "reject_token", "metric_prefix": ""}
    # In float64: sequence weights of long responses are smaller than any float32.
    result = sampled.corrected(RolloutCorrectionConfig.from_dict(fields), sampled.rewards, torch.float64)
    metrics = result.metrics()
    by_sign = {sign: f"rollout_rs_masked_fraction_reward_{sign}" for sign in REWARD_SIGNS}
    mask = result.mask
    weights = result.weights
    assert isinstance(mask, Tensor)  # as the batch is one of tensors, not of lists
    mean = 1.0 if weights is None else metrics["rollout_is_mean"]
    weights = weights if isinstance(weights, Tensor) else torch.ones(mask.shape)
    return Effect(
        choice,
        eff_sample_size=effective_share([mask], [weights], int(sampled.usable().sum())),
        mean_weight=mean,
        rejected_tokens=metrics["rollout_rs_masked_fraction"],
        rejected_sequences=metrics["rollout_rs_seq_masked_fraction"],
        rejected_by_reward={sign: metrics[name] for sign, name in by_sign.items() if name in metrics},
    )


def effective_share(masks: Sequence[Tensor], weights: Sequence[Tensor], tokens: int) -> float:
    """The effective sample size (Σ w)² / (n Σ w²) over all n ``tokens`` that could count, as a share of them.

    ``masks`` and ``weights`` are [n, s] for each batch; tokens outside of the mask have weight 0.
    """
    total = 0.0
    squares = 0.0
    for mask, weight in zip(masks, weights, strict=True):
        accepted = weight[mask].double()
        total += float(accepted.sum())
        squares += float(accepted.square().sum())
    return total**2 / (tokens * squares) if squares else 0.0
