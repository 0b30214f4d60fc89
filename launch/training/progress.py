"""Progress of a run on standard error: a line for each step, and a bar if it is a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from megatron_rc.launch.standard_error import visible
from megatron_rc.launch.training.shown import header, line

# Seconds between two lines: faster steps are not all shown.
_QUIET_SECONDS = 2.0
_HEADER_EVERY = 20  # lines
_COLUMNS = 100  # width if the output has none


class Progress:
    """Shows the steps of a run, of which ``done`` were made before."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self._begun_at = total, done, done
        # A dumb terminal cannot redraw a line.
        terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        # nrows is set, because tqdm shows nothing in a terminal with 0 rows, such as under `script`.
        self.bar = tqdm(
            total=total, initial=done, unit="step", file=sys.stderr, disable=not terminal, ncols=_columns(), nrows=24
        )
        self._begun = self._last_step = time.monotonic()
        self._last_line, self._lines = float("-inf"), 0

    def step(self, metrics: Mapping[str, float]) -> None:
        """Show one more step, from its metrics under their usual names."""
        self.done += 1
        now = time.monotonic()
        seconds, self._last_step = now - self._last_step, now
        if now - self._last_line > _QUIET_SECONDS or self.done == self.total:
            if self._lines % _HEADER_EVERY == 0:
                self.say(header(self.total, _columns()))
            left = (now - self._begun) / (self.done - self._begun_at) * (self.total - self.done)
            self.say(line(self.done, self.total, metrics, seconds=seconds, left=left, columns=_columns()))
            self._last_line, self._lines = now, self._lines + 1
        if not self.bar.disable:
            self.bar.ncols = _columns()
            self.bar.update()

    def say(self, text: str) -> None:
        """Write a line of text above the bar."""
        tqdm.write(visible(text), file=sys.stderr)
        sys.stderr.flush()

    def close(self) -> None:
        """End the bar; more lines may follow."""
        self.bar.close()


def _columns() -> int:
    """Characters that fit into a line of the terminal."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return (columns or _COLUMNS) - 1
