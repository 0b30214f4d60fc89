"""The runs of the study and the verdicts on them, fixed before the first run was started.

The strength of each mismatch was chosen with uncorrected runs of the seeds 101 and 102; see docs/study.md. Nothing that
``all_runs`` gives was changed after a run of ``SEEDS``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG, HARD_CONFIG = (f"configs/study/{name}.yaml" for name in ("count_up", "smollm2"))
SEEDS = (1, 2, 3)
# The engine's measurements of the trainer's policy, in a run's folder.
POLICY_FILE = "policy.jsonl"
# Exit code of a run that a training error ended, which is a result.
GAVE_UP = 3


@dataclass(frozen=True)
class Mismatch:
    """A difference of the engine from the trainer.

    Attributes:
        name: name in folders and files.
        title: title in pictures and tables.
        levels: levels of the engine's weights, see ``StudyEngine``; 0: exact weights.
        warming: growth of the engine's temperature, see ``StudyEngine``.
        flags: flags of the launcher, besides the engine.
    """

    name: str
    title: str
    levels: int = 0
    warming: float = 0.0
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Correction:
    """A correction by the trainer.

    Attributes:
        name: name in folders and files.
        title: title in pictures and tables.
        flags: flags of the launcher.
    """

    name: str
    title: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One run of the study.

    Attributes:
        mismatch: the engine's mismatch.
        correction: the trainer's correction.
        seed: seed of weights, prompts and sampling.
        setting: flags of the launcher for the task and the engine.
    """

    mismatch: Mismatch
    correction: Correction
    seed: int
    setting: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.mismatch.name}-{self.correction.name}-{self.seed}"

    @property
    def flags(self) -> list[str]:
        """Flags of the launcher, except those of the run's folder."""
        config, *others = self.setting
        return [config, f"--seed={self.seed}", *others, *self.mismatch.flags, *self.correction.flags]


NONE = Mismatch("none", "no mismatch")
MISMATCHES = (
    Mismatch("rounding", "weights rounded to −1, 0, 1", levels=1),
    Mismatch("staleness", "weights up to 50 steps old", flags=("--rollout-staleness=50",)),
    Mismatch("temperature", "temperature 1 % higher every step", warming=0.01),
)

# The trainer scores the tokens and clips π_θ/π_old, as if it had sampled them; weights are only measured.
UNCORRECTED = Correction("uncorrected", "without correction", ("--rollout-correction-preset=disabled",))
CORRECTIONS = (
    Correction("token_tis", "token TIS", ("--rollout-correction-preset=decoupled_token_is",)),
    Correction("seq_tis", "sequence TIS", ("--rollout-correction-preset=decoupled_seq_is",)),
    # Published bounds are for means over thousands of tokens; means of at most ten tokens vary far more.
    Correction(
        "geo_rs_token_tis",
        "geometric rejection, token TIS",
        ("--rollout-correction-preset=decoupled_geo_rs_token_tis", "--rollout-rs-threshold=0.5_2.0"),
    ),
    Correction("bypass", "bypass, PPO-clip", ("--rollout-correction-preset=bypass_ppo_clip",)),
)

# Both, with group baselines that estimate the mean reward of the trainer's policy instead of the engine's.
WEIGHTED = tuple(
    Correction(f"{how.name}_weighted", f"{how.title}, weighted baseline", (*how.flags, "--advantage-baseline=weighted"))
    for how in CORRECTIONS[:2]
)

# The verdict on a run, by the expected reward of the trainer's policy at temperature 1:
# collapsed if its last weights have less than this share of its best reward, or an error ended it;
COLLAPSE_SHARE = 0.5
# else degraded if they have this much less than the mean of the runs without mismatch; else sound.
DEGRADED_BY = 0.1


def all_runs() -> Iterator[Run]:
    """The 45 runs, one seed after the other, and for comparison 3 without mismatch."""
    for seed in SEEDS:
        yield _run(NONE, UNCORRECTED, seed)
        for mismatch in MISMATCHES:
            for correction in (UNCORRECTED, *CORRECTIONS):
                yield _run(mismatch, correction, seed)


def runs_without_entropy() -> Iterator[Run]:
    """One seed of each run without the default task's entropy bonus; added after the other runs were seen."""
    for run in all_runs():
        if run.seed == SEEDS[0]:
            yield replace(run, setting=(*run.setting, "--grpo-entropy-term-weight=0"))


def runs_of_baselines() -> Iterator[Run]:
    """27 runs without the entropy bonus: sequence TIS and token TIS with two baselines, and 3 without mismatch."""
    token, sequence = zip(CORRECTIONS[:2], WEIGHTED, strict=True)
    for seed in SEEDS:
        kinds = [(NONE, UNCORRECTED), *((mismatch, how) for mismatch in MISMATCHES for how in sequence)]
        for mismatch, how in [*kinds, *((MISMATCHES[-1], how) for how in token)]:
            run = _run(mismatch, how, seed)
            yield replace(run, setting=(*run.setting, "--grpo-entropy-term-weight=0"))


def hard_runs(model: Path) -> Iterator[Run]:
    """Three runs of a language model, one seed.

    Args:
        model: its Hugging Face directory.
    """
    old = Mismatch("smollm2", "weights up to 8 steps old")
    for correction in (UNCORRECTED, CORRECTIONS[0], CORRECTIONS[-1]):
        yield Run(old, correction, SEEDS[0], (f"--config={HARD_CONFIG}", f"--load-hf={model}"))


def _run(mismatch: Mismatch, correction: Correction, seed: int) -> Run:
    return Run(mismatch, correction, seed, (f"--config={CONFIG}", f"--rollout-engine=study-{mismatch.name}"))
