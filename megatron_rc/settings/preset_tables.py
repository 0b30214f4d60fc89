"""Presets that are another one by another name, or in bypass mode; those with numbers of their own are functions."""

from __future__ import annotations

from typing import Any

# Name: (the preset that it is another name of, where it comes from). seq_mis, geo_mis and ppo_is_bypass have arguments
# or numbers of their own, and so are functions.
ALIASES = {
    "token_is": ("decoupled_token_is", "from the first release that had presets"),
    "token_tis": ("decoupled_token_is", "token-level TIS"),
    "seq_is": ("decoupled_seq_is", "from the first release that had presets"),
    "seq_is_rs": ("decoupled_seq_is_rs", "from the first release that had presets"),
    "geo_rs": ("decoupled_geo_rs", "from the first release that had presets"),
    "geo_rs_seq_tis": ("decoupled_geo_rs_seq_tis", "as verl spelt it at the end of 2025"),
    "pg_is": ("bypass_pg_is", "its name in release 2025-11"),
    "pure_is": ("bypass_pg_is", "its name in the first release that had presets"),
    "pg_rs": ("bypass_pg_geo_rs", "its name in release 2025-11"),
    "pure_rs": ("bypass_pg_geo_rs", "its name before release 2025-11"),
    "bypass_pg_rs": ("bypass_pg_geo_rs", "as verl spelt it at the end of 2025"),
    "pg_geo_rs_seq_tis": ("bypass_pg_geo_rs_seq_tis", "as verl spelt it at the end of 2025"),
}

_PPO: dict[str, Any] = {"bypass_mode": True}
_REINFORCE: dict[str, Any] = {"bypass_mode": True, "loss_type": "reinforce"}

# Name: (the decoupled preset whose arguments and numbers it has, the objective in bypass mode, its docstring). ρ is
# π_θ / π_rollout there, and π_old := π_rollout needs no extra forward pass.
IN_BYPASS_MODE = {
    "bypass_ppo_clip_geo_rs": (
        "decoupled_geo_rs",
        _PPO,
        """``bypass_ppo_clip``, and sequences whose geometric mean ratio is out of bounds are rejected.

        Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".
        """,
    ),
    "bypass_ppo_clip_k3_rs": (
        "decoupled_k3_rs",
        _PPO,
        """``bypass_ppo_clip``, and sequences whose mean k3 is above a bound are rejected.

        Schulman 2020, "Approximating KL Divergence"; Li et al. 2025, "Trust Region Masking for Long-Horizon LLM
        Reinforcement Learning".
        """,
    ),
    "bypass_pg_is": (
        "decoupled_seq_is",
        _REINFORCE,
        """REINFORCE with sequence weights: -min(Π ρ_t, threshold) A log π_θ. Where PPO's clipping is not wanted.

        Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning"; Liu
        et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".
        """,
    ),
    "bypass_pg_token_icepop": (
        "decoupled_token_icepop",
        _REINFORCE,
        """REINFORCE with token weights that are 0 out of bounds (IcePop). Bounds as in ``decoupled_token_icepop``.

        Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model".
        """,
    ),
    "bypass_pg_geo_rs": (
        "decoupled_geo_rs",
        _REINFORCE,
        """REINFORCE without weights on sequences whose geometric mean ratio is within bounds. For long responses.

        Bounds and releases as in ``decoupled_geo_rs``.

        Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".
        """,
    ),
    "bypass_pg_geo_rs_seq_tis": (
        "decoupled_geo_rs_seq_tis",
        _REINFORCE,
        """``bypass_pg_geo_rs`` and ``bypass_pg_is`` together: the filter and sequence weights.

        Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".
        """,
    ),
    "bypass_pg_geo_rs_token_tis": (
        "decoupled_geo_rs_token_tis",
        _REINFORCE,
        """``bypass_pg_geo_rs`` with token weights: less variance than sequence weights, more bias.

        Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".
        """,
    ),
}
