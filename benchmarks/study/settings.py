"""The study's settings, mismatches, corrections and blocks, as data. docs/study.md gives the reasons.

Each block was committed before the first run of its seeds. Strengths of mismatches were tried with the seeds 101 and
102.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from benchmarks.study.design import Block, Correction, Kind, Mismatch, Run, Setting

THREE_SEEDS = (1, 2, 3)
FIVE_SEEDS = (1, 2, 3, 4, 5)

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
SMOLLM2 = Setting("smollm2", ("--config=configs/study/smollm2.yaml",), needs_model=True)
SMOLLM2_INT8 = Setting("smollm2_int8", ("--config=configs/study/smollm2_int8.yaml",), needs_model=True)

NONE = Mismatch("none", "no mismatch")
STRONG = (
    Mismatch("rounding", "weights rounded to −1, 0, 1", {"levels": 1}),
    Mismatch("staleness", "weights up to 50 steps old", staleness=50),
    Mismatch("temperature", "temperature 1 % higher every step", {"warming": 0.01}),
)
REALISTIC = (
    Mismatch("rounding_mild", "weights rounded to 3 values on each side of 0", {"levels": 3}),
    Mismatch("staleness_mild", "weights up to 4 steps old", staleness=4),
    Mismatch("temperature_mild", "temperature 0.4 % higher every step", {"warming": 0.004}),
)
LONG = Mismatch("rounding_long", "weights rounded to 4 values on each side of 0", {"levels": 4})
FP8 = Mismatch("fp8", "weights in fp8", {"dtype": "fp8-e4m3"})
FP8_OLD = Mismatch("fp8_old", "weights in fp8, up to 10 steps old", {"dtype": "fp8-e4m3"}, staleness=10)
# What working engines do: weights of some steps ago, and fp8 with a scale for each weight.
WORKING = (
    Mismatch("stale_4", "weights up to 4 steps old", staleness=4),
    Mismatch("stale_8", "weights up to 8 steps old", staleness=8),
    Mismatch("fp8_tensor", "weights in fp8 by tensor", {"fp8_by_tensor": True}),
    Mismatch("stale_4_fp8", "weights in fp8 by tensor, up to 4 steps old", {"fp8_by_tensor": True}, staleness=4),
)
OLD = Mismatch("old", "weights up to 8 steps old", engine=None)
# Samples with the launch file's --rollout-dtype, and evaluates the trainer's own weights.
INT8 = Mismatch("int8", "weights in int8", {"evaluates_exactly": True})

# Responses that take longer the longer they are, see ``late``.
LATE_WAIT = Mismatch("late_wait", "waiting", {"late": "wait"})
LATE_PACE = Mismatch("late_pace", "pacing", {"late": "pace"})
LATE_DROP = Mismatch("late_drop", "dropping", {"late": "drop"}, more_flags=("--bad-samples=drop",))
LATE_DROP_RANDOM = Mismatch(
    "late_drop_random", "dropping at random", {"late": "drop_random"}, more_flags=("--bad-samples=drop",)
)
LATE = (LATE_WAIT, LATE_PACE, LATE_DROP, LATE_DROP_RANDOM)
# All engines of the study's own.
ENGINES = (NONE, *STRONG, *REALISTIC, LONG, FP8, FP8_OLD, *WORKING, INT8, *LATE)


def _preset(name: str, title: str, preset: str, *others: str, against: str = "uncorrected") -> Correction:
    return Correction(name, title, (f"--rollout-correction-preset={preset}", *others), against)


def _geometric(name: str, title: str, bounds: str) -> Correction:
    return _preset(name, title, "decoupled_geo_rs_token_tis", f"--rollout-rs-threshold={bounds}")


# The trainer scores the tokens and clips π_θ/π_old, as if it had sampled them; weights are only measured.
UNCORRECTED = _preset("uncorrected", "without correction", "disabled", against="")
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
SEQ_TIS_10 = _preset(
    "seq_tis_10", "sequence TIS, bound 10", "decoupled_seq_is", "--rollout-is-threshold=10", against="seq_tis"
)
SEQ_IS = _preset(
    "seq_is",
    "sequence weights without a bound",
    "decoupled_seq_is",
    "--rollout-is-threshold=1e8",
    against="seq_tis",
)
SEQ_RS = _preset("seq_rs", "sequence TIS, sequence rejection", "decoupled_seq_is_rs")
# The published bounds are for means over thousands of tokens; means of at most ten tokens vary far more.
GEO_RS = _geometric("geo_rs_token_tis", "geometric rejection, token TIS", "0.5_2.0")
GEO_RS_PUBLISHED = _geometric("geo_rs_published", "geometric rejection at 0.999 to 1.001, token TIS", "0.999_1.001")
GEO_RS_GROWN = _geometric("geo_rs_grown", "geometric rejection at bounds for the length, token TIS", "0.95_1.02")
GEO_RS_INT8 = _geometric("geo_rs_int8", "geometric rejection at bounds for int8, token TIS", "0.98_1.016")
BYPASS = _preset("bypass", "bypass, PPO-clip", "bypass_ppo_clip")
BYPASS_PG = _preset("bypass_pg", "bypass, policy gradient", "bypass_pg_is")
KPOP = _preset("kpop", "KPop, token TIS", "decoupled_token_kpop")


def _objective(name: str, title: str) -> Correction:
    return _preset(f"bypass_{name}", f"bypass, {title}", "bypass_ppo_clip", f"--loss-type={name}")


DPPO_TV = _objective("dppo_tv", "DPPO, difference of probabilities")
# Methods that were published in 2026, with their own numbers or the objective's defaults.
_OF_2026 = (
    KPOP,
    _preset("prefix", "weights of prefixes", "decoupled_prefix_is"),
    _preset("min_prefix", "MinPRO weights", "decoupled_min_prefix_is"),
    _preset("turn", "weights of turns", "decoupled_turn_is"),
    _preset("min_prefix_pg", "bypass, policy gradient, MinPRO weights", "bypass_pg_min_prefix_is"),
    _preset("seq_mask_tis", "MLPerf's reference", "seq_mask_tis"),
    _preset("ess_rate", "sequence TIS, learning rate by ESS", "decoupled_seq_is", "--lr-ess-scaling=sqrt"),
    DPPO_TV,
    _objective("dppo_kl", "DPPO, KL of two events"),
    _objective("cppo", "CPPO"),
    _objective("sapo", "SAPO"),
    _objective("gmpo", "GMPO"),
)


def _with(correction: Correction, name: str, title: str, *flags: str) -> Correction:
    """A correction with further flags, compared with the correction itself."""
    return Correction(
        f"{correction.name}_{name}",
        f"{correction.title}, {title}",
        (*correction.flags, *flags),
        against=correction.name,
    )


def _baselines(correction: Correction) -> tuple[Correction, ...]:
    """A correction with the group's mean as its baseline, and with the three others."""
    return (
        correction,
        _with(correction, "no_std", "group mean without std", "--advantage-estimator=grpo-no-std"),
        _with(correction, "weighted", "weighted baseline", "--advantage-baseline=weighted"),
        _with(correction, "remax", "ReMax", "--advantage-estimator=remax"),
    )


