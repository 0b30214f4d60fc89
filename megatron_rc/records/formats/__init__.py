"""Rollouts in the formats of other programs."""
