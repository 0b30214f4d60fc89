"""Fills a template of a self-contained HTML page."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def filled(template: str, data: Any) -> str:
    """HTML of a page that needs no other file and no network.

    The template has ``@STYLE@``, ``@DRAWING@`` (JavaScript) and ``@DATA@``. Strings in the data are escaped, so that no
    string can end the script element.
    """
    # Data last, so that placeholders inside of strings are not replaced.
    for place, name in (("@STYLE@", "style.css"), ("@DRAWING@", "drawing.js")):
        template = template.replace(place, files("megatron_rc.replay").joinpath(name).read_text(encoding="utf-8"))
    return template.replace("@DATA@", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))
