"""Packages that a check needs."""

import importlib.util

import pytest


def require(*packages):
    """Skip without one of these packages."""
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ImportError:
            spec = None
        if spec is None:
            pytest.skip(f"{package} is not installed")
