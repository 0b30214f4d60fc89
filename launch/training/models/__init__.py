"""Megatron-Core's models with their optimizers, on a GPU or a CPU, and passes over micro-batches."""
