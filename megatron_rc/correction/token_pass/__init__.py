"""The one pass over the local tokens."""
