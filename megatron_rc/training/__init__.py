"""The correction inside a trainer: the plan before Megatron's schedule, the loss within it, the end of each step.

``docs/design.md`` begins with the words and symbols that are used here.
"""
