"""Download what a machine with a GPU and without a package index needs: ``python -m tests.gpu.wheels DIR [NAME ...]``.

The list is ``wheels.txt``: packages that do not come with PyTorch and Triton, for Python 3.12 on x86-64 Linux.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.machine import end, say

LIST = Path(__file__).with_name("wheels.txt")
PYTHON = "3.12"
USAGE = 2
# pip takes these names as they are, and none stands for an older one.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 27, 28, 31, 34, 35, 39)]
PLATFORMS += ["manylinux1_x86_64", "manylinux2014_x86_64"]


def requirements(names: Sequence[str]) -> list[str]:
    """The lines of the list, or those of these packages alone."""
    lines = [line for line in LIST.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    pinned = {line.partition("==")[0]: line for line in lines}
    unknown = [name for name in names if name not in pinned]
    if unknown:
        end(f"{', '.join(unknown)} is not in {LIST.name}: leave it out, or add it there", USAGE)
    return [pinned[name] for name in names] if names else lines


def main(arguments: Sequence[str]) -> None:
    """Fill the folder, and say how large it is."""
    if not arguments or not arguments[0]:
        end("name a folder for the wheels: make wheels WHEELS=DIR", USAGE)
    folder = Path(arguments[0])
    pinned_lines = requirements(arguments[1:])
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    done = subprocess.run([*command, *pinned_lines], check=False)
    if done.returncode:
        end(f"pip could not download all wheels (exit {done.returncode}): see its message above", done.returncode)
    files = list(folder.glob("*.whl"))
    size = sum(file.stat().st_size for file in files) / 2**20
    say(f"{len(files)} wheels for Python {PYTHON} in {folder}, {size:.1f} MiB")


if __name__ == "__main__":
    main(sys.argv[1:])
