"""Write the HTML page of an existing run: ``python -m megatron_rc.launch.report runs/NAME``.

A run writes its page when it ends; this command serves for a run that was killed or still goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_rc.launch.flags.commands import parse_report
from megatron_rc.launch.train_ppo import on_one_cpu
from megatron_rc.launch.training.reporting.run_page.page import PAGE, write_page


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page and print its path; ends with 2 for a folder without metrics, 1 if the page cannot be written."""
    with on_one_cpu():
        folder = parse_report(sys.argv[1:] if argv is None else argv)
        try:
            sys.stdout.write(f"report {write_page(folder)}\n")
        except OSError as error:
            words = f"{folder / PAGE} could not be written ({error.strerror}): make room, or copy {folder}"
            raise ValueError(words) from error


if __name__ == "__main__":
    main()
