"""A sentence about an attribution: the layers that carry half of the mismatch, or that no weight does."""

from __future__ import annotations

import re
from collections.abc import Mapping

PREFIX = "attribution/"
_LAYER = re.compile(rf"{PREFIX}layer_(\d+)")
_EXCESS = f"{PREFIX}excess_"
# Kinds of parameters that lie outside of the layers.
_OUTSIDE = ("embedding", "head")
_HALF = 0.5
# The parts do not add up if more than this share of the mismatch is missing.
_INCOMPLETE = 0.05
_MOST_NAMES = 6


def where_in_words(metrics: Mapping[str, float]) -> str | None:
    """Return a sentence about metrics with names as ``attribution/layer_0``; None if there was no attribution.

    If weights are not as intended, it begins with their places: such a fault may be hidden among the other parts.
    """
    explained = metrics.get(f"{PREFIX}explained")
    if explained is None:
        return None
    sentence = _of_parts(metrics, explained)
    places = unintended(metrics)
    if not places:
        return sentence
    doubt = ", or its format is not exactly the given one" if len(places) > _MOST_NAMES else ""
    return f"the engine's weights are not the trainer's in its format in {_listed(places)}{doubt}; {sentence}"


def _of_parts(metrics: Mapping[str, float], explained: float) -> str:
    """Return the sentence about the parts; ``explained`` is their share of the mismatch."""
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
    shown = _listed(names)
    if len(names) > _MOST_NAMES:
        shown += ", so that it is spread"
    return f"half of the mismatch is in the weights of {shown}; all weights explain {explained:.0%} of it"


def _listed(names: list[str]) -> str:
    """Return the first names, and how many follow."""
    shown = ", ".join(names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return shown if more <= 0 else f"{shown} and {more} more"


def attribution_of(row: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an attribution in a step's metrics; empty if the step has none."""
    return {name: value for name, value in row.items() if name.startswith(PREFIX)}


def unintended(metrics: Mapping[str, float]) -> list[str]:
    """Return the layers, and kinds outside of the layers, with an excess, the largest first."""
    shares = {}
    for name, share in metrics.items():
        if name.startswith(_EXCESS):
            place = name.removeprefix(_EXCESS)
            in_words = place.replace("layer_", "layer ") if place.startswith("layer_") else f"the {place}"
            shares[in_words] = share
    ordered = sorted(shares, key=lambda place: shares[place], reverse=True)
    return [f"{place} ({100 * shares[place]:.2g} % of the mismatch)" for place in ordered]


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
