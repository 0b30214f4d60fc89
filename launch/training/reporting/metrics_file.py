"""``metrics.jsonl``: a run's metrics, one flat JSON object per line, on disk before the next step begins."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_rc.launch.set_aside import set_aside

METRICS_FILE = "metrics.jsonl"
# The step of a row, also of one that another program wrote; parsing all rows would take 20 times as long.
_STEP = re.compile(rb'\s*{.*?"step"\s*:\s*(\d+)\s*[,}]')


class MetricsFile:
    """Appends rows; keeps none of them in memory.

    A new run renames an older file. A resumed run continues the file. Rows of steps that it makes again stay until it
    writes its own first row, which replaces them. OSError at the start if the file of a resumed run cannot be read.
    """

    def __init__(self, path: Path, iteration: int) -> None:
        self.path = path
        self.iteration = iteration
        self._is_continued = iteration > 0
        if path.exists() and self._is_continued:
            with path.open("rb") as file:
                file.read(1)
        elif path.exists():
            set_aside(path)

    def write(self, row: dict[str, float]) -> None:
        """Append a row, and wait until it is on disk; a removed file is made again. Raises OSError."""
        if self._is_continued and self.path.is_file():
            os.truncate(self.path, self._bytes_to_keep())
        self._is_continued = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Opened for each row, so that no row goes into a file that was removed or replaced under way.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _bytes_to_keep(self) -> int:
        """Bytes up to the end of the last complete row of a step before this run; what follows is made again."""
        bytes_to_keep = 0
        end = 0
        with self.path.open("rb") as file:
            for line in file:
                end += len(line)
                match = _STEP.match(line)
                if match and int(match[1]) <= self.iteration and line.endswith(b"\n"):
                    bytes_to_keep = end
        return bytes_to_keep


def read_rows(path: Path, having: str = "") -> Iterator[dict[str, float]]:
    """Yield the rows of a file, none if it does not exist; skips broken lines, and values that are no numbers.

    Only lines that contain ``having`` are parsed, which takes most of the time.
    """
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from map(_numbers, filter(None, (_parsed(line) for line in file if having in line)))


def read_thinned(path: Path, most: int, *, last: int) -> tuple[int, Iterator[dict[str, float]]]:
    """Read at most ``most`` rows of a file, evenly spaced, and in addition the last lines and all evaluations.

    Returns:
        The number k (only each k-th row is read), and an iterator over the rows as of :func:`read_rows`.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.is_file():
        return 1, iter(())
    with path.open("rb") as file:
        num_lines = sum(1 for _ in file)
    every = max(1, -(-num_lines // most))

    def rows() -> Iterator[dict[str, float]]:
        with path.open(encoding="utf-8", errors="replace") as file:
            for index, line in enumerate(file):
                is_wanted = index % every == 0 or index >= num_lines - last or '"eval/' in line
                row = _parsed(line) if is_wanted else None
                if row is not None:
                    yield _numbers(row)

    return every, rows()


def last_evaluation(path: Path, step: int) -> int:
    """Step of the newest evaluation in the file up to ``step``; −1 if there is none."""
    rows = (row for row in read_rows(path, '"eval/') if any(name.startswith("eval/") for name in row))
    return max((int(row["step"]) for row in rows if row["step"] <= step), default=-1)


def _numbers(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


def _parsed(line: str) -> dict[str, float] | None:
    """Row of a line; None if the line holds no row."""
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
