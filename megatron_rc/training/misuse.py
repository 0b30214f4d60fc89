"""Mistakes in the order of a step's calls, and their error messages."""

from __future__ import annotations

from enum import IntEnum

_ZERO = "zero the gradients and call reset_step() on every rank before a schedule is run again"
_END = "end each step with finish_step(), as wrap_finalize() does"


class StepError(ValueError, RuntimeError):
    """A call that would train wrongly because of the calls before it."""


class Misuse(IntEnum):
    """A mistake in a step that ends; its number travels in the step's header, and 0 is none.

    Of several mistakes all ranks raise the last one in this table: a consequence stands before its possible cause.
    """

    words: str

    NO_MICRO_BATCH = (
        "finish_step() without a micro-batch: no loss of this step was run backward on some rank: make it with "
        "masked_loss() in a schedule that is not forward-only, or call in_loss()"
    )
    OTHER_DIVISOR = (
        "plan.loss_scale() was told another calculate_per_token_loss than Megatron's config has, or a total_tokens "
        "that is not the sum of num_tokens over all micro-batches and ranks: pass calculate_per_token_loss= as the "
        f"model's config has it, with local_tokens= and total_tokens=; {_ZERO}"
    )
    SCALED_BEFORE = (
        "two schedules without an optimizer step and zeroed gradients in between: those of the one before were scaled "
        f"already; {_ZERO}"
    )
    OTHER_TOKENS = (
        "the tokens that this step has counted are not those of its mini-batch in the plan: a micro-batch is missing "
        "or was counted twice (an evaluation with in_loss() and gradients on, or a schedule that failed and was run "
        "again), or it has the mask or the weights of other tokens, as inputs in another order than the plan's give; "
        f"{_ZERO}"
    )
    UNFINISHED = (
        "a schedule started on sums that no step has finished (one failed, or finish_step() was not called): this step "
        "has another number of micro-batches than num_microbatches of its LossScale, or the local_microbatches it was "
        f"told; {_ZERO}, and {_END}"
    )
    OTHER_MINI_BATCH = (
        "micro-batches with sequences of another mini-batch, as their mini_batch_ids say, than the LossScale that "
        f"their losses were given: {_ZERO}, with the scale of their own"
    )
    OTHER_PLAN = (
        "the losses of this step were given the scale of a plan whose max_staleness, or whether it has a "
        f"current_version, is not that of the newest plan: {_ZERO}, with a scale of the newest plan"
    )
    SEVERAL_STEPS = f"the losses of this step were given scales of several mini-batches or plans: {_ZERO}, and {_END}"
    REFUSED_LOSS = f"a loss of this step was refused ({_ZERO})"

    def __new__(cls, words: str) -> Misuse:
        """The next number, with these words."""
        misuse = int.__new__(cls, len(cls.__members__) + 1)
        misuse._value_, misuse.words = int(misuse), words
        return misuse
