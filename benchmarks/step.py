"""What the correction costs in a real run, and what bypass mode saves: step times of three variants, in turns.

    python benchmarks/step.py [--config configs/launch/count_up.yaml] [--nproc 4] [--rounds 3] [--steps 30]

Prints medians over all steps but the first five of each launch, in seconds, and ratios to the run that the launch file
describes. Without correction both policies are measured all the same: it is the preset ``disabled``. Bypass mode keeps
the file's criteria and makes no forward-only pass. The last line is an optimizer step with its share of the plan.
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
VARIANTS = {
    "disabled": (CORRECTION, "rollout-correction-preset: disabled"),
    "bypass": (CORRECTION[:2], "rollout-correction-preset: bypass_ppo_clip"),
}
WARM_UP = 5


def variant(config: Path, name: str, folder: Path) -> Path:
    """The same launch file with another correction."""
    dropped, line = VARIANTS[name]
    kept = [line for line in config.read_text(encoding="utf-8").splitlines() if not line.startswith(dropped)]
    path = folder / f"{name}.yaml"
    path.write_text("\n".join([*kept, line]), encoding="utf-8")
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
        files = {"as launched": args.config} | {other: variant(args.config, other, folder) for other in VARIANTS}
        rows: dict[str, list[dict[str, float]]] = {label: [] for label in files}
        for _ in range(args.rounds):
            for label, path in files.items():
                rows[label] += launch(path, args.nproc, args.steps, folder)[WARM_UP:]
    print_table({label: medians(found) for label, found in rows.items()})


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Seconds of each phase, and of a step with its share of the plan."""
    seconds = {phase: statistics.median(row[f"perf/{phase}_seconds"] for row in rows) for phase in PHASES}
    updates = len(rows) / len({row["perf/plan_seconds"] for row in rows})
    return seconds | {"step": seconds["plan"] / updates + seconds["update"]}


def print_table(seconds: dict[str, dict[str, float]]) -> None:
    """One line a phase: seconds of every variant, ratios to the first."""
    first, *others = seconds
    head = "".join(f"{label:>14}" for label in seconds) + "".join(f"{label + ' ratio':>16}" for label in others)
    sys.stdout.write(f"{'phase':<10}{head}\n")
    for phase in (*PHASES, "step"):
        values = "".join(f"{found[phase]:>14.4f}" for found in seconds.values())
        ratios = "".join(f"{seconds[label][phase] / seconds[first][phase]:>16.2f}" for label in others)
        sys.stdout.write(f"{phase:<10}{values}{ratios}\n")


if __name__ == "__main__":
    main()
