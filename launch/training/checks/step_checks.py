"""Checks of the loss and the gradient before an optimizer step, and counts of steps left out; equal on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rc.launch.distributed import largest_over_ranks
from megatron_rc.launch.errors import RunError
from megatron_rc.launch.run_config import RunConfig

# Megatron-Core's number of values for comparison, and its factor of a value that is too large.
_SAMPLES = 100
_FACTOR = 10.0


class BadStepError(RunError):
    """A step must not be made, on any rank; weights and optimizer have not changed."""


class StepChecks:
    """Megatron-LM's three checks of a step, by its flags.

    Errors have ``whose`` before "loss" and "gradient norm", and name ``rate``, the flag of the model's learning rate.
    """

    def __init__(self, config: RunConfig, whose: str = "the", rate: str = "--lr") -> None:
        self.config = config
        self.training = config.training
        self.whose = whose
        self.advice = f"the step was not made; lower {rate}, or look at the rewards and log-probs of this batch"
        self.losses = _Largest()
        self.gradients = _Largest()

    def loss(self, step: int, loss: float) -> None:
        """Check the loss, which is equal on all ranks.

        Raises BadStepError if it is not finite, or with ``--check-for-spiky-loss`` much larger than earlier losses.
        """
        before = self.losses.exceeded_by(loss) if self.training.check_for_spiky_loss else None
        error = self._error(f"loss of step {step} is", loss, before, "--check-for-spiky-loss")
        if error is not None:
            raise BadStepError(error)

    def gradient(self, step: int, norm: float, numbers: Sequence[float] = ()) -> list[float]:
        """Check the gradient norms of all ranks, which differ between ranks with different experts.

        Args:
            step: number of the step, for the error.
            norm: this rank's gradient norm.
            numbers: further numbers of this rank, equally many on each.

        Returns:
            The largest of each of the ``numbers`` over all ranks.

        Collectives: :func:`largest_over_ranks`.

        Raises:
            BadStepError: on every rank, if the norm of any is not finite, or with ``--check-for-large-grads`` much
                larger than earlier norms.
        """
        finite = norm if math.isfinite(norm) else 0.0
        largest, is_infinite, is_nan, *shared = largest_over_ranks(
            self.config, [finite, math.isinf(norm), math.isnan(norm), *numbers]
        )
        if is_nan:
            largest = math.nan
        elif is_infinite:
            largest = math.inf
        before = self.gradients.exceeded_by(largest) if self.training.check_for_large_grads else None
        error = self._error(f"gradient norm of step {step} is", largest, before, "--check-for-large-grads")
        if error is not None:
            raise BadStepError(error)
        return shared

    def _error(self, begin: str, value: float, before: float | None, flag: str) -> str | None:
        """Error of a value that is not finite, or much larger than ``before``, the largest of the first values.

        ``begin`` is the beginning of its sentence, which ends before the value.
        """
        if self.training.check_for_nan_in_loss_and_grad and not math.isfinite(value):
            return f"{self.whose} {begin} {value}: {self.advice}"
        if before is None:
            return None
        largest = f"the largest of the first {_SAMPLES} steps was {before:.3g} ({flag})"
        return f"{self.whose} {begin} {value:.3g}, {largest}: {self.advice}"


@contextmanager
def telling_bad_steps() -> Iterator[None]:
    """Context that turns an error of all ranks about a step or its batch into a :class:`BadStepError`."""
    try:
        yield
    except (RunError, ValueError) as error:
        raise BadStepError(str(error)) from error


@dataclass
class LeftOut:
    """Numbers of steps that were not made, equal on all ranks; checkpoints carry them from run to run."""

    steps: int = 0  # all: without an accepted token, a weight or an advantage, or bad
    bad: int = 0
    without_signal: int = 0  # without an advantage (``--skip-steps-without-signal``)
    in_a_row: int = 0  # last steps, made or not, that did not change the model

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"left_out": asdict(self)}

    def load(self, loaded: Mapping[str, Any]) -> None:
        """Restore the counts from a checkpoint; older checkpoints have none."""
        for name, number in loaded.get("left_out", {}).items():
            setattr(self, name, int(number))


class _Largest:
    """The largest of the first values, for comparison with later values, as in Megatron's rerun machine."""

    def __init__(self) -> None:
        self.count = 0
        self.largest = 0.0

    def exceeded_by(self, value: float) -> float | None:
        """The largest of the first values if this value is ten times as large, else None; the first values are kept."""
        if not math.isfinite(value):
            return None
        if self.count < _SAMPLES:
            self.count += 1
            self.largest = max(self.largest, abs(value))
            return None
        return self.largest if abs(value) >= _FACTOR * self.largest else None
