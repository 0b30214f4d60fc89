"""The weights that rollouts under way are sampled from, where they are older than those that train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.state import load_model, model_state
from megatron_rc.launch.training.model import host_copy
from megatron_rc.launch.training.offload import exchanged

_NAME, _VERSION = "sampling", "sampling_version"


class SamplingWeights:
    """A copy of what the engines have, for checkpoints of a run with ``--rollout-staleness``.

    Its batches are sampled ahead. A run that goes on gives the engines these weights again, and has them sample what
    was under way: what a batch holds follows from its step and its weights.

    Args:
        config: of the run.
        chunks: of the policy, on this rank.

    Attributes:
        version: optimizer steps that lie behind them; −1: none are kept.
    """

    def __init__(self, config: RunConfig, chunks: Sequence[GPTModel]) -> None:
        rollouts, files = config.rollouts, config.checkpoints
        is_wanted = rollouts.rollout_staleness and not rollouts.load_rollouts and (files.save or files.load)
        self._chunks = host_copy(config, chunks) if is_wanted else []
        self.version = -1

    def keep(self, chunks: Sequence[torch.nn.Module], version: int) -> None:
        """Copy the policy as it is now, if a checkpoint may want it."""
        if not self._chunks:
            return
        self.version = version
        for own, chunk in zip(self._chunks, chunks, strict=True):
            own.load_state_dict(chunk.state_dict())

    @contextmanager
    def in_place_of(self, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Inside, the policy has these weights; afterwards its own, to the last bit."""
        with exchanged(chunks, self._chunks):
            yield

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of them."""
        return self.wanted_state() | {_VERSION: self.version} if self.version >= 0 else {}

    def wanted_state(self) -> dict[str, Any]:
        """What is asked of a checkpoint that has them."""
        return model_state(self._chunks, _NAME)

    def load(self, loaded: dict[str, Any]) -> None:
        """Take them from what was read."""
        load_model(self._chunks, loaded, _NAME)
        self.version = int(loaded[_VERSION])

    def are_among(self, names: Iterable[str]) -> bool:
        """Whether a checkpoint with these entries has them, and this run wants them."""
        return bool(self._chunks) and any(name.startswith(f"{_NAME}.") for name in names)
