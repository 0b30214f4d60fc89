"""Measures of a correction: metrics, histograms, checks of the data. No decision depends on it.

``docs/design.md`` begins with the words and symbols that are used here.
"""
