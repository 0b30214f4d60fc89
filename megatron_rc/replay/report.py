"""The outcomes as a dictionary for JSON and as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_rc.replay.outcome import Bucket, Outcome, edges
from megatron_rc.replay.tokens import Recorded
from megatron_rc.settings.fields import DEFAULTS

_GROUPS = (("reward", "by_reward"), ("length", "by_length"), ("age", "by_age"), ("turn", "by_turn"))


def as_dict(data: Recorded, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return data and outcomes as plain values, for JSON."""
    return {
        "batches": [part.name for part in data.parts],
        "sequences": int((data.lengths > 0).sum()),
        "tokens": int(data.lengths.sum()),
        "unscored_tokens": data.unscored,
        "notes": list(data.notes),
        "weight_edges": edges(),
        "corrections": [_outcome(outcome) for outcome in outcomes],
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    """Return one outcome as plain values; its settings are those that differ from the defaults, and the weights."""
    settings = {name: value for name, value in outcome.config.to_dict().items() if value != DEFAULTS[name]}
    return {
        "name": outcome.name,
        "settings": {"rollout_is": outcome.config.rollout_is, **settings},
        "total": asdict(outcome.total),
        **{name: [asdict(bucket) for bucket in getattr(outcome, name)] for _, name in _GROUPS},
        "weights": asdict(outcome.weights),
        "metrics": outcome.metrics,
    }


def as_text(data: Recorded, outcomes: Sequence[Outcome]) -> str:
    """Return tables of rejected shares and weights, and of rejected shares by reward, length, age and turn."""
    number = int((data.lengths > 0).sum())
    lines = [f"{number} sequences, {int(data.lengths.sum())} sampled tokens, {len(data.parts)} batches"]
    if data.unscored:
        lines.append(f"{data.unscored} more tokens without a log-prob of the trainer count nowhere")
    lines += [f"note: {note}" for note in data.notes]
    lines += ["", *_table(("correction", *_SUMMARY), [(outcome.name, *_summary(outcome)) for outcome in outcomes])]
    for key, name in _GROUPS:
        lines += ["", f"rejected tokens (sequences) by {key}", *_breakdown(outcomes, name)]
    return "\n".join(lines) + "\n"


_SUMMARY = ("rejected tokens", "sequences", "mean w", "smallest", "largest", "w = 0", "ESS")


def _summary(outcome: Outcome) -> tuple[str, ...]:
    """Return the cells of one correction, below ``_SUMMARY``."""
    total = outcome.total
    weights = outcome.weights
    return (
        _share(total.rejected_tokens, total.tokens),
        _share(total.rejected_sequences, total.sequences),
        f"{weights.mean:.3g}",
        f"{weights.smallest:.3g}",
        f"{weights.largest:.3g}",
        _share(weights.zeros, total.tokens),
        f"{weights.effective_share:.3f}",
    )


def _breakdown(outcomes: Sequence[Outcome], name: str) -> list[str]:
    """Rows of one breakdown; its buckets are the same for all corrections."""

    def buckets_of(outcome: Outcome) -> list[Bucket]:
        return list(getattr(outcome, name))

    first = buckets_of(outcomes[0])
    header = ("", *(bucket.label for bucket in first))
    rows = [("tokens (sequences)", *(f"{bucket.tokens} ({bucket.sequences})" for bucket in first))]
    for outcome in outcomes:
        cells = []
        for bucket in buckets_of(outcome):
            tokens = _share(bucket.rejected_tokens, bucket.tokens)
            cells.append(f"{tokens} ({_share(bucket.rejected_sequences, bucket.sequences)})")
        rows.append((outcome.name, *cells))
    return _table(header, rows)


def _share(part: int, total: int) -> str:
    return f"{part / max(total, 1):.2%}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with the first column aligned left and the others right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
