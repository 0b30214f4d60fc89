"""Measures of a correction: metrics, histograms, checks of the data. No decision depends on it. Words: docs/design.md."""
