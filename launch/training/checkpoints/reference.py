"""The reference policy of a KL penalty."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.models.gpt import GPTModel

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.state import load_model, model_state
from megatron_rc.launch.training.model import host_copy
from megatron_rc.launch.training.offload import exchanged

_NAME, _VERSION = "reference", "reference_version"


class Reference:
    """Weights that the policy is compared with, in host memory: on the device they take the place of the policy's.

    Args:
        config: of the run.
        chunks: of the policy as it begins, on this rank, whose weights it starts from.
        read: puts the weights of ``--ref-load`` or ``--ref-load-hf`` into such chunks; None: without them.

    Attributes:
        chunks: this rank's share, which does not train.
        version: optimizer steps of this run that lie behind these weights.
    """

    def __init__(
        self,
        config: RunConfig,
        chunks: Sequence[GPTModel],
        read: Callable[[Sequence[GPTModel]], None] | None = None,
    ) -> None:
        self.chunks, self.version = host_copy(config, chunks), 0
        self.interval, self.is_of_its_own = config.reference.ref_update_interval, read is not None
        if read is not None:
            with self.in_place_of(chunks):
                read(chunks)

    @contextmanager
    def in_place_of(self, chunks: Sequence[GPTModel]) -> Iterator[None]:
        """Inside, the policy has these weights; afterwards its own, to the last bit."""
        with exchanged(chunks, self.chunks):
            yield

    def refresh(self, chunks: Sequence[GPTModel], step: int) -> None:
        """Take the policy's weights, after so many optimizer steps, if ``--ref-update-interval`` is over."""
        if self.interval and step // self.interval > self.version // self.interval:
            self._copy(chunks)
            self.version = step

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return self.wanted_state() | {_VERSION: self.version}

    def wanted_state(self) -> dict[str, Any]:
        """What is asked of a checkpoint that has one."""
        return model_state(self.chunks, _NAME)

    def load(self, loaded: dict[str, Any]) -> None:
        """Take it from what was read."""
        load_model(self.chunks, loaded, _NAME)
        self.version = int(loaded[_VERSION])

    def start_from(self, chunks: Sequence[GPTModel]) -> None:
        """Take the weights that the policy has now starts from, unless it has a directory of its own."""
        if not self.is_of_its_own:
            self._copy(chunks)

    def _copy(self, chunks: Sequence[GPTModel]) -> None:
        for own, chunk in zip(self.chunks, chunks, strict=True):
            own.load_state_dict(chunk.state_dict())
