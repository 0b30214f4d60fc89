"""A sentence about an attribution: the layers that carry half of the mismatch, or that no weight does."""

from __future__ import annotations

import re
from collections.abc import Mapping

PREFIX = "attribution/"
_LAYER = re.compile(rf"{PREFIX}layer_(\d+)")
# Kinds of parameters that lie outside of the layers.
_OUTSIDE = ("embedding", "head")
_HALF = 0.5
# The parts do not add up if more than this share of the mismatch is missing.
_INCOMPLETE = 0.05
_MOST_NAMES = 6


def where_in_words(metrics: Mapping[str, float]) -> str | None:
    """Return a sentence about metrics with names as ``attribution/layer_0``; None if there was no attribution."""
    explained = metrics.get(f"{PREFIX}explained")
    if explained is None:
        return None
    if explained == 0 and metrics.get(f"{PREFIX}rest") == 0:
        return "there is no mismatch to explain: the log-probs of engine and trainer are equal, or no token counts"
    completeness = metrics.get(f"{PREFIX}completeness") or 1.0
    # Parts that are missing, or too much, as a share of the mismatch.
    missing = explained / completeness - explained
    if abs(missing) > _INCOMPLETE:
        return (
            f"the parts of the weights do not add up (completeness {completeness:.2f}): take more nodes "
            "(--attribution-nodes) before you read them"
        )
    if explained < _HALF:
        return (
            f"the weights do not explain it: {explained:.0%} of the mismatch; look for the rest in kernels, "
            "activations, the KV cache and sampling"
        )

    names = carriers(metrics)
    shown = ", ".join(names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    if more > 0:
        shown += f" and {more} more, so that it is spread"
    return f"half of the mismatch is in the weights of {shown}; all weights explain {explained:.0%} of it"


def attribution_of(row: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an attribution in a step's metrics; empty if the step has none."""
    return {name: value for name, value in row.items() if name.startswith(PREFIX)}


def carriers(metrics: Mapping[str, float]) -> list[str]:
    """Return the fewest layers, and kinds outside of the layers, whose shares add up to half, the largest first."""
    shares = {f"layer {match[1]}": metrics[name] for name in metrics if (match := _LAYER.fullmatch(name))}
    shares |= {f"the {kind}": metrics[PREFIX + kind] for kind in _OUTSIDE if PREFIX + kind in metrics}

    names: list[str] = []
    total = 0.0
    for name in sorted(shares, key=lambda name: shares[name], reverse=True):
        if total >= _HALF or shares[name] <= 0:
            break
        names.append(f"{name} ({shares[name]:.0%})")
        total += shares[name]
    return names
