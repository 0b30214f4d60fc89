"""Rewards: a rule makes a number from a prompt, a response, a label and a record, in processes of its own.

``worker.py`` and its imports know neither torch nor Megatron, so that a worker starts in a fraction of a second.
"""
