"""The correction inside a trainer: the plan before Megatron's schedule, the loss within it, the end of each step."""
