"""Checks of the source of rollouts, their age, the engine, and advantages."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_rc.advantages.estimators import GROUP_ESTIMATORS
from megatron_rc.launch.engines.registry import ENGINES
from megatron_rc.launch.engines.requests import API_KEY, check_key, check_url
from megatron_rc.launch.engines.vllm_args import read_engine_args
from megatron_rc.launch.errors import ConfigurationError, flag, require
from megatron_rc.launch.rollouts.recorded import find_rollouts
from megatron_rc.launch.rollouts.samples import bad_folder
from megatron_rc.launch.run_config import RunConfig


def check_recorded(config: RunConfig) -> None:
    """Check that recorded rollouts suffice for the run, and are not in a folder that it renames at its start."""
    folder = config.rollouts.load_rollouts
    if not folder:
        return
    if Path(folder).resolve() == bad_folder(config).resolve():
        raise ConfigurationError(
            f"--load-rollouts {folder} is the folder of this run's own bad batches: give another --run-name than "
            f"{config.launch.run_name}"
        )
    try:
        batches = len(find_rollouts(folder))
    except ValueError as error:
        raise ConfigurationError(f"--load-rollouts {error}") from error
    steps = batches * config.updates_per_rollout
    if steps < config.training.train_iters:
        raise ConfigurationError(
            f"--load-rollouts {folder} holds {batches} rollout batches, which make {steps} optimizer steps: "
            f"{config.typed('train_iters')} is more"
        )


def check_correction(config: RunConfig) -> None:
    """Check that the age of rollouts is known, and reaches the bounds for it, if the correction uses it."""
    correction = config.correction
    scale = correction.staleness_scale
    typed_scale = f"--rollout-staleness-scale {correction.rollout_staleness_scale}"
    oldest = config.rollouts.rollout_staleness or 0
    users = []
    if scale is not None:
        users.append(typed_scale)
    if correction.proximal_interpolation:
        users.append("--proximal-interpolation")
    if users and not config.rollouts.knows_versions:
        raise ConfigurationError(
            f"{users[0]} needs rollouts whose versions are steps of this run: say so with --rollout-staleness K, or "
            "drop it"
        )
    if scale is not None and scale.steps[-1] > oldest:
        raise ConfigurationError(
            f"{typed_scale} has bounds for a staleness of {scale.steps[-1]}, but --rollout-staleness allows {oldest}: "
            "raise that, or drop these bounds"
        )


def check_engine(config: RunConfig, samples: bool) -> None:
    """Check the engine's package, the flags that it needs, its servers' addresses, and that it reports what is used."""
    name = config.engine.rollout_engine
    engine = ENGINES[name]
    typed = config.typed("rollout_engine")
    _check_windows(config)
    if engine.package:
        require(engine.package, typed, engine.package)
    for needed in engine.needs:
        if getattr(config.engine, needed) is None:
            raise ConfigurationError(f"{typed} needs {flag(needed)}")
    if samples and config.launch.on_cpu and config.rollouts.replays_sampling and not engine.reports_kept_on_cpu:
        raise ConfigurationError(
            "--rollout-top-p, --rollout-top-k and --rollout-min-p need the tokens that the engine kept, which "
            f"{typed} reports on a GPU alone: use another engine, or sample from all tokens"
        )
    _check_vllm(config)
    if "rollout_url" in engine.needs:
        _check_servers(config)


def _check_windows(config: RunConfig) -> None:
    """Check that responses go on under new weights only if they may be that old, and where no turn ends them."""
    engine = config.engine
    staleness = config.rollouts.rollout_staleness
    if engine.rl_partial_rollouts and not staleness:
        raise ConfigurationError("--rl-partial-rollouts needs --rollout-staleness: give both, or neither")
    if engine.rl_partial_rollouts and config.rollouts.max_turns > 1:
        raise ConfigurationError(
            f"--rl-partial-rollouts does not go with {config.typed('max_turns')}: drop it, or use --max-turns 1"
        )
    if engine.rollout_colocate and staleness:
        raise ConfigurationError(
            f"--rollout-colocate does not go with {config.typed('rollout_staleness')}, which samples while the trainer "
            "works: drop one of them"
        )


def _check_vllm(config: RunConfig) -> None:
    engine = config.engine
    replicas = config.data_parallel_size
    ranks = config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size
    if engine.rollout_tensor_parallel_size > ranks and replicas > 1 and not config.launch.on_cpu:
        raise ConfigurationError(
            f"{config.typed('rollout_tensor_parallel_size')} with {replicas} replicas takes GPUs of the next replica: "
            f"give at most {ranks}, the ranks of a replica's first pipeline stage"
        )
    try:
        read_engine_args(engine.rollout_engine_args)
    except ValueError as problem:
        raise ConfigurationError(f"--rollout-engine-args {engine.rollout_engine_args}: {problem}") from None


def _check_servers(config: RunConfig) -> None:
    """Check the way of new weights to servers, and the servers' addresses."""
    way = config.engine.rollout_weight_transfer
    typed = config.typed("rollout_weight_transfer")
    fitting = "gloo" if config.launch.on_cpu else "nccl"
    if way in ("gloo", "nccl") and way != fitting:
        machines = "GPUs" if way == "nccl" else "CPUs"
        raise ConfigurationError(f"{typed} is for {machines}: give {fitting}, or files")
    if way == "ipc" and config.engine.rollout_engine != "vllm-server":
        raise ConfigurationError(f"{typed} is for --rollout-engine vllm-server: give {fitting}, or files")
    check_addresses(config, "rollout_url", "each needs one of its own, which gets its weights")


