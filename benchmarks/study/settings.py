"""The design of the study: its runs, in blocks, and the verdicts on them. docs/study.md gives the reasons.

It was committed before the first run of ``SEEDS``. Strengths of mismatches were chosen with the seeds 101 and 102.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SEEDS = (1, 2, 3)
# The engine's measurements of the trainer's policy, in a run's folder.
POLICY_FILE = "policy.jsonl"
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
# With five seeds it is by Welch's t-test: the chance of one wrong verdict in all of a family, by Holm's correction.
FAMILY_ERROR = 0.05


@dataclass(frozen=True)
class Setting:
    """A task and its training: the flags that all runs of a block have in common."""

    name: str  # in folders and files
    flags: tuple[str, ...]  # the launch file comes first


@dataclass(frozen=True)
class Mismatch:
    """A difference of the engine from the trainer.

    Attributes:
        name: name in folders, files and of the engine.
        title: title in pictures and tables.
        levels: levels of the engine's weights, see ``StudyEngine``; 0: exact weights.
        warming: growth of the engine's temperature, see ``StudyEngine``.
        dtype: number format of the engine's weights.
        fp8_by_tensor: whether linear layers are rounded to fp8 (e4m3) with one scale for each weight.
        flags: flags of the launcher, besides the engine.
    """

    name: str
    title: str
    levels: int = 0
    warming: float = 0.0
    dtype: str = "fp32"
    fp8_by_tensor: bool = False
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Correction:
    """A correction by the trainer, with its baseline.

    Attributes:
        name: name in folders and files.
        title: title in pictures and tables.
        flags: flags of the launcher.
        against: name of the correction that it is compared with.
    """

    name: str
    title: str
    flags: tuple[str, ...]
    against: str = "uncorrected"


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
    """

    name: str
    setting: Setting
    kinds: tuple[tuple[Mismatch, Correction], ...]
    seeds: tuple[int, ...] = SEEDS
    data: str = "study.json"

    @property
    def runs(self) -> list[Run]:
        """Its runs, one seed after the other, so that a part of them is complete for its seeds."""
        return [Run(self.setting, *kind, seed) for seed in self.seeds for kind in self.kinds]


def _engine(
    name: str,
    title: str,
    *,
    levels: int = 0,
    warming: float = 0.0,
    staleness: int = 0,
    dtype: str = "fp32",
    fp8_by_tensor: bool = False,
) -> Mismatch:
    """A mismatch that ``StudyEngine`` makes, or the launcher's flag for old weights."""
    old: tuple[str, ...] = ()
    if staleness:
        old = (f"--rollout-staleness={staleness}",)
        # Evaluations, every 50 steps by the launch file, need an interval that the staleness divides.
        interval = next(steps for steps in (50, 100, 200) if steps % staleness == 0)
        if interval != 50:
            old = (*old, f"--eval-interval={interval}")
    flags = (f"--rollout-engine=study-{name}", *old)
    return Mismatch(name, title, levels, warming, dtype, fp8_by_tensor, flags)


COUNT_UP = Setting("count_up", ("--config=configs/study/count_up.yaml", "--grpo-entropy-term-weight=0"))
# With the entropy bonus of the default task.
BONUS = Setting("bonus", ("--config=configs/study/count_up.yaml",))
COUNT_ON = Setting("count_on", ("--config=configs/study/count_on.yaml",))
# A mixture of eight experts of a quarter of the dense model's width, two for each token.
EXPERTS = Setting(
    "experts",
    (
        *COUNT_UP.flags,
        *(
            "--num-experts=8",
            "--moe-ffn-hidden-size=32",
            "--moe-router-topk=2",
            "--moe-router-load-balancing-type=none",
        ),
        *("--qk-layernorm", "--kv-channels=16", "--untie-embeddings-and-output-weights"),
    ),
)
SMOLLM2 = Setting("smollm2", ("--config=configs/study/smollm2.yaml",))

