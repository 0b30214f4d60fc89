"""The pass over a block of tokens through ``torch.compile``, which makes one loop of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.sequences import BlockReductions, TokenSums, extremes_of
from megatron_rc.correction.tokens import Tokens
from megatron_rc.settings.config import RolloutCorrectionConfig

# By default the compiler for CPUs makes several loops that read the tokens anew and pass results through memory; with
# these limits out of the way it makes one.
_ONE_LOOP: dict[str, Any] = dict.fromkeys(
    ("realize_opcount_threshold", "realize_reads_threshold", "max_fusion_size", "cpp.max_horizontal_fusion_size"), 10**4
)


@dataclass(frozen=True)
class BlockResult:
    """The decisions on one block of tokens, of the tokens' shape, and its numbers."""

    valid: Tensor  # bool
    bad: Tensor  # bool: tokens of the response mask that are not valid
    passed: Tensor  # bool: valid tokens that all criteria on tokens and turns accept
    weights: Tensor | None  # bounded, 0 if invalid; None unless token-level
    log_ratio: Tensor  # log ρ, 0 if invalid
    sums: TokenSums
    distances: Tensor  # [4] the test for shifted log-probs


@dataclass(frozen=True)
class CompiledReductions(BlockReductions):
    """The same reductions of blocks [n, length], one row after the other.

    ``torch.compile`` makes one loop of them, which reads each token once. Tables would be written to memory.
    """

    def counts(self, flags: Sequence[Tensor]) -> Tensor:
        """See :meth:`BlockReductions.counts`."""
        return torch.stack([row.sum(1, dtype=torch.int32) for row in flags])

    def sums(self, rows: Sequence[Tensor], num_squared: int) -> tuple[Tensor, Tensor]:
        """See :meth:`BlockReductions.sums`."""
        squares = [row.double().square().sum(1).sum() for row in rows[-num_squared:]]
        return torch.stack([row.sum(1, dtype=torch.float64) for row in rows]), torch.stack(squares)

    def totals(self, rows: Sequence[Tensor]) -> Tensor:
        """See :meth:`BlockReductions.totals`."""
        return torch.stack([row.sum(1, dtype=torch.float64).sum() for row in rows])

    def extremes(self, rows: Sequence[Tensor], left_out: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`BlockReductions.extremes`."""
        if not rows:
            return extremes_of(rows, left_out)
        largest = [row.masked_fill(left_out, -torch.inf).amax(1).amax() for row in rows]
        smallest = [row.masked_fill(left_out, torch.inf).amin(1).amin() for row in rows]
        return torch.stack(largest), torch.stack(smallest)


@functools.lru_cache(maxsize=64)
def compiled_block(
    decide_block: Callable[[Tokens, BlockReductions, RolloutCorrectionConfig], BlockResult],
    config: RolloutCorrectionConfig,
    device: str,
) -> Callable[[Tokens], BlockResult]:
    """Return ``decide_block`` for blocks of equally long sequences, compiled when it is first called.

    Masks go in and out as bytes, for which a CPU has vectors; the compiler takes bools one by one.
    """

    def program(tokens: Tokens, mask: Tensor, present: Tensor) -> BlockResult:
        tokens = dataclasses.replace(tokens, mask=(mask != 0) & present)
        result = decide_block(tokens, CompiledReductions(), config)
        masks = {name: getattr(result, name).to(torch.uint8) for name in ("valid", "bad", "passed")}
        return dataclasses.replace(result, **masks)

    compiled: Callable[..., BlockResult] = torch.compile(
        program, dynamic=False, options=_ONE_LOOP if device == "cpu" else None
    )

    def run(tokens: Tokens) -> BlockResult:
        # The compiler makes one loop of the sums and of the tokens' results only if the latter depend on the sequence.
        present = tokens.mask.new_ones(len(tokens.mask), 1)
        result = compiled(tokens, tokens.mask.view(torch.uint8), present)
        masks = {name: getattr(result, name).view(torch.bool) for name in ("valid", "bad", "passed")}
        return dataclasses.replace(result, **masks)

    return run
