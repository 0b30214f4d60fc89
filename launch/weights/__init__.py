"""Megatron's sharded weights under Hugging Face names."""

from megatron_rc.launch.weights.families import Family, find_family

__all__ = ["Family", "find_family"]
