"""Prompts from the user's files (``--prompt-data``, ``--eval-data``): reading, checking, order."""
