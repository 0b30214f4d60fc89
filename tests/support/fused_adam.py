"""Adam as Transformer Engine and apex have it on a GPU: the step stands in each group of parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW by its formula; like Transformer Engine's it takes no ``step`` of a parameter."""

    multi_tensor_adam = None

    def __init__(self, params: Any, lr: float, adam_w_mode: bool, **settings: Any) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            assert isinstance(group["step"], int)
            (first, second), step = group["betas"], group["step"]
            for parameter in (candidate for candidate in group["params"] if candidate.grad is not None):
                state = self.state[parameter]
                grad = parameter.grad
                mean, square = (state.setdefault(name, torch.zeros_like(grad)) for name in ("exp_avg", "exp_avg_sq"))
                mean.lerp_(grad, 1 - first)
                square.mul_(second).addcmul_(grad, grad, value=1 - second)
                scale = (square / (1 - second**step)).sqrt() + group["eps"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(mean / (1 - first**step), scale, value=-group["lr"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse states that Transformer Engine refuses."""
        names = {name for state_of_parameter in state["state"].values() for name in state_of_parameter}
        if names - {"exp_avg", "exp_avg_sq"}:
            raise KeyError(next(iter(names - {"exp_avg", "exp_avg_sq"})))
        super().load_state_dict(state)


@contextlib.contextmanager
def fused_adam() -> Iterator[None]:
    """Megatron-Core makes this Adam inside the block."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    made = mock.patch.multiple(optimizer, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False)
    with made, mock.patch.multiple(distrib_optimizer, Adam=FusedAdam, HAVE_APEX_OR_TE=True):
        yield
