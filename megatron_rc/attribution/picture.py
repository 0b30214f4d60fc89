"""A picture of an attribution: the share of each layer and kind of parameter in the mismatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rc.attribution.names import KINDS
from megatron_rc.attribution.result import Attribution

# Width of a layer's column in inches.
_COLUMN = 0.28


def draw(result: Attribution, axes: Any) -> None:
    """Draw a table of colours on matplotlib's axes: a column for each layer, a row for each kind of parameter.

    The first column has what lies outside of the layers. Red adds to the mismatch, blue cancels a part of it.
    """
    parts = result.by_layer_and_kind()
    kinds = [kind for kind in KINDS if any(kind == kind_of_part for _, kind_of_part in parts)]
    layers = [None, *sorted({layer for layer, _ in parts if layer is not None})]
    shares = [[result.share(parts.get((layer, kind), 0.0)) for layer in layers] for kind in kinds]
    # White must be 0, so both ends of the colours are equally far from it.
    largest = max((abs(share) for row in shares for share in row), default=0.0) or 1.0

    image = axes.imshow(shares, cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xticks(range(len(layers)), ["outside" if layer is None else str(layer) for layer in layers], rotation=90)
    axes.set_xlabel("layer")
    axes.set_title(f"share of the mismatch; the weights explain {result.explained:.0%}")
    axes.figure.colorbar(image, ax=axes, format=lambda share, _: f"{share:.0%}")


def write_picture(result: Attribution, path: str | Path) -> None:
    """Write the picture as a file in the format that its name says, such as ``.png``.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    num_layers = len(result.by_layer())
    figure = Figure(figsize=(4 + _COLUMN * num_layers, 3.2), layout="constrained")
    draw(result, figure.subplots())
    figure.savefig(path, dpi=110)