SEQ_TIS_WEIGHTED = _baselines(SEQ_TIS)[2]
REPLAY = Correction("replay", "routing replay", (*UNCORRECTED.flags, "--moe-enable-routing-replay"))
TOKEN_TIS_REPLAY = _with(TOKEN_TIS, "replay", "routing replay", "--moe-enable-routing-replay")


def _kinds(mismatches: Iterable[Mismatch], *corrections: Correction) -> tuple[Kind, ...]:
    return tuple(itertools.product(mismatches, corrections))


_REFERENCE = _kinds([NONE], UNCORRECTED)
_DECOUPLED = (TOKEN_TIS, TOKEN_TIS_NORM, ICEPOP, GEO_RS, SEQ_TIS, SEQ_TIS_10, SEQ_IS, SEQ_RS)
_TEMPERATURE = STRONG[-1:]

MAIN = Block(
    "main", COUNT_UP, (*_REFERENCE, *_kinds(STRONG, UNCORRECTED, *_DECOUPLED, BYPASS, BYPASS_PG)), seeds=THREE_SEEDS
)
BASELINES = Block(
    "baselines",
    COUNT_UP,
    (*_REFERENCE, *_kinds(STRONG, *_baselines(SEQ_TIS)), *_kinds(_TEMPERATURE, *_baselines(TOKEN_TIS))),
    seeds=THREE_SEEDS,
)
LONG_RESPONSES = Block(
    "long",
    COUNT_ON,
    (*_REFERENCE, *_kinds([LONG], UNCORRECTED, TOKEN_TIS, SEQ_TIS, GEO_RS_PUBLISHED, GEO_RS_GROWN)),
    seeds=THREE_SEEDS,
)
REALISTIC_STRENGTH = Block(
    "realistic",
    COUNT_UP,
    (*_REFERENCE, *_kinds(REALISTIC, UNCORRECTED, TOKEN_TIS, SEQ_TIS, BYPASS)),
    seeds=THREE_SEEDS,
)
WITH_BONUS = Block(
    "bonus",
    BONUS,
    (*_REFERENCE, *_kinds(STRONG, UNCORRECTED, TOKEN_TIS, SEQ_TIS, GEO_RS, BYPASS)),
    seeds=THREE_SEEDS,
)
PUBLISHED = Block(
    "published", COUNT_UP, (*_REFERENCE, *_kinds(_TEMPERATURE, UNCORRECTED, *_OF_2026)), seeds=THREE_SEEDS
)
MIXTURE = Block(
    "experts",
    EXPERTS,
    (*_REFERENCE, *_kinds([FP8, FP8_OLD], UNCORRECTED, REPLAY, TOKEN_TIS, TOKEN_TIS_REPLAY)),
    seeds=THREE_SEEDS,
)


