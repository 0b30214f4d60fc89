"""Presets: published corrections by name, each with its numbers and its paper.

ρ = π_train / π_rollout; every bound is on ρ. A preset is a row of ``PRESETS``; ``ALIASES`` has the other names that
verl's releases gave them. ``RolloutCorrectionConfig`` has a constructor for every name, with the arguments of its row.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc.numerics import UNTRUNCATED

_GAO = 'Gao et al. 2025, "Soft Adaptive Policy Optimization"'
_GUO = (
    'Guo et al. 2026, "Taming Training-Inference Mismatch in Reinforcement Learning with Adaptive Masking Regions", '
    "ringtech.notion.site/kpop"
)
_LEI = 'Lei et al. 2026, "A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization", arXiv 2601.22718'
_LI = 'Li et al. 2025, "Trust Region Masking for Long-Horizon LLM Reinforcement Learning"'
_LING = 'Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"'
_LIU = 'Liu et al. 2025, "When Speed Kills Stability"'
_MAO = 'Mao et al. 2026, "Beyond Uniform Token-Level Trust Region in LLM Reinforcement Learning"'
_PRECUP = 'Precup, Sutton, Singh 2000, "Eligibility Traces for Off-Policy Policy Evaluation"'
_QI = 'Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning"'
_SCHULMAN_KL = 'Schulman 2020, "Approximating KL Divergence"'
_SCHULMAN_PPO = 'Schulman et al. 2017, "Proximal Policy Optimization Algorithms"'
_WANG = (
    'Wang et al. 2025, "Reinforcement Learning Optimization for Large-Scale Learning: An Efficient and User-Friendly '
    'Scaling Library" (ROLL)'
)
_YAO = 'Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"'
_ZHAO = 'Zhao et al. 2025, "Geometric-Mean Policy Optimization"'

# Parts of the presets' fields.
_NO_WEIGHTS = {"rollout_is": None}
_TOKEN = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_TOKEN_UNTRUNCATED = {"rollout_is": "token", "rollout_is_threshold": UNTRUNCATED}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_SEQUENCE = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_PREFIX = {"rollout_is": "prefix", "rollout_is_threshold": 2.0}
_MIN_PREFIX = {"rollout_is": "min_prefix", "rollout_is_threshold": 2.0}
_TURN = {"rollout_is": "turn", "rollout_is_threshold": 2.0}
_GEOMETRIC = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_ALL_TOKENS = {"rejection_denominator": "original"}
# Bypass mode: π_old := π_rollout, so that ρ = π_θ / π_rollout, and no extra forward pass is needed.
_BYPASS = {"bypass_mode": True}
_REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}

# The field that an argument of a constructor sets.
_FIELD_OF_ARGUMENT = {
    "threshold": "rollout_is_threshold",
    "is_threshold": "rollout_is_threshold",
    "rs_threshold": "rollout_rs_threshold",
    "rs_threshold_lower": "rollout_rs_threshold_lower",
    "veto_threshold": "rollout_token_veto_threshold",
}
# Arguments of constructors, in order.
_WEIGHTS = ("threshold",)
_REJECTION = ("rs_threshold",)
_BOTH = ("is_threshold", "rs_threshold")
_GEOMETRIC_REJECTION = ("rs_threshold", "rs_threshold_lower", "veto_threshold")
_BOTH_GEOMETRIC = ("is_threshold", *_GEOMETRIC_REJECTION)


@dataclass(frozen=True)
class Preset:
    """A published correction.

    Attributes:
        fields: fields of the config, by name; the other fields have their defaults.
        summary: its formula and its use, in one line.
        paper: its source; empty for ``disabled``.
        arguments: names of the arguments of its constructor, in order; each sets the field that the table
            ``_FIELD_OF_ARGUMENT`` says. Presets in ``_FIELDS_FROM_ARGUMENTS`` have other arguments.
    """

    fields: Mapping[str, Any]
    summary: str
    paper: str
    arguments: tuple[str, ...] = ()


PRESETS: dict[str, Preset] = {
    # Decoupled mode: π_old is computed, ρ = π_old / π_rollout, and PPO clips π_θ / π_old.
    "decoupled_token_is": Preset(
        fields=_TOKEN,
        summary="Token weights w_t = min(ρ_t, u): low variance, biased; the first to try.",
        paper=f"{_YAO}, fengyao.notion.site/off-policy-rl",
        arguments=_WEIGHTS,
    ),
    "decoupled_token_icepop": Preset(
        fields=_ICEPOP,
        summary="IcePop: w_t = ρ_t in bounds, else 0, and all tokens in the denominators. For mixtures of experts.",
        paper=_LING,
    ),
    "decoupled_token_kpop": Preset(
        fields=_TOKEN_UNTRUNCATED | {"rollout_rs": "token_kpop", "rollout_rs_threshold": 0.1} | _ALL_TOKENS,
        summary="KPop: reject a token if the KL of two events, this token and any other, is above a bound; w_t = ρ_t.",
        paper=_GUO,
        arguments=("rs_threshold", "is_threshold"),
    ),
    "decoupled_prefix_is": Preset(
        fields=_PREFIX,
        summary="Prefix weights w_t = min(Π ρ_j over j <= t, u): less bias than token weights, more variance.",
        paper=_PRECUP,
        arguments=_WEIGHTS,
    ),
    "decoupled_min_prefix_is": Preset(
        fields=_MIN_PREFIX,
        summary="MinPRO weights w_t = min(ρ_t · min ρ_j over j < t, u): prefix weights of less variance.",
        paper=_LEI,
        arguments=_WEIGHTS,
    ),
    "decoupled_turn_is": Preset(
        fields=_TURN,
        summary="Turn weights w = min(Π ρ_t over a turn, u), for turns of trained tokens between observations.",
        paper=_WANG,
        arguments=_WEIGHTS,
    ),
    "decoupled_seq_is": Preset(
        fields=_SEQUENCE,
        summary="Sequence weights w = min(Π ρ_t, u), for short responses: unbiased but for u, more variance.",
        paper=_LIU,
        arguments=_WEIGHTS,
    ),
    "decoupled_seq_is_rs": Preset(
        fields=_SEQUENCE | {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
        summary="Seq-MIS, for a large mismatch: sequence weights, and reject sequences whose Π ρ_t is out of bounds.",
        paper=_LIU,
        arguments=("is_threshold", "rs_threshold", "rs_threshold_lower"),
    ),
    "decoupled_geo_rs": Preset(
        fields=_NO_WEIGHTS | _GEOMETRIC,
        summary="Reject sequences whose geometric mean ratio is out of bounds; no weights. For long chains of thought.",
        paper=_LIU,
        arguments=_GEOMETRIC_REJECTION,
    ),
    "decoupled_geo_rs_seq_tis": Preset(
        fields=_SEQUENCE | _GEOMETRIC,
        summary="The rejection of decoupled_geo_rs and the weights of decoupled_seq_is.",
        paper=_LIU,
        arguments=_BOTH_GEOMETRIC,
    ),
    "decoupled_geo_rs_token_tis": Preset(
        fields=_TOKEN | _GEOMETRIC,
        summary="The rejection of decoupled_geo_rs and the weights of decoupled_token_is.",
        paper=_LIU,
        arguments=_BOTH,
    ),
    "seq_mask_tis": Preset(
        fields=_TOKEN_UNTRUNCATED | _GEOMETRIC | {"rollout_rs_threshold": "0.999_1.002"} | _ALL_TOKENS,
        summary="The rejection of decoupled_geo_rs, w_t = ρ_t, and all tokens in the denominators (MLPerf v6.1).",
        paper=_LIU,
        arguments=_REJECTION,
    ),
    "decoupled_k3_rs": Preset(
        fields=_NO_WEIGHTS | _K3,
        summary="Reject sequences whose mean k3 = ρ - 1 - log ρ is above a bound; no weights. For a small mismatch.",
        paper=f"{_SCHULMAN_KL}; {_LI}",
        arguments=_REJECTION,
    ),
    "decoupled_k3_rs_seq_tis": Preset(
        fields=_SEQUENCE | _K3,
        summary="The rejection of decoupled_k3_rs and the weights of decoupled_seq_is.",
        paper=f"{_SCHULMAN_KL}; {_LIU}",
        arguments=_BOTH,
    ),
    "decoupled_k3_rs_token_tis": Preset(
        fields=_TOKEN | _K3,
        summary="The rejection of decoupled_k3_rs and the weights of decoupled_token_is.",
        paper=f"{_SCHULMAN_KL}; {_YAO}",
        arguments=_BOTH,
    ),
    "trust_region_masking": Preset(
        # verl's numbers: 0.01 of its k3 presets, and 2.5 (ρ in [0.107, 9.36]) of its example of seq_max_k2. The paper
        # bounds the exact divergence; for samples it uses k3 for the mean and |log ρ| for the maximum.
        fields=_NO_WEIGHTS | {"rollout_rs": "seq_mean_k3,seq_max_k2", "rollout_rs_threshold": "0.01,2.5"},
        summary=(
            "Reject sequences that leave the trust region on average (mean k3) or at any token (largest k2); no "
            "weights. For long responses, in which one token can make the surrogate objective invalid."
        ),
        paper=_LI,
    ),
    # Bypass mode, in which the ratio of the objective is the correction.
    "bypass_ppo_clip": Preset(
        fields=_NO_WEIGHTS | _BYPASS,
        summary="PPO clips π_θ / π_rollout, which is the correction; no weights. The fastest, for a small mismatch.",
        paper=_SCHULMAN_PPO,
    ),
    "bypass_ppo_clip_geo_rs": Preset(
        fields=_NO_WEIGHTS | _GEOMETRIC | _BYPASS,
        summary="The objective of bypass_ppo_clip with the rejection of decoupled_geo_rs.",
        paper=_LIU,
        arguments=_GEOMETRIC_REJECTION,
    ),
    "bypass_ppo_clip_k3_rs": Preset(
        fields=_NO_WEIGHTS | _K3 | _BYPASS,
        summary="The objective of bypass_ppo_clip with the rejection of decoupled_k3_rs.",
        paper=_SCHULMAN_KL,
        arguments=_REJECTION,
    ),
    # The bounds of these objectives are fields of the loss.
    "bypass_dppo_tv": Preset(
        fields=_NO_WEIGHTS | _BYPASS | {"loss_type": "dppo_tv"},
        summary="DPPO bounds π_θ - π_rollout of each token; no weights.",
        paper=_QI,
    ),
    "bypass_dppo_kl": Preset(
        fields=_NO_WEIGHTS | _BYPASS | {"loss_type": "dppo_kl"},
        summary="DPPO bounds the KL of two events, this token and any other; no weights.",
        paper=_QI,
    ),
    "bypass_cppo": Preset(
        fields=_NO_WEIGHTS | _BYPASS | {"loss_type": "cppo"},
        summary="CPPO bounds π_θ - π_rollout of a token and of the tokens before it; no weights.",
        paper=_MAO,
    ),
    "bypass_sapo": Preset(
        fields=_NO_WEIGHTS | _BYPASS | {"loss_type": "sapo"},
        summary="SAPO dampens π_θ / π_rollout by a sigmoid; no weights.",
        paper=_GAO,
    ),
    "bypass_gmpo": Preset(
        fields=_NO_WEIGHTS | _BYPASS | {"loss_type": "gmpo"},
        summary="GMPO takes the geometric mean of a sequence's clipped ratios; no weights.",
        paper=_ZHAO,
    ),
    # REINFORCE in bypass mode: -w A log π_θ.
    "bypass_pg_is": Preset(
        fields=_SEQUENCE | _REINFORCE,
        summary="REINFORCE with the sequence weights min(Π ρ_t, u).",
        paper=_LIU,
        arguments=_WEIGHTS,
    ),
    "bypass_pg_prefix_is": Preset(
        fields=_PREFIX | _REINFORCE,
        summary="REINFORCE with the prefix weights min(Π ρ_j over j <= t, u).",
        paper=_PRECUP,
        arguments=_WEIGHTS,
    ),
    "bypass_pg_min_prefix_is": Preset(
        fields=_MIN_PREFIX | _REINFORCE,
        summary="REINFORCE with MinPRO weights, in which π_θ / π_rollout is the ratio: the published use.",
        paper=_LEI,
        arguments=_WEIGHTS,
    ),
    "bypass_pg_token_icepop": Preset(
        fields=_ICEPOP | _REINFORCE,
        summary="REINFORCE with the weights of decoupled_token_icepop.",
        paper=_LING,
    ),
    "bypass_pg_geo_rs": Preset(
        fields=_NO_WEIGHTS | _GEOMETRIC | _REINFORCE,
        summary="REINFORCE with the rejection of decoupled_geo_rs; no weights.",
        paper=_LIU,
        arguments=_GEOMETRIC_REJECTION,
    ),
    "bypass_pg_geo_rs_seq_tis": Preset(
        fields=_SEQUENCE | _GEOMETRIC | _REINFORCE,
        summary="The rejection of bypass_pg_geo_rs and the weights of bypass_pg_is.",
        paper=_LIU,
        arguments=_BOTH_GEOMETRIC,
    ),
    "bypass_pg_geo_rs_token_tis": Preset(
        fields=_TOKEN | _GEOMETRIC | _REINFORCE,
        summary="The rejection of bypass_pg_geo_rs and token weights: less variance, more bias.",
        paper=_LIU,
        arguments=_BOTH,
    ),
    "disabled": Preset(
        fields=_TOKEN | {"rollout_is_apply": False},
        summary="Correct nothing: measure token weights and all differences, and apply none.",
        paper="",
    ),
}

# Other names of presets in verl's releases.
ALIASES: dict[str, str] = {
    "token_is": "decoupled_token_is",
    "token_tis": "decoupled_token_is",
    "seq_is": "decoupled_seq_is",
    "seq_is_rs": "decoupled_seq_is_rs",
    "seq_mis": "decoupled_seq_is_rs",
    "geo_rs": "decoupled_geo_rs",
    "geo_mis": "decoupled_geo_rs",
    "geo_rs_seq_tis": "decoupled_geo_rs_seq_tis",
    "ppo_is_bypass": "bypass_ppo_clip",
    "pg_is": "bypass_pg_is",
    "pure_is": "bypass_pg_is",
    "pg_rs": "bypass_pg_geo_rs",
    "pure_rs": "bypass_pg_geo_rs",
    "bypass_pg_rs": "bypass_pg_geo_rs",
    "pg_geo_rs_seq_tis": "bypass_pg_geo_rs_seq_tis",
}
NAMES = (*PRESETS, *ALIASES)
# The preset that a word of the papers means.
_MEANT = {"tis": "token_tis", "icepop": "decoupled_token_icepop", "kpop": "decoupled_token_kpop"}


def preset_of(name: str) -> Preset:
    """Return the preset of a name or an alias; ValueError for an unknown one."""
    if name not in NAMES:
        close_matches = difflib.get_close_matches(str(name), NAMES, n=1)
        meant = _MEANT.get(str(name)) or next(iter(close_matches), None)
        # In front of so many names that a reader would not find it behind them.
        question = f"did you mean {meant!r}? " if meant else ""
        raise ValueError(f"preset={name!r} is unknown: {question}The presets are {', '.join(NAMES)}")
    return PRESETS[ALIASES.get(name, name)]


def documentation_of(name: str) -> str:
    """Return the docstring of a preset's constructor: its formula, its special arguments, and its paper."""
    preset = preset_of(name)
    paragraphs = [preset.summary]
    if name in ALIASES:
        paragraphs.insert(0, f"Alias of ``{ALIASES[name]}``.")
    if name in _FIELDS_FROM_ARGUMENTS:
        paragraphs.append(str(_FIELDS_FROM_ARGUMENTS[name].__doc__))
    if preset.paper:
        paragraphs.append(f"{preset.paper}.")
    return "\n\n".join(paragraphs)


