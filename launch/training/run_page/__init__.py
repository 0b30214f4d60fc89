"""One HTML page of a run: what was run, how it went, and its curves."""
