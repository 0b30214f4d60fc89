"""Paths of the checkout and of the folders that are imported."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The folders beside megatron_rc/ that links of the same names in it lead to.
LINKED = ("parallel", "launch", "configs")
# Files that a wheel is built from.
SOURCES = ("megatron_rc", *LINKED, "setup.py", "pyproject.toml", "README.md", "LICENSE")
# Entries of a checkout that commands make.
_MADE = (".git", ".venv*", "runs", "sums", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")


def copy_checkout(folder):
    """Copy the checkout with its links, uncommitted changes included, into a new folder."""
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*_MADE))
