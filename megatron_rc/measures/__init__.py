"""Measures of a correction: metrics, histograms, checks of the data; no decision needs one. Words: docs/design.md."""
