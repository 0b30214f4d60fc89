"""A model with its optimizer; base of the policy's trainer and of the critic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.models.build import build_optimizer, unwrap, wrap_chunks
from megatron_rc.launch.training.models.passes import ModelPasses


class TrainedModel:
    """This rank's shard of a model, under Megatron's DDP, with Megatron's optimizer and schedule."""

    def __init__(self, config: RunConfig, passes: ModelPasses, chunks: list[Any]) -> None:
        self.passes = passes
        self.model = wrap_chunks(config, chunks)
        self.optimizer, self.scheduler = build_optimizer(config, self.model, passes.timers.megatron)
        self._gathers_late = False

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """This rank's models, unwrapped, with gathered weights; call it on all data-parallel ranks together."""
        self.gather_weights()
        return [unwrap(chunk) for chunk in self.model]

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def gather_weights(self) -> None:
        """Gather the weights now; ``--overlap-param-gather`` would delay it to the next training pass."""
        if self._gathers_late:
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)
        self._gathers_late = False

    def clear_gradients(self) -> None:
        """Clear the gradient buffers and the optimizer's copies of gradients."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self, rate_factor: float = 1.0) -> float | None:
        """Make one step and return the gradient norm; None if ``--fp16`` gradients overflowed and no step was made.

        The factor multiplies the learning rates of this step alone: schedule and checkpoints keep the rates without it.
        """
        with self.passes.timers.optimizer(), _rates_times(rate_factor, self.optimizer.param_groups):
            is_made, norm, _ = self.optimizer.step()
        if not is_made:
            return None
        self._gathers_late = bool(self.model[0].ddp_config.overlap_param_gather)
        self.scheduler.step(increment=1)
        return float(norm)


@contextmanager
def _rates_times(factor: float, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Learning rates of all parameter groups times a factor."""
    rates = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
