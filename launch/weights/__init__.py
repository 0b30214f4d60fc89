"""Megatron's sharded weights under Hugging Face names."""

from megatron_rc.launch.weights.families import find_family
from megatron_rc.launch.weights.family import Family

__all__ = ["Family", "find_family"]
