"""Find faults in a run's log-probs, and propose a correction that fits its numbers.

    python -m megatron_rc.doctor RUN|BATCH|FILE [--json]

RUN is a run's folder or its metrics.jsonl, a folder of TensorBoard's event files, or trainer_state.json. BATCH is a
recorded rollout batch (.safetensors, .jsonl, .pt, .npz), or the folder of --save-rollouts. FILE has the metrics of
another program as JSON, JSON lines or CSV.

Exit codes: 0 no fault found, 1 a fault found, 2 the input cannot be used, 3 the input has too few numbers to judge.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_rc.settings.levels import LEVELS


def main(argv: Sequence[str] | None = None) -> int:
    """Read the input, judge it, print the report. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rc.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="RUN|BATCH|FILE", type=Path, help="Input, as described above.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of text.")
    parser.add_argument(
        "--dialect",
        metavar="NAME",
        help="Program whose settings are proposed: megatron_rc, verl, slime or nemo-rl. Default: the program that "
        "wrote the input.",
    )
    parser.add_argument(
        "--rollout-is",
        choices=(*LEVELS, "none"),
        help="Level of the weights in exported metrics. Default: read from config.yaml, or from the metrics.",
    )
    args = parser.parse_args(argv)
    from megatron_rc.doctor.inputs import read_evidence
    from megatron_rc.doctor.programs import OWN, SETTINGS_OF
    from megatron_rc.doctor.report import UNUSABLE, as_json, examine, in_words
    from megatron_rc.parallel.arguments import one_of

    try:
        if args.dialect is not None:
            one_of("--dialect", args.dialect, (OWN, *SETTINGS_OF))
        evidence = read_evidence(args.path)
        if args.rollout_is is not None:
            evidence = evidence.of_level(args.rollout_is)
        report = examine(evidence if args.dialect is None else replace(evidence, program=args.dialect))
    except (ValueError, ImportError) as problem:
        sys.stderr.write(f"{problem}\n")
        return UNUSABLE
    sys.stdout.write((json.dumps(as_json(report), indent=1) if args.json else in_words(report)) + "\n")
    return report.code


if __name__ == "__main__":
    sys.exit(main())
