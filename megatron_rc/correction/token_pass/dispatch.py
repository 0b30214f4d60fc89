"""The pass over one block after the other: the one place that knows in which form each block is computed.

A CPU that runs PyTorch as it stands takes ``cpu_buffers``, everything else ``expressions``. With ``compile`` the
expressions go through ``torch.compile``, which makes a program for one shape: blocks of another one, and flat blocks,
in which every time other sequences lie, run as they stand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.token_pass.cpu_buffers import BufferedBlock, Buffers
from megatron_rc.correction.token_pass.expressions import ExpressionBlock
from megatron_rc.correction.token_pass.operations import BlockTokens, TokenResults, run_length
from megatron_rc.correction.token_pass.terms import BlockValues, TermNames, block_terms
from megatron_rc.parallel.blocks import Block
from megatron_rc.settings.config import RolloutCorrectionConfig

# By default the compiler for CPUs makes several loops that read the tokens anew and pass results through memory; with
# these limits out of the way it makes one.
_ONE_LOOP: dict[str, Any] = dict.fromkeys(
    ("realize_opcount_threshold", "realize_reads_threshold", "max_fusion_size", "cpp.max_horizontal_fusion_size"), 10**4
)


class BlockPass:
    """Computes what each block of tokens contributes.

    Args:
        config: decides which terms there are.
        names: theirs.
        compile: even blocks go through ``torch.compile`` while they have the first one's shape.
    """

    def __init__(self, config: RolloutCorrectionConfig, names: TermNames, compile: bool) -> None:
        self._config, self._names, self._compile = config, names, compile
        # All blocks but the last few have the same shape.
        self._buffers: Buffers | None = None
        self._compiled: tuple[tuple[int, ...], Callable[..., BlockValues], Tensor] | None = None

    def __call__(self, tokens: BlockTokens, results: TokenResults, block: Block) -> BlockValues:
        """The terms of one block; writes what it finds for each token to ``results``."""
        if not block.is_even:
            return self._as_it_stands(tokens, results, block.run_sizes(tokens.mask.device))
        run = run_length(block.shape[1])
        tokens, results = tokens.in_runs(run), results.in_runs(run)
        if self._compile and self._compiled is None:
            zero = torch.zeros(len(tokens.mask), 1, dtype=torch.float32, device=tokens.mask.device)
            self._compiled = block.shape, _compiled_terms(self._config, self._names, zero.device.type), zero
        if self._compiled is None or self._compiled[0] != block.shape:
            return self._as_it_stands(tokens, results, None)
        _, terms, zero = self._compiled
        mask, kept = tokens.mask.view(torch.uint8), results.kept.view(torch.uint8)
        return terms(tokens.train, tokens.rollout, mask, tokens.negative, tokens.level, results.weights, kept, zero)

    def _as_it_stands(self, tokens: BlockTokens, results: TokenResults, run_sizes: Tensor | None) -> BlockValues:
        if takes_buffers(tokens.mask.device):
            shape = tuple(tokens.mask.shape)
            if self._buffers is None or self._buffers.shape != shape:
                self._buffers = Buffers(shape, tokens.train.dtype)
            buffered = BufferedBlock(tokens, results, self._buffers, run_sizes)
            return block_terms(buffered, tokens, self._config).unnamed(self._names)
        block = ExpressionBlock(tokens, run_sizes)
        terms = block_terms(block, tokens, self._config)
        results.kept.copy_(block.kept)
        if results.weights is not None and block.weights is not None:
            results.weights.copy_(block.weights)
        return terms.unnamed(self._names)


def takes_buffers(device: torch.device) -> bool:
    """Whether blocks that no compiler sees are computed in buffers."""
    return device.type == "cpu"


@functools.lru_cache(maxsize=64)
def _compiled_terms(config: RolloutCorrectionConfig, names: TermNames, device: str) -> Callable[..., BlockValues]:
    """The expressions as a function of tensors alone: fields of records would be looked at before every call.

    A compiler can vectorise reads and writes of uint8, not of bool. And it may make one loop of everything only where
    what is written for each token depends on the run, as the sums do: so ``zero``, [runs, 1], is in the mask.
    """

    def terms(
        train: Tensor,
        rollout: Tensor,
        mask: Tensor,
        negative: Tensor | None,
        level: Tensor | None,
        weights: Tensor | None,
        kept: Tensor,
        zero: Tensor,
    ) -> BlockValues:
        tokens = BlockTokens(train, rollout, mask.float() + zero != 0, negative, level)
        block = ExpressionBlock(tokens)
        found = block_terms(block, tokens, config).unnamed(names)
        kept.copy_(torch.where(block.kept, 1.0, 0.0))
        if weights is not None and block.weights is not None:
            weights.copy_(block.weights)
        return found

    options = _ONE_LOOP if device == "cpu" else None
    compiled: Callable[..., BlockValues] = torch.compile(terms, dynamic=False, options=options)
    return compiled
