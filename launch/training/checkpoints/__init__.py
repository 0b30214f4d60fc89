"""Checkpoints that any parallel layout can read: Megatron's format, and beside it what makes them safe to rely on."""
