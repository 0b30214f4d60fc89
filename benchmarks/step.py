"""What the correction costs in a real run: step times with it and without it, in turns, in one call.

    python benchmarks/step.py [--config configs/launch/count_up.yaml] [--nproc 4] [--rounds 3] [--steps 30]

Prints medians over all steps but the first five of each launch, in seconds and as a ratio. Without correction both
policies are measured all the same: it is the preset ``disabled``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PHASES = ("sync", "rollout", "plan", "update")
CORRECTION = ("rollout-correction-", "rollout-is", "rollout-rs")
WARM_UP = 5


def without_correction(config: Path, folder: Path) -> Path:
    """The same launch file with the preset that corrects nothing."""
    lines = [line for line in config.read_text(encoding="utf-8").splitlines() if not line.startswith(CORRECTION)]
    path = folder / "disabled.yaml"
    path.write_text("\n".join([*lines, "rollout-correction-preset: disabled"]), encoding="utf-8")
    return path


def launch(config: Path, processes: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """The metrics of each step of one launch."""
    words = ["--nproc-per-node", str(processes), "--config", str(config), "--run-name", "benchmark"]
    command = [sys.executable, "-m", "megatron_rc.launch", *words, f"--train-iters={steps}", f"--runs-dir={folder}"]
    subprocess.run(command, check=True, capture_output=True)
    lines = (folder / "benchmark" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    """Run both in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/launch/count_up.yaml"), help="launch file")
    parser.add_argument("--nproc", type=int, default=4, help="processes")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each variant")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each launch")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {"corrected": args.config, "disabled": without_correction(args.config, folder)}
        rows: dict[str, list[dict[str, float]]] = {variant: [] for variant in files}
        for _ in range(args.rounds):
            for variant, path in files.items():
                rows[variant] += launch(path, args.nproc, args.steps, folder)[WARM_UP:]
    sys.stdout.write(f"{'phase':<10}{'corrected':>12}{'disabled':>12}{'ratio':>8}\n")
    for phase in PHASES:
        one, other = (statistics.median(row[f"perf/{phase}_seconds"] for row in rows[variant]) for variant in rows)
        sys.stdout.write(f"{phase:<10}{one:>12.4f}{other:>12.4f}{one / other:>8.2f}\n")


if __name__ == "__main__":
    main()
