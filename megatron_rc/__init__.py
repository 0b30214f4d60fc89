"""Rollout Correction for PPO with Megatron-Core, exact on sharded log-probs.

Whatever a user imports comes from here or from :mod:`megatron_rc.parallel`; :mod:`megatron_rc.public` lists the names,
and is loaded when the first of them is used.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rc.public import *  # noqa: F403

__version__ = "0.1.0"

# Nothing here needs it, and torch says so at the top of every command's output.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


def __getattr__(name: str) -> Any:
    """A public name; PEP 562."""
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = importlib.import_module(f"{__name__}.public")
    if name != "__all__" and name not in public.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(public, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module(f"{__name__}.public").__all__})
