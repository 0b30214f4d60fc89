"""Texts of ``--help``, one screen of flags for new users, and of ``--help-all``, every flag by group."""

from __future__ import annotations

import copy
import re

from megatron_rc.launch.flags.parser import PARSER, Parser, build_parser, long_options
from megatron_rc.launch.flags.torchrun import torchrun_parser

_USAGE = "python -m megatron_rc.launch [--nproc-per-node N] [--config FILE] [flags]"
_ABOUT = (
    "PPO with Rollout Correction on Megatron-Core. Flags have Megatron-LM's names. A first run, on 4 "
    "processes: python -m megatron_rc.launch --nproc-per-node 4 --config count_up"
)
_MORE = (
    "All flags, by group: --help-all. Prompts and rewards: docs/data.md, engines: docs/rollouts.md, "
    "corrections: docs/presets.md, the rest: docs/launching.md (megatron-rc docs: their folder)."
)
_NEEDED = {
    "processes": "nproc-per-node nnodes dry-run print-config",
    "the run": "config train-iters runs-dir save save-interval load eval-interval",
    "the model and its layout": "load-hf tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size "
    "seq-length",
    "task and rewards": "task prompt-data reward",
    "rollouts and their correction": "rollout-engine grpo-prompts-per-step grpo-group-size max-response-length "
    "rollout-correction-preset",
    "optimizer": "lr global-batch-size micro-batch-size",
}


def short_help() -> str:
    """Text of ``--help``: the flags that a new user needs, each with the first clause of its help text."""
    options = long_options(PARSER) | long_options(torchrun_parser())
    parser = Parser(usage=_USAGE, description=_ABOUT, epilog=_MORE, add_help=False)
    for title, names in _NEEDED.items():
        group = parser.add_argument_group(title)
        for name in names.split():
            shown = copy.copy(options[name])  # the parser's own flag stays as it is
            shown.option_strings = [f"--{name}"]
            shown.choices = None
            shown.help = re.split("[:;,] ", shown.help or "")[0]
            # One short word stands for the value: N, or the last word of the flag. A switch has no value.
            if not isinstance(shown.metavar, str):
                shown.metavar = None
            takes_value = shown.nargs != 0
            if shown.metavar is None and takes_value:
                shown.metavar = "N" if shown.type is int else name.rpartition("-")[2].upper()
            group._add_action(shown)
    return parser.format_help()


def whole_help() -> str:
    """Text with every flag, by group."""
    return f"{torchrun_parser().format_help()}\n{build_parser().format_help()}"
