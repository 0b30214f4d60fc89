"""Compares the effects of several corrections on recorded rollouts."""
