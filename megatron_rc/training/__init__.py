"""The correction in a trainer: the plan, the loss in Megatron's schedule, the end of a step. Words: docs/design.md."""
