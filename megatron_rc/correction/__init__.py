"""Weights, masks, denominators and metrics from log-probs that lie on many ranks.

``docs/design.md`` begins with the words and symbols that all modules use: ρ, m and m', n_i, G and D₀, valid and usable.
"""
