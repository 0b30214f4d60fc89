"""The correction in a trainer: the plan, the loss in Megatron's schedule, the end of each step. Words: docs/design.md."""
