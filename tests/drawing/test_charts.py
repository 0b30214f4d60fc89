"""Charts: what matplotlib draws of curves, and that a missing matplotlib is named."""

import builtins
import math
import xml.etree.ElementTree as ElementTree

import pytest
from matplotlib.figure import Figure

from megatron_rc.drawing.charts import Chart, Curve, draw_curves, picture_of, svg_of


def axes_with(*curves, **options):
    axes = Figure().subplots()
    draw_curves(axes, curves, **options)
    return axes


def chart_of(*curves, **options):
    return Chart("a title", "a note", lambda axes: draw_curves(axes, curves, **options))


def test_a_curve_has_its_values_its_label_and_its_band():
    axes = axes_with(Curve("mean", x=[1, 2, 3], y=[4.0, 5.0, 4.5], low=[3.0, 4.0, 3.5], high=[5.0, 6.0, 7.0]))
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[1, 4], [2, 5], [3, 4.5]]
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == (3, 7)
    assert axes.get_legend_handles_labels()[1] == ["mean"]


@pytest.mark.parametrize(
    ("values", "scale", "expected"),
    [
        ([0.5, 2.0], "linear", "linear"),
        ([0.5, 2.0], "log", "log"),
        ([0.0, 2.0], "log", "log"),
        ([0.0, -2.0], "log", "linear"),
        ([1.0, 29.0], "wide", "linear"),
        ([1.0, 31.0], "wide", "log"),
        ([0.0, 31.0], "wide", "linear"),
        ([], "log", "linear"),
    ],
    ids=str,
)
def test_an_axis_is_logarithmic_if_it_is_asked_to_be_and_can_be(values, scale, expected):
    axes = axes_with(Curve("weights", x=range(len(values)), y=values), scale=scale)
    assert axes.get_yscale() == expected


@pytest.mark.parametrize("values", [[0.97, 1.03], [0.5, 2.0], [0.02, 3.0], [1e-20, 1e9]], ids=str)
def test_a_logarithmic_axis_has_plain_numbers(values):
    axes = axes_with(Curve("weights", x=[1, 2], y=values), scale="log")
    axes.figure.draw_without_rendering()
    low, high = axes.get_ylim()
    shown = [tick.label1.get_text() for tick in axes.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert 2 <= len(shown) <= 16
    assert all(math.isfinite(float(text.replace("−", "-"))) for text in shown)


def test_nothing_measured_is_said():
    assert [text.get_text() for text in axes_with().texts] == ["nothing measured"]


@pytest.mark.parametrize("label", ["a < b & c", "$\\x", "half \ud800", "日本"])
def test_a_chart_is_svg_whatever_its_labels_hold(label):
    chart = chart_of(Curve(label, x=[1, 2], y=[1.0, math.nan]))
    text = svg_of(chart)
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "matplotlib.org" not in text
    assert svg_of(chart) == text, "equal charts are equal files"


def test_a_picture_has_two_charts_in_a_row():
    charts = [chart_of(Curve("y", x=[1], y=[1.0]))] * 3
    picture = picture_of("a $ run \ud800", charts)
    assert picture.startswith(b"\x89PNG")
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert 1.5 < width / height < 1.8


def test_a_missing_matplotlib_is_named(monkeypatch):
    real_import = builtins.__import__

    def without_matplotlib(name, *others):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real_import(name, *others)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        svg_of(chart_of())
