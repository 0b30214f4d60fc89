"""Checks of steps, batches, weight syncs and run folders, counts of left-out steps, and conditions that end a run."""
