"""HybridModel's names of the parameters of a GPTModel: a layer's attention and its MLP are two layers."""

from __future__ import annotations

import re

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OF_THE_MLP = ("mlp.", "pre_mlp_layernorm.")


def hybrid_name(name: str) -> str:
    """The name in a model chunk of HybridModel of a parameter with this name in a chunk of GPTModel."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return name.replace("decoder.final_layernorm.", "decoder.final_norm.")
    half = 2 * int(found[1]) + found[2].startswith(_OF_THE_MLP)
    return f"decoder.layers.{half}.{found[2]}"