def check_addresses(config: RunConfig, name: str, remedy: str) -> None:
    """Check the addresses of servers, one for each data-parallel replica, and the key for them.

    Args:
        config: settings of the run.
        name: flag with the addresses; its name has underscores.
        remedy: what to do about another number of addresses.
    """
    addresses = config.value_of(name.replace("_", "-")).split(",")
    try:
        for address in addresses:
            check_url(address)
        check_key(os.environ.get(API_KEY))
    except ValueError as problem:
        raise ConfigurationError(f"{flag(name)}: {problem}") from None
    if len(addresses) != config.data_parallel_size:
        raise ConfigurationError(
            f"{flag(name)} names {len(addresses)} servers for {config.data_parallel_size} data-parallel replicas: "
            f"{remedy}"
        )


def check_advantages(config: RunConfig) -> None:
    """Check that advantages and values have the responses and the correction that they are made from."""
    advantages = config.advantages
    correction = config.correction
    estimator = config.typed("advantage_estimator")
    corrected_values = config.critic.correct_values if config.critic else "none"
    if correction.corrects_in_loss:
        _check_before_the_loss(config, corrected_values)
    if advantages.advantage_estimator == "remax" and config.rollouts.load_rollouts:
        raise ConfigurationError(
            f"{estimator} asks the engine for the most likely response to each prompt, which "
            f"{config.typed('load_rollouts')} does not have: use another estimator"
        )
    of_responses = GROUP_ESTIMATORS.get(advantages.advantage_estimator)
    needs_several = of_responses is not None and of_responses.needs_several
    if needs_several and config.rollouts.grpo_group_size == 1:
        raise ConfigurationError(
            f"{estimator} compares the responses to one prompt, and with --grpo-group-size 1 each would have the "
            "advantage 0: raise that, or use another estimator"
        )
    rejects = correction.rejects or correction.bad_log_probs != "error"
    if advantages.advantage_scope == "accepted" and not rejects:
        raise ConfigurationError("--advantage-scope accepted does nothing without a rejection: give --rollout-rs")
    by_correction = (
        advantages.advantage_baseline == "weighted" and advantages.advantage_baseline_weights == "correction"
    )
    if by_correction and not correction.applies_weights:
        raise ConfigurationError(
            "--advantage-baseline-weights correction needs importance weights: use ratio, or give --rollout-is"
        )
    if corrected_values == "weights" and not correction.applies_weights:
        raise ConfigurationError("--correct-values weights needs importance weights: use mask, or give --rollout-is")


def _check_before_the_loss(config: RunConfig, corrected_values: str) -> None:
    """Refuse what needs the correction or log π_old before the loss, if the loss makes the correction."""
    advantages = config.advantages
    mode = "--bypass-mode" if config.correction.bypass_mode else "--proximal-interpolation"
    without = f"before the loss, which {mode} does without"
    if advantages.advantage_scope == "accepted":
        raise ConfigurationError(f"--advantage-scope accepted needs a rejection {without}: use all, or drop that")
    if advantages.advantage_baseline == "weighted":
        raise ConfigurationError(f"--advantage-baseline weighted needs log π_old {without}: use group, or drop that")
    if advantages.needs_squares:
        raise ConfigurationError(
            f"{config.typed('advantage_estimator')} needs log π_old {without}: use another estimator, or drop that"
        )
    if corrected_values != "none":
        raise ConfigurationError(
            f"--correct-values {corrected_values} needs a correction {without}: use --correct-values none"
        )
