"""Compare a program's own correction with ours, on random batches, inside that program's environment.

    python -m megatron_rc.adaptors.check verl|slime|nemo_rl|megatron_lm [--seeds 1] [--allow-left-out]

Both correct the same batches: whole, and ours also on two ranks that hold parts of them (processes on this machine,
with gloo; no GPU is needed). Prints what is equal, what differs, and by how much.

Exit codes: 0 all results are equal up to rounding, 1 a result differs, 2 the program cannot be called here, or a part
of the comparison is left out because the program lacks it here (0 with --allow-left-out).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from megatron_rc.adaptors.check.comparison import Comparison, report

HOSTS = ("verl", "slime", "nemo_rl", "megatron_lm")
UNUSABLE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the report, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rc.adaptors.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("host", choices=HOSTS, help="Program whose own functions are called.")
    parser.add_argument("--seeds", type=int, default=1, help="Number of random batches; default: 1.")
    parser.add_argument(
        "--allow-left-out",
        action="store_true",
        help="End with 0 although a part of the comparison is left out (Megatron-LM's loss without megatron.rl).",
    )
    args = parser.parse_args(argv)
    module = importlib.import_module(f"megatron_rc.adaptors.check.{args.host}")
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: give 1 or more")

    compared: list[Comparison] = []
    failure = None
    try:
        importlib.import_module(module.NEEDS)
        for seed in range(args.seeds):
            for comparison in module.comparisons(seed):
                compared.append(comparison)
    except ImportError as problem:
        failure = f"{problem}: run this in an environment in which {module.NEEDS} can be imported"
    except Exception as problem:  # whatever the host's functions raise
        failure = f"{args.host} could not be called: {type(problem).__name__}: {problem}"
    if failure is not None:
        # What was compared before it failed is not lost.
        sys.stdout.write("".join(f"{comparison.line()}\n" for comparison in compared))
        sys.stderr.write(f"{failure}\n")
        return UNUSABLE

    left_out = module.left_out() if hasattr(module, "left_out") else ()
    text, code = report(args.host, compared, left_out)
    sys.stdout.write(text)
    if code == 0 and left_out and not args.allow_left_out:
        sys.stderr.write("a part of the comparison is left out: install what it names, or pass --allow-left-out\n")
        return UNUSABLE
    return code


if __name__ == "__main__":
    sys.exit(main())