NONE = _engine("none", "no mismatch")
STRONG = (
    _engine("rounding", "weights rounded to −1, 0, 1", levels=1),
    _engine("staleness", "weights up to 50 steps old", staleness=50),
    _engine("temperature", "temperature 1 % higher every step", warming=0.01),
)
REALISTIC = (
    _engine("rounding_mild", "weights rounded to 3 values on each side of 0", levels=3),
    _engine("staleness_mild", "weights up to 4 steps old", staleness=4),
    _engine("temperature_mild", "temperature 0.4 % higher every step", warming=0.004),
)
LONG = _engine("rounding_long", "weights rounded to 4 values on each side of 0", levels=4)
FP8 = _engine("fp8", "weights in fp8", dtype="fp8-e4m3")
FP8_OLD = _engine("fp8_old", "weights in fp8, up to 10 steps old", staleness=10, dtype="fp8-e4m3")
# What working engines do: weights of some steps ago, and fp8 with a scale for each weight.
WORKING = (
    _engine("stale_4", "weights up to 4 steps old", staleness=4),
    _engine("stale_8", "weights up to 8 steps old", staleness=8),
    _engine("fp8_tensor", "weights in fp8 by tensor", fp8_by_tensor=True),
    _engine("stale_4_fp8", "weights in fp8 by tensor, up to 4 steps old", staleness=4, fp8_by_tensor=True),
)
ENGINES = (NONE, *STRONG, *REALISTIC, LONG, FP8, FP8_OLD, *WORKING)
OLD = Mismatch("old", "weights up to 8 steps old")


def _preset(name: str, title: str, preset: str, *others: str, against: str = "uncorrected") -> Correction:
    return Correction(name, title, (f"--rollout-correction-preset={preset}", *others), against)


# The trainer scores the tokens and clips π_θ/π_old, as if it had sampled them; weights are only measured.
UNCORRECTED = _preset("uncorrected", "without correction", "disabled")
TOKEN_TIS = _preset("token_tis", "token TIS", "decoupled_token_is")
TOKEN_TIS_NORM = _preset(
    "token_tis_norm",
    "token TIS, batch normalisation",
    "decoupled_token_is",
    "--rollout-is-batch-normalize",
    against="token_tis",
)
ICEPOP = _preset("icepop", "IcePop", "decoupled_token_icepop")
SEQ_TIS = _preset("seq_tis", "sequence TIS", "decoupled_seq_is")
SEQ_TIS_10, SEQ_IS = (
    _preset(name, title, "decoupled_seq_is", f"--rollout-is-threshold={bound}", against="seq_tis")
    for name, title, bound in (
        ("seq_tis_10", "sequence TIS, bound 10", "10"),
        ("seq_is", "sequence weights without a bound", "1e8"),
    )
)
SEQ_RS = _preset("seq_rs", "sequence TIS, sequence rejection", "decoupled_seq_is_rs")
BYPASS = _preset("bypass", "bypass, PPO-clip", "bypass_ppo_clip")
BYPASS_PG = _preset("bypass_pg", "bypass, policy gradient", "bypass_pg_is")


def _geometric(name: str, title: str, bounds: str, against: str = "uncorrected") -> Correction:
    preset = "decoupled_geo_rs_token_tis"
    return _preset(name, title, preset, f"--rollout-rs-threshold={bounds}", against=against)


# The published bounds are for means over thousands of tokens; means of at most ten tokens vary far more.
GEO_RS = _geometric("geo_rs_token_tis", "geometric rejection, token TIS", "0.5_2.0")
GEO_RS_PUBLISHED = _geometric("geo_rs_published", "geometric rejection at 0.999 to 1.001, token TIS", "0.999_1.001")
GEO_RS_GROWN = _geometric("geo_rs_grown", "geometric rejection at bounds for the length, token TIS", "0.95_1.02")


def _with_baseline(how: Correction, name: str, title: str, *flags: str) -> Correction:
    return Correction(f"{how.name}_{name}", f"{how.title}, {title}", (*how.flags, *flags), against=how.name)


def _baselines(how: Correction) -> tuple[Correction, ...]:
    """A correction with the group's mean as its baseline, and with the three others."""
    return (
        how,
        _with_baseline(how, "no_std", "group mean without std", "--advantage-estimator=grpo-no-std"),
        _with_baseline(how, "weighted", "weighted baseline", "--advantage-baseline=weighted"),
        _with_baseline(how, "remax", "ReMax", "--advantage-estimator=remax"),
    )


