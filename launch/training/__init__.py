"""The trainer on Megatron-Core: model, micro-batches, steps, checkpoints and reports."""
