"""A stand-in for the package mamba-ssm, whose kernels need a GPU: the same functions from their formulas, on a CPU."""

__version__ = "2.2.6"
