"""Advantages from rewards: by the responses to a prompt, by discounted returns, by a critic.

``docs/design.md`` begins with the words that are used here, ``docs/presets.md`` has the formulas and their sources.
"""
