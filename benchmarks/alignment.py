"""Errors of the shift test: refused honest batches, and accepted shifted batches.

    python benchmarks/alignment.py [--batches 2000]

The batches are the smallest that it judges (a little over 512 pairs), with log-probs of a language model's shape: most
tokens nearly certain, some surprising. ``noise`` is the standard deviation of the difference of the two policies.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.measures.shift import find_lag

SHAPE = (9, 64)
NOISES = (1e-3, 0.02, 0.1, 0.5, 1.0, 3.0)


def sample(generator: torch.Generator) -> Tensor:
    """Log-probs of one batch."""
    certain = torch.rand(SHAPE, generator=generator) < 0.6
    surprise = -torch.rand(SHAPE, generator=generator).clamp(min=1e-9).log()
    return -torch.where(certain, 0.02, 1.5) * surprise


def verdict(train: Tensor, rollout: Tensor) -> int:
    """The lag that the shift test finds."""
    result = correct_rollouts(train, rollout, torch.ones(SHAPE, dtype=torch.bool), RolloutCorrectionConfig())
    return find_lag(result.on_host.tokens)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=2000, help="honest and shifted batches for each noise")
    count = parser.parse_args().batches
    if count < 1:
        parser.error(f"--batches {count}: take 1 or more")
    sys.stdout.write("| noise | honest refused | shifted let pass |\n|---|---|---|\n")
    for noise in (*NOISES, None):
        generator = torch.Generator().manual_seed(0)
        refused = missed = 0
        for _ in range(count):
            train = sample(generator)
            apart = sample(generator) if noise is None else train + noise * torch.randn(SHAPE, generator=generator)
            rollout = apart.clamp(max=0)
            refused += verdict(train, rollout) != 0
            missed += verdict(train, rollout.roll(1, dims=1)) != 1
        label = "unrelated policies" if noise is None else noise
        sys.stdout.write(f"| {label} | {refused} of {count} | {missed} of {count} |\n")
