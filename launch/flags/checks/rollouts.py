"""Checks of the source of rollouts, their age, and the engine."""

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
    """Check that recorded rollouts suffice, and that a rollout batch is finished before its log-probs are written."""
    folder, last, each = config.rollouts.load_rollouts, config.training.train_iters, config.updates_per_rollout
    if config.rollouts.save_log_probs and last < each:
        raise ConfigurationError(
            f"--save-log-probs does nothing with --train-iters {last}: log-probs are written after the {each} "
            f"optimizer steps of a rollout batch; give at least {each}"
        )
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
    if batches * each < last:
        raise ConfigurationError(
            f"--load-rollouts {folder} holds {batches} rollout batches, which make {batches * each} optimizer steps: "
            f"--train-iters {last} is more"
        )


def check_correction(config: RunConfig) -> None:
    """Check that the correction uses log π_old, if it was asked for, and knows the age of rollouts, if it uses that."""
    correction = config.correction
    if config.rollouts.always_score and correction.corrects_in_loss:
        mode = "--bypass-mode" if correction.bypass_mode else "--proximal-interpolation"
        raise ConfigurationError(
            f"--always-score does nothing with {mode}, which uses no log π_old of a forward-only pass: drop one of them"
        )
    scale, given = correction.staleness_scale, correction.rollout_staleness_scale
    users = [f"--rollout-staleness-scale {given}"] * (scale is not None)
    users += ["--proximal-interpolation"] * correction.proximal_interpolation
    if users and not config.rollouts.knows_versions:
        raise ConfigurationError(
            f"{users[0]} needs rollouts whose versions are steps of this run: say so with --rollout-staleness K, or "
            "drop it"
        )
    oldest = config.rollouts.rollout_staleness or 0
    if scale is not None and scale.steps[-1] > oldest:
        raise ConfigurationError(
            f"--rollout-staleness-scale {given} has bounds for a staleness of {scale.steps[-1]}, but "
            f"--rollout-staleness allows {oldest}: raise that, or drop these bounds"
        )


def check_engine(config: RunConfig) -> None:
    """Check the engine's package, the flags that it needs, and its servers' addresses."""
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
