"""How far a run is, on standard error: a bar in a terminal, a line now and then in a file or a pipe."""

from __future__ import annotations

import os
import sys
import time

from tqdm import tqdm

_QUIET_SECONDS = 2.0
# Of a terminal that does not say how wide it is.
_COLUMNS = 100


class Progress:
    """The optimizer steps made, of all.

    Args:
        total: steps of the run.
        done: those that lie behind.
    """

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done = total, done
        # A dumb terminal cannot write over what it has shown.
        terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        # Rows are said here because tqdm shows nothing in a terminal that says it has none, as under `script`.
        self.bar = tqdm(
            total=total, initial=done, unit="step", file=sys.stderr, disable=not terminal, ncols=_columns(), nrows=24
        )
        self.last_line = float("-inf")

    def step(self, words: str) -> None:
        """One more step is made."""
        self.done += 1
        if not self.bar.disable:
            self.bar.ncols = _columns()
            self.bar.set_postfix_str(words, refresh=False)
            self.bar.update()
            return
        now = time.monotonic()
        if now - self.last_line > _QUIET_SECONDS or self.done == self.total:
            self.say(f"step {self.done}/{self.total}  {words}")
            self.last_line = now

    def say(self, text: str) -> None:
        """A line of text that does not break the bar."""
        tqdm.write(text, file=sys.stderr)
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
