"""Distillation of a trained model of count_up into a fresh one, with rollouts that are stale or in fp8.

    python -m benchmarks.distillation [--data docs/distillation.jsonl] [--runs runs/distillation] [--seconds 3600]

A teacher of four layers learns count_up from rewards. Fresh students of two layers then learn from the teacher alone,
without rewards: by the reverse KL over the whole vocabulary (``--policy-loss distill``), or by the sampled tokens
(``--advantage-estimator distillation``). Each kind of run has three seeds. One run is made at a time; a finished run is
one line of the data file, and is not repeated. docs/distillation.md has the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.study.design import POLICY_FILE, ROOT

SEEDS = (1, 2, 3)
STEPS = 60
TEACHER_SEED = 1
# Model, task and learning rate of the study; rewards teach the teacher, and no one else.
_COMMON = ("--config=configs/study/count_up.yaml", "--grpo-entropy-term-weight=0")
_TEACHER = (*_COMMON, "--num-layers=4", "--rollout-engine=study-none", "--rollout-correction-preset=disabled")
# What a student learns from: the divergence at each context, or the teacher's log-prob of the sampled token.
FORMS = {
    "divergence": ("--policy-loss=distill", "--distillation-kind=reverse_kl"),
    "sampled": ("--advantage-estimator=distillation",),
}
# Engines of the study: exact weights, and weights in fp8 (e4m3) with one scale for each row of a linear layer.
ENGINES = {
    "exact": ("--rollout-engine=study-none",),
    # An evaluation needs an interval that the staleness divides.
    "stale": ("--rollout-engine=study-none", "--rollout-staleness=20", "--eval-interval=60"),
    "fp8": ("--rollout-engine=study-fp8",),
}
CORRECTIONS = {
    "none": ("--rollout-correction-preset=disabled",),
    "token_is": ("--rollout-correction-preset=decoupled_token_is",),
}
# Kinds of runs; a correction of exact rollouts corrects nothing.
KINDS = (("exact", "none"), ("stale", "none"), ("stale", "token_is"), ("fp8", "none"), ("fp8", "token_is"))
# A correction is better than none if its worst seed ends this much nearer to the teacher, as a share of the KL of the
# best seed without it; worse the other way round; else undecided.
APART_BY = 0.1
# Responses to each of the hundred problems, by the last weights, for the KL of a run.
_SAMPLES = 8


@dataclass(frozen=True)
class Run:
    """One student."""

    form: str
    engine: str
    correction: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder and of its line in the data file."""
        return f"{self.form}-{self.engine}-{self.correction}-{self.seed}"

    def flags(self, teacher: Path) -> list[str]:
        """Flags of the launcher, except those of the run's folder."""
        of_kind = (*FORMS[self.form], *ENGINES[self.engine], *CORRECTIONS[self.correction])
        return [*_COMMON, f"--train-iters={STEPS}", *of_kind, f"--seed={self.seed}", f"--teacher-load-hf={teacher}"]


def runs() -> list[Run]:
    """All students, one form and one seed after the other, so that a part of them is complete for its seeds."""
    return [Run(form, engine, correction, seed) for form in FORMS for seed in SEEDS for engine, correction in KINDS]


