"""Which runs work: checked in one process, before any process group is made.

Everything here depends on the settings, the files they name and the number of processes alone, so every rank comes to
the same verdict. An error is one sentence: the flag, its value and the remedy.
"""

from __future__ import annotations

from megatron_rc.launch.flags.checks.advantages import check_advantages
from megatron_rc.launch.flags.checks.batches import check_batches
from megatron_rc.launch.flags.checks.critic import check_critic
from megatron_rc.launch.flags.checks.experts import check_experts
from megatron_rc.launch.flags.checks.files import check_checkpoints
from megatron_rc.launch.flags.checks.guards import check_guards
from megatron_rc.launch.flags.checks.megatron import check_megatron
from megatron_rc.launch.flags.checks.model import check_model, check_optimizer
from megatron_rc.launch.flags.checks.parallel import check_parallelism
from megatron_rc.launch.flags.checks.profiling import check_profiling
from megatron_rc.launch.flags.checks.reference import check_reference
from megatron_rc.launch.flags.checks.rewards import check_rewards
from megatron_rc.launch.flags.checks.rollouts import (
    check_engine,
    check_recorded,
    check_saved,
    check_scored,
    check_staleness,
)
from megatron_rc.launch.flags.checks.task import check_evaluation, check_prompts
from megatron_rc.launch.flags.checks.weights import check_architecture, check_bridge
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Task


def check(config: RunConfig, task: Task, *, engine: bool = True) -> None:
    """Check how settings go together.

    Args:
        config: the settings.
        task: where prompts come from.
        engine: rollouts are sampled by an engine of this run, unless they are read; False: they come from elsewhere.

    Raises:
        ConfigurationError: one sentence: the flag, its value and the remedy.
    """
    samples = engine and not config.rollouts.load_rollouts
    check_parallelism(config)
    check_model(config)
    check_experts(config)
    check_megatron(config)
    check_architecture(config, samples)
    check_batches(config)
    check_recorded(config)
    check_saved(config)
    check_scored(config)
    check_staleness(config, samples)
    check_engine(config)
    check_optimizer(config)
    check_critic(config)
    check_guards(config)
    check_profiling(config)
    check_checkpoints(config)
    check_bridge(config, samples)
    check_reference(config)
    check_prompts(config, task)
    check_evaluation(config, task)
    check_rewards(config, task, samples)
    check_advantages(config)
