"""Standard error that outlasts its reader: a run whose words nobody reads any more goes on."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any

_DESCRIPTOR = 2


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
