"""Progress of a run on standard error: a line for each logged step, a bar if it is a terminal, the table at the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from tqdm import tqdm

from megatron_rc.launch.standard_error import visible
from megatron_rc.launch.training.reporting.series import Series

AVERAGED = 10  # steps of the means at the end
TABLE_HEADER = ("metric", "first step", f"last {AVERAGED} steps")
_HEADER_EVERY = 20  # lines
_WIDTH = 9  # of a column; three significant digits of any usual number fit
_GAP = "  "
_UNKNOWN_WIDTH = 120  # characters of a line if the output is no terminal


class Column(NamedTuple):
    """Column of a metric in the line of a step."""

    title: str  # title in the header
    metric: str  # usual name of the metric
    form: str = ".3g"  # format of the value


# In order of importance: a narrow terminal shows the first ones only.
COLUMNS = (
    Column("reward", "reward/mean"),
    Column("kl", "rollout_corr/kl"),
    Column("ess", "rollout_corr/rollout_is_eff_sample_size", ".3f"),
    Column("rejected", "rollout_corr/rollout_rs_masked_fraction", ".4f"),
    Column("grad norm", "grad_norm"),
    Column("s/step", "seconds"),
    Column("tok/s", "perf/tokens_per_second", ".0f"),
    Column("GiB", "perf/peak_memory_gib"),
)
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


class Progress:
    """Shows the steps of a run, of which ``done`` were made before.

    A reader of standard error that goes away (``… 2>&1 | head``, a closed terminal) ends nothing: later lines are lost.
    """

    def __init__(self, total: int, done: int) -> None:
        self.total = total
        self.done = done
        self._done_before = done
        # A dumb terminal cannot redraw a line.
        has_bar = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            file=sys.stderr,
            disable=not has_bar,
            # tqdm's own measurement shows nothing in a terminal with 0 rows, such as under `script`.
            ncols=_width() - 1,
            nrows=24,
        )
        self._started = self._last_step = time.monotonic()
        self._num_lines = 0

    def step(self, metrics: Mapping[str, float], *, is_logged: bool = True) -> None:
        """Count one more step; if it is logged, show a line of its metrics under their usual names."""
        self.done += 1
        now = time.monotonic()
        seconds = now - self._last_step
        self._last_step = now
        if is_logged or self.done == self.total:
            if self._num_lines % _HEADER_EVERY == 0:
                self.say(header(self.total, _width()))
            seconds_a_step = (now - self._started) / (self.done - self._done_before)
            left = seconds_a_step * (self.total - self.done)
            self.say(line(self.done, self.total, {**metrics, "seconds": seconds}, left=left, width=_width()))
            self._num_lines += 1
        with suppress(OSError):
            self._bar.ncols = _width() - 1
            self._bar.update()

    def say(self, text: str) -> None:
        """Write a line of text above the bar."""
        with suppress(OSError):
            tqdm.write(visible(text), file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        """End the bar; more lines may follow."""
        with suppress(OSError):
            self._bar.close()


def _width() -> int:
    """Characters that fit into a line."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _UNKNOWN_WIDTH
    except (OSError, ValueError):  # no terminal, or no file at all
        return _UNKNOWN_WIDTH


def header(total: int, width: int) -> str:
    """Titles above the columns of :func:`line`."""
    return _row("step", total, [column.title for column in COLUMNS], "left", width)


def line(step: int, total: int, metrics: Mapping[str, float], *, left: float, width: int) -> str:
    """Return the line about an optimizer step; ``-`` stands for a missing metric.

    Args:
        step: the step's number.
        total: steps of the whole run.
        metrics: metrics under their usual names, and ``seconds``, the duration of the step.
        left: seconds until the end of the run.
        width: characters of the terminal; the columns that do not fit are left out.
    """
    cells = []
    for column in COLUMNS:
        value = metrics.get(column.metric)
        cells.append("-" if value is None else format(value, column.form))
    return _row(f"{step}/{total}", total, cells, tqdm.format_interval(left), width)


def _row(first: str, total: int, cells: list[str], last: str, width: int) -> str:
    begin = first.rjust(max(len("step"), len(f"{total}/{total}")))
    num_fitting = max((width - 1 - len(begin)) // (len(_GAP) + _WIDTH), 0)
    return _GAP.join([begin, *(f"{cell:>{_WIDTH}}" for cell in [*cells, last][:num_fitting])])


def table(series: Mapping[str, Series]) -> str:
    """Return the table at the end of a run, and a line about its machines."""
    lines = [f"{name:<44}{first:>12}{last:>15}" for name, first, last in [TABLE_HEADER, *table_rows(series)]]
    return "\n".join([*lines, *_machine(series)])


def table_rows(series: Mapping[str, Series]) -> list[tuple[str, str, str]]:
    """Return name, first value and mean of the last values of the main metrics; of evaluations the last value."""
    rows = []
    for name in _ROWS:
        if name in series and series[name].values:
            last = series[name].mean_of_last(1 if name.startswith("eval/") else AVERAGED)
            rows.append((name, f"{series[name].values[0]:.4g}", f"{last:.4g}"))
    return rows


def _machine(series: Mapping[str, Series]) -> list[str]:
    """Line with each phase's share of the last steps' time, and the peak memory of a rank."""
    shares = {
        name.removeprefix("perf/").removesuffix("_share"): phase.mean_of_last(AVERAGED)
        for name, phase in series.items()
        if name.startswith("perf/") and name.endswith("_share")
    }
    parts = [", ".join(f"{phase} {share:.0%}" for phase, share in shares.items())] if shares else []
    if "perf/peak_memory_gib" in series:
        size = series["perf/peak_memory_gib"].values[-1]
        rank = series["perf/peak_memory_rank"].values[-1]
        parts.append(f"peak memory {size:.3g} GiB, of rank {rank:.0f}")
    return [f"\n{'; '.join(parts)}"] if parts else []
