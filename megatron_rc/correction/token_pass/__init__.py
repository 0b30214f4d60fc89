"""The one pass over the local tokens.

``docs/design.md`` begins with the words and symbols that are used here.
"""
