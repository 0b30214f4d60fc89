"""Checks of the source of rollouts, their age, the engine, and advantages."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_rc.advantages.estimators import GROUP_ESTIMATORS
from megatron_rc.launch.engines.registry import ENGINES
from megatron_rc.launch.engines.requests import API_KEY, check_key, check_url
from megatron_rc.launch.engines.vllm_args import read_engine_args
from megatron_rc.launch.errors import ConfigurationError, flag, require
from megatron_rc.launch.flags.checks.refuse import refuse
from megatron_rc.launch.rollouts.recorded import find_rollouts
from megatron_rc.launch.rollouts.samples import bad_folder
from megatron_rc.launch.run_config import RunConfig


def check_recorded(config: RunConfig) -> None:
    """Check that recorded rollouts suffice, and that a rollout batch is finished before its log-probs are written."""
    folder, last, each = config.rollouts.load_rollouts, config.training.train_iters, config.updates_per_rollout
    is_bad = folder and Path(folder).resolve() == bad_folder(config).resolve()
    wrong = {
        "{save_log_probs} does nothing with {train_iters}: log-probs are written after the {each} optimizer steps of a "
        "rollout batch; give at least {each}": config.rollouts.save_log_probs and last < each,
        "{load_rollouts} is the folder of this run's own bad batches: give another --run-name than {name}": is_bad,
    }
    refuse(config, wrong, each=each, name=config.launch.run_name)
    if not folder:
        return
    try:
        batches = len(find_rollouts(folder))
    except ValueError as error:
        raise ConfigurationError(f"--load-rollouts {error}") from error
    holds = "{load_rollouts} holds {batches} rollout batches, which make {steps} optimizer steps: {train_iters} is more"
    refuse(config, {holds: batches * each < last}, batches=batches, steps=batches * each)


def check_correction(config: RunConfig) -> None:
    """Check that the correction uses log π_old, if it was asked for, and knows the age of rollouts, if it uses that."""
    correction, rollouts = config.correction, config.rollouts
    scale, given = correction.staleness_scale, correction.rollout_staleness_scale
    users = [f"--rollout-staleness-scale {given}"] * (scale is not None)
    users += ["--proximal-interpolation"] * correction.proximal_interpolation
    last = 0 if scale is None else scale.steps[-1]
    wrong = {
        "{always_score} does nothing with {mode}, which uses no log π_old of a forward-only pass: drop one of them": (
            rollouts.always_score and correction.corrects_in_loss
        ),
        "{found[0]} needs rollouts whose versions are steps of this run: say so with --rollout-staleness K, "
        "or drop it": not rollouts.knows_versions and users,
        "--rollout-staleness-scale {given} has bounds for a staleness of {last}, but --rollout-staleness allows "
        "{oldest}: raise that, or drop these bounds": last > (rollouts.rollout_staleness or 0),
    }
    mode = "--bypass-mode" if correction.bypass_mode else "--proximal-interpolation"
    refuse(config, wrong, mode=mode, given=given, last=last, oldest=rollouts.rollout_staleness or 0)


def check_engine(config: RunConfig, samples: bool) -> None:
    """Check the engine's package, the flags that it needs, its servers' addresses, and that it reports what is used."""
    name = config.engine.rollout_engine
    engine, urls = ENGINES[name], (config.engine.rollout_url or "").split(",")
    if engine.package:
        require(engine.package, f"--rollout-engine {name}", engine.package)
    needs = {f"{{rollout_engine}} needs {flag(one)}": getattr(config.engine, one) is None for one in engine.needs}
    is_silent = samples and config.launch.on_cpu and not engine.reports_kept_on_cpu
    kept = (
        "--rollout-top-p, --rollout-top-k and --rollout-min-p need the tokens that the engine kept, which "
        "{rollout_engine} reports on a GPU alone: use another engine, or sample from all tokens"
    )
    greedy = "{rollout_top_k} samples the likeliest token alone, from which nothing is learned: give 0, or 2 and more"
    replays_sampling = config.rollouts.replays_sampling
    wrong = {
        kept: is_silent and replays_sampling,
        greedy: config.rollouts.rollout_top_k == 1,
        "{entropy_over_support} does nothing without --rollout-top-p, --rollout-top-k or --rollout-min-p: drop it": (
            config.rollouts.entropy_over_support and not replays_sampling
        ),
    }
    refuse(config, needs | wrong)
    _check_vllm(config)
    if "rollout_url" not in engine.needs:
        return
    try:
        for url in urls:
            check_url(url)
        check_key(os.environ.get(API_KEY))
    except ValueError as problem:
        raise ConfigurationError(f"--rollout-url: {problem}") from None
    _check_transfer(config)
    names = (
        "--rollout-url names {urls} servers for {dp} data-parallel ranks: each needs one of its own, which gets its "
    )
    is_wrong = len(urls) != config.data_parallel_size
    refuse(config, {names + "weights": is_wrong}, urls=len(urls), dp=config.data_parallel_size)


def _check_vllm(config: RunConfig) -> None:
    engine, parallel = config.engine, config.parallel
    of_replica = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    is_large = engine.rollout_tensor_parallel_size > of_replica and config.data_parallel_size > 1
    wrong = {
        "{rollout_tensor_parallel_size} with {dp} replicas takes GPUs of the next replica: give at most {most}, the "
        "ranks of a replica's first pipeline stage": is_large and not config.launch.on_cpu,
        "{rollout_colocate} needs a GPU, whose memory it shares: drop it": engine.rollout_colocate
        and config.launch.on_cpu,
    }
    refuse(config, wrong, dp=config.data_parallel_size, most=of_replica)
    try:
        read_engine_args(engine.rollout_engine_args)
    except ValueError as problem:
        raise ConfigurationError(f"--rollout-engine-args {engine.rollout_engine_args}: {problem}") from None


def _check_transfer(config: RunConfig) -> None:
    way, on_cpu = config.engine.rollout_weight_transfer, config.launch.on_cpu
    needs, other = "GPUs" if way == "nccl" else "CPUs", "gloo" if on_cpu else "nccl"
    wrong = {
        "{rollout_weight_transfer} is for {needs}: give {other}, or files": (
            way in ("gloo", "nccl") and (way == "nccl") == on_cpu
        ),
        "{rollout_weight_transfer} is for {rollout_engine} vllm-server: give {other}, or files": (
            way == "ipc" and config.engine.rollout_engine != "vllm-server"
        ),
    }
    refuse(config, wrong, needs=needs, other=other)


def check_advantages(config: RunConfig) -> None:
    """Check that advantages and values have the responses and the correction that they are made from."""
    wanted, correction, load = config.advantages, config.correction, config.rollouts.load_rollouts
    of_accepted, weighs = wanted.advantage_scope == "accepted", wanted.advantage_baseline != "group"
    of_responses = GROUP_ESTIMATORS.get(wanted.advantage_estimator)
    needs_several = of_responses is not None and of_responses.needs_several
    is_alone = needs_several and config.rollouts.grpo_group_size == 1
    corrects = config.critic.correct_values if config.critic else "none"
    in_loss = "--proximal-interpolation" if correction.proximal_interpolation else "--bypass-mode"
    early = " before the loss, which {in_loss} does without: "
    of_the_loss: dict[str, object] = {
        "{advantage_scope} needs a rejection" + early + "use all, or drop that": of_accepted,
        "{advantage_baseline} needs log π_old" + early + "use group, or drop that": weighs,
        "{advantage_estimator} needs log π_old" + early + "use another estimator, or drop that": wanted.needs_squares,
        "{correct_values} needs a correction" + early + "use --correct-values none": corrects != "none",
    }
    wrong = {
        "{advantage_estimator} asks the engine for the most likely response to each prompt, which {load_rollouts} does "
        "not have: use another estimator": wanted.advantage_estimator == "remax" and load,
        "{advantage_estimator} compares the responses to one prompt, and with {grpo_group_size} each would have the "
        "advantage 0: raise that, or use another estimator": is_alone,
        "{advantage_scope} does nothing without a rejection: give --rollout-rs": (
            of_accepted and not correction.rejects and correction.bad_log_probs == "error"
        ),
        "{advantage_baseline_weights} needs importance weights: use ratio, or give --rollout-is": (
            weighs and wanted.advantage_baseline_weights == "correction" and not correction.applies_weights
        ),
        "{correct_values} needs importance weights: use mask, or give --rollout-is": (
            corrects == "weights" and not correction.applies_weights
        ),
    }
    refuse(config, (of_the_loss if correction.corrects_in_loss else {}) | wrong, in_loss=in_loss)
