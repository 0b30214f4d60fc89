"""What the site has beside what its Markdown files say: it is read from the code when ``make docs`` builds.

docs/launching.md has comments ``<!-- made by ... -->`` in the place of lists that would be out of date as soon as they
were written. On GitHub the page says where else the lists can be read. Each row of the table in docs/api.md becomes a
section with the docstrings of its names, and the tables of docs/index.md the table of contents.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from megatron_rc.launch.flags.parser import build_parser
from megatron_rc.launch.flags.torchrun import torchrun_parser

ROOT = Path(__file__).resolve().parents[1]
# Commands whose flags are not the launcher's.
COMMANDS = ("launch.attribute", "launch.export", "launch.report", "replay", "doctor", "adaptors.check")
_MARK = re.compile(r"^<!-- made by (\w+) -->$", flags=re.MULTILINE)
_LINK = re.compile(r"^\| \[([^\]]+)\]\(([\w./-]+\.md)\)", flags=re.MULTILINE)
# The table of docs/api.md, and a row of it: a part of the library, and the public names of this part.
_API_TABLE = re.compile(r"^\| part \| names \|\n\|---\|---\|\n((?:\|.*\n)+)", flags=re.MULTILINE)
_API_ROW = re.compile(r"^\| (.+?) \| (.+) \|$", flags=re.MULTILINE)
_NAME = re.compile(r"`(megatron_rc(?:\.\w+)+)`")


def completed(name: str, text: str) -> str:
    """A page of the site, with what is read from the code.

    Args:
        name: of the page below the checkout, without ``.md``.
        text: the page's Markdown.
    """
    if name == "docs/index":
        return with_contents(text)
    if name == "docs/api":
        return _API_TABLE.sub(lambda match: "\n".join(_api_sections(match[1])), text)
    return _MARK.sub(lambda match: "\n".join(_MAKERS[match.group(1)]()), text)


def with_contents(text: str) -> str:
    """The front page, with the site's table of contents: what each of its sections links to, in that order."""
    pieces = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return pieces[0] + "".join(f"{section}\n{_toctree(section)}\n" for section in pieces[1:])


def _toctree(section: str) -> str:
    title = section.partition("\n")[0].removeprefix("## ")
    pages = [f"{text} <{path.removesuffix('.md')}>" for text, path in _LINK.findall(section)]
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```"])


@functools.cache
def api_names() -> dict[str, str]:
    """Every name of docs/api.md, with the module that the page says it is imported from."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    return {path.rpartition(".")[2]: path for path in _NAME.findall("".join(_API_TABLE.findall(text)))}


def _api_sections(rows: str) -> Iterator[str]:
    """A section for each row of the table, with what Sphinx is asked for each of its names."""
    for title, names in _API_ROW.findall(rows):
        yield f"## {title}\n"
        for path in _NAME.findall(names):
            yield f"{documented(path)}\n"


def documented(path: str) -> str:
    """What Sphinx is asked for a public name."""
    module, _, name = path.rpartition(".")
    public_object = getattr(importlib.import_module(module), name)
    if not isinstance(public_object, type):
        return f"```{{eval-rst}}\n.. autofunction:: {path}\n```"
    return f"```{{eval-rst}}\n.. autoclass:: {path}\n   :members:\n```"


def flags() -> Iterator[str]:
    """Every flag of the launcher by group, then the other commands' help."""
    for parser in (torchrun_parser(), build_parser()):
        for group in parser._action_groups:
            actions = [action for action in group._group_actions if action.option_strings and action.dest != "help"]
            if actions:
                yield f"### {group.title}\n"
                for action in actions:
                    yield from _flag(parser, action)
    yield "### Other commands\n"
    for name in COMMANDS:
        yield f"#### {name.replace('.', ': ')}\n\n```text\n{help_of(f'megatron_rc.{name}')}```\n"


def _flag(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    """A flag with all its names; what it takes stands behind the first."""
    first, *others = [text for text in action.option_strings if not (text.startswith("--") and "_" in text)]
    value = parser._get_formatter()._format_args(action, (action.metavar or action.dest).upper())
    yield f"````{{option}} {', '.join([f'{first} {value}'.strip(), *others])}\n"
    help = parser._get_formatter()._expand_help(action)
    kind = getattr(action.type, "__name__", "") if action.nargs != 0 else ""
    if kind in ("int", "float"):
        help += f" ({'a whole number' if kind == 'int' else 'a number'})"
    yield f"{_plain(help)}\n````\n"


def _plain(text: str) -> str:
    """Text in which nothing is Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>$|#~])", r"\\\1", " ".join(text.split()))


def help_of(module: str) -> str:
    """What the command prints for ``--help``."""
    printed = io.StringIO()
    command = importlib.import_module(module)
    if hasattr(command, "__path__"):  # a package
        command = importlib.import_module(f"{module}.__main__")
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        command.main(["--help"])
    return printed.getvalue()


def launch_files() -> Iterator[str]:
    """Every launch file as it is; what it is for stands in its first lines."""
    for path in sorted((ROOT / "configs" / "launch").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        yaml.safe_load(text)
        yield f"### {path.stem}\n\n```yaml\n{text}```\n"


_MAKERS: dict[str, Callable[[], Iterator[str]]] = {"flags": flags, "launch_files": launch_files}
