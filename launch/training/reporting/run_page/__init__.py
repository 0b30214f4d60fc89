"""The HTML page of a run: its settings, its curves and the doctor's verdict."""
