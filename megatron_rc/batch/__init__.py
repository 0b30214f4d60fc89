"""A whole rollout batch: decisions and measures, through three collectives to one result. Words: docs/design.md."""
