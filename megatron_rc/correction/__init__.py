"""The decisions of a correction: weights, accepted mask, denominators. Words: docs/design.md."""
