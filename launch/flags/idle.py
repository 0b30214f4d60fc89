"""Flags of this project that would do nothing beside the others: given ones are refused."""

from __future__ import annotations

import argparse

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.parser import needs_of
from megatron_rc.launch.run_config import RunConfig, flag_options
from megatron_rc.launch.run_config.options import as_typed, is_met, name_of, why_unmet
from megatron_rc.loss.objectives import OBJECTIVES

_OBJECTIVE = (*("policy_loss", "loss_type", "bypass_mode"), *("rollout_correction_preset", "rollout_correction_config"))


def drop_idle(args: argparse.Namespace) -> None:
    """Refuse given flags whose conditions are not met, and list the idle ones in ``args.idle``.

    A key of the launch file whose condition fails by a typed flag gets its default: it may serve another choice.
    """
    for _, option in flag_options().values():
        need = next((need for need in needs_of(option) if not is_met(need, args)), None)
        if need is not None:
            # A typed --task takes the place of a launch file's --prompt-data.
            of_files = name_of(need) in ("prompt_data", "eval_data", "eval_interval")
            because_of = (name_of(need), "task") if of_files else (name_of(need),)
            _refuse(args, option.flag, why_unmet(need, args), because_of, default=option.default)
            if option.flag in args.in_launch_file:
                setattr(args, option.flag, option.default)


def drop_idle_in_loss(args: argparse.Namespace, config: RunConfig) -> None:
    """Refuse given flags of the objective and of the reference policy that this objective does not use."""
    loss = config.loss
    if loss.kl_coef == 0:
        because_of = ("grpo_kl_beta", "rollout_is_batch_normalize", *_OBJECTIVE)
        why = "with --grpo-kl-beta 0: raise that, or drop it"
        _refuse(args, "kl_estimator", why, because_of)
        _refuse(args, "kl_importance_weight", why, because_of, default=False)
    if loss.algorithm is not None and not OBJECTIVES[loss.algorithm].clips:
        clipping = ", ".join(name for name, objective in OBJECTIVES.items() if objective.clips)
        why = f"with the objective {loss.algorithm}, which has no bounds: drop it, or use one of {clipping}"
        for name in ("grpo_clamp_eps_lower", "grpo_clamp_eps_upper"):
            _refuse(args, name, why, _OBJECTIVE)
    if not config.needs_reference:
        because_of = ("grpo_kl_beta", "kl_in_reward", *_OBJECTIVE)
        for name in ("ref_load", "ref_load_hf", "ref_update_interval"):
            _refuse(args, name, "without --grpo-kl-beta or --kl-in-reward: give one of them, or drop it", because_of)


def _refuse(args: argparse.Namespace, name: str, why: str, because_of: tuple[str, ...], default: object = None) -> None:
    """Refuse an idle flag that was typed, or is in a launch file beside none of the flags that make it idle."""
    args.idle.add(name)
    is_typed = name in args.typed
    if not is_typed and (name not in args.in_launch_file or not args.typed.isdisjoint(because_of)):
        return
    value = getattr(args.command_line if is_typed else args.launch_file, name)
    if isinstance(value, bool) and value == default:
        return
    place = "" if is_typed else f"--config {args.config}: "
    raise ConfigurationError(f"{place}{as_typed(name, value)} does nothing {why}")
