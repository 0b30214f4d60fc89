"""Whole training steps of this launcher beside TRL's ``GRPOTrainer``, on SmolLM2-135M-Instruct and the same prompts.

    make bench-peers
    python -m benchmarks.peers MODEL --trl PYTHON [--rounds 2] [--steps 4]

Both programs train the same model in float32 on the same file of sums: 4 prompts with 4 sampled responses of up to 32
tokens in a step, one update, learning rate 2e-5, no KL penalty. transformers samples in both. TRL runs in one process;
this launcher runs in one process and, as its launch file says, in two with context parallel 2. Each round runs all
three, one after the other. The table has medians of wall seconds a step over all rounds, without the first step of each
run, and their ratio to TRL's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("sync", "rollout", "plan", "update")
PROCESSES = {"megatron_rc, 1 process": 1, "megatron_rc, 2 processes": 2}
TRL = "TRL"
# Both programs do the same work: no rounded weights, one problem in the evaluations, no skipped step.
OURS = """--config smollm2_sums --rollout-engine transformers --rollout-dtype fp32
--grpo-group-size 4 --global-batch-size 16 --rl-default-temperature 1 --lr 2e-5 --lr-warmup-iters 0
--eval-interval 1000 --eval-problems 1 --no-skip-steps-without-signal --lr-decay-style constant""".split()


def our_steps(model: Path, processes: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """Seconds of each phase of each step of this launcher, without its first step."""
    run = [*OURS, f"--load-hf={model}", f"--train-iters={steps}", f"--runs-dir={folder}", f"--run-name={processes}"]
    layout = ["--nproc-per-node", str(processes), f"--context-parallel-size={processes}"]
    subprocess.run([sys.executable, "-m", "megatron_rc.launch", *layout, *run], check=True, cwd=ROOT)
    lines = (folder / str(processes) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[1:]]
    return [{phase: row.get(f"perf/{phase}_seconds", 0.0) for phase in PHASES} for row in rows]


def trl_steps(model: Path, python: Path, steps: int, folder: Path) -> list[dict[str, float]]:
    """Wall seconds of each step of TRL, without its first step."""
    words = [str(model), str(ROOT / "sums" / "train.jsonl"), str(steps), str(folder)]
    # TRL takes all processors of the machine, as it does for its own users.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run(
        [str(python), str(ROOT / "benchmarks" / "peers_trl.py"), *words], check=True, cwd=ROOT, env=environment
    )
    return [{"step": seconds} for seconds in json.loads((folder / "trl.json").read_text(encoding="utf-8"))[1:]]


def table(steps: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: medians of each phase and of a whole step, and its ratio to TRL's."""
    whole = {
        name: statistics.median(sum(step.values()) for step in steps_of_program)
        for name, steps_of_program in steps.items()
    }
    lines = ["| | step | / TRL | sync | rollout | plan | update |", "|---|---|---|---|---|---|---|"]
    for name, steps_of_program in steps.items():
        medians = [
            statistics.median(step[phase] for step in steps_of_program)
            for phase in PHASES
            if phase in steps_of_program[0]
        ]
        cells = [f"{value:.1f}" for value in (whole[name], *medians)]
        cells.insert(1, f"{whole[name] / whole[TRL]:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |" + " |" * (len(PHASES) - len(medians)))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all programs in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face directory of SmolLM2-135M-Instruct")
    parser.add_argument("--trl", type=Path, required=True, help="Python of an environment with TRL 1.16")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each program")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run; the first is not counted")
    args = parser.parse_args()
    if args.steps < 2 or args.rounds < 1:
        parser.error(f"--steps {args.steps} --rounds {args.rounds}: take at least 2 steps and 1 round")
    steps: dict[str, list[dict[str, float]]] = {TRL: [], **{name: [] for name in PROCESSES}}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as name:
            steps[TRL] += trl_steps(args.model.resolve(), args.trl.absolute(), args.steps, Path(name))
            for label, processes in PROCESSES.items():
                steps[label] += our_steps(args.model.resolve(), processes, args.steps, Path(name))
    sys.stdout.write(table(steps))


if __name__ == "__main__":
    main()
