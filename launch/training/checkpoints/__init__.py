"""Checkpoints that any parallel layout can read: Megatron's format, with settings and checksums beside it."""
