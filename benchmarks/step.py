"""Cost of the correction in a real run, and the time that a step saves without a forward-only pass.

    python benchmarks/step.py [--config configs/launch/count_up.yaml] [--nproc 4] [--rounds 3] [--steps 30]
    python benchmarks/step.py --large [--rounds 6]

The first command launches whole runs. It prints medians over all steps but the first five of each launch, in seconds,
and ratios to the launch file's own run. The variant without correction is the preset ``disabled``, which still measures
both policies. Bypass mode keeps the file's criteria and makes no forward-only pass. The last line is an optimizer step
with its share of the plan.

``--large`` measures a model in which arithmetic dominates: 8 layers and 512 channels on sequences of 256 tokens, on one
thread of this process, without an engine. It times the plan and one update of a rollout batch, each variant once a
round, and prints the processor's seconds, the seconds inside the correction, their share, and the ratio to the
decoupled step with a forward-only pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from megatron_rc.launch.training.trainer import Trainer
    from megatron_rc.records.rollout import RolloutBatch

PHASES = ("sync", "rollout", "plan", "update")
CRITERIA = ("--rollout-rs=token_k1", "--rollout-rs-threshold=0.9_1.1")
# Flags of each variant; a preset replaces all of the launch file's correction settings.
VARIANTS = {
    "disabled": ("--rollout-correction-preset=disabled",),
    "bypass": ("--rollout-correction-preset=bypass_ppo_clip", *CRITERIA),
}
WARM_UP = 5

SEQUENCES = 4
LENGTH = 256
VOCABULARY = 2048
LARGE = f"""--cpu --from-scratch --num-layers=8 --hidden-size=512 --ffn-hidden-size=1536 --num-attention-heads=8
--group-query-attention --num-query-groups=4 --position-embedding-type=rope --normalization=RMSNorm --swiglu
--disable-bias-linear --seq-length={LENGTH} --vocab-size={VOCABULARY} --task=count_up --max-response-length=200
--grpo-prompts-per-step=2 --grpo-group-size=2 --grpo-iterations=1 --global-batch-size={SEQUENCES}
--micro-batch-size=2 --train-iters=100 --lr=1e-5 --lr-decay-style=constant --grpo-kl-beta=0""".split()
TWO_PASSES = (*CRITERIA, "--always-score")
LARGE_VARIANTS = {
    "decoupled, token weights": ("--rollout-is=token", *TWO_PASSES),
    "the same in one pass": ("--rollout-is=token", *CRITERIA),
    "bypass": ("--rollout-is=none", "--bypass-mode", *CRITERIA),
    "decoupled, no weights": ("--rollout-is=none", *TWO_PASSES),
    "decoupled, sequence weights": ("--rollout-is=sequence", *TWO_PASSES),
    "decoupled, geometric weights": ("--rollout-is=geometric", *TWO_PASSES),
}


def launch(config: Path, flags: Sequence[str], processes: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """The metrics of each step of one launch."""
    words = ["--nproc-per-node", str(processes), "--config", str(config), "--run-name", "benchmark", *flags]
    command = [sys.executable, "-m", "megatron_rc.launch", *words, f"--train-iters={steps}", f"--runs-dir={folder}"]
    subprocess.run(command, check=True, capture_output=True)
    lines = (folder / "benchmark" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    """Run all variants in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", type=Path, default=Path("configs/launch/count_up.yaml"), help="launch file; default: count_up's"
    )
    parser.add_argument("--nproc", type=int, default=4, help="processes of a launch; default: 4")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each variant; default: 3")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each launch; default: 30")
    parser.add_argument("--large", action="store_true", help="measure a larger model, in this process, without engine")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if args.large:
            return print_large(measure_large(args.rounds, Path(name)))
        variants = {"as launched": (), **VARIANTS}
        rows: dict[str, list[dict[str, float]]] = {label: [] for label in variants}
        for _ in range(args.rounds):
            for label, flags in variants.items():
                rows[label] += launch(args.config, flags, args.nproc, args.steps, Path(name))[WARM_UP:]
    print_table({label: medians(found) for label, found in rows.items()})


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Median seconds of each phase, and of a step with its share of the plan."""
    seconds = {phase: statistics.median(row[f"perf/{phase}_seconds"] for row in rows) for phase in PHASES}
    updates = len(rows) / len({row["perf/plan_seconds"] for row in rows})
    return seconds | {"step": seconds["plan"] / updates + seconds["update"]}


def print_table(seconds: dict[str, dict[str, float]]) -> None:
    """Print a line for each phase: seconds of every variant, ratios to the first."""
    first, *others = seconds
    head = "".join(f"{label:>14}" for label in seconds) + "".join(f"{label + ' ratio':>16}" for label in others)
    sys.stdout.write(f"{'phase':<10}{head}\n")
    for phase in (*PHASES, "step"):
        values = "".join(f"{found[phase]:>14.4f}" for found in seconds.values())
        ratios = "".join(f"{seconds[label][phase] / seconds[first][phase]:>16.2f}" for label in others)
        sys.stdout.write(f"{phase:<10}{values}{ratios}\n")


def measure_large(rounds: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """(seconds of plan and update, seconds inside the correction) of each variant's steps, without the first."""
    import torch

    from megatron_rc.launch.distributed import alone
    from megatron_rc.launch.training.models.cpu import cpu_backend, without_compiler
    from tests.support.recorded_training import make_trainer, run_config

    by_label: dict[str, list[tuple[float, float]]] = {label: [] for label in LARGE_VARIANTS}
    words = {label: [*LARGE, *flags, f"--runs-dir={folder}"] for label, flags in LARGE_VARIANTS.items()}
    with without_compiler():
        import megatron_rc.launch.training.trainer  # noqa: F401
    torch.set_num_threads(1)
    with cpu_backend(), alone(run_config(words["bypass"], engine=False)):
        trainers = {label: make_trainer(each) for label, each in words.items()}
        for index in range(rounds + 1):
            batch = rollouts(trainers["decoupled, no weights"], index)
            for label, trainer in trainers.items():
                with timed_correction(trainer.correction) as calls:
                    start = time.process_time()
                    trainer.update(trainer.prepare(batch), 0)
                    if index:
                        inside = sum(end - begun for begun, end in calls)
                        by_label[label].append((time.process_time() - start, inside))
    return by_label


