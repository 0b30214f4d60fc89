"""One HTML page without scripts, which needs no network: sections of text, tables and charts.

The functions return HTML. All text that they are given is escaped; only ``section`` and ``page_of`` join HTML.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_rc.drawing.charts import Chart, svg_of

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ margin: 0; background: #f7f7f5; color: #16181d; font: 14px/1.45 system-ui, sans-serif; }}
main {{ max-width: 1500px; margin: 0 auto; padding: 28px 20px 60px; }}
h1 {{ font-size: 22px; margin: 0 0 4px; }}
h2 {{ font-size: 15px; margin: 0 0 2px; }}
p, li, td {{ overflow-wrap: anywhere; }}
p {{ margin: 0 0 10px; max-width: 100ch; }}
.note {{ color: #5d636e; }}
section, figure {{ background: #fff; border: 1px solid #dfe1e5; border-radius: 8px; padding: 16px; margin: 16px 0; }}
section {{ overflow-x: auto; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)); gap: 16px; }}
.charts figure {{ margin: 0; }}
svg {{ display: block; width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 4px 12px; text-align: left; vertical-align: top; border-bottom: 1px solid #ebecef; }}
td {{ white-space: pre-wrap; max-width: 620px; }}
pre {{ overflow-x: auto; }}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""


def page_of(title: str, parts: Iterable[str]) -> str:
    """Return a page with a title and parts of HTML, of the functions below."""
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def write_page(path: Path, text: str) -> None:
    """Write a page, so that nobody sees half of it. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    # Names may hold lone surrogates, which no UTF-8 file has.
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    partial.replace(path)


def section(title: str, *parts: str) -> str:
    """Return parts of HTML in a frame with a title."""
    return "\n".join(["<section>", f"<h2>{html.escape(title)}</h2>", *parts, "</section>"])


def paragraph(text: str, *, is_note: bool = False) -> str:
    """Return text as a paragraph; a note is gray."""
    opening = '<p class="note">' if is_note else "<p>"
    return f"{opening}{html.escape(text)}</p>"


def lines_of(text: str) -> str:
    """Return text with its own line ends and spaces, such as a settings file."""
    return f"<pre>{html.escape(text)}</pre>"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; the cells are shown as ``str`` shows them."""
    lines = ["<table>", _table_row("th", header)]
    lines += [_table_row("td", row) for row in rows]
    return "\n".join([*lines, "</table>"])


def _table_row(tag: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in cells)}</tr>"


def charts(drawn: Iterable[Chart]) -> str:
    """Return charts beside each other, each with its title and note. Raises ImportError without matplotlib."""
    figures = []
    for chart in drawn:
        caption = f"<h2>{html.escape(chart.title)}</h2>{paragraph(chart.note, is_note=True)}"
        figures.append(f"<figure>{caption}{svg_of(chart)}</figure>")
    return "\n".join(['<div class="charts">', *figures, "</div>"])
