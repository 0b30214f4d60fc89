"""The words of the study's design: settings, mismatches, corrections, runs and blocks. ``settings`` has the study's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
# The engine's measurements of the trainer's policy, in a run's folder.
POLICY_FILE = "policy.jsonl"
# The engine's expectation of which responses are in time, in a run's folder.
LATE_FILE = "late.jsonl"
# Optimizer steps of one point of a curve.
WINDOW = 10
# Exit code of a run that a training error ended, which is a result.
GAVE_UP = 3

# The verdict on a run, by the expected reward of the trainer's policy at temperature 1:
# collapsed if its last weights have less than this share of its best reward, or an error ended it;
COLLAPSE_SHARE = 0.5
# else degraded if they have this much less than the mean of the runs without mismatch; else sound.
DEGRADED_BY = 0.1
# The verdict on two kinds of run: better if the worst seed of one is this much above the best seed of the other.
APART_BY = 0.02
# In blocks with tests: the chance of one wrong verdict in all of a family, by Welch's t-test with Holm's correction.
FAMILY_ERROR = 0.05
# Not worse, in blocks that ask for it: the whole 95 % interval of the difference is above -MARGIN.
MARGIN = 0.05


@dataclass(frozen=True)
class Setting:
    """A task and its training: the flags that all runs of a block have in common.

    Attributes:
        name: name in folders and files.
        flags: flags of the launcher; the launch file comes first.
        needs_model: whether a run needs SmolLM2, by ``--load-hf``.
    """

    name: str
    flags: tuple[str, ...]
    needs_model: bool = False


@dataclass(frozen=True)
class Mismatch:
    """A difference of the engine from the trainer.

    Attributes:
        name: name in folders, files and of the engine.
        title: title in pictures and tables.
        engine: arguments of the study's engine; None: the launch file's engine.
        staleness: age of the oldest weights that the engine holds, in optimizer steps; 0: the newest weights.
        more_flags: further flags of the launcher.
    """

    name: str
    title: str
    engine: Mapping[str, Any] | None = field(default_factory=dict, hash=False)
    staleness: int = 0
    more_flags: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """Flags of the launcher."""
        if self.engine is None:
            return [*self.more_flags]
        flags = [f"--rollout-engine=study-{self.name}"]
        if self.staleness:
            flags.append(f"--rollout-staleness={self.staleness}")
            # Evaluations, every 50 steps by the launch file, need an interval that the staleness divides.
            interval = next(steps for steps in (50, 100, 200) if steps % self.staleness == 0)
            if interval != 50:
                flags.append(f"--eval-interval={interval}")
        return [*flags, *self.more_flags]


@dataclass(frozen=True)
class Correction:
    """A correction by the trainer, with its baseline.

    Attributes:
        name: name in folders and files.
        title: title in pictures and tables.
        flags: flags of the launcher.
        against: name of the correction that it is compared with, under the same mismatch; empty: with none.
    """

    name: str
    title: str
    flags: tuple[str, ...]
    against: str = "uncorrected"


Kind = tuple[Mismatch, Correction]


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    setting: Setting
    mismatch: Mismatch
    correction: Correction
    seed: int  # of weights, prompts and sampling

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Its place in the data."""
        return self.setting.name, self.mismatch.name, self.correction.name, self.seed

    @property
    def name(self) -> str:
        """Name of its folder."""
        return "-".join(map(str, self.key))

    @property
    def flags(self) -> list[str]:
        """Flags of the launcher, except those of the run's folder."""
        return [*self.setting.flags, f"--seed={self.seed}", *self.mismatch.flags, *self.correction.flags]


@dataclass(frozen=True)
class Block:
    """Runs that are made and shown together: each kind with each seed.

    Attributes:
        name: name on the command line and in the page.
        setting: setting of all its runs.
        kinds: pairs of mismatch and correction, in the order of the table.
        seeds: seeds of each kind.
        data: name of the file in docs/ that has its runs.
        table: ``ranges``: verdicts by the ranges of the seeds; ``tests``: by Welch's test, with Holm's correction over
            all blocks of the data file; ``evaluations``: a line for each run, without verdicts.
        measures: names of the measures that tests compare, see ``comparison``; empty: all.
        pairs: each kind that tests compare, and the kind that it is compared with; empty: each kind with the one that
            its correction names.
        shows_margin: whether the table says which differences are above ``-MARGIN``.
        means: measures whose means over the whole run a table of ``tests`` has besides, or ``skipped_steps``: the
            number of steps that were not made.
    """

    name: str
    setting: Setting
    kinds: tuple[Kind, ...]
    seeds: tuple[int, ...]
    data: str = "study.json"
    table: str = "ranges"
    measures: tuple[str, ...] = ()
    pairs: tuple[tuple[Kind, Kind], ...] = ()
    shows_margin: bool = False
    means: tuple[str, ...] = ("k3", "ess")

    @property
    def runs(self) -> list[Run]:
        """Its runs, one seed after the other, so that a part of them is complete for its seeds."""
        return [
            Run(self.setting, mismatch, correction, seed) for seed in self.seeds for mismatch, correction in self.kinds
        ]

    def compared_with(self, mismatch: Mismatch, correction: Correction) -> Kind | None:
        """The kind with the same mismatch that a kind's correction is compared with; None: it is not in the block."""
        by_name = {(kind[0].name, kind[1].name): kind for kind in self.kinds}
        return by_name.get((mismatch.name, correction.against))

    @property
    def compared_pairs(self) -> list[tuple[Kind, Kind]]:
        """Each kind that tests compare, and the kind that it is compared with."""
        if self.pairs:
            return list(self.pairs)
        others = [(kind, self.compared_with(*kind)) for kind in self.kinds]
        return [(kind, other) for kind, other in others if other is not None]
