"""The words of ``python -m megatron_rc.launch.report``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.parser import Parser

_METRICS = "metrics.jsonl"


def parse_report(argv: Sequence[str]) -> Path:
    """The run's folder.

    Raises:
        ConfigurationError: it is none, or holds no metrics that can be read.
    """
    parser = Parser(
        prog="python -m megatron_rc.launch.report",
        description="Write report.html, a page of a run that opens in a browser, into the run's folder.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="the run's folder: runs/NAME")
    folder: Path = parser.parse_args(list(argv)).folder
    if not os.access(folder / _METRICS, os.R_OK):
        raise ConfigurationError(
            f"{folder} holds no {_METRICS} that can be read: name the folder of a run, as runs/count_up"
        )
    return folder
