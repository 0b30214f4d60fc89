"""Prompt files: JSON lines, Parquet, CSV, and folders of ``datasets``. Rows stay on disk until they are used."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable
from pathlib import Path

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks.prompt_data.rows import Row, parse_line
from megatron_rc.launch.tasks.prompt_data.tables import TABLES, Table

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# First bytes of other formats, with the remedy for the error.
_OTHER_FORMATS = {
    b"\x1f\x8b": "compressed by gzip: decompress it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: decompress it",
    b"BZh": "compressed by bzip2: decompress it",
    b"\xfd7zXZ": "compressed by xz: decompress it",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"PAR1": "in Parquet: give it a name that ends in .parquet",
    b"\xff\xfe": "in UTF-16: save it as UTF-8",
    b"\xfe\xff": "in UTF-16: save it as UTF-8",
}
Visit = Callable[[int, Row], None]


def open_rows(name: str, path: str, visit: Visit) -> JsonLines | Table:
    """Open a prompt file of the flag ``name``, and check each of its rows with ``visit``, which raises ValueError."""
    # Path.exists() raises OSError for a name that is too long; open() below reports it.
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise ConfigurationError(f"{name} {path} is no regular file, and every rank must read it: write it to one")
    is_table = os.path.isdir(path) or Path(path).suffix.lower() in TABLES
    rows: JsonLines | Table = Table(name, path, visit) if is_table else JsonLines(name, path, visit)
    if not len(rows):
        raise ConfigurationError(f"{name} {path} is empty: every prompt is one row")
    return rows


class JsonLines:
    """Rows of a file with one JSON object per line. Memory: eight bytes per line, its offset."""

    def __init__(self, name: str, path: str, visit: Visit) -> None:
        self.name = name
        self.path = path
        self._starts = array("Q", [0])
        digest = hashlib.blake2b(digest_size=8)
        try:
            with open(path, "rb") as file:
                self._state = self._state_of(file.fileno())
                blank = 0
                for number, line in enumerate(file, 1):
                    digest.update(line)
                    if not line.strip():
                        blank = blank or number
                        continue
                    # Empty lines are allowed at the end only.
                    self._read(blank or number, b"" if blank else line, visit)
                    self._starts.append(self._starts[-1] + len(line))
        except OSError as error:
            raise ConfigurationError(f"{name} {path} cannot be read: {error.strerror}") from error
        self.digest = digest.digest()

    def __len__(self) -> int:
        """Number of lines, without empty ones at the end."""
        return len(self._starts) - 1

    def row(self, index: int) -> Row:
        """Read one line."""
        begin, end = self._starts[index : index + 2]
        try:
            with open(self.path, "rb") as file:
                if self._state_of(file.fileno()) != self._state:
                    raise ConfigurationError(
                        f"{self.name} {self.path} has changed since the run began: start the run again"
                    )
                file.seek(begin)
                return self._read(index + 1, file.read(end - begin))
        except OSError as error:
            raise ConfigurationError(f"{self.name} {self.path} cannot be read any more: {error.strerror}") from error

    def where(self, index: int) -> str:
        """Name of a row for errors: flag, file and place in it."""
        return f"{self.name} {self.path}, line {index + 1}"

    def _read(self, number: int, line: bytes, visit: Visit | None = None) -> Row:
        try:
            row = parse_line(line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line)
            if visit is not None:
                visit(number - 1, row)
        except ValueError as error:
            if number == 1:
                self._refuse_other_formats(line)
            raise ConfigurationError(f"{self.where(number - 1)} {error}") from error
        return row

    def _refuse_other_formats(self, line: bytes) -> None:
        """Raise ConfigurationError if a first line that is no JSON object shows another file format."""
        other_format = next((words for begin, words in _OTHER_FORMATS.items() if line.startswith(begin)), None)
        text = line.strip()
        if text == b"[" or text.startswith(b"[{"):
            other_format = "a JSON array: write each of its objects on a line of its own (jq -c '.[]' FILE)"
        if text == b"{":
            other_format = "one JSON value over several lines: write each prompt as an object on a line of its own"
        if other_format is not None:
            raise ConfigurationError(f"{self.name} {self.path} is {other_format}")

    @staticmethod
    def _state_of(descriptor: int) -> tuple[int, int, int]:
        state = os.fstat(descriptor)
        return state.st_ino, state.st_size, state.st_mtime_ns
