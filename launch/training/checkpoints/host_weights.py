"""Copies of the policy's weights in host memory: the reference policy, and the weights of rollouts under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.state import load_model, model_state
from megatron_rc.launch.training.models.build import host_copy
from megatron_rc.launch.training.models.chunk import ModelChunk
from megatron_rc.launch.training.models.offload import exchanged


class HostWeights:
    """This rank's share of a copy that does not train; on the device it can replace the policy's weights.

    Attributes:
        name: prefix of the entries in a checkpoint.
        chunks: from ``host_copy``; empty if no copy is wanted.
        version: optimizer steps that made these weights; −1: not set yet.
    """

    def __init__(self, name: str, chunks: Sequence[torch.nn.Module], version: int) -> None:
        self.name = name
        self.chunks = chunks
        self.version = version

    def in_place_of(self, chunks: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
        """Context in which the policy has these weights; afterwards it has its own, bit for bit."""
        return exchanged(chunks, self.chunks)

    def copy(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Copy the policy's present weights."""
        for copied, chunk in zip(self.chunks, chunks, strict=True):
            copied.load_state_dict(chunk.state_dict())

    def sharded_state(self) -> dict[str, Any]:
        """Return the sharded state to save or to load."""
        return model_state(self.chunks, self.name)

    def load(self, loaded: dict[str, Any], *, version: int) -> None:
        """Take the copy from a loaded state, and the number of steps that made it."""
        load_model(self.chunks, loaded, self.name)
        self.version = version


class Reference(HostWeights):
    """The reference policy of a KL penalty; on the device it replaces the policy while it scores.

    It begins as a copy of the policy, or as ``read`` loads ``--ref-load`` or ``--ref-load-hf``.
    """

    def __init__(
        self,
        config: RunConfig,
        chunks: Sequence[ModelChunk],
        read: Callable[[Sequence[ModelChunk]], object] | None = None,
    ) -> None:
        super().__init__("reference", host_copy(config, chunks), version=0)
        self.interval = config.reference.ref_update_interval
        self.is_of_its_own = read is not None
        if read is not None:
            with self.in_place_of(chunks):
                read(chunks)

    def refresh(self, chunks: Sequence[ModelChunk], step: int) -> None:
        """Copy the policy's weights if ``--ref-update-interval`` has passed since the last copy."""
        if self.interval and step // self.interval > self.version // self.interval:
            self.copy(chunks)
            self.version = step

    def start_from(self, chunks: Sequence[ModelChunk]) -> None:
        """Copy the policy's weights, unless a flag gives the reference its own."""
        if not self.is_of_its_own:
            self.copy(chunks)


class SamplingWeights(HostWeights):
    """Copy of the engines' weights, for checkpoints of a run with ``--rollout-staleness``.

    Batches are sampled ahead. A resumed run gives the engines these weights again and repeats the rollouts that were
    under way: a batch follows from its step and its weights. With ``--rl-partial-rollouts`` a batch follows from timing
    too; no copy is kept, and the checkpoint has the responses instead, see :class:`OpenRollouts`.
    """

    def __init__(self, config: RunConfig, chunks: Sequence[ModelChunk]) -> None:
        rollouts = config.rollouts
        files = config.checkpoints
        samples_ahead = rollouts.rollout_staleness and not rollouts.load_rollouts
        is_wanted = samples_ahead and not config.engine.rl_partial_rollouts and (files.save or files.load)
        super().__init__("sampling", host_copy(config, chunks) if is_wanted else [], version=-1)

    def keep(self, chunks: Sequence[torch.nn.Module], version: int) -> None:
        """Copy the present policy, if checkpoints keep such a copy."""
        if self.chunks:
            self.copy(chunks)
            self.version = version

    def are_among(self, names: Iterable[str]) -> bool:
        """Whether a checkpoint with these entries has such weights and this run wants them."""
        return bool(self.chunks) and any(name.startswith(f"{self.name}.") for name in names)
