"""Comparison of a host's own correction with ours, inside the host's environment; see docs/adaptors.md."""