def signature_of(name: str) -> inspect.Signature:
    """Return the arguments of a preset's constructor, each with the preset's number as its default."""
    if name in _FIELDS_FROM_ARGUMENTS:
        function_signature = inspect.signature(_FIELDS_FROM_ARGUMENTS[name])
        return function_signature.replace(return_annotation=inspect.Signature.empty)
    preset = preset_of(name)
    return inspect.Signature(
        [
            inspect.Parameter(
                argument,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=preset.fields.get(_FIELD_OF_ARGUMENT[argument]),
            )
            for argument in preset.arguments
        ]
    )


def fields_of(name: str, *values: Any, **values_by_name: Any) -> dict[str, Any]:
    """Return the fields of a preset with the arguments of its constructor; None leaves the preset's number.

    Raises:
        ValueError: an unknown preset, or a number that a preset with special arguments does not take.
        TypeError: arguments that the constructor does not have.
    """
    preset = preset_of(name)
    signature = signature_of(name)
    try:
        arguments = signature.bind(*values, **values_by_name).arguments
    except TypeError as error:
        raise TypeError(f"{name}{signature}: {error}") from error

    arguments = {argument: value for argument, value in arguments.items() if value is not None}
    if name in _FIELDS_FROM_ARGUMENTS:
        changes = _FIELDS_FROM_ARGUMENTS[name](**arguments)
    else:
        changes = {_FIELD_OF_ARGUMENT[argument]: value for argument, value in arguments.items()}
    return {**preset.fields, **changes}


