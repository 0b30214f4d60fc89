"""From a template and data to one self-contained HTML page."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def filled(template: str, data: Any) -> str:
    """The page's text: it needs no other file and no network.

    Args:
        template: HTML with ``@STYLE@``, ``@DRAWING@`` (JavaScript) and ``@DATA@`` where these go.
        data: what JSON can say. Whatever a string of it holds stays a string: nothing ends the element that it is in.
    """
    # The data come last: what they hold is not looked through.
    for place, name in (("@STYLE@", "style.css"), ("@DRAWING@", "drawing.js")):
        template = template.replace(place, files("megatron_rc.replay").joinpath(name).read_text(encoding="utf-8"))
    return template.replace("@DATA@", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))
