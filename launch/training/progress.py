"""How far a run is, on standard error: a line a step, and in a terminal a bar below the lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from megatron_rc.launch.standard_error import visible
from megatron_rc.launch.training.shown import header, line

# Steps that are faster than this are not all shown.
_QUIET_SECONDS = 2.0
# Lines between two headers.
_HEADER_EVERY = 20
# Of what does not say how wide it is.
_COLUMNS = 100


class Progress:
    """The optimizer steps made, of all.

    Args:
        total: steps of the run.
        done: those that lie behind.
    """

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self._begun_at = total, done, done
        # A dumb terminal cannot write over what it has shown.
        terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        # Rows are said here because tqdm shows nothing in a terminal that says it has none, as under `script`.
        self.bar = tqdm(
            total=total, initial=done, unit="step", file=sys.stderr, disable=not terminal, ncols=_columns(), nrows=24
        )
        self._begun = self._last_step = time.monotonic()
        self._last_line, self._lines = float("-inf"), 0

    def step(self, metrics: Mapping[str, float]) -> None:
        """One more step is made: its metrics, those of the correction under their usual names."""
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
        """A line of text that does not break the bar."""
        tqdm.write(visible(text), file=sys.stderr)
        sys.stderr.flush()

    def close(self) -> None:
        """The bar stays as it is; more lines may follow."""
        self.bar.close()


def _columns() -> int:
    """Columns of a line that the terminal does not wrap."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return (columns or _COLUMNS) - 1
