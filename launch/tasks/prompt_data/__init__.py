"""Prompts from the user's own files: what the rows say, which ones fit, and in which order they come."""
