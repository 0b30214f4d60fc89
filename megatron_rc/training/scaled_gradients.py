"""Whether gradients were zeroed since they were scaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ScaledGradients:
    """Gradients of a model that were multiplied by their step's factor, and must be zeroed before more is added.

    Torch counts a version for every tensor, which rises with each write in place: so zeroing can be seen.
    """

    def __init__(self, model: Sequence[Any]) -> None:
        firsts = (_first_with_gradient(chunk) for chunk in model)
        self._versions = [(one, _gradient(one)._version) for one in firsts if one is not None]

    @property
    def are_untouched(self) -> bool:
        """Whether nothing has been written to any of them since."""
        found = ((_gradient(parameter), version) for parameter, version in self._versions)
        return any(gradient is not None and gradient._version == version for gradient, version in found)


def _gradient(parameter: Any) -> Any:
    """The gradient: Megatron's buffer, or torch's own."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def _first_with_gradient(chunk: Any) -> Any:
    return next((parameter for parameter in chunk.parameters() if _gradient(parameter) is not None), None)
