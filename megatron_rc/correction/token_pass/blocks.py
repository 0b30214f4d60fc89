"""The pass over one block after the other, as it stands or through ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.inputs import Shards
from megatron_rc.correction.token_pass.terms import BlockTokens, BlockValues, block_terms, fused_terms
from megatron_rc.correction.token_pass.values import Scratch, run_length
from megatron_rc.parallel.blocks import Block
from megatron_rc.settings.config import RolloutCorrectionConfig

# Left to itself the compiler for CPUs keeps in memory what several sums need, and reads the tokens for every few anew.
_ONE_LOOP: dict[str, Any] = dict.fromkeys(
    ("realize_opcount_threshold", "realize_reads_threshold", "max_fusion_size", "cpp.max_horizontal_fusion_size"), 10**4
)


class _ScratchPool:
    """The buffers of the latest block shape: all blocks but the last few have the same."""

    def __init__(self, shards: Shards) -> None:
        self._options = (shards.dtype, shards.device)
        self._shape: tuple[int, ...] | None = None

    def of(self, tokens: BlockTokens) -> Scratch:
        shape = tuple(tokens.mask.shape)
        if shape != self._shape:
            self._shape, self._scratch = shape, Scratch(shape, *self._options)
        return self._scratch


class BlockPass:
    """What each block contributes.

    Args:
        shards: the shard that the blocks are cut from.
        config: decides which terms there are.
        compile: even blocks go through ``torch.compile`` while they have the first one's shape.
    """

    def __init__(self, shards: Shards, config: RolloutCorrectionConfig, compile: bool) -> None:
        self._config, self._compile, self._scratch = config, compile, _ScratchPool(shards)
        self._fused: tuple[tuple[int, ...], Callable[..., BlockValues], Tensor] | None = None

    def __call__(self, tokens: BlockTokens, block: Block) -> BlockValues:
        """The terms of one block; writes what it finds for each token."""
        if not block.is_even:
            lengths = block.lengths(tokens.mask.device)
            return block_terms(tokens, self._config, self._scratch.of(tokens), lengths).unnamed()
        tokens = tokens.in_runs(run_length(block.shape[1]))
        if self._compile and self._fused is None:
            zero = torch.zeros(len(tokens.mask), 1, dtype=torch.float32, device=tokens.mask.device)
            self._fused = block.shape, _compiled_terms(self._config, zero.device.type), zero
        if self._fused is None or self._fused[0] != block.shape:
            return block_terms(tokens, self._config, self._scratch.of(tokens)).unnamed()
        _, terms, zero = self._fused
        mask, kept = tokens.mask.view(torch.uint8), tokens.kept.view(torch.uint8)
        return terms(tokens.train, tokens.rollout, mask, tokens.negative, tokens.weights, kept, zero)


@functools.lru_cache(maxsize=64)
def _compiled_terms(config: RolloutCorrectionConfig, device: str) -> Callable[..., BlockValues]:
    """:func:`fused_terms` of tensors alone: the fields of :class:`BlockTokens` would be looked at before every call."""

    def terms(
        train: Tensor,
        rollout: Tensor,
        mask: Tensor,
        negative: Tensor | None,
        weights: Tensor | None,
        kept: Tensor,
        zero: Tensor,
    ) -> BlockValues:
        return fused_terms(BlockTokens(train, rollout, mask, negative, weights, kept), zero, config).unnamed()

    options = _ONE_LOOP if device == "cpu" else None
    compiled: Callable[..., BlockValues] = torch.compile(terms, dynamic=False, options=options)
    return compiled
