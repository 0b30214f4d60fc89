"""Flags and launch files, and which combinations work.

Whatever a user gives wrongly is a ConfigurationError, here and in every function of the launcher that reads it; their
docstrings do not repeat it.
"""
