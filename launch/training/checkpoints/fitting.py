"""Whether a checkpoint holds what a run asks of it, said in the words of its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from megatron_rc.launch.errors import flag
from megatron_rc.launch.run_config import RunConfig, sections_of
from megatron_rc.launch.run_config.options import options_of
from megatron_rc.launch.training.checkpoints.settings import settings_beside

# Sections that shape the model.
_SHAPE = ("transformer", "experts", "model")


def misfit(where: str, index: Metadata, config: RunConfig, *, with_optimizer: bool, with_reference: bool) -> str | None:
    """What the checkpoint does not hold although it is asked for; None: nothing.

    Args:
        where: the folder and the checkpoint, for the message.
        index: PyTorch's, of the checkpoint.
        config: of the run.
        with_optimizer: the optimizer's state is to be loaded.
        with_reference: a reference policy is to be loaded.
    """
    names = index.state_dict_metadata
    if with_reference and not any(name.startswith("reference.") for name in names):
        return (
            f"{where} was written without a reference policy: give --grpo-kl-beta 0, or --finetune, which takes its "
            "weights as the reference"
        )
    return _optimizer_misfit(where, index, config) if with_optimizer else None


def _optimizer_misfit(where: str, index: Metadata, config: RunConfig) -> str | None:
    kept = [name for name in index.state_dict_metadata if name.startswith("optimizer.")]
    wants = config.optimizer
    if not kept and wants.optimizer != "sgd":
        return f"{where} was written without the optimizer's state (--no-save-optim): give --no-load-optim"
    if not kept:
        return None
    is_adam = any(name.startswith("optimizer.state.exp_avg.") for name in kept)
    if is_adam != (wants.optimizer == "adam"):
        written = "adam" if is_adam else "sgd"
        return f"{where} was written with --optimizer {written}: give that, or --no-load-optim"
    is_distributed = any(name.startswith("optimizer.state.param.") for name in kept)
    if is_distributed != wants.use_distributed_optimizer:
        written, now = ("with", "give it") if is_distributed else ("without", "drop it")
        return (
            f"{where} was written {written} --use-distributed-optimizer, which keeps the optimizer's state in another "
            f"form: {now}, or give --no-load-optim"
        )
    return None


def differences(config: RunConfig, folder: Path) -> str:
    """How the model differs from the one that was saved, by the settings beside it; empty where nothing is known."""
    kept = settings_beside(folder)
    for name, kind, _ in sections_of(RunConfig):
        section, before = getattr(config, name), kept.get(name)
        if name not in _SHAPE or (section is None and before is None):
            continue
        if section is None or not isinstance(before, dict):
            return f"it was written {'without' if before is None else 'with'} --num-experts"
        for option in options_of(kind):
            mine, its = getattr(section, option.field), before.get(option.field)
            if option.field in before and mine != its:
                return f"{flag(option.flag)} {_shown(mine)}; it was written with {_shown(its)}"
    return ""


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