def _working(name: str, setting: Setting, geometric: Correction, *measures: str) -> Block:
    """The mismatches of working engines with five seeds.

    Args:
        name: name of the block.
        setting: task and training.
        geometric: geometric rejection with the bounds for the responses' length.
        measures: measures that are compared; none: all.
    """
    token_tis_norm = dataclasses.replace(TOKEN_TIS_NORM, against=UNCORRECTED.name)
    corrections = (UNCORRECTED, TOKEN_TIS, token_tis_norm, geometric, BYPASS, BYPASS_PG, DPPO_TV, KPOP)
    return Block(
        name,
        setting,
        (*_REFERENCE, *_kinds(WORKING, *corrections)),
        seeds=FIVE_SEEDS,
        data="study_working.json",
        table="tests",
        measures=measures,
    )


# One family: every correction of both is compared with no correction.
WORKING_SHORT = _working("working_short", COUNT_UP, GEO_RS)
# Whole answers of count_on are never right if the policy lacks the successor of a single digit, so they are left out.
WORKING_LONG = _working("working_long", COUNT_ON, GEO_RS_GROWN, "reward of the last weights", "over the run")
# Which responses train. The page has the predictions.
_WAITING = (LATE_WAIT, UNCORRECTED)
_DROPPING = (LATE_DROP, UNCORRECTED)
_DROPPING_AT_RANDOM = (LATE_DROP_RANDOM, UNCORRECTED)
SELECTION = Block(
    "selection",
    COUNT_UP,
    (
        *_kinds([LATE_WAIT], UNCORRECTED),
        *_kinds([LATE_PACE, LATE_DROP], UNCORRECTED, TOKEN_TIS),
        *_kinds([LATE_DROP_RANDOM], UNCORRECTED),
    ),
    seeds=FIVE_SEEDS,
    data="study_selection.json",
    table="tests",
    pairs=(
        ((LATE_PACE, UNCORRECTED), _WAITING),
        ((LATE_PACE, TOKEN_TIS), _WAITING),
        (_DROPPING, _WAITING),
        ((LATE_DROP, TOKEN_TIS), _WAITING),
        (_DROPPING_AT_RANDOM, _DROPPING),
        (_DROPPING_AT_RANDOM, _WAITING),
    ),
    shows_margin=True,
    means=(
        "batch_time",
        "inclusion",
        "inclusion_longest",
        "expected_longest",
        "inclusion_shortest",
        "expected_shortest",
        "prompts_without",
        "inclusion_prompt_std",
        "age",
        "k3",
        "ess",
    ),
)
HARD = Block(
    "hard",
    SMOLLM2,
    _kinds([OLD], UNCORRECTED, TOKEN_TIS, BYPASS),
    seeds=(1,),
    data="study_hard.json",
    table="evaluations",
)
INT8_ENGINE = Block(
    "int8",
    SMOLLM2_INT8,
    _kinds([INT8], UNCORRECTED, TOKEN_TIS, GEO_RS_INT8, BYPASS),
    seeds=THREE_SEEDS,
    data="study_int8.json",
    table="tests",
    measures=("reward of the last weights",),
    means=("k3", "ess", "rejected", "skipped_steps"),
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
        WORKING_SHORT,
        WORKING_LONG,
        SELECTION,
        HARD,
        INT8_ENGINE,
    )
}


def family_of(block: Block) -> list[Block]:
    """The blocks whose comparisons are corrected together: those of one data file."""
    return [other for other in BLOCKS.values() if other.data == block.data]


def runs_of(blocks: Iterable[Block]) -> Iterator[Run]:
    """The runs of some blocks, each once."""
    yield from {run.key: run for block in blocks for run in block.runs}.values()
