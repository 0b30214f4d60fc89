"""Megatron-LM's patterns of layers: a number, a list written as sums and products, or a layout of pipeline stages."""

from __future__ import annotations

import ast
import contextlib
from itertools import groupby
from typing import Any

# A longer list would fill the memory before it is compared with --num-layers.
_MOST_LAYERS = 100_000


def number_or_pattern(word: str) -> int | list[int]:
    """Read a number or a list with one entry a layer, such as ``[0]*3+[1]*9``; nothing is run as code."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        value = _pattern(ast.parse(word, mode="eval").body)
        if isinstance(value, int | list):
            return value
    raise ValueError(f"expected a number, or a list such as [0]*3+[1]*9, got {word!r}")


def _pattern(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left = _pattern(node.left)
        right = _pattern(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and {type(left), type(right)} == {list, int}:
            times, layers = (left, right) if isinstance(left, int) else (right, left)
            if times * len(layers) <= _MOST_LAYERS:
                return layers * times
    if isinstance(node, ast.List) and all(isinstance(element, ast.Constant) for element in node.elts):
        return [_pattern(element) for element in node.elts]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError(ast.unparse(node))


def layers_of_layout(layout: str, stages: int, num_layers: int) -> list[int]:
    """Number of layers of each model chunk in the order of the layers, from ``Et|t*2|(t|)*2L``, read by Megatron.

    Chunk ``i`` lies on pipeline stage ``i % stages``. Raises ValueError for a layout that Megatron refuses.
    """
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        read = PipelineParallelLayerLayout.from_str(layout, stages)
        read.validate_layer_layout(num_layers, None)
    except (AssertionError, IndexError) as error:  # of a wrong layout, and of one without layers
        raise ValueError(" ".join(str(error).split())) from error
    turns = zip(*read.layout, strict=True)  # Megatron lists the chunks of each stage
    return [chunk.count(LayerType.decoder) for turn in turns for chunk in turn]


def layer_pattern(word: str) -> str:
    """Normal form of a pattern of layers: ``4`` for every fourth layer, or ``[0]*3+[1]``."""
    value = number_or_pattern(word)
    if isinstance(value, int) and value > 0:
        return str(value)
    if isinstance(value, list) and value and set(value) <= {0, 1}:
        return pattern_in_words(value)
    raise ValueError(f"expected a number above 0, or a list of 0 and 1, got {word!r}")


def pattern_in_words(layers: list[int]) -> str:
    """A list with one entry a layer, written as products: ``[0]*3+[1]*58``."""
    return "+".join(f"[{kind}]*{len(list(equal))}" for kind, equal in groupby(layers))


def expert_layers(word: str) -> str:
    """Normal form of a value of ``--moe-layer-freq``: ``1`` for all layers, else ``3``, or ``[0]*3+[1]*58``."""
    value = number_or_pattern(word)
    has_all = isinstance(value, list) and set(value) == {1}
    return "1" if has_all else layer_pattern(word)


def attention_window(word: str) -> str:
    """Normal form of a value of ``--window-size``: ``127,0``; Megatron-LM also takes ``(127,0)``."""
    before, _, behind = word.strip("()").partition(",")
    if before.strip().isdecimal() and behind.strip() == "0":
        return f"{int(before)},0"
    raise ValueError(f"expected a number of keys and 0, such as 127,0, got {word!r}")
