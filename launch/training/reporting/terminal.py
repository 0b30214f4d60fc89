"""Progress of a run on standard error: a line for each step, a bar if it is a terminal, and the table at the end."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from statistics import fmean
from typing import NamedTuple

from tqdm import tqdm

from megatron_rc.launch.standard_error import visible
from megatron_rc.launch.training.reporting.series import Series

# Seconds between two lines: faster steps are not all shown.
_QUIET_SECONDS = 2.0
_HEADER_EVERY = 20  # lines
_COLUMNS = 100  # width if the output has none


class Column(NamedTuple):
    """Column of a metric in the line of a step."""

    title: str  # title in the header
    metric: str  # usual name of the metric
    width: int  # characters of the column
    digits: int | None = None  # decimal places, for values between 0 and 1; None: three significant digits


# In order of importance: a narrow terminal shows the first ones only.
COLUMNS = (
    Column("reward", "reward/mean", 8),
    Column("kl", "rollout_corr/kl", 8),
    Column("ess", "rollout_corr/rollout_is_eff_sample_size", 5, digits=3),
    Column("rejected", "rollout_corr/rollout_rs_masked_fraction", 8, digits=4),
    Column("grad norm", "grad_norm", 9),
    Column("s/step", "seconds", 6),
    Column("tok/s", "perf/tokens_per_second", 6),
    Column("GiB", "perf/peak_memory_gib", 6),
)
_LEFT, _GAP = 8, "  "
_ROWS = (
    "reward/mean",
    "eval/exact_match",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/rollout_is_raw_max",
    "rollout_corr/rollout_rs_masked_fraction",
    "policy/entropy",
    "grad_norm",
    "perf/tokens_per_second",
)
IN_TABLE = (*_ROWS, "perf/")  # all metrics that the table needs, as collect() takes them
AVERAGED = 10


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


def header(total: int, columns: int) -> str:
    """Titles of the columns of :func:`line`, as many as fit into ``columns``."""
    titles = (f"{column.title:>{column.width}}" for column in COLUMNS)
    return _cut([f"{'step':>{_step_width(total)}}", *titles, f"{'left':>{_LEFT}}"], columns)


def line(step: int, total: int, metrics: Mapping[str, float], *, seconds: float, left: float, columns: int) -> str:
    """One line about an optimizer step, with fixed widths of its columns; ``-`` is shown for a missing metric.

    ``left`` is the number of seconds until the end of the run, ``columns`` the largest width of the line.
    """
    cells = (_cell(column, {**metrics, "seconds": seconds}) for column in COLUMNS)
    return _cut([f"{f'{step}/{total}':>{_step_width(total)}}", *cells, f"{_duration(left):>{_LEFT}}"], columns)


def narrow(value: float, width: int) -> str:
    """A number with three significant digits, or as many as fit, right-justified.

    Every float fits into six characters, or seven with a minus sign.
    """
    if abs(value) >= 999.5 and len(f"{value:.0f}") <= width:
        return f"{value:>{width}.0f}"
    found = ""
    for digits in (3, 2, 1):
        # 1e-05 and 1e+05 are shown as 1e-5 and 1e5.
        found = re.sub(r"e(-?)\+?0*", r"e\1", f"{value:.{digits}g}")
        if len(found) <= width:
            break
    return f"{found:>{width}}"


def _cell(column: Column, metrics: Mapping[str, float]) -> str:
    value = metrics.get(column.metric)
    if value is None:
        return f"{'-':>{column.width}}"
    if column.digits is not None:
        return f"{value:>{column.width}.{column.digits}f}"
    return narrow(value, column.width)


def _step_width(total: int) -> int:
    return max(len("step"), len(f"{total}/{total}"))


def _cut(cells: list[str], columns: int) -> str:
    """Join the first cell and as many more as fit."""
    text = cells[0]
    for cell in cells[1:]:
        if len(text) + len(_GAP) + len(cell) > columns:
            break
        text += _GAP + cell
    return text


def _duration(seconds: float) -> str:
    """A duration such as 1:23, 4:05:06 or 12d 3h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 100:
        return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours}h" if days < 1000 else f"{min(days, 9_999_999)}d"


def table(series: Mapping[str, Series]) -> str:
    """Table with first values and means of the last values; for evaluations, only the last value."""
    lines = [f"{'metric':<44}{'first step':>12}{f'last {AVERAGED} steps':>15}"]
    for name in _ROWS:
        if name in series:
            values = series[name].values
            last = fmean(values[-1:] if name.startswith("eval/") else values[-AVERAGED:])
            lines.append(f"{name:<44}{values[0]:>12.4g}{last:>15.4g}")
    return "\n".join([*lines, *_machine(series)])


def _machine(series: Mapping[str, Series]) -> list[str]:
    """Line with each phase's share of the last steps' time, and the peak memory of a rank."""
    shares = {name: fmean(one.values[-AVERAGED:]) for name, one in series.items() if name.endswith("_share")}
    words = (f"{name.removeprefix('perf/').removesuffix('_share')} {share:.0%}" for name, share in shares.items())
    found = [", ".join(words)] if shares else []
    if "perf/peak_memory_gib" in series:
        size, rank = (series[name].values[-1] for name in ("perf/peak_memory_gib", "perf/peak_memory_rank"))
        found.append(f"peak memory {size:.3g} GiB, of rank {rank:.0f}")
    return [f"\n{'; '.join(found)}"] if found else []
