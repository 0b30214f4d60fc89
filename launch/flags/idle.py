"""Flags that would do nothing beside the others, although they have a default: only what was given is refused."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rc.advantages.group import GROUP_ESTIMATORS
from megatron_rc.launch.engines.registry import ENGINES
from megatron_rc.launch.errors import ConfigurationError, flag
from megatron_rc.launch.flags.resolve_critic import WITH_CRITIC
from megatron_rc.launch.flags.resolve_data import OF_EVALUATIONS, OF_FILES
from megatron_rc.launch.rewards.rules import Source
from megatron_rc.launch.run_config.critic import CriticSection
from megatron_rc.launch.run_config.options import options_of
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.loss.policy import PolicyLossConfig

_OBJECTIVE = (
    *("policy_loss", "loss_type", "bypass_mode"),
    *("rollout_correction_preset", "rollout_correction_config"),
)


@dataclass(frozen=True)
class _Idle:
    """A flag that does nothing here.

    Attributes:
        name: of the flag, with underscores.
        why: and the remedy.
        because_of: the flags that decide it.
    """

    name: str
    why: str
    because_of: tuple[str, ...]


def check_idle(args: argparse.Namespace, loss: PolicyLossConfig) -> None:
    """Refuse them. What the launch file says may serve another choice than the one that was typed beside it.

    Raises:
        ConfigurationError: names the flag, what makes it idle, and the remedy.
    """
    for idle in _idle(args, loss):
        if idle.name in args.typed:
            raise ConfigurationError(f"{_as_typed(args.command_line, idle.name)} does nothing {idle.why}")
        if idle.name in args.in_launch_file and args.typed.isdisjoint(idle.because_of):
            value = _shown(args.launch_file, idle.name)
            key = flag(idle.name).removeprefix("--")
            raise ConfigurationError(f"--config {args.config}: {key}: {value} does nothing {idle.why}")


def idle_names(args: argparse.Namespace, loss: PolicyLossConfig) -> set[str]:
    """The flags that do nothing here, of which ``check_idle`` lets some stand in a launch file."""
    return {idle.name for idle in _idle(args, loss)}


def _as_typed(given: argparse.Namespace, name: str) -> str:
    """The flag with its value; a switch has none."""
    value = getattr(given, name)
    if isinstance(value, bool):
        return flag(name) if value else flag(f"no_{name}")
    return f"{flag(name)} {_shown(given, name)}"


def _shown(given: argparse.Namespace, name: str) -> str:
    value = getattr(given, name)
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(value) if isinstance(value, list) else str(value)


def _idle(args: argparse.Namespace, loss: PolicyLossConfig) -> Iterator[_Idle]:
    used = ENGINES[args.rollout_engine].settings
    for name in dict.fromkeys(setting for engine in ENGINES.values() for setting in engine.settings):
        users = " or ".join(other for other, engine in ENGINES.items() if name in engine.settings)
        if name not in used:
            why = f"with --rollout-engine {args.rollout_engine}: drop it, or use {users}"
            yield _Idle(name, why, ("rollout_engine",))
    if not args.group_query_attention:
        why = "without --group-query-attention: give both, or neither"
        yield _Idle("num_query_groups", why, ("group_query_attention",))
    if args.multi_latent_attention:
        why = "with --multi-latent-attention, whose heads have widths of their own: drop it"
        yield _Idle("kv_channels", why, ("multi_latent_attention",))
    if not args.use_rope_scaling:
        why = "without --use-rope-scaling: give both, or neither"
        yield _Idle("rope_scaling_factor", why, ("use_rope_scaling",))
    if not args.save_rollouts:
        yield _Idle("save_log_probs", "without --save-rollouts DIR: give both, or neither", ("load_rollouts",))
    if args.optimizer == "sgd" and not (args.sgd_momentum or args.bf16 or args.fp16):
        why = "with --optimizer sgd, --sgd-momentum 0 and float32, which keep no state: drop it"
        yield _Idle("optimizer_offload", why, ("optimizer", "sgd_momentum"))
    if args.lr_decay_style != "WSD":
        why = f"with --lr-decay-style {args.lr_decay_style}: use WSD, or drop it"
        yield _Idle("lr_wsd_decay_style", why, ("lr_decay_style",))
    if args.prompt_data:
        yield _Idle("task", "with --prompt-data: drop one of them", ("prompt_data",))
    else:
        for name in ("prompt_data", *OF_FILES):
            yield _Idle(name, "without --prompt-data: give both, or neither", ("task",))
    if args.eval_interval is None:
        for name in OF_EVALUATIONS:
            yield _Idle(name, "without --eval-interval: give both, or neither", ("task",))
    if loss.kl_coef == 0:
        because_of = ("grpo_kl_beta", "rollout_is_batch_normalize", *_OBJECTIVE)
        yield _Idle("kl_estimator", "with --grpo-kl-beta 0: give that, or drop it", because_of)
    if loss.algorithm is not None and not OBJECTIVES[loss.algorithm].clips:
        clipping = ", ".join(name for name, objective in OBJECTIVES.items() if objective.clips)
        why = f"with the objective {loss.algorithm}, which clips no ratio: drop it, or use one of {clipping}"
        for name in ("grpo_clamp_eps_lower", "grpo_clamp_eps_upper"):
            yield _Idle(name, why, _OBJECTIVE)
    if args.advantage_estimator != WITH_CRITIC:
        why = f"without a critic: give --advantage-estimator {WITH_CRITIC}, or drop it"
        for option in options_of(CriticSection):
            yield _Idle(option.flag, why, ("advantage_estimator",))
    elif args.critic_lr_decay_style == "constant":
        why = "with --critic-lr-decay-style constant: use another, or drop it"
        yield _Idle("critic_min_lr", why, ("critic_lr_decay_style",))
    yield from _idle_guards(args)
    yield from _idle_rewards(args)
    yield from _idle_advantages(args)


def _idle_guards(args: argparse.Namespace) -> Iterator[_Idle]:
    if args.load_rollouts:
        why = f"with --load-rollouts {args.load_rollouts}, whose responses are there already: drop one of them"
        yield _Idle("bad_samples", why, ("load_rollouts",))
    if args.bad_samples != "resample" or args.load_rollouts:
        why = f"with --bad-samples {args.bad_samples}: drop it, or use resample"
        yield _Idle("bad_sample_attempts", why, ("bad_samples", "load_rollouts"))


def _idle_rewards(args: argparse.Namespace) -> Iterator[_Idle]:
    workers, errors = ("reward_workers", "reward_timeout"), ("reward_errors", "reward_on_error")
    if args.load_rollouts:
        why = f"with --load-rollouts {args.load_rollouts}, which has rewards: drop one of them"
        for name in ("reward", *workers, *errors, "dynamic_sampling"):
            yield _Idle(name, why, ("load_rollouts",))
    source = Source(args.task, args.seed, args.reward)
    if source.is_harmless:
        for name in workers:
            yield _Idle(name, f"with {source.name}, which is scored by the trainer itself: drop it", ("task", "reward"))
    if args.reward_errors == "stop":
        yield _Idle("reward_on_error", "with --reward-errors stop: drop one of them", ("reward_errors",))
    if args.overlong != "penalise":
        for name in ("overlong_buffer", "overlong_penalty_factor"):
            yield _Idle(name, f"with --overlong {args.overlong}: drop it, or use penalise", ("overlong",))


def _idle_advantages(args: argparse.Namespace) -> Iterator[_Idle]:
    estimator, because_of = args.advantage_estimator, ("advantage_estimator",)
    for name, users in {
        "gamma": ("reinforce-pp", "gae"),
        "gae_lambda": ("gae",),
        "gpg_f_norm": ("gpg",),
        "advantage_scope": (*GROUP_ESTIMATORS, "reinforce-pp", "reinforce-pp-baseline", "gae"),
    }.items():
        if estimator not in users:
            why = f"with --advantage-estimator {estimator}: drop it, or use {' or '.join(users)}"
            yield _Idle(name, why, because_of)
    if args.kl_in_reward == 0:
        yield _Idle("kl_in_reward_estimator", "with --kl-in-reward 0: give that, or drop it", ("kl_in_reward",))
