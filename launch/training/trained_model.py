"""A model that learns, whichever it is: its chunks under Megatron's DDP, and the optimizer that changes them."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.model import build_optimizer, unwrap, wrap_chunks
from megatron_rc.launch.training.passes import ModelPasses


class TrainedModel:
    """The policy's or the critic's share on this rank.

    Args:
        config: of the run; the optimizer and its schedule are made as it says.
        passes: whose timers count the optimizer's time.
        chunks: this rank's GPTModels, with the weights that training starts from.

    Attributes:
        model: the chunks under Megatron's DDP.
        optimizer: Megatron's, of these.
        scheduler: of the learning rate; counts the steps that were made.
    """

    def __init__(self, config: RunConfig, passes: ModelPasses, chunks: list[Any]) -> None:
        self.passes = passes
        self.model = wrap_chunks(config, chunks)
        self.optimizer, self.scheduler = build_optimizer(config, self.model, passes.timers.megatron)
        self._gathers_late = False

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """This rank's GPTModels, unwrapped, with whole weights: all data-parallel ranks ask for them together."""
        self.gather_weights()
        return [unwrap(chunk) for chunk in self.model]

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def gather_weights(self) -> None:
        """With --overlap-param-gather the shares of a step's weights come together in the next training pass alone."""
        if self._gathers_late:
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)
        self._gathers_late = False

    def clear_gradients(self) -> None:
        """Those in the buffers, and the optimizer's copies of them."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float | None:
        """One step with the gradients in the buffers: their norm. None: ``--fp16`` found them out of range, no step."""
        with self.passes.timers.optimizer():
            is_made, norm, _ = self.optimizer.step()
        if not is_made:
            return None
        self._gathers_late = bool(self.model[0].ddp_config.overlap_param_gather)
        self.scheduler.step(increment=1)
        return float(norm)
