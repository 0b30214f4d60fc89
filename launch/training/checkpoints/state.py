"""What a checkpoint holds of this rank's models and optimizer, in the form that Megatron saves and loads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state

from megatron_rc.launch.training.model import unwrap


def model_state(model: Sequence[Any], name: str = "model") -> dict[str, Any]:
    """Sharded state of each chunk. Keys inside the file name global layers, so that chunks do not matter there."""
    prefix = "" if name == "model" else f"{name}."
    return {
        f"{name}{index}": unwrap(chunk).sharded_state_dict(prefix=prefix, metadata=_metadata())
        for index, chunk in enumerate(model)
    }


def optimizer_state(optimizer: Any, model: list[Any], name: str = "model", *, is_loading: bool = False) -> Any:
    """Sharded state of the optimizer of these chunks."""
    return optimizer.sharded_state_dict(model_state(model, name), is_loading=is_loading, metadata=_metadata())


def load_model(model: Sequence[Any], loaded: dict[str, Any], name: str = "model") -> None:
    """Copy what was loaded into the chunks."""
    prefix = "" if name == "model" else f"{name}."
    for index, chunk in enumerate(model):
        state = {key.removeprefix(prefix): value for key, value in loaded[f"{name}{index}"].items()}
        unwrap(chunk).load_state_dict(state)


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Megatron's own loading, with torch's Adam in the distributed optimizer as well.

    There Megatron (0.16 to 0.19) forgets that torch keeps a ``step`` for every parameter: it looks for one in what it
    has read, and gives one tensor to all parameters, which each of them would then count up. In the others it leaves a
    ``step`` of 0 out of the checkpoint, as it is before the first step that is made, and misses it afterwards.
    """
    _add_step_of_zero(state)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    with ExitStack() as stack:
        for part in parts:
            if hasattr(part, "_set_main_param_and_optimizer_states"):
                copy = partial(_copy_with_step, part, part._set_main_param_and_optimizer_states)
                stack.enter_context(mock.patch.object(part, "_set_main_param_and_optimizer_states", copy))
        optimizer.load_state_dict(state)
    for part in parts:
        for own in part.optimizer.state.values():
            if isinstance(own.get("step"), torch.Tensor):
                own["step"] = own["step"].clone()


def _add_step_of_zero(state: Any) -> None:
    """Where moments of Adam have no step, however Megatron nests them."""
    if not isinstance(state, dict):
        return
    for value in state.values():
        _add_step_of_zero(value)
    moments = [own for own in state.values() if isinstance(own, dict) and "exp_avg" in own and "step" not in own]
    if moments and "common_step" not in state:
        state["common_step"] = torch.zeros((), dtype=torch.float32)


def _copy_with_step(part: Any, copy: Any, parameter: Any, tensors: dict[str, Any]) -> None:
    own = part._get_main_param_and_optimizer_states(parameter)
    copy(parameter, {name: own[name] for name in ("step",) if name in own} | tensors)


def _metadata() -> dict[str, Any]:
    """Optimizer state is stored by parameter, so that another TP, PP and DP size can load it."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
