"""Which of a run's many numbers the terminal shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class Column(NamedTuple):
    """A metric in the line of a step.

    Attributes:
        title: in the header.
        metric: its name; of the correction's the usual one.
        width: that no number exceeds.
        digits: after the point, of what lies between 0 and 1; None: three digits that count.
    """

    title: str
    metric: str
    width: int
    digits: int | None = None


# By importance: the last ones are left out where a terminal is narrow.
COLUMNS = (
    Column("reward", "reward/mean", 8),
    Column("kl", "rollout_corr/kl", 8),
    Column("ess", "rollout_corr/rollout_is_eff_sample_size", 5, digits=3),
    Column("rejected", "rollout_corr/rollout_rs_masked_fraction", 8, digits=4),
    Column("grad norm", "grad_norm", 9),
)
# Behind the seconds.
MACHINE = (
    Column("tok/s", "perf/tokens_per_second", 6),
    Column("GiB", "perf/peak_memory_gib", 6),
)
_SECONDS, _LEFT, _GAP = 6, 8, "  "
TABLE = (
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
AVERAGED = 10
_USUAL, _SHARE = "rollout_corr/", "_share"


def usual_names(row: dict[str, float], prefix: str) -> dict[str, float]:
    """The metrics of a row, those of the correction under their usual names whatever ``--metric-prefix`` says.

    The prefix of the oldest dashboards has a name that says it twice: ``mismatch/mismatch_kl``.
    """
    if prefix == _USUAL:
        return row
    return {
        _USUAL + name.removeprefix(prefix).removeprefix("mismatch_") if name.startswith(prefix) else name: value
        for name, value in row.items()
    }


def header(total: int, columns: int) -> str:
    """What the columns of :func:`line` are; as many as fit into ``columns``."""
    cells = [f"{'step':>{_step_width(total)}}", *(f"{column.title:>{column.width}}" for column in COLUMNS)]
    cells += [f"{'s/step':>{_SECONDS}}", *(f"{column.title:>{column.width}}" for column in MACHINE)]
    return _cut([*cells, f"{'left':>{_LEFT}}"], columns)


def line(step: int, total: int, metrics: Mapping[str, float], *, seconds: float, left: float, columns: int) -> str:
    """An optimizer step in one line, which no number makes wider.

    Args:
        step: its number.
        total: steps of the run.
        metrics: of the step; a minus sign stands for one that is not there.
        seconds: that it took.
        left: seconds until the end of the run.
        columns: most characters of the line.
    """
    cells = [f"{f'{step}/{total}':>{_step_width(total)}}", *(_cell(column, metrics) for column in COLUMNS)]
    cells += [narrow(seconds, _SECONDS), *(_cell(column, metrics) for column in MACHINE)]
    return _cut([*cells, f"{_duration(left):>{_LEFT}}"], columns)


def narrow(value: float, width: int) -> str:
    """A number to three digits, or to as many as fit, right-justified.

    Six characters hold every float, with a minus sign seven.
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
    """The first cells, as many as fit; never less than the first."""
    text = cells[0]
    for cell in cells[1:]:
        if len(text) + len(_GAP) + len(cell) > columns:
            break
        text += _GAP + cell
    return text


def _duration(seconds: float) -> str:
    """As 1:23, 4:05:06 or 12d 3h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 100:
        return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours}h" if days < 1000 else f"{min(days, 9_999_999)}d"


def table(summary: dict[str, tuple[float, list[float]]]) -> str:
    """First values, and means of the last ones; of an evaluation the last one alone."""
    lines = [f"{'metric':<44}{'first step':>12}{f'last {AVERAGED} steps':>15}"]
    for name in TABLE:
        if name in summary:
            first, values = summary[name]
            last = values[-1:] if name.startswith("eval/") else values
            lines.append(f"{name:<44}{first:>12.4g}{_mean(last):>15.4g}")
    return "\n".join([*lines, *_machine(summary)])


def _machine(summary: dict[str, tuple[float, list[float]]]) -> list[str]:
    """Where the time of the last steps went, and the most memory that a rank has needed."""
    shares = {
        name.removeprefix("perf/").removesuffix(_SHARE): _mean(values)
        for name, (_, values) in summary.items()
        if name.startswith("perf/") and name.endswith(_SHARE)
    }
    found = [", ".join(f"{phase} {share:.0%}" for phase, share in shares.items())] if shares else []
    if "perf/peak_memory_gib" in summary:
        size, rank = (summary[name][1][-1] for name in ("perf/peak_memory_gib", "perf/peak_memory_rank"))
        found.append(f"peak memory {size:.3g} GiB, of rank {rank:.0f}")
    return [f"\n{'; '.join(found)}"] if found else []


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
