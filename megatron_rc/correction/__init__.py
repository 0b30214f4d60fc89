"""The decisions of a correction: from log-probs to weights, accepted mask and denominators."""
