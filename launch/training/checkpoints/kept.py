"""The parts of a run that its checkpoints hold; of the models that learn also the optimizer and the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.reference import Reference
from megatron_rc.launch.training.checkpoints.sampling_weights import SamplingWeights
from megatron_rc.launch.training.checkpoints.schedule import check_schedule, load_optimizer_and_schedule
from megatron_rc.launch.training.checkpoints.state import load_model, model_state, optimizer_state
from megatron_rc.launch.training.left_out import LeftOut
from megatron_rc.launch.training.rewards import RewardScaler
from megatron_rc.launch.training.trained_model import TrainedModel

POLICY, CRITIC = "model", "critic"
_OPTIMIZERS = {POLICY: "optimizer", CRITIC: "critic_optimizer"}
_SCHEDULES = {POLICY: "opt_param_scheduler", CRITIC: "critic_opt_param_scheduler"}
OPTIMIZERS = frozenset(_OPTIMIZERS.values())
# The flags of a critic, by the policy's.
_FLAGS = {
    POLICY: dict[str, str](),
    CRITIC: {name: f"critic_{name}" for name in ("lr", "min_lr", "lr_warmup_iters", "lr_decay_style")},
}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The parts of a run that a checkpoint holds, on this rank.

    Attributes:
        policy: with its optimizer and schedule.
        critic: with its optimizer and schedule; None: there is no critic.
        reference: policy; None without a KL penalty.
        sampling: weights of the rollouts under way.
        rewards: statistics of the rewards so far.
        left_out: steps that were not made.
    """

    policy: TrainedModel
    critic: TrainedModel | None
    reference: Reference | None
    sampling: SamplingWeights
    rewards: RewardScaler
    left_out: LeftOut


def trained_state(
    trained: TrainedModel, name: str, *, with_optimizer: bool, is_loading: bool = False
) -> dict[str, Any]:
    """Return the sharded state of a trained model, to save or to load; ``name``: ``POLICY`` or ``CRITIC``."""
    state = model_state(trained.model, name)
    if with_optimizer:
        state[_OPTIMIZERS[name]] = optimizer_state(trained.optimizer, trained.model, name, is_loading=is_loading)
        if not is_loading:
            state[_SCHEDULES[name]] = trained.scheduler.state_dict()
    return state


def load_trained(
    where: str,
    config: RunConfig,
    trained: TrainedModel,
    name: str,
    loaded: dict[str, Any],
    iteration: int,
    *,
    with_optimizer: bool,
) -> None:
    """Take a loaded state; without the optimizer's state the schedule goes to optimizer step ``iteration``.

    Raises:
        AgreedError: the checkpoint's learning rate is not the flags'; see :func:`check_schedule`.
    """
    load_model(trained.model, loaded, name)
    if not with_optimizer:
        trained.optimizer.reload_model_params()
        trained.scheduler.step(increment=iteration)
        return
    state = {"optimizer": loaded[_OPTIMIZERS[name]], "opt_param_scheduler": loaded[_SCHEDULES[name]]}
    check_schedule(where, config, trained.scheduler, trained.optimizer, state, _FLAGS[name])
    load_optimizer_and_schedule(config, trained.optimizer, trained.scheduler, state)
