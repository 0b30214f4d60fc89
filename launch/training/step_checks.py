"""Which losses and gradients an optimizer step is made with; every rank comes to the same verdict before it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_rc.launch.distributed import AgreedError, agree_and_share
from megatron_rc.launch.run_config import RunConfig

# Megatron-Core's: what it compares with, and how much larger is too large.
_SAMPLES, _FACTOR = 100, 10.0


class BadStepError(AgreedError):
    """A step that must not be made, on every rank alike; the weights and the optimizer are as before it."""


class StepChecks:
    """Megatron-LM's three checks of a step, by its flags.

    Args:
        config: of the run.
        whose: loss and gradient they are, as a sentence says it.
        rate: the flag of the model's learning rate.
    """

    def __init__(self, config: RunConfig, whose: str = "the", rate: str = "--lr") -> None:
        self.config, self.wanted, self.whose = config, config.training, whose
        self.advice = f"the step was not made; lower {rate}, or look at the rewards and log-probs of this batch"
        self.losses, self.gradients = _Largest(), _Largest()

    def loss(self, step: int, loss: float) -> None:
        """Before the step; the loss is the same on all ranks.

        Raises:
            BadStepError: it is not finite, or by flag much larger than those before.
        """
        if self.wanted.check_for_nan_in_loss_and_grad and not math.isfinite(loss):
            raise BadStepError(f"{self.whose} loss of step {step} is {loss}: {self.advice}")
        before = self.losses.exceeded_by(loss) if self.wanted.check_for_spiky_loss else None
        if before is not None:
            raise BadStepError(
                f"{self.whose} loss of step {step} is {loss:.3g}, the largest of the first {_SAMPLES} steps was "
                f"{before:.3g} (--check-for-spiky-loss): {self.advice}"
            )

    def gradient(self, step: int, norm: float, numbers: Sequence[float] = ()) -> list[float]:
        """Before the step; ranks with other experts may have another norm.

        Args:
            step: its number.
            norm: of this rank's gradient.
            numbers: that the agreement of all ranks carries too, as many on each.

        Returns:
            The largest of each of the numbers over all ranks.

        Raises:
            BadStepError: on every rank, if the norm is not finite on any, or by flag much larger than those before.
        """
        error = None
        before = self.gradients.exceeded_by(norm) if self.wanted.check_for_large_grads else None
        if self.wanted.check_for_nan_in_loss_and_grad and not math.isfinite(norm):
            error = f"{self.whose} gradient norm of step {step} is {norm}: {self.advice}"
        elif before is not None:
            error = (
                f"{self.whose} gradient norm of step {step} is {norm:.3g}, the largest of the first {_SAMPLES} steps "
                f"was {before:.3g} (--check-for-large-grads): {self.advice}"
            )
        with telling_bad_steps():
            return agree_and_share(self.config, numbers, error)[1]


@contextmanager
def telling_bad_steps() -> Iterator[None]:
    """What is wrong with a step or its batch, as all ranks know it, is a :class:`BadStepError`."""
    try:
        yield
    except (AgreedError, ValueError) as error:
        raise BadStepError(str(error)) from error


class _Largest:
    """The largest of the first values, which later ones are compared with, as Megatron's rerun machine does it."""

    def __init__(self) -> None:
        self.count, self.largest = 0, 0.0

    def exceeded_by(self, value: float) -> float | None:
        """The largest value, if this one is ten times that; nothing is known before there are enough."""
        if not math.isfinite(value):
            return None
        if self.count < _SAMPLES:
            self.count += 1
            self.largest = max(self.largest, abs(value))
            return None
        return self.largest if abs(value) >= _FACTOR * self.largest else None
