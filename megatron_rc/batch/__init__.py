"""A whole rollout batch: decisions and measures, through the same three collectives to one result. Words: docs/design.md."""