def rollouts(trainer: Trainer, seed: int) -> RolloutBatch:
    """A batch of random tokens, with log-probs near the trainer's."""
    import torch

    from tests.support.made_rollouts import near_rollouts

    mask = torch.zeros(SEQUENCES, LENGTH, dtype=torch.bool)
    mask[:, 32:240] = True
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(SEQUENCES) // 2
    return near_rollouts(trainer, mask, 0.03, generator, group_ids=groups)


@contextlib.contextmanager
def timed_correction(correction: Any, clock: Callable[[], Any] = time.process_time) -> Iterator[list[tuple[Any, Any]]]:
    """What the clock shows at the start and at the end of every call of the correction inside the block.

    Default: the processor's seconds.
    """
    calls: list[tuple[Any, Any]] = []

    def timed(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return method(*args, **kwargs)
            finally:
                calls.append((start, clock()))

        return call

    methods = [(correction, name) for name in ("plan", "corrected", "finish_step")] + [(correction.open_step, "count")]
    for owner, name in methods:
        setattr(owner, name, timed(getattr(owner, name)))
    try:
        yield calls
    finally:
        for owner, name in methods:
            delattr(owner, name)
    if not calls:
        raise RuntimeError("no call of the correction was timed")


def print_large(by_label: dict[str, list[tuple[float, float]]]) -> None:
    """Print one line for each variant."""
    first = statistics.median(total for total, _ in next(iter(by_label.values())))
    sys.stdout.write(f"{'variant':<30}{'step s':>10}{'correction s':>14}{'its share':>11}{'step ratio':>12}\n")
    for label, rows in by_label.items():
        total, inside = (statistics.median(column) for column in zip(*rows, strict=True))
        share = statistics.median(part / whole for whole, part in rows)
        sys.stdout.write(f"{label:<30}{total:>10.3f}{inside:>14.5f}{share:>11.2%}{total / first:>12.3f}\n")


if __name__ == "__main__":
    main()
