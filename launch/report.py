"""Write the HTML page of an existing run: ``python -m megatron_rc.launch.report runs/NAME``.

A run writes its page when it ends; this command serves for a run that was killed or still goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.commands import parse_report
from megatron_rc.launch.standard_error import say_error
from megatron_rc.launch.train_ppo import FAILURE, USAGE_ERROR
from megatron_rc.launch.training.run_page.page import PAGE, write_page


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page and print its path; ends with 2 for a folder without metrics, 1 if the page cannot be written."""
    try:
        folder = parse_report(sys.argv[1:] if argv is None else argv)
    except ConfigurationError as error:
        say_error(str(error))
        sys.exit(USAGE_ERROR)
    try:
        path = write_page(folder)
    except OSError as error:
        sys.stderr.write(
            f"error: {folder / PAGE} could not be written ({error.strerror}): make room, or copy {folder}\n"
        )
        sys.exit(FAILURE)
    sys.stdout.write(f"report {path}\n")


if __name__ == "__main__":
    main()
