"""Standard error that outlasts its reader, and obeys nobody: a run whose words nobody reads any more goes on."""

from __future__ import annotations

import errno
import io
import logging
import sys
from typing import Any

_DESCRIPTOR = 2
_LAID_OUT = "\n\t"


class _Unread(io.FileIO):
    """Where the reader is gone (``… 2>&1 | head``, a closed terminal), what is written vanishes, as if it were read."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            return memoryview(content).nbytes


def outlast_reader() -> None:
    """From now on a closed pipe or terminal is no error of who writes to ``sys.stderr``; for a process's own beginning.

    Otherwise rank 0, which alone speaks, would end with an error that the other ranks cannot know of.
    """
    raw = io.BufferedWriter(_Unread(_DESCRIPTOR, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, "backslashreplace", line_buffering=True)


def visible(text: str) -> str:
    """The text with control characters as escapes: what others wrote must not move or clear a terminal."""
    return "".join(char if char.isprintable() or char in _LAID_OUT else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def say_error(words: str) -> None:
    """A line for the user, ``error: …``; whatever it repeats is visible."""
    sys.stderr.write(f"error: {visible(words)}\n")
    sys.stderr.flush()


class VisibleFormatter(logging.Formatter):
    """Log lines whose control characters are escapes."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return visible(super().format(record))
