"""Checks of steps, batches and weight syncs, and the conditions that end a run."""
