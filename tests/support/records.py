"""Comparing the records of rollouts."""

import torch


def identical(one, other):
    """Whether all fields have the same dtypes, shapes and bits, NaN included; where they lie does not matter."""
    mine, theirs = one.tensors(), other.tensors()
    return (
        one.sampling == other.sampling
        and mine.keys() == theirs.keys()
        and all(_same_bits(value, theirs[name]) for name, value in mine.items())
    )


def _same_bits(one, other):
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(value.cpu().contiguous().flatten().view(torch.uint8) for value in (one, other)))
