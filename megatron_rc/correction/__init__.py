"""The decisions of a correction: from log-probs to weights, accepted mask and denominators.

``docs/design.md`` begins with the words and symbols that are used here.
"""
