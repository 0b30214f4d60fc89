"""Where the checkout is, and which folders of it are imported."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The folders beside megatron_rc/, where links with their names lead to them.
LINKED = ("parallel", "launch", "configs")
# What a wheel is built from.
SOURCES = ("megatron_rc", *LINKED, "setup.py", "pyproject.toml", "README.md", "LICENSE")
