"""Texts of ``--help``, one screen of flags for new users, and of ``--help-all``, every flag by group."""

from __future__ import annotations

import copy

from megatron_rc.launch.flags.parser import Parser, build_parser, long_options
from megatron_rc.launch.flags.torchrun import torchrun_parser

_USAGE = "python -m megatron_rc.launch [--nproc-per-node N] [--config FILE] [flags]"
_ABOUT = (
    "PPO with Rollout Correction on Megatron-Core. Flags have Megatron-LM's names. A first run, on 4 "
    "processes: python -m megatron_rc.launch --nproc-per-node 4 --config count_up"
)
_MORE = "All flags, by group: --help-all. What they do together: docs/launching.md (megatron-rc docs: its folder)."
# Flags by title, with a shorter text if the flag's own is long.
_NEEDED: dict[str, dict[str, str | None]] = {
    "processes": {
        "nproc-per-node": "processes on this machine, or auto: one for each GPU",
        "nnodes": "number of machines; see docs/runs.md",
        "dry-run": "check, and print the needs of each rank; start nothing",
        "print-config": "check, and print all flags as a launch file",
    },
    "the run": {
        "config": "launch file (YAML), or the name of one in configs/launch",
        "train-iters": "optimizer steps of the run",
        "runs-dir": None,
        "save": None,
        "save-interval": "optimizer steps between checkpoints",
        "load": "go on from the newest checkpoint in this folder",
        "eval-interval": "optimizer steps between evaluations",
    },
    "the model and its layout": {
        "load-hf": "start from this Hugging Face model",
        "tensor-model-parallel-size": "TP: ranks that share each layer",
        "pipeline-model-parallel-size": "PP: pipeline stages, each with some layers",
        "context-parallel-size": "CP: ranks that share each sequence",
        "seq-length": "tokens of a prompt with its response",
    },
    "task and rewards": {
        "task": "built-in task: count_up, reasoning_gym:NAME",
        "prompt-data": "your own prompts instead (docs/data.md)",
        "reward": "rule that scores responses (docs/tasks.md)",
    },
    "rollouts and their correction": {
        "rollout-engine": "engine that samples (docs/rollouts.md)",
        "grpo-prompts-per-step": None,
        "grpo-group-size": None,
        "max-response-length": "most tokens of a response",
        "rollout-correction-preset": "a published correction (docs/presets.md)",
    },
    "optimizer": {"lr": None, "global-batch-size": "sequences of one optimizer step", "micro-batch-size": None},
}


def short_help() -> str:
    """Text with the flags that a new user needs."""
    known = long_options(build_parser()) | long_options(torchrun_parser())
    parser = Parser(usage=_USAGE, description=_ABOUT, epilog=_MORE, add_help=False)
    for title, names in _NEEDED.items():
        group = parser.add_argument_group(title)
        for name, text in names.items():
            shown = copy.copy(known[name])
            shown.option_strings = [f"--{name}"]
            shown.help, shown.choices = text or shown.help, None
            shown.metavar = shown.metavar if isinstance(shown.metavar, str) else None
            if shown.metavar is None and shown.nargs != 0:
                shown.metavar = "N" if shown.type is int else name.rpartition("-")[2].upper()
            group._add_action(shown)
    return parser.format_help()


def whole_help() -> str:
    """Text with every flag, by group."""
    return f"{torchrun_parser().format_help()}\n{build_parser().format_help()}"
