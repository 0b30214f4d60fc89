"""One self-contained HTML page: tables, distributions and points, with the data in it as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from megatron_rc.replay.outcome import Outcome
from megatron_rc.replay.report import as_dict
from megatron_rc.replay.tokens import Recorded

POINTS, BAND_TOKENS, BAND_BINS = 3000, 200_000, 24
MAX_SEQUENCES = 1500
_LOWEST = -16.0  # log π_rollout; less likely tokens are drawn at this edge


def as_page(data: Recorded, outcomes: Sequence[Outcome]) -> str:
    """Return the HTML of the page."""
    return filled(_resource("page.html"), page_data(data, outcomes))


def filled(template: str, data: Any) -> str:
    """HTML of a page that needs no other file and no network.

    The template has ``@STYLE@``, ``@DRAWING@`` (JavaScript) and ``@DATA@``. Strings in the data are escaped, so that no
    string can end the script element.
    """
    # Data last, so that placeholders inside of strings are not replaced.
    template = template.replace("@STYLE@", _resource("style.css")).replace("@DRAWING@", _resource("drawing.js"))
    return template.replace("@DATA@", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def _resource(name: str) -> str:
    return files("megatron_rc.replay").joinpath(name).read_text(encoding="utf-8")


def page_data(data: Recorded, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Data of the page: the report, points for tokens and sequences, and bands.

    Large inputs are drawn from at random, with a fixed seed.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = _draw(torch.cat([part.mask.flatten() for part in data.parts]), BAND_TOKENS, generator)
    chosen = _tokens(data, drawn)
    points = slice(0, POINTS)
    return {
        "report": as_dict(data, outcomes),
        "tokens": {name: _rounded(values[points]) for name, values in chosen.items()}
        | {"weights": [_rounded(_weights(data, found, drawn[points])) for found in outcomes]},
        "bands": {
            "tokens": len(drawn),
            "position": _bands(torch.log2(chosen["position"] + 1.0), chosen["log_ratio"]),
            "probability": _bands(chosen["log_prob"].clamp(min=_LOWEST), chosen["log_ratio"]),
        },
        "sequences": _sequences(data, outcomes, generator),
    }


def _draw(mask: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """[k] int64: indices of True entries in random order, at most ``most``."""
    index = mask.nonzero().flatten()
    if len(index) > most:
        index = index[torch.randint(len(index), (most,), generator=generator).unique()]
    return index[torch.randperm(len(index), generator=generator)]


def _at(values: Sequence[Tensor], places: Tensor) -> Tensor:
    """[k] float64: values at flat indices into all batches, [n, s] each."""
    out, first = torch.zeros(len(places), dtype=torch.float64), 0
    for one in values:
        here = (places >= first) & (places < first + one.numel())
        out[here] = one.flatten()[places[here] - first].double()
        first += one.numel()
    return out


def _tokens(data: Recorded, places: Tensor) -> dict[str, Tensor]:
    """Position in the response, log-probs, token and sequence at flat indices."""
    rows, columns, first_row = [], [], 0
    for part in data.parts:
        number, width = part.mask.shape
        begins = part.mask.int().argmax(dim=1, keepdim=True)
        columns.append((torch.arange(width) - begins).expand(number, width))
        rows.append((torch.arange(number).unsqueeze(1) + first_row).expand(number, width))
        first_row += number
    old, rollout = (_at([getattr(part, name) for part in data.parts], places) for name in ("old", "rollout"))
    return {
        "position": _at(columns, places),
        "log_ratio": old - rollout,
        "log_prob": rollout,
        "token": _at([part.records.tokens for part in data.parts], places),
        "sequence": _at(rows, places),
    }


def _weights(data: Recorded, found: Outcome, places: Tensor) -> Tensor:
    """[k]: weight of each token, -1 for rejected ones."""
    kept = _at(found.masks, places)
    weights = kept if found.token_weights is None else _at(found.token_weights, places)
    return torch.where(kept > 0, weights, -1.0)


def _bands(across: Tensor, values: Tensor) -> list[list[float]]:
    """[middle, 5 %, 50 %, 95 %] of the values in each bin of equal width with at least 20 values."""
    if not len(across) or across.min() == across.max():
        return []
    span = across.max() - across.min()
    bins = ((across - across.min()) / span * BAND_BINS).long().clamp(max=BAND_BINS - 1)
    shares, found = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64), []
    for number in range(BAND_BINS):
        held = values[bins == number]
        if len(held) >= 20:
            middle = float(across.min() + span * (number + 0.5) / BAND_BINS)
            found.append([middle, *held.quantile(shares).tolist()])
    return found


def _sequences(data: Recorded, outcomes: Sequence[Outcome], generator: torch.Generator) -> dict[str, Any]:
    sums = [torch.where(part.mask, part.old - part.rollout, 0).sum(dim=1, dtype=torch.float64) for part in data.parts]
    rows = _draw(data.lengths > 0, MAX_SEQUENCES, generator).sort().values
    samples = torch.cat([part.records.sample_ids for part in data.parts])
    batches = torch.cat([torch.full((len(part.mask),), index) for index, part in enumerate(data.parts)])
    return {
        "row": rows.tolist(),
        "batch": batches[rows].tolist(),
        "sample_id": samples[rows].tolist(),
        "reward": _rounded(data.rewards[rows]),
        "age": data.ages[rows].tolist(),
        "length": data.lengths[rows].tolist(),
        "log_ratio": _rounded(torch.cat(sums)[rows]),
        "accepted": [found.accepted[rows].tolist() for found in outcomes],
        "mean_weight": [_rounded(found.mean_weights[rows]) for found in outcomes],
    }


def _rounded(values: Tensor) -> list[float]:
    """Values with five digits, more than a picture shows."""
    return [float(f"{value:.5g}") for value in values.tolist()]
