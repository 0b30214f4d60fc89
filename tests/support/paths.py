"""Paths of the checkout and of the folders that are imported."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The folders beside megatron_rc/ that links of the same names in it lead to.
LINKED = ("parallel", "launch", "configs")
# Files that a wheel is built from.
SOURCES = ("megatron_rc", *LINKED, "setup.py", "pyproject.toml", "README.md", "LICENSE")