# Functions from the arguments of a constructor to changed fields, for presets with an argument that is not the value
# of one field. Their docstrings become a part of the constructors' docstrings.


def _icepop(threshold: float | str = "0.5_5.0", threshold_lower: float | None = None) -> dict[str, Any]:
    """Set the bounds of the weights: a pair, or an upper bound with ``threshold_lower`` (0.5) below it."""
    if "_" in str(threshold):
        return {"rollout_is_threshold": threshold, "rollout_is_threshold_lower": threshold_lower}
    lower = 0.5 if threshold_lower is None else threshold_lower
    return {"rollout_is_threshold": f"{lower}_{threshold}"}


def _seq_mis(threshold: float = 2.0) -> dict[str, Any]:
    """Bound the weights by u = ``threshold``, and the product of a sequence's ratios by [1/u, u]."""
    return {"rollout_is_threshold": threshold, "rollout_rs_threshold": f"{1 / threshold!r}_{threshold!r}"}


def _geo_mis(
    rs_threshold: float | str = "0.999_1.001",
    rs_threshold_lower: float | None = None,
    veto_threshold: float | None = None,
) -> dict[str, Any]:
    """Set the bounds on the mean: a pair, or an upper bound with ``rs_threshold_lower`` (0.999) below it."""
    if "_" not in str(rs_threshold) and rs_threshold_lower is None:
        rs_threshold_lower = 0.999
    return {
        "rollout_rs_threshold": rs_threshold,
        "rollout_rs_threshold_lower": rs_threshold_lower,
        "rollout_token_veto_threshold": veto_threshold,
    }


