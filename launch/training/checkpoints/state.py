"""Sharded states of this rank's models, in Megatron's form."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state

from megatron_rc.launch.training.models.build import unwrap

_log = logging.getLogger("megatron_rc")


def model_state(model: Sequence[Any], name: str = "model") -> dict[str, Any]:
    """Return the sharded state of each chunk; its keys name global layers, and so do not depend on chunks."""
    prefix = "" if name == "model" else f"{name}."
    return {
        f"{name}{index}": unwrap(chunk).sharded_state_dict(prefix=prefix, metadata=sharding_options())
        for index, chunk in enumerate(model)
    }


def load_model(model: Sequence[Any], loaded: dict[str, Any], name: str = "model") -> None:
    """Copy a loaded state into the chunks, without the states that layers of Transformer Engine would unpickle."""
    prefix = "" if name == "model" else f"{name}."
    for index, chunk in enumerate(model):
        state = {key.removeprefix(prefix): value for key, value in loaded[f"{name}{index}"].items()}
        extra_states = [key for key in state if key.endswith("_extra_state")]
        if any(_has_content(state[key]) for key in extra_states):
            _log.warning("the checkpoint holds fp8 state of Transformer Engine's layers, which is a pickle: not read")
        unwrap(chunk).load_state_dict(state | dict.fromkeys(extra_states))


def sharding_options() -> dict[str, Any]:
    """Return Megatron's options; optimizer state is stored by parameter, so that any TP, PP and DP size can load it."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _has_content(extra_state: Any) -> bool:
    """Return whether a layer has stored more than an empty state: bytes, or a tensor of bytes."""
    if hasattr(extra_state, "getbuffer"):
        return len(extra_state.getbuffer()) > 0
    return hasattr(extra_state, "numel") and bool(extra_state.numel())
