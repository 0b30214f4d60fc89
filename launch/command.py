"""``megatron-rc COMMAND``: a short name for each module that ``python -m`` starts."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import megatron_rc

_COMMANDS = {
    "launch": ("megatron_rc.launch", "check the flags, then start a training run"),
    "dry-run": ("megatron_rc.launch", "show batches, memory and places of the ranks of a run; starts nothing"),
    "doctor": ("megatron_rc.doctor", "find faults in a run's log-probs, propose a correction"),
    "replay": ("megatron_rc.replay", "compare the effects of corrections on a recorded batch"),
    "attribute": ("megatron_rc.launch.attribute", "find the layers that make engine and trainer differ"),
    "report": ("megatron_rc.launch.report", "draw a run: report.html and summary.png in its folder"),
    "check-engine": ("megatron_rc.launch.check_engine", "compare an engine with the trainer before a run"),
    "export": ("megatron_rc.launch.export", "write a checkpoint as a Hugging Face directory"),
    "docs": (None, "print the folder of the pages; docs/NAME.md in a message is NAME.md there"),
}


def main(words: Sequence[str] | None = None) -> None:
    """Run the command. The process ends with its exit code, or with 2 for an unknown command."""
    name, *rest = (sys.argv[1:] if words is None else words) or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(_usage())
        return
    if name == "--version":
        sys.stdout.write(f"megatron-rc {megatron_rc.__version__}\n")
        return
    if name not in _COMMANDS:
        sys.stderr.write(f"error: {name} is not one of the commands {', '.join(_COMMANDS)}\n")
        sys.exit(2)
    module, _ = _COMMANDS[name]
    if module is None:
        sys.stdout.write(f"{Path(megatron_rc.__file__).parent / 'docs'}\n")
        return
    sys.argv[1:] = ["--dry-run", *rest] if name == "dry-run" else rest
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _usage() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in _COMMANDS.items()]
    return "\n".join(["usage: megatron-rc COMMAND [flags]; megatron-rc COMMAND --help has its flags", "", *lines, ""])