def _trust_region_masking(mean_threshold: float = 0.01, max_threshold: float = 2.5) -> dict[str, Any]:
    """Set the bounds, in nats, on the mean k3 and on the largest k2 of a sequence."""
    return {"rollout_rs_threshold": f"{mean_threshold!r},{max_threshold!r}"}


def _ppo_is_bypass(threshold: float | None = None) -> dict[str, Any]:
    """Measure token weights truncated at ``threshold``, if it is given, as verl's first releases; do not apply them."""
    if threshold is None:
        return {}
    return {"rollout_is": "token", "rollout_is_threshold": threshold}


def _bypass_ppo_clip(threshold: float | None = None) -> dict[str, Any]:
    """Refuse ``threshold``: verl's first releases measured weights with this bound; this preset has no weights."""
    if threshold is None:
        return {}
    raise ValueError(
        f"threshold={threshold!r} does nothing: bypass_ppo_clip has no weights; drop it, or measure them with "
        f"ppo_is_bypass(threshold={threshold!r})"
    )


_FIELDS_FROM_ARGUMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "decoupled_token_icepop": _icepop,
    "bypass_pg_token_icepop": _icepop,
    "seq_mis": _seq_mis,
    "geo_mis": _geo_mis,
    "trust_region_masking": _trust_region_masking,
    "ppo_is_bypass": _ppo_is_bypass,
    "bypass_ppo_clip": _bypass_ppo_clip,
}
