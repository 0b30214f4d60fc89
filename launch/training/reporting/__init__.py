"""Metrics of a run: files, boards, lines on the terminal, the page and the picture."""
