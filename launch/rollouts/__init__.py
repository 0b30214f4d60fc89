"""Rollout batches on their way from the engines to every rank."""
