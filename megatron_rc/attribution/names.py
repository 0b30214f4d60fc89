"""Layer, kind and expert of a parameter, read from its name in Megatron-Core or in Hugging Face's files."""

from __future__ import annotations

import re
from typing import NamedTuple

# Kinds of parameters; ``other`` is what no rule below knows.
KINDS = ("embedding", "attention", "mlp", "router", "experts", "norms", "head", "other")

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.)?(\d+)\.")
# Megatron's grouped products have a weight for each expert in one module.
_GROUPED_EXPERT = re.compile(r"\.experts\.linear_fc[12]\.(?:weight|bias)(\d+)$")

# The first rule that matches decides: a norm inside of the attention is a norm.
_RULES = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("norms", r"norm|(?:^|\.)ln_(?:\d|f)\."),
        ("embedding", r"embed|(?:^|\.)w[tp]e\."),
        ("head", r"output_layer|lm_head"),
        ("router", r"\.router\.|\.(?:mlp|block_sparse_moe)\.gate\."),
        ("experts", r"\.experts\."),
        ("attention", r"attention|\.self_attn\.|\.attn\."),
        ("mlp", r"\.mlp\.|shared_expert"),
    )
)


class Place(NamedTuple):
    """Where a parameter lies in the model."""

    layer: int | None  # number of the layer, from 0; None outside of the layers
    kind: str  # one of ``KINDS``
    expert: int | None  # number of the expert in its layer, from 0; None for all else


def place_of(name: str) -> Place:
    """Return the place of a parameter with this name in the whole model."""
    layer = _LAYER.search(name)
    expert = _EXPERT.search(name) or _GROUPED_EXPERT.search(name)
    kind = next((kind for kind, pattern in _RULES if pattern.search(name)), "other")
    return Place(
        layer=int(layer[1]) if layer else None,
        kind=kind,
        expert=int(expert[1]) if expert else None,
    )


def model_order(name: str) -> tuple[int, int, list[tuple[int, str]]]:
    """Return a key that sorts names by layer, and the numbers in them as numbers.

    Embeddings come before the layers, the last norm and the head behind them.
    """
    layer, kind, _ = place_of(name)
    if layer is not None:
        section = 1
    elif kind == "embedding":
        section = 0
    else:
        section = 2
    pieces = [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]
    return section, layer or 0, pieces
