"""Charts that matplotlib draws: each as SVG for a page, several together as one PNG picture.

matplotlib is imported when a chart is drawn: it takes half a second, and is no requirement of the library.
"""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Curves with fewer points have markers, because a line of one point is invisible.
_FEW_POINTS = 20
# Values whose largest is this many times their smallest are drawn on a logarithmic axis, if the chart allows it.
_WIDE_RANGE = 30.0
# Without a date equal charts are equal files, and without addresses a page names no other.
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.fontsize": 8,
    "svg.hashsalt": "megatron_rc",  # equal charts are equal files
    "svg.fonttype": "none",  # text stays text: it can be searched, and is short
    "text.parse_math": False,  # a $ in a name starts no formula
}


@dataclass(frozen=True)
class Chart:
    """A chart with its explanation.

    Attributes:
        title: title with the unit.
        note: one or two sentences below the title of a page's chart; a picture leaves them out.
        draw: function that draws into matplotlib's axes.
    """

    title: str
    note: str
    draw: Callable[[Any], None]


@dataclass(frozen=True)
class Curve:
    """One line of a chart, and the band around it.

    Attributes:
        label: name in the legend.
        x: places on the horizontal axis, in rising order.
        y: the values, one for each place.
        low: lower edge of the band at each place; None: no band.
        high: upper edge of the band.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def draw_curves(axes: Any, curves: Sequence[Curve], *, x_label: str = "step", scale: str = "linear") -> None:
    """Draw curves over steps.

    Args:
        axes: matplotlib's axes.
        curves: the curves; none at all are drawn as the words "nothing measured".
        x_label: title of the horizontal axis.
        scale: of the vertical axis: ``linear``; ``log``, which draws values up to 0 at the lower edge; or ``wide``,
            which is logarithmic if all values are positive and differ by orders of magnitude.
    """
    for curve in curves:
        marker = "o" if len(curve.x) < _FEW_POINTS else None
        (line,) = axes.plot(curve.x, curve.y, linewidth=1.2, marker=marker, markersize=3, label=_printable(curve.label))
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, alpha=0.25, color=line.get_color(), linewidth=0)

    values = [value for curve in curves for value in (*curve.y, *(curve.low or ()), *(curve.high or ()))]
    finite = [value for value in values if math.isfinite(value)]
    has_wide_range = bool(finite) and 0 < _WIDE_RANGE * min(finite) < max(finite)
    positive = [value for value in finite if value > 0]
    if positive and (scale == "log" or (scale == "wide" and has_wide_range)):
        axes.set_yscale("log", nonpositive="clip")
        label_plainly(axes.yaxis, min(positive), max(positive))

    axes.set_xlabel(x_label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if finite:
        axes.legend(loc="best")
    else:
        axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center", color="gray")


def label_plainly(axis: Any, lowest: float, highest: float) -> None:
    """Write plain numbers, some in each decade, beside a logarithmic axis."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    if highest < 10 * lowest:
        axis.set_major_locator(MaxNLocator(5))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest < 300 * lowest else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def svg_of(chart: Chart) -> str:
    """Return a chart as an ``<svg>`` element, without its title and note. Raises ImportError without matplotlib."""
    with _drawing() as new_figure:
        figure = new_figure(figsize=(6.0, 3.2))
        chart.draw(figure.subplots())
        text = _saved(figure, format="svg", transparent=True, metadata=_NO_METADATA).decode("utf-8")
    return text[text.index("<svg") :]


def picture_of(title: str, charts: Sequence[Chart]) -> bytes:
    """Return charts as one PNG picture, two in a row. Raises ImportError without matplotlib."""
    rows = math.ceil(len(charts) / 2)
    with _drawing() as new_figure:
        figure = new_figure(figsize=(11.0, 3.3 * rows))
        figure.suptitle(_printable(title), fontweight="bold")
        grid = figure.subplots(rows, 2, squeeze=False)
        for axes, chart in zip(grid.flat, charts, strict=False):
            axes.set_title(chart.title)
            chart.draw(axes)
        for axes in list(grid.flat)[len(charts) :]:
            axes.set_axis_off()
        return _saved(figure, format="png", dpi=110)


@contextmanager
def _drawing() -> Iterator[Callable[..., Any]]:
    """Context with matplotlib in our style; yields its class of figures. Its warnings of missing glyphs are silent."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # a home that cannot be written is no news
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError("drawing needs matplotlib, which is not installed: pip install matplotlib") from error

    def new_figure(figsize: tuple[float, float]) -> Any:
        return Figure(figsize=figsize, layout="constrained")

    with warnings.catch_warnings(), matplotlib.rc_context(_STYLE):
        warnings.simplefilter("ignore", UserWarning)
        yield new_figure


def _saved(figure: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, **options)
    return file.getvalue()


def _printable(text: str) -> str:
    """Text without lone surrogates, which no font and no file has."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
