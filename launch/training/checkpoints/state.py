"""Sharded states of this rank's models and optimizers, in Megatron's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_rc.launch.training.models.build import unwrap


def model_state(model: Sequence[Any], name: str = "model") -> dict[str, Any]:
    """Return the sharded state of each chunk; its keys name global layers, and so do not depend on chunks."""
    prefix = "" if name == "model" else f"{name}."
    return {
        f"{name}{index}": unwrap(chunk).sharded_state_dict(prefix=prefix, metadata=_metadata())
        for index, chunk in enumerate(model)
    }


def optimizer_state(optimizer: Any, model: list[Any], name: str = "model", *, is_loading: bool = False) -> Any:
    """Return the sharded state of these chunks' optimizer."""
    return optimizer.sharded_state_dict(model_state(model, name), is_loading=is_loading, metadata=_metadata())


def load_model(model: Sequence[Any], loaded: dict[str, Any], name: str = "model") -> None:
    """Copy a loaded state into the chunks."""
    prefix = "" if name == "model" else f"{name}."
    for index, chunk in enumerate(model):
        state = {key.removeprefix(prefix): value for key, value in loaded[f"{name}{index}"].items()}
        unwrap(chunk).load_state_dict(state)


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Load the state of Megatron's optimizer, with torch's Adam in the distributed optimizer as well.

    Torch keeps a ``step`` for every parameter. In the distributed optimizer Megatron (0.16 to 0.19) also looks for a
    ``step`` among the stored tensors, and gives one tensor to all parameters, which each of them would then count up.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    _place_step(state, in_groups=any(hasattr(part.optimizer, "multi_tensor_adam") for part in parts))
    states = [state] if len(parts) == 1 else [state[name] for name in sorted(state)]
    tensors = [_taken_tensors(part, own) for part, own in zip(parts, states, strict=True)]
    optimizer.load_state_dict(state)
    for part, own in zip(parts, tensors, strict=True):
        steps = [one.pop("step", None) for one in part.optimizer.state.values()]
        if own is not None:
            part.load_parameter_state_from_fully_reshardable(own)
        for one, step in zip(part.optimizer.state.values(), steps, strict=True):
            if step is not None:
                one["step"] = step.clone() if isinstance(step, torch.Tensor) else step


def _taken_tensors(part: Any, state: dict[str, Any]) -> Any:
    """Take the tensors out of a distributed optimizer's state; None: they are not apart in it."""
    is_apart = hasattr(part, "load_parameter_state_from_fully_reshardable") and "param_state" in state
    return state.pop("param_state") if is_apart else None


def _place_step(state: Any, *, in_groups: bool) -> None:
    """Put the step of Adam's moments, at any depth, into the place in which the optimizer of this run looks for it.

    Transformer Engine's and apex's Adam has it in each group of parameters, as an integer, and takes no other; Megatron
    reads ``common_step`` for torch's, and stores it in the groups, as a float, if the optimizer is distributed. A step
    of 0 is not stored.
    """
    if not isinstance(state, dict):
        return
    for value in state.values():
        _place_step(value, in_groups=in_groups)
    moments, groups = state.get("state", {}), state.get("param_groups", [])
    for group in groups:
        if "step" in group:
            group["step"] = int(group["step"])
    if any(isinstance(own, dict) and "exp_avg" in own for own in moments.values()):
        steps = [group.pop("step") for group in groups if "step" in group]
        step = moments.pop("common_step", max(steps, default=0))
        if in_groups:
            for group in groups:
                group["step"] = int(step)
        else:
            moments["common_step"] = torch.tensor(float(step))


def _metadata() -> dict[str, Any]:
    """Return Megatron's options; optimizer state is stored by parameter, so that any TP, PP and DP size can load it."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
