"""Flags and launch files, and which combinations work."""
