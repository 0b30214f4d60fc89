"""Presets: published corrections by name, each with its numbers and its paper.

Every name of every release of verl works. ρ = π_train / π_rollout; every bound is on ρ.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megatron_rc.numerics import UNTRUNCATED
from megatron_rc.parallel.arguments import one_of

NEWEST = "2026-08"
RELEASES = (NEWEST, "2025-11")
_LIU = 'Liu et al. 2025, "When Speed Kills Stability"'
_LING = 'Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"'
_SCHULMAN = 'Schulman 2020, "Approximating KL Divergence"'
_PRECUP = 'Precup, Sutton, Singh 2000, "Eligibility Traces for Off-Policy Policy Evaluation"'
_LEI = 'Lei et al. 2026, "A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization", arXiv 2601.22718'
_QI = 'Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning"'
_MAO = 'Mao et al. 2026, "Beyond Uniform Token-Level Trust Region in LLM Reinforcement Learning"'
_GAO = 'Gao et al. 2025, "Soft Adaptive Policy Optimization"'
_ZHAO = 'Zhao et al. 2025, "Geometric-Mean Policy Optimization"'
Bound = float | str
C = TypeVar("C", bound="Presets")
M = TypeVar("M")


class _Variant(classmethod):  # type: ignore[type-arg]
    """A constructor that gets its name, and in its docstring the name of its preset, when the class is complete."""

    def __set_name__(self, owner: type, name: str) -> None:
        function: Any = self.__func__
        function.__name__, function.__qualname__ = name, f"{owner.__qualname__}.{name}"
        function.__doc__ = function.__doc__.format(preset=function.__wrapped__.__name__)


def _alias(preset: M, origin: str) -> M:
    """A preset with another name."""
    return _variant(preset, f"Alias of ``{{preset}}``: {origin}.", {})


def _bypass(loss_type: str, preset: M, words: str, paper: str = _LIU) -> M:
    """A preset with the same arguments in bypass mode."""
    return _variant(preset, f"{words}\n\n{paper}.", {"bypass_mode": True, "loss_type": loss_type})


def _variant(preset: M, doc: str, fields: dict[str, Any]) -> M:
    """A constructor with a preset's arguments and type, whose configs have other fields."""
    make = cast(Any, preset).__func__  # in a class body: type checkers take class methods for bound ones there

    @functools.wraps(make)
    def variant(*args: Any, **kwargs: Any) -> Any:
        config = make(*args, **kwargs)
        return type(config)(**config.to_dict() | fields) if fields else config

    variant.__doc__ = doc
    return cast(M, _Variant(variant))


