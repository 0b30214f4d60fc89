"""``metrics.jsonl``: a run's metrics, one flat JSON object per line, on disk before the next step begins."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO

from megatron_rc.launch.set_aside import set_aside

METRICS_FILE = "metrics.jsonl"
_BLOCK = 1 << 20


class MetricsFile:
    """Appends rows; keeps none of them in memory.

    A new run renames an older file. A resumed run continues the file, or raises ValueError if it cannot be read. Its
    first row overwrites the rows of steps that it repeats. Until then they stay, so that a killed run loses no row and
    doubles none. Only the file's end is read, back to the last row that stays.
    """

    def __init__(self, path: Path, iteration: int) -> None:
        self.path, self.iteration = path, iteration
        self._file: TextIO | None = None
        if path.exists():
            _require_readable(path) if iteration else set_aside(path)

    def write(self, row: dict[str, float]) -> None:
        """Append a row, and wait until it is on disk."""
        line = json.dumps(row) + "\n"
        if self._file is None:
            if self.path.is_file():
                self._write_behind_kept(line)
                line = ""
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(line)
        _to_disk(self._file)

    def close(self) -> None:
        """Close the file."""
        # A write that failed was reported when its row was written.
        with suppress(OSError):
            if self._file is not None:
                self._file.close()

    def _write_behind_kept(self, line: str) -> None:
        """Overwrite the first row of a repeated step, then truncate the file.

        A run that is killed in between leaves part of a line, and the old rows of later steps.
        """
        with self.path.open("rb+") as file:
            file.seek(self._kept(file))
            file.write(line.encode())
            _to_disk(file)
            file.truncate()

    def _kept(self, file: BinaryIO) -> int:
        """Bytes up to the end of the last complete row of a step before this run."""
        for begin, line in _lines_backwards(file):
            row = _parsed(line)
            if line.endswith(b"\n") and row is not None and row["step"] <= self.iteration:
                return begin + len(line)
        return 0


def read_rows(path: Path) -> Iterator[dict[str, float]]:
    """Yield the rows of a file; skips broken lines, and values that are no numbers."""
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from map(_numbers, filter(None, map(_parsed, file)))


def read_rows_backwards(path: Path, having: bytes = b"") -> Iterator[dict[str, float]]:
    """Yield the rows of :func:`read_rows` in reverse order, only from lines that contain ``having``."""
    with path.open("rb") as file:
        lines = (line for _, line in _lines_backwards(file) if having in line)
        yield from map(_numbers, filter(None, map(_parsed, lines)))


def last_evaluation(path: Path, step: int) -> int:
    """Step of the newest evaluation in the file up to ``step``; −1 if there is none."""
    rows = read_rows_backwards(path, b'"eval/') if path.is_file() else ()
    evaluated = (int(row["step"]) for row in rows if any(name.startswith("eval/") for name in row))
    return next((found for found in evaluated if found <= step), -1)


def _require_readable(path: Path) -> None:
    """Raise ValueError if the file cannot be read; done at the start, when all ranks can still agree on the error."""
    if not path.is_file():  # reading a pipe would block
        raise ValueError(
            f"{path}, which the resumed run continues, is no regular file: move it away, or choose another --run-name"
        )
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 1))
            file.read(1)
    except OSError as error:
        raise ValueError(
            f"{path}, which the resumed run continues, cannot be read ({error.strerror}): make it readable, or choose "
            "another --run-name"
        ) from error


def _lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line with its newline) from the last line of a file to the first."""
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
    """Row of a line; None if the line holds no row."""
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
