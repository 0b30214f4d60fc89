"""The parts of a run that its checkpoints hold; of the models that learn also the optimizer and the schedule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rc.launch.rollouts.open_rollouts import OpenRollouts
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.reward_scaling import RewardScaler
from megatron_rc.launch.training.checkpoints.host_weights import HostWeights, Reference, SamplingWeights
from megatron_rc.launch.training.checkpoints.optimizers import load_optimizer_and_schedule, optimizer_state
from megatron_rc.launch.training.checkpoints.state import load_model, model_state
from megatron_rc.launch.training.checks.step_checks import LeftOut
from megatron_rc.launch.training.models.trained_model import TrainedModel

PROGRESS = "progress.json"  # file with the counters of the run
POLICY = "model"
CRITIC = "critic"
_OPTIMIZERS = {POLICY: "optimizer", CRITIC: "critic_optimizer"}
_SCHEDULES = {POLICY: "opt_param_scheduler", CRITIC: "critic_opt_param_scheduler"}


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

    def copies(self) -> Iterator[HostWeights]:
        """Yield the copies of the policy's weights that are set."""
        for copy in (self.reference, self.sampling):
            if copy is not None and copy.version >= 0:
                yield copy

    def state(self, *, with_optimizer: bool) -> dict[str, Any]:
        """Return Megatron's sharded state to save."""
        state: dict[str, Any] = {}
        for copy in self.copies():
            state |= copy.sharded_state()
        for name, trained in self.trained():
            state |= trained_state(trained, name, with_optimizer=with_optimizer)
        return state

    def progress(self, iteration: int) -> dict[str, Any]:
        """Return the run's counters after these optimizer steps, equal on all ranks, as JSON values."""
        versions = {f"{copy.name}_version": copy.version for copy in self.copies()}
        return {"iteration": iteration} | versions | self.rewards.state() | self.left_out.state()

    def wanted_state(self, *, with_optimizer: bool, with_sampling: bool) -> dict[str, Any]:
        """Return the sharded state to load; ``with_sampling``: with the weights of rollouts under way."""
        state = self.reference.sharded_state() if self.reference is not None else {}
        if with_sampling:
            state |= self.sampling.sharded_state()
        for name, trained in self.trained():
            state |= trained_state(trained, name, with_optimizer=with_optimizer, is_loading=True)
        return state

    def load(self, config: RunConfig, loaded: dict[str, Any], folder: Path, *, with_sampling: bool) -> int:
        """Take everything from a loaded state and from the files beside it.

        With ``--no-load-optim`` the schedules go to the checkpoint's step.

        Returns:
            The number of optimizer steps so far.

        Raises:
            ValueError: the flags' learning rate, or another number of the schedule, is not the checkpoint's.
        """
        # An older checkpoint has these values among Megatron's.
        progress = loaded
        if (folder / PROGRESS).is_file():
            progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        iteration = int(progress["iteration"])
        if self.reference is not None:
            self.reference.load(loaded, version=int(progress[f"{self.reference.name}_version"]))
        if with_sampling:
            self.sampling.load(loaded, version=int(progress[f"{self.sampling.name}_version"]))
        for name, trained in self.trained():
            load_model(trained.model, loaded, name)
            if config.checkpoints.no_load_optim:
                trained.optimizer.reload_model_params()
                trained.scheduler.step(increment=iteration)
            else:
                load_optimizer_and_schedule(config, trained, loaded[_OPTIMIZERS[name]], loaded[_SCHEDULES[name]])
        self.rewards.load(progress)
        self.left_out.load(progress)
        if self.open_rollouts is not None:
            self.open_rollouts.load(folder)
        return iteration


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
