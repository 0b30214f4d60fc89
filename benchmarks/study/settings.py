"""Which runs the study has, and what is said of them: fixed before the first of them was started.

How strong each mismatch is was chosen with runs of the seeds 101 and 102, all of them without correction; see
docs/study.md. Of what ``all_runs`` gives nothing was changed after a run of ``SEEDS``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG, HARD_CONFIG = (f"configs/study/{name}.yaml" for name in ("count_up", "smollm2"))
SEEDS = (1, 2, 3)
# In a run's folder: what the engine measured of the trainer's policy.
POLICY_FILE = "policy.jsonl"
# Exit code of a run that an error of its own ended, which is a result.
GAVE_UP = 3


@dataclass(frozen=True)
class Mismatch:
    """How the engine differs from the trainer.

    Attributes:
        name: in folders and files.
        title: in pictures and tables.
        levels: of the engine's weights, see ``StudyEngine``; 0: they are exact.
        warming: of its temperature, likewise.
        flags: of the launcher, besides the engine.
    """

    name: str
    title: str
    levels: int = 0
    warming: float = 0.0
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Correction:
    """What the trainer does about it.

    Attributes:
        name: in folders and files.
        title: in pictures and tables.
        flags: of the launcher.
    """

    name: str
    title: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One run of the study.

    Attributes:
        mismatch: what is wrong with the engine.
        correction: what the trainer does about it.
        seed: of weights, prompts and sampling.
        setting: flags of the launcher that say what is trained, and on what engine.
    """

    mismatch: Mismatch
    correction: Correction
    seed: int
    setting: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.mismatch.name}-{self.correction.name}-{self.seed}"

    @property
    def flags(self) -> list[str]:
        """Of the launcher, but for where the run's folder is."""
        config, *others = self.setting
        return [config, f"--seed={self.seed}", *others, *self.mismatch.flags, *self.correction.flags]


NONE = Mismatch("none", "no mismatch")
MISMATCHES = (
    Mismatch("rounding", "weights rounded to −1, 0, 1", levels=1),
    Mismatch("staleness", "weights up to 50 steps old", flags=("--rollout-staleness=50",)),
    Mismatch("temperature", "temperature 1 % higher every step", warming=0.01),
)

# The trainer scores the tokens itself and clips π_θ/π_old, as if it had sampled them; weights are measured alone.
UNCORRECTED = Correction("uncorrected", "without correction", ("--rollout-correction-preset=disabled",))
CORRECTIONS = (
    Correction("token_tis", "token TIS", ("--rollout-correction-preset=decoupled_token_is",)),
    Correction("seq_tis", "sequence TIS", ("--rollout-correction-preset=decoupled_seq_is",)),
    # Published bounds are for means over thousands of tokens; of at most ten they spread far more.
    Correction(
        "geo_rs_token_tis",
        "geometric rejection, token TIS",
        ("--rollout-correction-preset=decoupled_geo_rs_token_tis", "--rollout-rs-threshold=0.5_2.0"),
    ),
    Correction("bypass", "bypass, PPO-clip", ("--rollout-correction-preset=bypass_ppo_clip",)),
)

# What is said of a run, by the expected reward of the trainer's policy at temperature 1:
# collapsed where its last weights have less than this share of the best that it had, or an error ended it;
COLLAPSE_SHARE = 0.5
# else degraded where they have this much less than the mean of the runs without mismatch; else sound.
DEGRADED_BY = 0.1


def all_runs() -> Iterator[Run]:
    """The 45 runs, a seed after the other, and 3 without mismatch that they are compared with."""
    for seed in SEEDS:
        yield _run(NONE, UNCORRECTED, seed)
        for mismatch in MISMATCHES:
            for correction in (UNCORRECTED, *CORRECTIONS):
                yield _run(mismatch, correction, seed)


def runs_without_entropy() -> Iterator[Run]:
    """One seed of each kind without the default task's entropy bonus; thought of when the others had been seen."""
    for run in all_runs():
        if run.seed == SEEDS[0]:
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
