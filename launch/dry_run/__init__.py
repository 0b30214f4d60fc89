"""``--dry-run``: what a run would do on its ranks, found in one process without any of them.

The settings are checked as a run checks them; the model of each pipeline stage is built and gone through with tensors
that have shapes and no memory; the collectives of the correction are traced in groups that have no other ranks.
"""
