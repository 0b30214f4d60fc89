"""``--dry-run``: batches, memory and collectives of a run, found in one process that starts no rank.

The settings are checked by the code of a real run. The model of each pipeline stage is built and run on tensors that
have a shape and no memory. The correction's collectives are traced in groups whose other ranks do not exist.
"""
