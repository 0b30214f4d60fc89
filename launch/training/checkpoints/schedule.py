"""Learning rate and other optimizer settings of a resumed run: the checkpoint's or the flags'.

Megatron's optimizer and schedule load these numbers with their state. A flag that says something else would be ignored,
so it is refused, unless another flag says which of the two counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rc.launch.distributed import AgreedError
from megatron_rc.launch.errors import flag
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.state import load_optimizer
from megatron_rc.launch.training.models.trained_model import TrainedModel

# Flags by the schedule's names for them; and the names that a constant learning rate does not use.
_SCHEDULE = {
    "max_lr": "lr",
    "min_lr": "min_lr",
    "lr_warmup_steps": "lr_warmup_iters",
    "lr_decay_steps": "lr_decay_iters",
    "lr_decay_style": "lr_decay_style",
    "start_wd": "weight_decay",
}
_UNUSED = {"constant": ("min_lr", "lr_decay_steps")}
# Flags by their names in each group of parameters.
_GROUP = {"betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_eps",), "momentum": ("sgd_momentum",)}
_RATES = ("max_lr", "min_lr")
# The keys that distinguish the groups of one optimizer.
_KIND = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def check_schedule(
    where: str, config: RunConfig, trained: TrainedModel, loaded: dict[str, Any], flags: Mapping[str, str]
) -> None:
    """Refuse flags that differ from the checkpoint, unless a flag says which of the two counts.

    ``where`` names folder and checkpoint in the message, ``loaded`` has the checkpoint's ``optimizer`` and
    ``opt_param_scheduler``, ``flags`` the names of a critic's flags by the policy's names.

    Raises:
        AgreedError: names the flag, both values and the remedies; every rank has read the same.
    """
    files = config.checkpoints
    if files.override_opt_param_scheduler or files.use_checkpoint_opt_param_scheduler:
        return
    for name, own, before in _differences(trained, loaded):
        default = " (by default --train-iters)" if name == "lr_decay_iters" else ""
        words = flag(flags.get(name, name))
        remedy = "give the same"
        if name == "lr_decay_iters" and own == config.training.train_iters:
            remedy = f"add {words} {before}, and the schedule keeps its shape"
        elif name == "lr_warmup_iters" and config.schedule.lr_warmup_fraction is not None:
            remedy = f"give {words} {before} in the place of --lr-warmup-fraction"
        raise AgreedError(
            f"{where} was written with {words} {before}, this run has {own}{default}: {remedy}, or "
            "--override-opt-param-scheduler to go on with this run's, or --use-checkpoint-opt-param-scheduler to keep "
            "the checkpoint's"
        )


def load_optimizer_and_schedule(config: RunConfig, trained: TrainedModel, loaded: dict[str, Any]) -> None:
    """Load both, with the checkpoint's learning rates, or by flag with this run's."""
    optimizer, scheduler = trained.optimizer, trained.scheduler
    override = config.checkpoints.override_opt_param_scheduler
    own = [_some(group, (*_RATES, *_GROUP)) for group in optimizer.param_groups]
    # Since 0.19 Megatron looks for a group with equal rates.
    rates = {_kind(group): _some(group, _RATES) for group in _groups(loaded["optimizer"])}
    for group in optimizer.param_groups:
        group.update(rates.get(_kind(group), {}))
    load_optimizer(optimizer, loaded["optimizer"])
    if override:
        for group, values in zip(optimizer.param_groups, own, strict=True):
            group.update(values)
    scheduler.override_opt_param_scheduler, scheduler.use_checkpoint_opt_param_scheduler = override, not override
    scheduler.load_state_dict(loaded["opt_param_scheduler"])


def _kind(group: dict[str, Any]) -> tuple[Any, ...]:
    # Some versions write these names with a prefix.
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in _KIND)


def _some(group: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: group[name] for name in names if name in group}


def _differences(trained: TrainedModel, loaded: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (flag, this run's value, the checkpoint's value) of each difference."""
    own, before = trained.scheduler, loaded["opt_param_scheduler"]
    unused = _UNUSED.get(own.lr_decay_style, ()) if before["lr_decay_style"] == own.lr_decay_style else ()
    pairs = [(option, getattr(own, name), before[name]) for name, option in _SCHEDULE.items() if name not in unused]
    mine = trained.optimizer.param_groups[0]
    for group in _groups(loaded["optimizer"])[:1]:
        for name in (name for name in _GROUP if name in group and name in mine):
            pairs += zip(_GROUP[name], _values(mine[name]), _values(group[name]), strict=True)
    yield from (pair for pair in pairs if pair[1] != pair[2])


def _groups(state: Any) -> list[dict[str, Any]]:
    """Return the groups of parameters in an optimizer's state, at any depth."""
    if not isinstance(state, dict):
        return []
    if isinstance(state.get("param_groups"), list):
        return list(state["param_groups"])
    return [group for value in state.values() for group in _groups(value)]


def _values(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
