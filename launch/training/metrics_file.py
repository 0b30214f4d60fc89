"""``metrics.jsonl``: a run's numbers, one flat JSON object a line, each on the disk before the next step is made."""

from __future__ import annotations

import json
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from megatron_rc.launch.set_aside import set_aside

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """Rows are appended one at a time; none of them stays in memory.

    A run from the start keeps an older file under another name. A resumed run goes on with the file: rows of steps that
    it makes again stay until its own first row, which takes their place in one move. So whenever a run is killed, no
    row is lost, and none is there twice.

    Args:
        path: of the file.
        iteration: optimizer steps that lie behind.

    Raises:
        ValueError: a resumed run cannot read the file.
    """

    def __init__(self, path: Path, iteration: int) -> None:
        self.path, self.iteration = path, iteration
        self._file: TextIO | None = None
        if path.exists():
            _require_readable(path) if iteration else set_aside(path)

    def write(self, row: dict[str, float]) -> None:
        """Append a row, and wait until it is on the disk."""
        line = json.dumps(row) + "\n"
        if self._file is None:
            if self.path.is_file() and not all(map(self._stays, _lines(self.path))):
                self._replace_with_kept(line)
                line = ""
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(line)
        _to_disk(self._file)

    def close(self) -> None:
        """Nothing more is written."""
        # What did not reach the disk was an error when its row was written.
        with suppress(OSError):
            if self._file is not None:
                self._file.close()

    def _stays(self, line: str) -> bool:
        """Whether a line is whole, and of a step that lies behind."""
        row = _parsed(line)
        return line.endswith("\n") and row is not None and row["step"] <= self.iteration

    def _replace_with_kept(self, line: str) -> None:
        """A new file of the rows that stay and this one, in the place of the old file."""
        partial = self.path.with_name(f"{self.path.name}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(kept for kept in _lines(self.path) if self._stays(kept))
            file.write(line)
            _to_disk(file)
        partial.replace(self.path)


def read_rows(path: Path) -> Iterator[dict[str, float]]:
    """The rows of a file one by one, without a last one that was cut off when the run was killed.

    Of a row that somebody has changed by hand, what is no number is left out.
    """
    for row in filter(None, map(_parsed, _lines(path))):
        yield {name: value for name, value in row.items() if isinstance(value, (int, float))}


def last_evaluation(path: Path, step: int) -> int:
    """The newest evaluation that a file holds up to a step; −1: none."""
    rows = read_rows(path) if path.is_file() else ()
    evaluated = (int(row["step"]) for row in rows if any(name.startswith("eval/") for name in row))
    return max((found for found in evaluated if found <= step), default=-1)


def summarize(rows: Iterable[dict[str, float]], window: int) -> dict[str, tuple[float, list[float]]]:
    """The first value of every metric, and its last ones, as many as ``window`` says."""
    first: dict[str, float] = {}
    last: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=window))
    for row in rows:
        for name, value in row.items():
            first.setdefault(name, value)
            last[name].append(value)
    return {name: (value, list(last[name])) for name, value in first.items()}


def _require_readable(path: Path) -> None:
    """Now, while the other ranks can hear of it: what counts on from its rows reads them on rank 0 alone."""
    if not path.is_file():  # a pipe would be waited for
        raise ValueError(
            f"{path}, which the run goes on with, is no regular file: move it away, or choose another --run-name"
        )
    try:
        deque(_lines(path), maxlen=0)
    except OSError as error:
        raise ValueError(
            f"{path}, which the run goes on with, cannot be read ({error.strerror}): make it readable, or choose "
            "another --run-name"
        ) from error


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def _parsed(line: str) -> dict[str, float] | None:
    """The row of a line, if it is one."""
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _to_disk(file: TextIO) -> None:
    file.flush()
    os.fsync(file.fileno())
