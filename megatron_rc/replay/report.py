"""The outcomes as a dictionary for JSON and as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_rc.replay.affected import AffectedSequence, most_affected
from megatron_rc.replay.outcome import Bucket, Outcome, edges
from megatron_rc.replay.tokens import Recorded
from megatron_rc.settings.fields import DEFAULTS

_GROUPS = (("reward", "by_reward"), ("length", "by_length"), ("age", "by_age"), ("turn", "by_turn"))


def as_dict(data: Recorded, outcomes: Sequence[Outcome], sequences: int) -> dict[str, Any]:
    """Data and outcomes as plain values, for JSON, with ``sequences`` most affected sequences of each correction."""
    return {
        "batches": [part.name for part in data.parts],
        "sequences": int((data.lengths > 0).sum()),
        "tokens": int(data.lengths.sum()),
        "unscored_tokens": data.unscored,
        "gradient_of": outcomes[0].effect.of,
        "weight_edges": edges(),
        "corrections": [_outcome(data, found, sequences) for found in outcomes],
    }


def _outcome(data: Recorded, found: Outcome, sequences: int) -> dict[str, Any]:
    settings = {name: value for name, value in found.config.to_dict().items() if value != DEFAULTS[name]}
    return {
        "name": found.name,
        "settings": {"rollout_is": found.config.rollout_is, **settings},
        "total": asdict(found.total),
        **{name: [asdict(bucket) for bucket in getattr(found, name)] for _, name in _GROUPS},
        "weights": asdict(found.weights),
        "gradient": {"cosine": found.effect.cosine, "length": found.effect.length},
        "metrics": found.metrics,
        "most_affected": [asdict(one) for one in most_affected(data, found, sequences)],
    }


def as_text(data: Recorded, outcomes: Sequence[Outcome], sequences: int) -> str:
    """Tables of shares, weights and gradients, and the most affected sequences of each correction."""
    number = int((data.lengths > 0).sum())
    lines = [f"{number} sequences, {int(data.lengths.sum())} sampled tokens, {len(data.parts)} batches"]
    if data.unscored:
        lines.append(f"{data.unscored} more tokens without a log-prob of the trainer count nowhere")
    lines += ["", *_table(("correction", *_SUMMARY), [(found.name, *_summary(found)) for found in outcomes])]
    lines += ["", f"cosine, length: {outcomes[0].effect.of}; compared with the uncorrected gradient"]
    for word, name in _GROUPS:
        lines += ["", f"rejected tokens (sequences) by {word}", *_breakdown(outcomes, name)]
    for found in outcomes:
        affected = most_affected(data, found, sequences)
        if affected:
            lines += ["", f"sequences that {found.name} changes most", *_sequences(affected)]
    return "\n".join(lines) + "\n"


_SUMMARY = ("rejected tokens", "sequences", "mean w", "smallest", "largest", "w = 0", "ESS", "cosine", "length")


def _summary(found: Outcome) -> tuple[str, ...]:
    weights, cosine = found.weights, found.effect.cosine
    return (
        _share(found.total.rejected_tokens, found.total.tokens),
        _share(found.total.rejected_sequences, found.total.sequences),
        *(f"{value:.3g}" for value in (weights.mean, weights.smallest, weights.largest)),
        _share(weights.zeros, found.total.tokens),
        f"{weights.effective_share:.3f}",
        "none" if cosine is None else f"{cosine:.4f}",
        f"{found.effect.length:.3f}",
    )


def _breakdown(outcomes: Sequence[Outcome], name: str) -> list[str]:
    """Rows of one breakdown; its buckets are the same for all corrections."""

    def of(found: Outcome) -> list[Bucket]:
        return list(getattr(found, name))

    header = ("", *(bucket.label for bucket in of(outcomes[0])))
    counts = ("tokens (sequences)", *(f"{one.tokens} ({one.sequences})" for one in of(outcomes[0])))
    rows = []
    for found in outcomes:
        shares = ((_share(one.rejected_tokens, one.tokens), one) for one in of(found))
        rows.append(
            (found.name, *(f"{share} ({_share(one.rejected_sequences, one.sequences)})" for share, one in shares))
        )
    return _table(header, [counts, *rows])


def _sequences(affected: Sequence[AffectedSequence]) -> list[str]:
    header = ("of the change", "batch", "sample", "reward", "age", "tokens", "accepted", "mean w", "log ρ", "farthest")
    rows = []
    for one in affected:
        farthest = sorted(one.tokens, key=lambda token: -abs(token[2]))[:3]
        words = ", ".join(f"{token} at {position}: {ratio:+.2f}" for token, position, ratio, *_ in farthest)
        numbers = f"{one.reward:g}", str(one.age), str(one.num_tokens), str(one.accepted), f"{one.mean_weight:.3f}"
        rows.append(
            (f"{one.change:.1%}", Path(one.batch).name, str(one.sample_id), *numbers, f"{one.log_ratio:+.3f}", words)
        )
    return _table(header, rows)


def _share(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.2%}"


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
