"""The sequences that a correction changes most, with their tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_rc.replay.outcome import Outcome
from megatron_rc.replay.tokens import Recorded, Tokens

MOST_TOKENS = 512  # the first tokens of a sequence


@dataclass(frozen=True)
class AffectedSequence:
    """A sequence, the effect of a correction on it, and its sampled tokens."""

    batch: str  # name of its batch
    sample_id: int  # in the batch
    reward: float
    age: int  # steps between the batch and the oldest weights that sampled the sequence
    num_tokens: int  # sampled and scored tokens
    accepted: int  # accepted tokens
    mean_weight: float  # of all tokens, 0 for rejected ones
    log_ratio: float  # sum of log π_old - log π_rollout; in bypass mode of log π_θ - log π_rollout
    change: float  # share of the squared distance between the corrected and the uncorrected gradient
    # Of each of the first 512 tokens: token id, position in the whole sequence, log ratio, log π_rollout, weight (0 if
    # rejected), and whether it is accepted.
    tokens: list[tuple[int, int, float, float, float, bool]]


def most_affected(data: Recorded, found: Outcome, number: int) -> list[AffectedSequence]:
    """The sequences with the largest shares of the gradient's change, largest first; never a share of 0."""
    change = found.effect.change
    index = change.argsort(descending=True, stable=True)[:number]
    return [_sequence(data, found, row) for row in index[change[index] > 0].tolist()]


def log_ratio(part: Tokens, found: Outcome) -> Tensor:
    """[n, s]: log ρ of the policy that the correction compares with the engine's; any value outside of the mask."""
    return (part.theta if found.config.bypass_mode else part.old) - part.rollout


def place(data: Recorded, row: int) -> tuple[int, int]:
    """Index of a sequence's batch, and its row there."""
    for index, part in enumerate(data.parts):
        if row < len(part.mask):
            return index, row
        row -= len(part.mask)
    raise IndexError(f"there is no sequence {row}")


def _sequence(data: Recorded, found: Outcome, row: int) -> AffectedSequence:
    index, own = place(data, row)
    part = data.parts[index]
    mask, ratio = part.mask[own], log_ratio(part, found)[own]
    kept = found.masks[index][own]
    weights = kept.double() if found.token_weights is None else found.token_weights[index][own] * kept
    shown = mask.nonzero().flatten()[:MOST_TOKENS]
    columns = (part.records.tokens[own], ratio, part.rollout[own], weights, kept)
    ids, ratios, log_probs, held, accepted = (column[shown].tolist() for column in columns)
    return AffectedSequence(
        batch=part.name,
        sample_id=int(part.records.sample_ids[own]),
        reward=float(data.rewards[row]),
        age=int(data.ages[row]),
        num_tokens=int(data.lengths[row]),
        accepted=int(found.accepted[row]),
        mean_weight=float(found.mean_weights[row]),
        log_ratio=float(ratio[mask].double().sum()),
        change=float(found.effect.change[row]),
        tokens=list(zip(ids, shown.tolist(), ratios, log_probs, held, accepted, strict=True)),
    )
