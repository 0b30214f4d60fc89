"""Optimizer steps from numbers of sequences, as Megatron-LM has them with ``--train-samples``."""

from __future__ import annotations

import argparse

from megatron_rc.launch.errors import ConfigurationError, flag


def resolve_samples(args: argparse.Namespace) -> None:
    """Fill in the numbers of steps; the last step may be a fraction."""
    total, size = args.train_samples, args.global_batch_size
    if total is None:
        return
    if not size or total < size:
        raise ConfigurationError(f"--train-samples {total} must be at least one --global-batch-size, got {size}")
    for steps in ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"):
        samples = steps.replace("iters", "samples")
        if getattr(args, steps):
            raise ConfigurationError(
                f"{flag(steps)} {getattr(args, steps)} counts steps beside --train-samples: give {flag(samples)}"
            )
        number = getattr(args, samples)
        if number:
            setattr(args, steps, number // size if steps == "train_iters" or number % size == 0 else number / size)
