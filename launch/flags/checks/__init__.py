"""Checks of settings that span several sections, before any process group is made.

They depend only on the settings, the files that they name and the number of processes, so that every rank raises the
same error: one sentence with the flag, its value and the remedy. Sections check themselves when they are made. These
checks are no part of ``RunConfig``, because an export reads a checkpoint's settings as one, of any layout and engine.
"""

from __future__ import annotations

from megatron_rc.launch.flags.checks.distillation import check_teachers
from megatron_rc.launch.flags.checks.experts import check_experts
from megatron_rc.launch.flags.checks.files import check_files
from megatron_rc.launch.flags.checks.layout import check_batches, check_layout, check_steps
from megatron_rc.launch.flags.checks.megatron import check_megatron
from megatron_rc.launch.flags.checks.model import check_model
from megatron_rc.launch.flags.checks.rollouts import (
    check_advantages,
    check_correction,
    check_engine,
    check_recorded,
)
from megatron_rc.launch.flags.checks.task import check_prompts, check_rewards
from megatron_rc.launch.flags.checks.weights import check_architecture, check_bridge, check_other_models
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Task


def check(config: RunConfig, task: Task, samples: bool) -> None:
    """Check that the settings go together; ``samples``: an engine of this run samples the rollouts."""
    check_layout(config)
    check_model(config)
    check_experts(config)
    check_megatron(config)
    check_architecture(config, samples)
    check_batches(config)
    check_steps(config, samples)
    check_recorded(config)
    check_correction(config)
    check_engine(config, samples)
    check_files(config)
    check_bridge(config, samples)
    check_other_models(config)
    check_prompts(config, task)
    check_rewards(config, task, samples)
    check_advantages(config)
    check_teachers(config, task)
