"""Rollouts as records: their fields, checks and files."""
