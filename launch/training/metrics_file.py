"""``metrics.jsonl``: a run's numbers, one flat JSON object a line, each on the disk before the next step is made."""

from __future__ import annotations

import json
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO

from megatron_rc.launch.set_aside import set_aside

METRICS_FILE = "metrics.jsonl"
_BLOCK = 1 << 20


class MetricsFile:
    """Rows are appended one at a time; none of them stays in memory.

    A run from the start keeps an older file under another name. A resumed run goes on with the file: rows of steps that
    it makes again stay until its own first row, which is written over them. So whenever a run is killed, no row is
    lost, and none is there twice. Of the file only its tail is read, back to the last row that stays.

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
            if self.path.is_file():
                self._write_behind_kept(line)
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

    def _write_behind_kept(self, line: str) -> None:
        """Write a row over the first one that goes, then cut off the others.

        A run that is killed between the two leaves rows of later steps, as they were, and part of a line.
        """
        with self.path.open("rb+") as file:
            file.seek(self._kept(file))
            file.write(line.encode())
            _to_disk(file)
            file.truncate()

    def _kept(self, file: BinaryIO) -> int:
        """Bytes up to the end of the last whole row of a step that lies behind."""
        for begin, line in _lines_backwards(file):
            row = _parsed(line)
            if line.endswith(b"\n") and row is not None and row["step"] <= self.iteration:
                return begin + len(line)
        return 0


def read_rows(path: Path) -> Iterator[dict[str, float]]:
    """The rows of a file one by one, without a last one that was cut off when the run was killed.

    Of a row that somebody has changed by hand, what is no number is left out.
    """
    yield from map(_numbers, filter(None, map(_parsed, _lines(path))))


def read_rows_backwards(path: Path, having: bytes = b"") -> Iterator[dict[str, float]]:
    """The rows of :func:`read_rows` from the last one to the first, of those whose line has this text."""
    with path.open("rb") as file:
        lines = (line for _, line in _lines_backwards(file) if having in line)
        yield from map(_numbers, filter(None, map(_parsed, lines)))


def last_evaluation(path: Path, step: int) -> int:
    """The newest evaluation that a file holds up to a step; −1: none."""
    rows = read_rows_backwards(path, b'"eval/') if path.is_file() else ()
    evaluated = (int(row["step"]) for row in rows if any(name.startswith("eval/") for name in row))
    return next((found for found in evaluated if found <= step), -1)


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
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 1))
            file.read(1)
    except OSError as error:
        raise ValueError(
            f"{path}, which the run goes on with, cannot be read ({error.strerror}): make it readable, or choose "
            "another --run-name"
        ) from error


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def _lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(where it begins, a line with its end) from the last line of a file to the first."""
    begin, held = file.seek(0, os.SEEK_END), b""
    while begin:
        size = min(_BLOCK, begin)
        begin -= size
        file.seek(begin)
        held = file.read(size) + held
        end = len(held)
        while (found := held.rfind(b"\n", 0, end - 1)) >= 0:
            yield begin + found + 1, held[found + 1 : end]
            end = found + 1
        held = held[:end]
    if held:
        yield 0, held


def _numbers(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


def _parsed(line: str | bytes) -> dict[str, float] | None:
    """The row of a line, if it is one."""
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