SEQ_TIS_WEIGHTED = _baselines(SEQ_TIS)[2]
_DECOUPLED = (TOKEN_TIS, TOKEN_TIS_NORM, ICEPOP, GEO_RS, SEQ_TIS, SEQ_TIS_10, SEQ_IS, SEQ_RS)
_REFERENCE = ((NONE, UNCORRECTED),)
MAIN = Block("main", COUNT_UP, (*_REFERENCE, *itertools.product(STRONG, (UNCORRECTED, *_DECOUPLED, BYPASS, BYPASS_PG))))
BASELINES = Block(
    "baselines",
    COUNT_UP,
    (
        *_REFERENCE,
        *itertools.product(STRONG, _baselines(SEQ_TIS)),
        *((STRONG[-1], how) for how in _baselines(TOKEN_TIS)),
    ),
)
LONG_RESPONSES = Block(
    "long",
    COUNT_ON,
    (*_REFERENCE, *((LONG, how) for how in (UNCORRECTED, TOKEN_TIS, SEQ_TIS, GEO_RS_PUBLISHED, GEO_RS_GROWN))),
)
REALISTIC_STRENGTH = Block(
    "realistic", COUNT_UP, (*_REFERENCE, *itertools.product(REALISTIC, (UNCORRECTED, TOKEN_TIS, SEQ_TIS, BYPASS)))
)
WITH_BONUS = Block(
    "bonus", BONUS, (*_REFERENCE, *itertools.product(STRONG, (UNCORRECTED, TOKEN_TIS, SEQ_TIS, GEO_RS, BYPASS)))
)
# One run each of the methods that were published in 2026, with their own numbers or the objective's defaults.
_OBJECTIVES = {
    "dppo_tv": "DPPO, difference of probabilities",
    "dppo_kl": "DPPO, KL of two events",
    "cppo": "CPPO",
    "sapo": "SAPO",
    "gmpo": "GMPO",
}
_OF_2026 = (
    _preset("kpop", "KPop, token TIS", "decoupled_token_kpop"),
    _preset("prefix", "weights of prefixes", "decoupled_prefix_is"),
    _preset("min_prefix", "MinPRO weights", "decoupled_min_prefix_is"),
    _preset("turn", "weights of turns", "decoupled_turn_is"),
    _preset("min_prefix_pg", "bypass, policy gradient, MinPRO weights", "bypass_pg_min_prefix_is"),
    _preset("seq_mask_tis", "MLPerf's reference", "seq_mask_tis"),
    _preset("ess_rate", "sequence TIS, learning rate by ESS", "decoupled_seq_is", "--lr-ess-scaling=sqrt"),
    *(
        _preset(f"bypass_{name}", f"bypass, {title}", "bypass_ppo_clip", f"--loss-type={name}")
        for name, title in _OBJECTIVES.items()
    ),
)
PUBLISHED = Block(
    "published", COUNT_UP, (*_REFERENCE, *((STRONG[-1], how) for how in (UNCORRECTED, *_OF_2026))), SEEDS[:1]
)
_REPLAY = ("--moe-enable-routing-replay",)
REPLAY = Correction("replay", "routing replay", (*UNCORRECTED.flags, *_REPLAY))
TOKEN_TIS_REPLAY = Correction(
    "token_tis_replay", "token TIS, routing replay", (*TOKEN_TIS.flags, *_REPLAY), against="token_tis"
)
MIXTURE = Block(
    "experts",
    EXPERTS,
    (
        *_REFERENCE,
        *itertools.product((FP8, FP8_OLD), (UNCORRECTED, REPLAY, TOKEN_TIS, TOKEN_TIS_REPLAY)),
    ),
)
FIVE_SEEDS = (1, 2, 3, 4, 5)
KPOP = _preset("kpop", "KPop, token TIS", "decoupled_token_kpop")
DPPO_TV = _preset(
    "bypass_dppo_tv", "bypass, DPPO, difference of probabilities", "bypass_ppo_clip", "--loss-type=dppo_tv"
)


def _working(name: str, setting: Setting, geometric: Correction) -> Block:
    """The mismatches of working engines with five seeds; ``geometric`` has the bounds for the responses' length."""
    token_tis_norm = dataclasses.replace(TOKEN_TIS_NORM, against=UNCORRECTED.name)
    corrections = (UNCORRECTED, TOKEN_TIS, token_tis_norm, geometric, BYPASS, BYPASS_PG, DPPO_TV, KPOP)
    kinds = (*_REFERENCE, *itertools.product(WORKING, corrections))
    return Block(name, setting, kinds, FIVE_SEEDS, data="study_working.json")


# One family: every correction of both is compared with no correction, see ``comparison``.
WORKING_BLOCKS = (_working("working_short", COUNT_UP, GEO_RS), _working("working_long", COUNT_ON, GEO_RS_GROWN))
HARD = Block(
    "hard", SMOLLM2, tuple((OLD, how) for how in (UNCORRECTED, TOKEN_TIS, BYPASS)), SEEDS[:1], data="study_hard.json"
)
# In the order in which they are made.
BLOCKS = {
    block.name: block
    for block in (
        MAIN,
        BASELINES,
        LONG_RESPONSES,
        REALISTIC_STRENGTH,
        WITH_BONUS,
        PUBLISHED,
        MIXTURE,
        *WORKING_BLOCKS,
    )
}


def runs_of(blocks: Iterable[Block]) -> Iterator[Run]:
    """The runs of some blocks, each once."""
    yield from {run.key: run for block in blocks for run in block.runs}.values()
