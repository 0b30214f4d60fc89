"""Weights, masks, denominators and metrics from log-probs that lie on many ranks."""
