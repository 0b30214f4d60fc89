"""How Sphinx builds the site: ``make docs``. The source directory is the checkout, so that links work as on GitHub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.pages import api_names, completed  # noqa: E402
from megatron_rc import __version__  # noqa: E402

project = "megatron_rc"
version = release = __version__
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md", "examples/**.md", "benchmarks/**.md"]
exclude_patterns = [".*", "build", "runs", "tests", "sums"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
]

# As GitHub reads the same files.
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

# Docstrings are in Google's style; types stand in the signature, one argument a line.
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
maximum_signature_line_length = 88
# What stands in other programs' documents: they are not read, so that the site is built without a network.
# The others are what a constructor holds that is not called from outside, and letters that stand for types.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|collections\.abc|argparse|dataclasses|os|pathlib)\..*|InitVar"),
    ("py:class", r"megatron_rc\..*\.(Block|CorrectionInputs|OpenCounts|OutOfRange|Progress)"),
    ("py:class", r"megatron_rc\..*\.(LossStatistics|Part|PlannedStep|PromptSums|SequenceMeasures|SequenceSums|Source)"),
    (
        "py:class",
        r"megatron_rc\..*\.(SequenceDecisions|StalenessScale|StepSums|TokenMeasures|TokenTotals|WeightLevel|_\w+)",
    ),
    ("py:class", r"(megatron_rc\..*\.)?(BatchHeader|StepHeader|[CLNV])|Tensor"),
]

# Two dashes are two dashes: they begin a flag.
smartquotes = False

html_theme = "furo"
html_title = f"megatron_rc {release}"
html_show_sourcelink = False


def setup(app: Any) -> None:
    """What Sphinx is told beside the settings."""
    app.connect("source-read", _complete)
    app.connect("missing-reference", _public_name)
    app.connect("build-finished", _front_page)
    app.connect("autodoc-process-docstring", _no_type, priority=400)


def _complete(app: Any, name: str, source: list[str]) -> None:
    source[0] = completed(name, source[0])


def _public_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """A link to a name of docs/api.md, where it stands without its module or with the one that defines it."""
    module, _, name = node.get("reftarget", "").rpartition(".")
    listed = api_names().get(name)
    if node.get("refdomain") != "py" or listed is None or not f"{module}.".startswith((".", "megatron_rc.")):
        return None
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", listed, node, content)


def _no_type(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Begin a property with a comment: Napoleon would take what stands before its first colon for a type."""
    if what in ("property", "attribute"):
        lines[:0] = ["..", ""]


def _front_page(app: Any, failure: Exception | None) -> None:
    """``index.html`` beside the folders leads to the front page, which is among the documents."""
    if failure is None and app.builder.format == "html":
        text = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=docs/index.html">'
        (Path(app.outdir) / "index.html").write_text(f"{text}\n", encoding="utf-8")
