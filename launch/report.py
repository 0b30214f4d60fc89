"""Draw an existing run: ``megatron-rc report runs/NAME`` writes its ``report.html`` and its ``summary.png``.

A run draws itself when it ends; this command serves for a run that was killed or still goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_rc.launch.flags.commands import parse_report
from megatron_rc.launch.train_ppo import on_one_cpu
from megatron_rc.launch.training.reporting.metrics_file import METRICS_FILE
from megatron_rc.launch.training.reporting.run_page import PAGE, PICTURE, draw_run, history_of


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page and the picture of a run, and print their paths.

    Exit codes: 2 if the folder has no metrics, 1 if a file cannot be read or written or a package is missing.
    ``on_one_cpu`` prints the error, and ends the process with the code.
    """
    with on_one_cpu():
        folder = parse_report(sys.argv[1:] if argv is None else argv)
        try:
            history, settings = history_of(folder)
        except OSError as error:
            raise ValueError(f"{folder / METRICS_FILE} could not be read ({error.strerror})") from error
        try:
            draw_run(folder, history, settings)
        except OSError as error:
            message = f"{folder / PAGE} could not be written ({error.strerror}): make room, or copy {folder}"
            raise ValueError(message) from error
        except ImportError as error:
            raise ValueError(str(error)) from error
        sys.stdout.write(f"report {folder / PAGE}\n")
        if history.series:
            sys.stdout.write(f"picture {folder / PICTURE}\n")


if __name__ == "__main__":
    main()
