"""A rollout batch on a rank: micro-batches, rewards, advantages and metrics."""