class Presets:
    """The presets as constructors of the config.

    ``release`` chooses the numbers of a release of verl: ``"2026-08"``, the newest and the default, or ``"2025-11"``.
    Every name takes it, also if its numbers did not change. ``rs_threshold_lower`` and ``veto_threshold``, arguments of
    these releases, are the fields ``rollout_rs_threshold_lower`` and ``rollout_token_veto_threshold``.
    """

    if TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None: ...

    # Decoupled mode: π_old is computed, ρ = π_old / π_rollout, and PPO clips π_θ / π_old.

    @classmethod
    def decoupled_token_is(cls: type[C], threshold: float = 2.0, *, release: str = NEWEST) -> C:
        """Token-level truncated importance sampling: w_t = min(ρ_t, threshold). Low variance, biased; the first to try.

        Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
        fengyao.notion.site/off-policy-rl.
        """
        return _made(cls, release, "token", threshold)

    @classmethod
    def decoupled_token_icepop(
        cls: type[C], threshold: Bound = "0.5_5.0", threshold_lower: float | None = None, *, release: str = NEWEST
    ) -> C:
        """Tokens whose ratio is out of bounds get weight 0, the others ρ_t (IcePop). For mixtures of experts.

        Tokens with weight 0 count in the denominators of the loss. ``threshold`` is "lo_hi", or the upper bound alone,
        with ``threshold_lower`` or 0.5 as the lower one. Ling Team 2025, "Every Step Evolves: Scaling Reinforcement
        Learning for Trillion-Scale Thinking Model".
        """
        if "_" not in str(threshold):
            threshold, threshold_lower = f"{0.5 if threshold_lower is None else threshold_lower}_{threshold}", None
        return _made(cls, release, "token", threshold, rollout_is_threshold_lower=threshold_lower)

    @classmethod
    def decoupled_token_kpop(
        cls: type[C], rs_threshold: float = 0.1, is_threshold: float = UNTRUNCATED, *, release: str = NEWEST
    ) -> C:
        """Reject tokens that the two policies find differently likely (KPop), and weigh the others by ρ_t.

        The test is the larger KL of the two events "this token" and "another one", in nats: it leaves rare tokens more
        room than likely ones. Rejected tokens count in the denominators of the loss, as IcePop's do. Guo et al. 2026,
        "Taming Training-Inference Mismatch in Reinforcement Learning with Adaptive Masking Regions",
        ringtech.notion.site/kpop.
        """
        return _made(cls, release, "token", is_threshold, "token_kpop", rs_threshold, rejection_denominator="original")

    @classmethod
    def decoupled_prefix_is(cls: type[C], threshold: float = 2.0, *, release: str = NEWEST) -> C:
        """Prefix-level truncated importance sampling: w_t = min(Π ρ_j over j <= t, threshold).

        The contexts and the action are the trainer's, the continuation is the engine's: less bias than token weights,
        and a variance that grows with the position. Precup, Sutton, Singh 2000, "Eligibility Traces for Off-Policy
        Policy Evaluation".
        """
        return _made(cls, release, "prefix", threshold)

    @classmethod
    def decoupled_min_prefix_is(cls: type[C], threshold: float = 2.0, *, release: str = NEWEST) -> C:
        """MinPRO weights: w_t = min(ρ_t · m_t, threshold), m_t the smallest ρ_j with j < t, 1 for the first token.

        The smallest ratio stands for the product of all before, whose variance grows with the position. Lei et al.
        2026, "A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization", arXiv 2601.22718.
        """
        return _made(cls, release, "min_prefix", threshold)

    @classmethod
    def decoupled_turn_is(cls: type[C], threshold: float = 2.0, *, release: str = NEWEST) -> C:
        """Turn-level truncated importance sampling: w = min(Π ρ_t over the tokens of a turn, threshold).

        For responses of several turns: sequence weights if there is one turn, token weights if each turn has one token.
        A turn is a run of trained tokens between observations, as the segments of Wang et al. 2025, "Reinforcement
        Learning Optimization for Large-Scale Learning: An Efficient and User-Friendly Scaling Library" (ROLL).
        """
        return _made(cls, release, "turn", threshold)

    @classmethod
    def decoupled_seq_is(cls: type[C], threshold: float = 2.0, *, release: str = NEWEST) -> C:
        """Sequence-level truncated importance sampling: w = min(Π ρ_t, threshold). Unbiased except for the truncation.

        For short responses: the variance of the product grows with the length. Liu et al. 2025, "When Speed Kills
        Stability".
        """
        return _made(cls, release, "sequence", threshold)

    @classmethod
    def decoupled_seq_is_rs(
        cls: type[C],
        is_threshold: float = 2.0,
        rs_threshold: Bound = "0.5_2.0",
        rs_threshold_lower: float | None = None,
        *,
        release: str = NEWEST,
    ) -> C:
        """Sequence weights, and sequences whose product of ratios is out of bounds are rejected (Seq-MIS).

        For a large mismatch, at which the tail of the weights is noise. Liu et al. 2025, "When Speed Kills Stability".
        """
        lower = {"rollout_rs_threshold_lower": rs_threshold_lower}
        return _made(cls, release, "sequence", is_threshold, "seq_sum_k1", rs_threshold, **lower)

    @classmethod
    def seq_mis(cls: type[C], threshold: float = 2.0, *, release: str = NEWEST) -> C:
        """Alias of ``decoupled_seq_is_rs`` with one number u for weights and rejection: Π ρ_t in [1/u, u].

        ``release="2025-11"`` has no lower bound: it keeps long sequences that are unlikely under the trainer.
        """
        lower = 1 / threshold if _is_newest(release) else 1e-300
        return cls.decoupled_seq_is_rs(threshold, f"{lower!r}_{threshold!r}")

    @classmethod
    def decoupled_geo_rs(
        cls: type[C],
        rs_threshold: Bound | None = None,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
        *,
        release: str = NEWEST,
    ) -> C:
        """Reject sequences whose geometric mean ratio is out of bounds; no weights. For long chains of thought.

        Unlike a product of ratios, the mean does not depend on the length. ``rs_threshold`` is "0.999_1.001";
        ``release="2025-11"``: 1.001, which means [1/1.001, 1.001], with a veto at 1e-4. Liu et al. 2025, "When Speed
        Kills Stability".
        """
        return _made(cls, release, None, **_geometric(rs_threshold, rs_threshold_lower, veto_threshold, release))

    @classmethod
    def geo_mis(
        cls: type[C],
        rs_threshold: Bound = "0.999_1.001",
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
        *,
        release: str = NEWEST,
    ) -> C:
        """Alias of ``decoupled_geo_rs`` whose bounds are "0.999_1.001" in both releases (2025-11: with the veto)."""
        if "_" not in str(rs_threshold) and rs_threshold_lower is None:
            rs_threshold_lower = 0.999
        return cls.decoupled_geo_rs(rs_threshold, rs_threshold_lower, veto_threshold, release=release)

    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls: type[C],
        is_threshold: float = 2.0,
        rs_threshold: Bound | None = None,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
        *,
        release: str = NEWEST,
    ) -> C:
        """``decoupled_geo_rs`` and ``decoupled_seq_is`` together: the filter, and weights for the rest.

        Liu et al. 2025, "When Speed Kills Stability".
        """
        rejection = _geometric(rs_threshold, rs_threshold_lower, veto_threshold, release)
        return _made(cls, release, "sequence", is_threshold, **rejection)

    @classmethod
    def decoupled_geo_rs_token_tis(
        cls: type[C], is_threshold: float = 2.0, rs_threshold: Bound = "0.999_1.001", *, release: str = NEWEST
    ) -> C:
        """``decoupled_geo_rs`` and ``decoupled_token_is`` together: the filter, with weights of low variance.

        Liu et al. 2025, "When Speed Kills Stability".
        """
        return _made(cls, release, "token", is_threshold, **_geometric(rs_threshold))

    @classmethod
    def seq_mask_tis(cls: type[C], rs_threshold: Bound = "0.999_1.002", *, release: str = NEWEST) -> C:
        """``decoupled_geo_rs`` with token weights that are not truncated; rejected tokens count in the denominators.

        The correction of the GRPO reference of MLPerf Training v6.1, under NeMo-RL's name. Liu et al. 2025, "When Speed
        Kills Stability".
        """
        return _made(cls, release, "token", UNTRUNCATED, **_geometric(rs_threshold), rejection_denominator="original")

    @classmethod
    def decoupled_k3_rs(cls: type[C], rs_threshold: float = 0.01, *, release: str = NEWEST) -> C:
        """Reject sequences whose mean k3 = ρ - 1 - log ρ is above a bound, in nats; no weights.

        Steadier than the geometric mean for a small mismatch: ratios on both sides of 1 cannot cancel. Schulman 2020,
        "Approximating KL Divergence"; Li et al. 2025, "Trust Region Masking for Long-Horizon LLM Reinforcement
        Learning".
        """
        return _made(cls, release, None, None, "seq_mean_k3", rs_threshold)

    @classmethod
    def decoupled_k3_rs_seq_tis(
        cls: type[C], is_threshold: float = 2.0, rs_threshold: float = 0.01, *, release: str = NEWEST
    ) -> C:
        """``decoupled_k3_rs`` and ``decoupled_seq_is`` together.

        Schulman 2020, "Approximating KL Divergence"; Liu et al. 2025, "When Speed Kills Stability".
        """
        return _made(cls, release, "sequence", is_threshold, "seq_mean_k3", rs_threshold)

    @classmethod
    def decoupled_k3_rs_token_tis(
        cls: type[C], is_threshold: float = 2.0, rs_threshold: float = 0.01, *, release: str = NEWEST
    ) -> C:
        """``decoupled_k3_rs`` and ``decoupled_token_is`` together.

        Schulman 2020, "Approximating KL Divergence"; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
        Off-Policy RL Training".
        """
        return _made(cls, release, "token", is_threshold, "seq_mean_k3", rs_threshold)

    @classmethod
    def trust_region_masking(
        cls: type[C], mean_threshold: float = 0.01, max_threshold: float = 2.5, *, release: str = NEWEST
    ) -> C:
        """Reject whole sequences that leave the trust region on average (mean k3) or at any token (max k2); no weights.

        For long responses, in which a single token's divergence can make the surrogate objective invalid. The paper's
        theory bounds the exact divergence; for samples it uses k3 for the mean, which is unbiased, and ``|log ρ|`` for
        the maximum, which is symmetric (k2 is half its square). Choose bounds for your mismatch: the defaults are
        verl's, 0.01 from its k3 presets and 2.5 (ρ in [0.107, 9.36]) from its example of seq_max_k2. Li et al. 2025,
        "Trust Region Masking for Long-Horizon LLM Reinforcement Learning".
        """
        bounds = f"{mean_threshold!r},{max_threshold!r}"
        return _made(cls, release, None, None, "seq_mean_k3,seq_max_k2", bounds)

    # Bypass mode, with numbers of its own.

    @classmethod
    def _no_weights(cls: type[C], *, release: str = NEWEST) -> C:
        return _made(cls, release, None)

    @classmethod
    def bypass_ppo_clip(cls: type[C], threshold: float | None = None, *, release: str = NEWEST) -> C:
        """PPO clips π_θ / π_rollout, and this is the correction; no weights. The fastest, for a small mismatch.

        ``release="2025-11"`` also measures token weights truncated at ``threshold`` (2.0), without applying them.
        Schulman et al. 2017, "Proximal Policy Optimization Algorithms".
        """
        if not _is_newest(release):
            return _made(cls, release, "token", 2.0 if threshold is None else threshold, bypass_mode=True)
        if threshold is not None:
            raise ValueError(
                f"threshold={threshold!r} does nothing: release {NEWEST!r} of this preset has no weights; drop it, or "
                'use release="2025-11"'
            )
        return _made(cls, release, None, bypass_mode=True)

    @classmethod
    def ppo_is_bypass(cls: type[C], threshold: float | None = None, *, release: str = NEWEST) -> C:
        """Alias of ``bypass_ppo_clip``: its name in the first releases, which measured weights.

        With ``threshold``, in any release, token weights truncated at it are measured, not applied.
        """
        with_weights = not _is_newest(release) or threshold is not None
        return cls.bypass_ppo_clip(threshold, release=RELEASES[1] if with_weights else NEWEST)

    @classmethod
    def disabled(cls: type[C], *, release: str = NEWEST) -> C:
        """Correct nothing, measure everything: a first run with it shows how large the mismatch is.

        It measures token weights, truncated at 2.
        """
        return _made(cls, release, "token", 2.0, rollout_is_apply=False)

    # Decoupled presets in bypass mode: ρ = π_θ / π_rollout, and π_old := π_rollout needs no extra forward pass.

    bypass_ppo_clip_geo_rs = _bypass(
        "ppo_clip", decoupled_geo_rs, "``bypass_ppo_clip`` with the rejection of ``decoupled_geo_rs``."
    )
    bypass_ppo_clip_k3_rs = _bypass(
        "ppo_clip", decoupled_k3_rs, "``bypass_ppo_clip`` with the rejection of ``decoupled_k3_rs``.", _SCHULMAN
    )
    bypass_pg_is = _bypass(
        "reinforce", decoupled_seq_is, "REINFORCE with sequence weights: -min(Π ρ_t, threshold) A log π_θ."
    )
    bypass_pg_prefix_is = _bypass(
        "reinforce",
        decoupled_prefix_is,
        "REINFORCE with weights of prefixes: -min(Π π_θ/π_rollout over j <= t, u) A log π_θ.",
        _PRECUP,
    )
    bypass_pg_min_prefix_is = _bypass(
        "reinforce",
        decoupled_min_prefix_is,
        "REINFORCE with MinPRO weights, in which π_θ/π_rollout is the ratio: the published use.",
        _LEI,
    )
    bypass_pg_token_icepop = _bypass(
        "reinforce", decoupled_token_icepop, "REINFORCE with the weights of ``decoupled_token_icepop``.", _LING
    )
    bypass_pg_geo_rs = _bypass(
        "reinforce", decoupled_geo_rs, "REINFORCE with the rejection of ``decoupled_geo_rs``, without weights."
    )
    bypass_pg_geo_rs_seq_tis = _bypass(
        "reinforce", decoupled_geo_rs_seq_tis, "``bypass_pg_geo_rs`` and ``bypass_pg_is`` together."
    )
    bypass_pg_geo_rs_token_tis = _bypass(
        "reinforce", decoupled_geo_rs_token_tis, "``bypass_pg_geo_rs`` with token weights: less variance, more bias."
    )

    # Other objectives whose ratio π_θ / π_rollout is the correction; their bounds are fields of the loss.

    bypass_dppo_tv = _bypass("dppo_tv", _no_weights, "DPPO bounds π_θ - π_rollout of each token; no weights.", _QI)
    bypass_dppo_kl = _bypass("dppo_kl", _no_weights, "DPPO bounds the KL of each token's two events; no weights.", _QI)
    bypass_cppo = _bypass(
        "cppo", _no_weights, "CPPO bounds the differences of a token and of the tokens before it; no weights.", _MAO
    )
    bypass_sapo = _bypass("sapo", _no_weights, "SAPO dampens π_θ / π_rollout by a sigmoid; no weights.", _GAO)
    bypass_gmpo = _bypass(
        "gmpo", _no_weights, "GMPO takes the geometric mean of the clipped ratios; no weights.", _ZHAO
    )

    # Other names of presets, with the name's origin.

    token_is = _alias(decoupled_token_is, "from the first release with presets")
    token_tis = _alias(decoupled_token_is, "token-level TIS")
    seq_is = _alias(decoupled_seq_is, "from the first release with presets")
    seq_is_rs = _alias(decoupled_seq_is_rs, "from the first release with presets")
    geo_rs = _alias(decoupled_geo_rs, "from the first release with presets")
    geo_rs_seq_tis = _alias(decoupled_geo_rs_seq_tis, "verl's spelling at the end of 2025")
    pg_is = _alias(bypass_pg_is, "its name in release 2025-11")
    pure_is = _alias(bypass_pg_is, "its name in the first release with presets")
    pg_rs = _alias(bypass_pg_geo_rs, "its name in release 2025-11")
    pure_rs = _alias(bypass_pg_geo_rs, "its name before release 2025-11")
    bypass_pg_rs = _alias(bypass_pg_geo_rs, "verl's spelling at the end of 2025")
    pg_geo_rs_seq_tis = _alias(bypass_pg_geo_rs_seq_tis, "verl's spelling at the end of 2025")


PRESETS = tuple(
    name for name, value in vars(Presets).items() if isinstance(value, classmethod) and not name.startswith("_")
)


def _is_newest(release: str) -> bool:
    one_of("release", release, RELEASES)
    return release == NEWEST


def _made(
    config: type[C],
    release: str,
    level: str | None,
    threshold: Bound | None = None,
    criterion: str | None = None,
    bound: Bound | None = None,
    **fields: Any,
) -> C:
    """A config with these weights and this rejection; ValueError for an unknown release."""
    _is_newest(release)
    weights = {"rollout_is": level, "rollout_is_threshold": threshold}
    return config(**weights, rollout_rs=criterion, rollout_rs_threshold=bound, **fields)


def _geometric(
    rs_threshold: Bound | None, lower: float | None = None, veto: float | None = None, release: str = NEWEST
) -> dict[str, Any]:
    default, default_veto = ("0.999_1.001", None) if _is_newest(release) else (1.001, 1e-4)
    return {
        "criterion": "seq_mean_k1",
        "bound": default if rs_threshold is None else rs_threshold,
        "rollout_rs_threshold_lower": lower,
        "rollout_token_veto_threshold": default_veto if veto is None else veto,
    }
