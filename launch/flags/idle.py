"""Flags that would do nothing beside the others, although they have a default: only what was typed is refused."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from megatron_rc.launch.engines.registry import ENGINES
from megatron_rc.launch.errors import ConfigurationError, flag
from megatron_rc.loss.policy import PolicyLossConfig


def check_idle(args: argparse.Namespace, loss: PolicyLossConfig) -> None:
    """Refuse them; what only the launch file says may serve another choice than the one that was typed.

    Raises:
        ConfigurationError: names the flag, what makes it idle, and the remedy.
    """
    for name, why in _idle(args, loss):
        if flag(name) in args.typed:
            raise ConfigurationError(f"{flag(name)} {getattr(args.command_line, name)} does nothing {why}")


def _idle(args: argparse.Namespace, loss: PolicyLossConfig) -> Iterator[tuple[str, str]]:
    """(flag, why it does nothing here)."""
    used = ENGINES[args.rollout_engine].settings
    for name in dict.fromkeys(setting for engine in ENGINES.values() for setting in engine.settings):
        users = " or ".join(other for other, engine in ENGINES.items() if name in engine.settings)
        if name not in used:
            yield name, f"with --rollout-engine {args.rollout_engine}: drop it, or use {users}"
    if not args.group_query_attention:
        yield "num_query_groups", "without --group-query-attention: give both, or neither"
    if loss.kl_coef == 0:
        yield "kl_estimator", "with --grpo-kl-beta 0: give that, or drop it"
