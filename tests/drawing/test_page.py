"""A page: it needs nothing from elsewhere, and no text can leave its place."""

import re
from html.parser import HTMLParser

from megatron_rc.drawing import page
from megatron_rc.drawing.charts import Chart, Curve, draw_curves

HOSTILE = '</table><script>alert(1)</script><!-- {x} {0} \u2028 &amp; "'


class Reader(HTMLParser):
    """Tags, addresses and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.addresses = []
        self.texts = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href") and value[:1] != "#"]

    def handle_data(self, data):
        self.texts.append(data)


def made():
    curve = Curve(HOSTILE, x=[1, 2], y=[1.0, 2.0])
    chart = Chart(HOSTILE, HOSTILE, lambda axes: draw_curves(axes, [curve]))
    parts = [page.paragraph(HOSTILE), page.table([HOSTILE], [[HOSTILE], [1.5]]), page.lines_of(HOSTILE)]
    return page.page_of(HOSTILE, [page.section(HOSTILE, *parts), page.charts([chart])])


def test_text_stays_text():
    reader = Reader(made())
    assert "script" not in reader.tags
    # Title of the page (twice), of the section, of the chart; paragraph, two cells, lines, note, label of the curve.
    assert "".join(reader.texts).count(HOSTILE) >= 9


def test_a_page_needs_nothing_from_elsewhere():
    text = made()
    reader = Reader(text)
    assert reader.addresses == []
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    assert "@import" not in text
    assert "url(http" not in text
    assert reader.tags.count("svg") == 1


def test_a_page_is_written_as_a_whole_with_any_text(tmp_path):
    path = tmp_path / "page.html"
    page.write_page(path, page.page_of("half \ud800", []))
    assert "half \\ud800" in path.read_text(encoding="utf-8")
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
