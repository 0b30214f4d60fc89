"""``--dry-run``: batches, memory and ranks of a run, found in one process that starts no rank.

The settings are checked by the code of a real run. The memory of a rank comes from formulas.
"""
