"""Steps that the flags count in sequences, as Megatron-LM does with ``--train-samples``; the last may be a part."""

from __future__ import annotations

import argparse

from megatron_rc.launch.errors import ConfigurationError, flag

# What counts sequences, by what counts steps.
_IN_SAMPLES = {
    "lr_decay_iters": "lr_decay_samples",
    "lr_warmup_iters": "lr_warmup_samples",
    "lr_wsd_decay_iters": "lr_wsd_decay_samples",
}


def resolve_samples(args: argparse.Namespace) -> None:
    """Fill in the steps.

    Raises:
        ConfigurationError: steps and sequences are mixed, or do not fit ``--global-batch-size``.
    """
    if args.train_samples is None:
        for samples in _IN_SAMPLES.values():
            if getattr(args, samples):
                raise ConfigurationError(
                    f"{flag(samples)} {getattr(args, samples)} does nothing without --train-samples: give both, or "
                    "count steps"
                )
        return
    if args.train_iters is not None:
        raise ConfigurationError(
            f"--train-samples {args.train_samples} and --train-iters {args.train_iters} say the same: drop one of them"
        )
    size = args.global_batch_size
    if not size or args.train_samples < size:
        raise ConfigurationError(
            f"--train-samples {args.train_samples} must be at least one --global-batch-size, got {size}"
        )
    args.train_iters = args.train_samples // size
    for steps, samples in _IN_SAMPLES.items():
        _in_steps(args, steps, samples)


def _in_steps(args: argparse.Namespace, steps: str, samples: str) -> None:
    number, size = getattr(args, samples), args.global_batch_size
    if getattr(args, steps):
        raise ConfigurationError(
            f"{flag(steps)} {getattr(args, steps)} counts steps beside --train-samples: give {flag(samples)}"
        )
    if not number:
        return
    setattr(args, steps, number // size if number % size == 0 else number / size)
