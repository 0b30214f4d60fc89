"""Rollouts as other programs write them."""
