"""Weights that rollouts under way are sampled from, if they are older than the trained weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from megatron.core.models.gpt import GPTModel

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.host_weights import HostWeights
from megatron_rc.launch.training.model import host_copy


class SamplingWeights(HostWeights):
    """Copy of the engines' weights, for checkpoints of a run with ``--rollout-staleness``.

    Batches are sampled ahead. A resumed run gives the engines these weights again and repeats the rollouts that were
    under way: a batch follows from its step and its weights.

    Args:
        config: of the run.
        chunks: of the policy, on this rank.
    """

    def __init__(self, config: RunConfig, chunks: Sequence[GPTModel]) -> None:
        rollouts, files = config.rollouts, config.checkpoints
        is_wanted = rollouts.rollout_staleness and not rollouts.load_rollouts and (files.save or files.load)
        super().__init__("sampling", host_copy(config, chunks) if is_wanted else [], version=-1)

    def keep(self, chunks: Sequence[torch.nn.Module], version: int) -> None:
        """Copy the present policy, if checkpoints keep such a copy."""
        if self.chunks:
            self.copy(chunks)
            self.version = version

    def are_among(self, names: Iterable[str]) -> bool:
        """Whether a checkpoint with these entries has such weights and this run wants them."""
        return bool(self.chunks) and any(name.startswith(f"{self.name}.") for name in names)
