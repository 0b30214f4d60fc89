"""Standard error that survives its reader, and escapes control characters."""

from __future__ import annotations

import errno
import io
import logging
import sys
import traceback
from types import TracebackType
from typing import Any

_DESCRIPTOR = 2
_LAID_OUT = "\n\t"


class _Unread(io.FileIO):
    """A file that drops all output once the reader is gone (``… 2>&1 | head``, a closed terminal)."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            return memoryview(content).nbytes


def outlast_reader() -> None:
    """Let writes to ``sys.stderr`` survive a closed pipe or terminal, and escape tracebacks; for a process's beginning.

    Ctrl-C also ends the reader of ``… 2>&1 | tee FILE``, and a closed terminal is a signal to save: the rank that
    writes must live on to save.
    """
    raw = io.BufferedWriter(_Unread(_DESCRIPTOR, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, "backslashreplace", line_buffering=True)
    sys.excepthook = _write_traceback


def _write_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(visible("".join(traceback.format_exception(kind, error, trace))))


def visible(text: str) -> str:
    """Return the text with control characters escaped, so that foreign text cannot move or clear a terminal."""
    hidden = {char for char in text if not char.isprintable()} - set(_LAID_OUT)
    return text.translate({ord(char): char.encode("unicode_escape").decode("ascii") for char in hidden})


def say_error(words: str) -> None:
    """Write the line ``error: …`` for the user, with control characters escaped."""
    sys.stderr.write(f"error: {visible(words)}\n")
    sys.stderr.flush()


class VisibleFormatter(logging.Formatter):
    """Log lines with control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return visible(super().format(record))
