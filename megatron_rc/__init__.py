"""Rollout Correction for PPO with Megatron-Core, exact on sharded log-probs.

:mod:`megatron_rc.public` lists the public names of this package, and is loaded when the first of them is used;
:mod:`megatron_rc.parallel` has the others.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rc.public import *  # noqa: F403

__version__ = "0.1.0"

# torch prints this warning above the output of every command; nothing here needs NumPy.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


def __getattr__(name: str) -> Any:
    """A public name, loaded when it is first used (PEP 562)."""
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = importlib.import_module(f"{__name__}.public")
    if name != "__all__" and name not in public.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(public, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module(f"{__name__}.public").__all__})
