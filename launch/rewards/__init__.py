"""From a prompt, a response, a label and a record to a number: rules, the processes that they run in, and errors.

``worker.py`` and what it imports know neither torch nor Megatron, so that a worker starts in a fraction of a second.
"""
