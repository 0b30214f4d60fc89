"""Where rollouts come from, how old they may be, and which engine can serve them."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_rc.launch.engines.registry import ENGINES
from megatron_rc.launch.engines.requests import API_KEY, check_key, check_url
from megatron_rc.launch.errors import ConfigurationError, flag, require
from megatron_rc.launch.rollouts.recorded import find_rollouts
from megatron_rc.launch.rollouts.samples import bad_folder
from megatron_rc.launch.run_config import RunConfig


def check_recorded(config: RunConfig) -> None:
    """Rollouts that are read instead of sampled."""
    folder, engine, train_iters = (
        config.rollouts.load_rollouts,
        config.engine.rollout_engine,
        config.training.train_iters,
    )
    if not folder:
        return
    if config.rollouts.save_rollouts:
        raise ConfigurationError(
            f"--save-rollouts {config.rollouts.save_rollouts} would write again what --load-rollouts {folder} reads: "
            "drop one of them"
        )
    if Path(folder).resolve() == bad_folder(config).resolve():
        raise ConfigurationError(
            f"--load-rollouts {folder} is where this run writes its own bad batches: name the run otherwise "
            f"(--run-name, now {config.launch.run_name})"
        )
    if engine != "transformers":
        raise ConfigurationError(f"--rollout-engine {engine} does nothing with --load-rollouts {folder}: drop one")
    try:
        batches = len(find_rollouts(folder))
    except ValueError as error:
        raise ConfigurationError(f"--load-rollouts {error}") from error
    steps = batches * config.updates_per_rollout
    if steps < train_iters:
        raise ConfigurationError(
            f"--load-rollouts {folder} holds {batches} rollout batches, which make {steps} optimizer steps: "
            f"--train-iters {train_iters} is more"
        )


def check_saved(config: RunConfig) -> None:
    """Log-probs are written when the last optimizer step on a rollout batch is made."""
    last, steps = config.training.train_iters, config.updates_per_rollout
    if config.rollouts.save_log_probs and last < steps:
        raise ConfigurationError(
            f"--save-log-probs does nothing with --train-iters {last}: they are written after the {steps} "
            f"optimizer steps of a rollout batch; give at least {steps}"
        )


def check_scored(config: RunConfig) -> None:
    """Whether a forward-only pass that was asked for is of any use."""
    correction = config.correction
    if config.rollouts.always_score and correction.corrects_in_loss:
        mode = "--bypass-mode" if correction.bypass_mode else "--proximal-interpolation"
        raise ConfigurationError(
            f"--always-score does nothing with {mode}, which uses no log π_old of a forward-only pass: drop one of them"
        )


def check_staleness(config: RunConfig, samples: bool) -> None:
    """How old rollouts may be, in optimizer steps, and whether what looks at their age knows it.

    Args:
        config: the settings.
        samples: this run's engine samples. What another run or program wrote counts its own steps, unless the user says
            otherwise.
    """
    staleness, steps = config.rollouts.rollout_staleness, config.updates_per_rollout
    if samples and staleness and staleness % steps:
        raise ConfigurationError(
            f"--rollout-staleness {staleness} counts optimizer steps, of which each rollout batch makes {steps}: give "
            f"a multiple of {steps}, that is {steps} for every rollout batch that may be sampled ahead"
        )
    scale, given = config.correction.staleness_scale, config.correction.rollout_staleness_scale
    looking = [f"--rollout-staleness-scale {given}"] * (scale is not None)
    looking += ["--proximal-interpolation"] * config.correction.proximal_interpolation
    if looking and not config.rollouts.knows_versions:
        raise ConfigurationError(
            f"{looking[0]} needs rollouts whose versions are steps of this run: say so with --rollout-staleness K, or "
            "drop it"
        )
    oldest = staleness or 0
    if scale is not None and scale.steps[-1] > oldest:
        raise ConfigurationError(
            f"--rollout-staleness-scale {given} has bounds for a staleness of {scale.steps[-1]}, --rollout-staleness "
            f"allows {oldest}: raise that, or drop these bounds"
        )


def check_engine(config: RunConfig) -> None:
    """The package that an engine needs, and the flags that say where it is."""
    name, dp = config.engine.rollout_engine, config.data_parallel_size
    engine = ENGINES[name]
    if engine.package:
        require(engine.package, f"--rollout-engine {name}", engine.package)
    for field in engine.needs:
        if getattr(config.engine, field) is None:
            raise ConfigurationError(f"--rollout-engine {name} needs {flag(field)}")
    if "rollout_url" not in engine.needs:
        return
    urls = (config.engine.rollout_url or "").split(",")
    try:
        for url in urls:
            check_url(url)
        check_key(os.environ.get(API_KEY))
    except ValueError as problem:
        raise ConfigurationError(f"--rollout-url: {problem}") from None
    if len(urls) != dp:
        raise ConfigurationError(
            f"--rollout-url names {len(urls)} servers for {dp} data-parallel ranks: each needs one of its own, which "
            "gets its weights"
        )
