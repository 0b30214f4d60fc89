"""The reference policy of a KL penalty."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.core.models.gpt import GPTModel

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.host_weights import HostWeights
from megatron_rc.launch.training.model import host_copy


class Reference(HostWeights):
    """Weights of the reference policy in host memory; on the device they replace the policy's while it scores.

    Args:
        config: of the run.
        chunks: of the policy at the start, on this rank; their weights are copied.
        read: loads ``--ref-load`` or ``--ref-load-hf`` into such chunks; None: neither is given.
    """

    def __init__(
        self,
        config: RunConfig,
        chunks: Sequence[GPTModel],
        read: Callable[[Sequence[GPTModel]], None] | None = None,
    ) -> None:
        super().__init__("reference", host_copy(config, chunks), version=0)
        self.interval, self.is_of_its_own = config.reference.ref_update_interval, read is not None
        if read is not None:
            with self.in_place_of(chunks):
                read(chunks)

    def refresh(self, chunks: Sequence[GPTModel], step: int) -> None:
        """Copy the policy's weights if ``--ref-update-interval`` has passed since the last copy."""
        if self.interval and step // self.interval > self.version // self.interval:
            self.copy(chunks)
            self.version = step

    def start_from(self, chunks: Sequence[GPTModel]) -> None:
        """Copy the policy's weights, unless a flag gives the reference its own."""
        if not self.is_of_its_own:
            self.copy(chunks)
