"""Optimizers and schedules of checkpoints: Megatron's states, whichever Adam wrote them and reads them."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rc.launch.errors import one_line
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.state import model_state, sharding_options
from megatron_rc.launch.training.models.trained_model import TrainedModel

# Numbers in each group of parameters: of the schedule, and of the optimizer.
_RATES = ("max_lr", "min_lr")
_OF_OPTIMIZER = ("betas", "eps", "momentum")
# The keys that distinguish the groups of one optimizer.
_KIND = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def optimizer_state(optimizer: Any, model: list[Any], name: str = "model", *, is_loading: bool = False) -> Any:
    """Return the sharded state of these chunks' optimizer."""
    return optimizer.sharded_state_dict(model_state(model, name), is_loading=is_loading, metadata=sharding_options())


def load_optimizer_and_schedule(config: RunConfig, trained: TrainedModel, optimizer_state: Any, schedule: Any) -> None:
    """Load both, with the checkpoint's learning rates, or with ``--override-opt-param-scheduler`` with this run's.

    Raises:
        ValueError: the optimizer's state has another form than this run's, or a number of the schedule is not the
            checkpoint's, and no flag says which of the two counts.
    """
    optimizer = trained.optimizer
    scheduler = trained.scheduler
    override = config.checkpoints.override_opt_param_scheduler
    numbers_of_run = [_some(group, (*_RATES, *_OF_OPTIMIZER)) for group in optimizer.param_groups]
    # Since 0.19 Megatron looks for a group with equal rates.
    rates_of_kind = {_kind(group): _some(group, _RATES) for group in _groups(optimizer_state)}
    for group in optimizer.param_groups:
        group.update(rates_of_kind.get(_kind(group), {}))
    try:
        _load_optimizer(optimizer, optimizer_state)
    except Exception as error:  # Megatron and PyTorch raise errors of many kinds for a state of another form
        # Short, because the caller cuts the whole sentence, whose end is the remedy.
        reason = f"{type(error).__name__}: {one_line(error, 120)}"
        raise ValueError(
            f"the optimizer's state does not fit this run's optimizer ({reason}): "
            "give the layout and the flags of the run that wrote it, or --no-load-optim"
        ) from error
    if override:
        for group, numbers in zip(optimizer.param_groups, numbers_of_run, strict=True):
            group.update(numbers)
    if scheduler.lr_decay_style == "constant" == schedule["lr_decay_style"]:
        # A constant rate looks at neither, so that such a run goes on with another --train-iters.
        schedule = schedule | {"min_lr": scheduler.min_lr, "lr_decay_steps": scheduler.lr_decay_steps}
    if scheduler.wd_incr_style == "constant" == schedule["wd_incr_style"]:
        schedule = schedule | {"wd_incr_steps": scheduler.wd_incr_steps}
    scheduler.override_opt_param_scheduler = override
    scheduler.use_checkpoint_opt_param_scheduler = config.checkpoints.use_checkpoint_opt_param_scheduler
    try:
        scheduler.load_state_dict(schedule)
    except AssertionError as error:
        raise ValueError(
            f"{error}: give the flags of the run that wrote it, or --override-opt-param-scheduler to go on with this "
            "run's, or --use-checkpoint-opt-param-scheduler to keep the checkpoint's"
        ) from error


def _kind(group: dict[str, Any]) -> tuple[Any, ...]:
    # Some versions write these names with a prefix.
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in _KIND)


def _some(group: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: group[name] for name in names if name in group}


def _groups(state: Any) -> list[dict[str, Any]]:
    """Return the groups of parameters in an optimizer's state, at any depth."""
    if not isinstance(state, dict):
        return []
    if isinstance(state.get("param_groups"), list):
        return list(state["param_groups"])
    return [group for value in state.values() for group in _groups(value)]


def _load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Load the state of Megatron's optimizer, with torch's Adam in the distributed optimizer as well.

    Torch keeps a ``step`` for every parameter. In the distributed optimizer Megatron (0.16 to 0.19) also looks for a
    ``step`` among the stored tensors, and gives one tensor to all parameters, which each of them would then count up.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    _place_step(state, in_groups=any(hasattr(part.optimizer, "multi_tensor_adam") for part in parts))
    states = [state] if len(parts) == 1 else [state[name] for name in sorted(state)]
    tensors_of_parts = [_take_tensors(part, part_state) for part, part_state in zip(parts, states, strict=True)]
    optimizer.load_state_dict(state)
    for part, tensors in zip(parts, tensors_of_parts, strict=True):
        steps = [moments.pop("step", None) for moments in part.optimizer.state.values()]
        if tensors is not None:
            part.load_parameter_state_from_fully_reshardable(tensors)
        for moments, step in zip(part.optimizer.state.values(), steps, strict=True):
            if step is not None:
                moments["step"] = step.clone() if isinstance(step, torch.Tensor) else step


def _take_tensors(part: Any, state: dict[str, Any]) -> Any:
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
    state_of_parameters = state.get("state", {})
    groups = state.get("param_groups", [])
    for group in groups:
        if "step" in group:
            group["step"] = int(group["step"])
    if not any(isinstance(moments, dict) and "exp_avg" in moments for moments in state_of_parameters.values()):
        return
    steps = [group.pop("step") for group in groups if "step" in group]
    step = state_of_parameters.pop("common_step", max(steps, default=0))
    if in_groups:
        for group in groups:
            group["step"] = int(step)
    else:
        state_of_parameters["common_step"] = torch.tensor(float(step))
