"""The parts of a run that its checkpoints hold; of the models that learn also the optimizer and the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.rollouts.open_rollouts import OpenRollouts
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.reward_scaling import RewardScaler
from megatron_rc.launch.training.checkpoints.host_weights import Reference, SamplingWeights
from megatron_rc.launch.training.checkpoints.schedule import check_schedule, load_optimizer_and_schedule
from megatron_rc.launch.training.checkpoints.state import load_model, model_state, optimizer_state
from megatron_rc.launch.training.checks.step_checks import LeftOut
from megatron_rc.launch.training.models.trained_model import TrainedModel

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
    """The parts of a run that a checkpoint holds, on this rank."""

    policy: TrainedModel
    critic: TrainedModel | None
    reference: Reference | None  # None without a KL penalty
    sampling: SamplingWeights  # weights of the rollouts under way
    open_rollouts: OpenRollouts | None  # responses of the rollouts under way; None: no partial rollouts
    rewards: RewardScaler  # with the statistics of the rewards so far
    left_out: LeftOut  # steps that were not made

    def trained(self) -> Iterator[tuple[str, TrainedModel]]:
        """Yield the models that learn, with their names."""
        yield POLICY, self.policy
        if self.critic is not None:
            yield CRITIC, self.critic

    def state(self, iteration: int, *, with_optimizer: bool) -> dict[str, Any]:
        """Return the sharded state to save after these optimizer steps."""
        state: dict[str, Any] = {"iteration": iteration}
        state |= self.sampling.state() | self.rewards.state() | self.left_out.state()
        if self.reference is not None:
            state |= self.reference.state()
        for name, trained in self.trained():
            state |= trained_state(trained, name, with_optimizer=with_optimizer)
        return state

    def wanted_state(self, *, with_optimizer: bool) -> dict[str, Any]:
        """Return the sharded state to load, without the weights of rollouts under way."""
        state = self.reference.wanted_state() if self.reference is not None else {}
        for name, trained in self.trained():
            state |= trained_state(trained, name, with_optimizer=with_optimizer, is_loading=True)
        return state

    def load_models(self, where: str, config: RunConfig, loaded: dict[str, Any], iteration: int) -> None:
        """Take the models; with ``--no-load-optim`` the schedules go to optimizer step ``iteration``.

        Raises AgreedError if the checkpoint's learning rate is not the flags'; see :func:`check_schedule`.
        """
        if self.reference is not None:
            self.reference.load(loaded)
        for name, trained in self.trained():
            load_model(trained.model, loaded, name)
            if not config.checkpoints.no_load_optim:
                state = {"optimizer": loaded[_OPTIMIZERS[name]], "opt_param_scheduler": loaded[_SCHEDULES[name]]}
                check_schedule(where, config, trained, state, _FLAGS[name])
                load_optimizer_and_schedule(config, trained, state)
            else:
                trained.optimizer.reload_model_params()
                trained.scheduler.step(increment=iteration)


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
