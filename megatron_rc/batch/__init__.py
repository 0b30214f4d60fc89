"""A whole rollout batch: its decisions and its measures, through the same three collectives to one result.

``docs/design.md`` begins with the words and symbols that are used here.
"""
