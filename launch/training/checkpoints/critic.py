"""What a checkpoint holds of a critic: its weights, its optimizer and its schedule, beside the policy's."""

from __future__ import annotations

from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.schedule import check_schedule, load_optimizer_and_schedule
from megatron_rc.launch.training.checkpoints.state import load_model, model_state, optimizer_state
from megatron_rc.launch.training.trained_model import TrainedModel

NAME = "critic"
OPTIMIZER, SCHEDULE = f"{NAME}_optimizer", f"{NAME}_opt_param_scheduler"
# The critic's own flags, by the policy's.
_FLAGS = {name: f"critic_{name}" for name in ("lr", "min_lr", "lr_warmup_iters", "lr_decay_style")}


def critic_state(critic: TrainedModel, *, with_optimizer: bool) -> dict[str, Any]:
    """What is written of it."""
    state = model_state(critic.model, NAME)
    if with_optimizer:
        state[OPTIMIZER] = optimizer_state(critic.optimizer, critic.model, NAME)
        state[SCHEDULE] = critic.scheduler.state_dict()
    return state


def wanted_critic_state(critic: TrainedModel, *, with_optimizer: bool) -> dict[str, Any]:
    """What is asked of a checkpoint that has one."""
    state = model_state(critic.model, NAME)
    if with_optimizer:
        state[OPTIMIZER] = optimizer_state(critic.optimizer, critic.model, NAME, is_loading=True)
    return state


def load_critic(
    where: str, config: RunConfig, critic: TrainedModel, loaded: dict[str, Any], iteration: int, *, with_optimizer: bool
) -> None:
    """Take what was read.

    Raises:
        AgreedError: the checkpoint's learning rate is not the flags'; see :func:`check_schedule`.
    """
    load_model(critic.model, loaded, NAME)
    if not with_optimizer:
        critic.optimizer.reload_model_params()
        critic.scheduler.step(increment=iteration)
        return
    state = {"optimizer": loaded[OPTIMIZER], "opt_param_scheduler": loaded[SCHEDULE]}
    check_schedule(where, config, critic.scheduler, critic.optimizer, state, flags=_FLAGS)
    load_optimizer_and_schedule(config, critic.optimizer, critic.scheduler, state)
