"""The sequences that a correction changes most, with their tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_rc.replay.outcome import Outcome
from megatron_rc.replay.tokens import Recorded, Tokens

MOST_TOKENS = 512  # of a sequence, the first ones


@dataclass(frozen=True)
class AffectedSequence:
    """A sequence, what a correction does to it, and its sampled tokens.

    Attributes:
        batch: that it is of.
        sample_id: in it.
        reward: of it.
        age: how many steps behind the oldest weights were that sampled it.
        num_tokens: sampled and scored ones.
        accepted: of them.
        mean_weight: over all of them, with 0 for rejected ones.
        log_ratio: the sum of log π_old - log π_rollout, or in bypass mode of log π_θ - log π_rollout.
        change: its share of the squared distance between the corrected gradient and the uncorrected one.
        tokens: of each of the first 512: token id, position in the whole sequence, log ratio, log π_rollout, weight (0:
            rejected, or weighed away), and whether it is accepted.
    """

    batch: str
    sample_id: int
    reward: float
    age: int
    num_tokens: int
    accepted: int
    mean_weight: float
    log_ratio: float
    change: float
    tokens: list[tuple[int, int, float, float, float, bool]]


def most_affected(data: Recorded, found: Outcome, number: int) -> list[AffectedSequence]:
    """The sequences with the largest share of the change of the gradient, largest first; those without any left out."""
    change = found.effect.change
    index = change.argsort(descending=True, stable=True)[:number]
    return [_sequence(data, found, row) for row in index[change[index] > 0].tolist()]


def log_ratio(part: Tokens, found: Outcome) -> Tensor:
    """[n, s]: of the policy that the correction compares with the engine's; anything where nothing was sampled."""
    return (part.theta if found.config.bypass_mode else part.old) - part.rollout


def place(data: Recorded, row: int) -> tuple[int, int]:
    """(which batch, which of its rows) a sequence is."""
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
    weights = kept.float() if found.token_weights is None else found.token_weights[index][own] * kept
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