def main() -> None:
    """Make the runs that the data file lacks, until the time is over."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distillation", description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT / "docs" / "distillation.jsonl")
    parser.add_argument("--runs", type=Path, default=Path("runs/distillation"), help="folder of the runs")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no run after so many seconds")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    folder = args.runs.resolve()
    teacher = _make_teacher(folder)
    finished = {row["name"] for row in read(args.data)}
    for run in runs():
        if run.name in finished:
            continue
        if time.monotonic() > end:
            sys.stdout.write(f"the time is over; {run.name} and those after it are missing\n")
            return
        seconds = _train(run.flags(teacher), folder, run.name)
        row = {"name": run.name, "form": run.form, "engine": run.engine, "correction": run.correction}
        row["seed"] = run.seed
        row |= _measured(folder / run.name, _model_folder(folder, run.name), teacher) | {"seconds": round(seconds, 1)}
        with args.data.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        sys.stdout.write(f"{json.dumps({name: row[name] for name in ('name', 'kl', 'reward', 'seconds')})}\n")
        sys.stdout.flush()
    for form in FORMS:
        sys.stdout.write(f"{form}\n{table(read(args.data), form)}")


def read(data: Path) -> list[dict[str, Any]]:
    """The lines of the data file; none if there is no file."""
    if not data.is_file():
        return []
    return [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]


def table(rows: list[dict[str, Any]], form: str) -> str:
    """The table of docs/distillation.md on one form, with a line for each kind of run."""
    rows = [row for row in rows if row["form"] == form]
    lines = [
        "| rollouts | correction | KL(student ‖ teacher) of the seeds | reward | verdict |",
        "|---|---|---|---|---|",
    ]
    for engine, correction in KINDS:
        runs_of_kind = _of_kind(rows, engine, correction)
        divergences = ", ".join(f"{row['kl']:.4f}" for row in runs_of_kind)
        rewards = ", ".join(f"{row['reward']:.3f}" for row in runs_of_kind)
        word = "" if correction == "none" else verdict(rows, engine, correction)
        lines.append(f"| {engine} | {_TITLES[correction]} | {divergences} | {rewards} | {word} |")
    return "\n".join(lines) + "\n"


_TITLES = {"none": "none", "token_is": "token weights"}


def verdict(rows: list[dict[str, Any]], engine: str, correction: str) -> str:
    """Return better, worse or undecided, by APART_BY, from the rows of one form.

    It is ``unknown`` unless all seeds of both kinds are there.
    """
    corrected = [row["kl"] for row in _of_kind(rows, engine, correction)]
    uncorrected = [row["kl"] for row in _of_kind(rows, engine, "none")]
    if len(corrected) < len(SEEDS) or len(uncorrected) < len(SEEDS):
        return "unknown"
    if max(corrected) < (1 - APART_BY) * min(uncorrected):
        return "better"
    return "worse" if max(uncorrected) < (1 - APART_BY) * min(corrected) else "undecided"


def _of_kind(rows: list[dict[str, Any]], engine: str, correction: str) -> list[dict[str, Any]]:
    """The runs of a kind, in the order of their seeds."""
    runs_of_kind = [row for row in rows if (row["engine"], row["correction"]) == (engine, correction)]
    return sorted(runs_of_kind, key=lambda row: row["seed"])


def _make_teacher(folder: Path) -> Path:
    """Train the teacher, unless its directory is there; return the directory."""
    if not (_model_folder(folder, "teacher") / "config.json").is_file():
        _train([*_TEACHER, f"--seed={TEACHER_SEED}"], folder, "teacher")
    return _model_folder(folder, "teacher")


def _model_folder(folder: Path, name: str) -> Path:
    """Hugging Face directory of a run's last weights."""
    directories = sorted((folder / f"{name}-hf").glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
    return directories[-1] if directories else folder / f"{name}-hf"


def _train(flags: list[str], folder: Path, name: str) -> float:
    """Make one run in a process of its own; return its seconds. RuntimeError with its last line if it fails."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    words = [*flags, f"--runs-dir={folder}", f"--run-name={name}", f"--save-hf={folder / f'{name}-hf'}"]
    begun = time.monotonic()
    with (place / "log.txt").open("w", encoding="utf-8") as log:
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.study.trainer", *words],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    if ended.returncode:
        lines = (place / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        raise RuntimeError(f"{name} ended with code {ended.returncode}: {lines[-1] if lines else 'it said nothing'}")
    return time.monotonic() - begun


def _measured(place: Path, student: Path, teacher: Path) -> dict[str, Any]:
    """The outcome of a run: the KL of its last weights, and the curves of the reward and of the loss's divergence."""
    rows = list(_rows(place / "metrics.jsonl"))
    names = ("distillation/reverse_kl", "distillation/sampled_kl")
    divergences = [row[name] for row in rows for name in names if name in row]
    policy = {row["step"]: row["reward"] for row in _rows(place / POLICY_FILE)}
    return {
        "kl": round(reverse_kl(student, teacher), 6),
        "reward": round(policy[max(policy)], 4),
        "reward_before": round(policy[0], 4),
        "divergence": [round(value, 5) for value in divergences[:: len(divergences) // 20]],
        "rewards": [[step, round(policy[step], 4)] for step in sorted(policy)[:: max(1, len(policy) // 20)]],
        "eff_sample_size": [round(row[_ESS], 4) for row in rows if _ESS in row][::5],
    }


_ESS = "rollout_corr/rollout_is_eff_sample_size"


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def reverse_kl(student_folder: Path, teacher_folder: Path) -> float:
    """KL(student ‖ teacher) of a token, in nats: the mean over tokens that the student itself samples.

    Each distribution is compared over the whole vocabulary. Eight responses to each of the hundred problems.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.study.task import CountUp

    student = AutoModelForCausalLM.from_pretrained(student_folder, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32)
    task = CountUp(seed=0)
    prompts = torch.tensor([task.text.encode(problem) for problem in task.problems(0, 100, held_out=True)])
    tokens = prompts.repeat_interleave(_SAMPLES, dim=0)
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    count = 0
    is_running = torch.ones(len(tokens), dtype=torch.bool)
    with torch.inference_mode():
        for _ in range(task.max_response_length):
            log_probs = student(input_ids=tokens).logits[:, -1].double().log_softmax(-1)
            of_teacher = teacher(input_ids=tokens).logits[:, -1].double().log_softmax(-1)
            divergence = (log_probs.exp() * (log_probs - of_teacher)).sum(-1)
            total += float(divergence[is_running].sum())
            count += int(is_running.sum())
            sampled = torch.multinomial(log_probs.exp().float(), 1, generator=generator)
            tokens = torch.cat([tokens, sampled], dim=1)
            is_running &= sampled[:, 0] != task.text.eos
    return total / max(count, 1)


if __name__ == "__main__":
    main()
