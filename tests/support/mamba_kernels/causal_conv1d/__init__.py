"""A stand-in for the package causal-conv1d; mamba-ssm's stand-in has the convolution."""

__version__ = "1.5.3"
causal_conv1d_fn = None
