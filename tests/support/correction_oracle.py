"""The correction in float64 loops: one process, whole sequences, plain lists. Imports nothing of the library.

Definitions:

- m is the response mask, under ``bad="reject_token"`` without the bad tokens.
- A bad token (log-prob NaN, infinite or above 1e-4 in either policy) is in no statistic: every metric, weight and
  criterion uses the *good* tokens of m alone, and "valid" in the name of a metric means good. Denominators count m.
- Bounds of k1 criteria and of ``opsm`` are on log ρ, ρ = π_train / π_rollout. Metrics named after a k1 criterion
  describe -log ρ, with negated bounds; ``..._rho_fraction_above/_below`` describe ρ.
- The mean, extreme or share of no values is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.objectives_oracle import two_point

Table = Sequence[Sequence[float]]
Rows = list[dict[int, float]]  # for each sequence: position -> value
Criterion = tuple[str, float, float]  # name, lower, upper

EXP_LIMIT = 20.0
PPL_LIMIT = 80.0
POSITIVE_LIMIT = 1e-4
SMALLEST_MEAN = 1e-125
FAR_LIMIT = 300.0  # of the log of a weight of several tokens
AGGREGATIONS = ("token", "seq_sum", "seq_mean", "seq_max", "group_mean", "turn_sum", "turn_mean", "turn_max")
BY_TOKEN = ("token", "turn", "turn_geometric", "prefix", "min_prefix")  # levels whose weights differ in a sequence


@dataclass(frozen=True)
class Settings:
    """Parsed settings: ``lower`` None means 1/upper; bounds of ``criteria`` are in nats (of log ρ for k1)."""

    level: str | None = None
    mode: str = "truncate"
    apply: bool = True
    lower: float | None = None
    upper: float = 2.0
    batch_normalize: bool = False
    scope: str = "all"
    criteria: tuple[Criterion, ...] = ()
    veto: float | None = None
    denominator: str = "accepted"
    bad: str = "error"
    staleness: tuple[tuple[int, float], ...] = ()  # (least staleness, factor of bounds in nats), ascending

    @property
    def low(self) -> float:
        return 1 / self.upper if self.lower is None else self.lower


@dataclass(frozen=True)
class Result:
    """The results as nested lists and floats; ``weights`` is None without a level, or if they are not applied."""

    weights: list[list[float]] | None
    weights_unnormalized: list[list[float]] | None
    mask: list[list[bool]]
    denominators: list[list[float]]
    skip: list[bool]
    sequence_lengths: list[int]
    metrics: dict[str, float]
    breakdowns: dict[str, dict[Any, dict[str, float]]]


@dataclass(frozen=True)
class Sides:
    """The side inputs; ``advantages`` and ``versions`` hold a number or a list of numbers for each sequence."""

    advantages: Sequence[Any] | None = None
    rewards: Sequence[float] | None = None
    group_ids: Sequence[int] | None = None
    versions: Sequence[Any] | None = None
    current_version: int | None = None
    turn_ids: Sequence[Sequence[int]] | None = None
    max_staleness: int = 0
    mini_batch_ids: Sequence[int] | None = None
    num_mini_batches: int = 1


@dataclass(frozen=True)
class Batch:
    """The inputs at unmasked tokens: positions of m and of its good tokens, and their log-probs."""

    length: int
    given: list[list[int]]  # of the response mask
    counted: list[list[int]]  # of m
    good: list[list[int]]
    train: Rows
    rollout: Rows
    log_ratio: Rows
    turns: list[list[list[int]]]  # the positions of each turn of each sequence
    groups: list[int]
    sides: Sides
    scale: Rows  # factor of the bounds in nats, by the staleness of each good token
    oldest: list[float]  # the same factor by the staleness of the oldest good token of each sequence

    def widened(self, i: int, t: int, aggregation: str) -> float:
        """The factor at a token: by its own staleness for token criteria and weights, else by the oldest good token."""
        return self.scale[i][t] if aggregation == "token" else self.oldest[i]

    @property
    def sequences(self) -> list[int]:
        """Sequences with a good token."""
        return [i for i, tokens in enumerate(self.good) if tokens]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.good))


def correct(train: Table, rollout: Table, mask: Table, settings: Settings | Mapping[str, Any], **sides: Any) -> Result:
    """Correct a batch; ``sides``: fields of :class:`Sides`."""
    settings = as_settings(settings)
    batch = read(train, rollout, mask, settings, Sides(**sides))
    rejected = reject(batch, settings)
    accepted = [
        [t for t in batch.good[i] if not any(t in rows[i] for rows in rejected.values())] for i in all_of(batch)
    ]
    raw, bounded, applied, factor = weigh(batch, accepted, settings)
    metrics = policy_metrics(batch) | rejection_metrics(batch, accepted, rejected, settings)
    if settings.level is not None:
        metrics |= weight_metrics(batch, raw, bounded, applied, settings)
    if settings.level is not None and settings.batch_normalize:
        metrics["rollout_is_batch_norm_factor"] = factor
    denominators = count(batch, accepted)
    in_loss = accepted if settings.denominator == "accepted" else batch.counted
    return Result(
        weights=dense(applied, batch) if settings.level and settings.apply else None,
        weights_unnormalized=dense(bounded, batch) if settings.level else None,
        mask=[[t in tokens for t in range(batch.length)] for tokens in map(set, accepted)],
        denominators=denominators,
        skip=[row[2] == 0 for row in denominators],
        sequence_lengths=[len(tokens) for tokens in in_loss],
        metrics=metrics,
        breakdowns=break_down(batch, accepted),
    )


# Arithmetic


def clamp(x: float, limit: float = EXP_LIMIT) -> float:
    return max(-limit, min(limit, x))


def log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


def deviation(values: Iterable[float], lost: int = 0) -> float:
    """Standard deviation with len - ``lost`` in the denominator."""
    values = list(values)
    if len(values) < 1 + lost:
        return 0.0
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - lost))


def divergence(kind: str, x: float) -> float:
    """The divergence of one log ρ; k1 is log ρ here."""
    if kind == "error":
        return math.expm1(min(abs(x), EXP_LIMIT))
    return {"k1": x, "k2": x * x / 2, "k3": math.expm1(min(x, EXP_LIMIT)) - min(x, EXP_LIMIT)}[kind]


def kpop(train: float, rollout: float) -> float:
    """The larger of D(p‖q) and D(q‖p), p and q the probabilities of the token."""
    return max(two_point(train, rollout), two_point(rollout, train))


def flat(rows: Rows) -> list[float]:
    return [value for row in rows for value in row.values()]


def all_of(batch: Batch) -> range:
    return range(len(batch.given))


def dense(rows: Rows, batch: Batch) -> list[list[float]]:
    return [[row.get(t, 0.0) for t in range(batch.length)] for row in rows]


# Reading


def as_settings(settings: Settings | Mapping[str, Any]) -> Settings:
    return settings if isinstance(settings, Settings) else Settings(**settings)


def read(train: Table, rollout: Table, mask: Table, settings: Settings, sides: Sides) -> Batch:
    trained = [[t for t, valid in enumerate(row) if valid] for row in mask]
    good = [
        [t for t in row if is_log_prob(train[i][t]) and is_log_prob(rollout[i][t])] for i, row in enumerate(trained)
    ]
    kept_train, kept_rollout, log_ratio = (
        [{t: value(i, t) for t in tokens} for i, tokens in enumerate(good)]
        for value in (lambda i, t: train[i][t], lambda i, t: rollout[i][t], lambda i, t: train[i][t] - rollout[i][t])
    )
    versions = sides.versions
    newest = sides.current_version
    ages = [{t: 0 if versions is None else newest - at(versions, i, t) for t in row} for i, row in enumerate(good)]
    return Batch(
        turns=turns_of(trained, sides.turn_ids),
        scale=[{t: widening(age, settings) for t, age in row.items()} for row in ages],
        oldest=[widening(max(row.values(), default=0), settings) for row in ages],
        length=len(mask[0]) if mask else 0,
        given=trained,
        counted=good if settings.bad == "reject_token" else trained,
        good=good,
        train=kept_train,
        rollout=kept_rollout,
        log_ratio=log_ratio,
        groups=list(range(len(mask)) if sides.group_ids is None else sides.group_ids),
        sides=sides,
    )


def turns_of(trained: list[list[int]], ids: Sequence[Sequence[int]] | None) -> list[list[list[int]]]:
    """The trained positions of each turn: neighbours with one id, without ids the runs of the response mask."""
    turns_of_rows = []
    for i, row in enumerate(trained):
        turns: list[list[int]] = []
        for t in row:
            last = turns[-1][-1] if turns else -2
            joined = t == last + 1 if ids is None else turns and all(ids[i][j] == ids[i][t] for j in range(last, t))
            if joined:
                turns[-1].append(t)
            else:
                turns.append([t])
        turns_of_rows.append(turns)
    return turns_of_rows


def widening(age: int, settings: Settings) -> float:
    """The factor of the bounds at a staleness."""
    return next((factor for step, factor in reversed(settings.staleness) if age >= step), 1.0)


def is_log_prob(value: float) -> bool:
    return math.isfinite(value) and value <= POSITIVE_LIMIT


def at(values: Sequence[Any], i: int, t: int) -> float:
    """The value of token t in sequence i, from one value for each token or for each sequence."""
    return values[i][t] if isinstance(values[i], Sequence) else values[i]


# Rejection


def statistic(name: str, batch: Batch) -> Rows:
    """A criterion's statistic at every good token, repeated for a turn, a sequence or a prompt. k1: log ρ."""
    if name == "opsm":
        return statistic("seq_mean_k1", batch)
    aggregation, _, kind = name.rpartition("_")
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"unknown criterion {name!r}")
    if kind == "kpop":
        values = [{t: kpop(batch.train[i][t], batch.rollout[i][t]) for t in row} for i, row in enumerate(batch.good)]
    else:
        values = [{t: divergence(kind, x) for t, x in row.items()} for row in batch.log_ratio]
    if aggregation == "token":
        return values
    if aggregation == "group_mean":
        prompts = [[values[j] for j in all_of(batch) if batch.groups[j] == group] for group in batch.groups]
        return [dict.fromkeys(row, mean(flat(prompts[i]))) for i, row in enumerate(values)]
    unit, _, how = aggregation.partition("_")
    reduce: Callable[[Iterable[float]], float] = {"sum": math.fsum, "mean": mean, "max": max}[how]
    if unit == "turn":
        of_turns: Rows = [{} for _ in values]
        for i, row in enumerate(values):
            for turn in batch.turns[i]:
                good = [t for t in turn if t in row]
                of_turns[i] |= dict.fromkeys(good, reduce([row[t] for t in good]) if good else 0.0)
        return of_turns
    return [dict.fromkeys(row, reduce(row.values())) if row else {} for row in values]


def tested(name: str, batch: Batch) -> Rows:
    """The statistic at the tokens that the criterion tests: those with A < 0 for ``opsm``."""
    rows = statistic(name, batch)
    if name != "opsm":
        return rows
    return [{t: x for t, x in row.items() if at(batch.sides.advantages, i, t) < 0} for i, row in enumerate(rows)]


def reject(batch: Batch, settings: Settings) -> dict[str, list[set[int]]]:
    """The rejected good tokens of each criterion, ``veto`` and ``bad``, a set for each sequence."""
    rejected = {
        name: [
            {t for t, x in row.items() if outside(x, lower, upper, batch.widened(i, t, name.split("_")[0]))}
            for i, row in enumerate(tested(name, batch))
        ]
        for name, lower, upper in settings.criteria
        if name != "group_any"
    }
    if settings.veto is not None and settings.apply:
        vetoed = [any(x < log(settings.veto) for x in row.values()) for row in batch.log_ratio]
        rejected["veto"] = whole_sequences(batch, vetoed)
    if settings.bad == "reject_sequence":
        holds_bad = [len(batch.good[i]) < len(batch.given[i]) for i in all_of(batch)]
        rejected["bad"] = whole_sequences(batch, holds_bad)
    if any(name == "group_any" for name, _, _ in settings.criteria):
        lost = {batch.groups[i] for i in all_of(batch) if batch.given[i] and is_lost(i, batch, rejected)}
        rejected["group_any"] = whole_sequences(batch, [group in lost for group in batch.groups])
    return rejected


def outside(x: float, lower: float, upper: float, scale: float) -> bool:
    return not lower * scale <= x <= upper * scale


def is_lost(i: int, batch: Batch, rejected: Mapping[str, list[set[int]]]) -> bool:
    """Whether no token of the sequence is left: every one is bad or rejected."""
    return all(any(t in rows[i] for rows in rejected.values()) for t in batch.good[i])


def whole_sequences(batch: Batch, chosen: Sequence[bool]) -> list[set[int]]:
    return [set(batch.good[i]) if chosen[i] else set() for i in all_of(batch)]


# Weights


def weight_log(batch: Batch, settings: Settings) -> Rows:
    """Log w at every good token, before any clamp."""
    if settings.level in ("prefix", "min_prefix"):
        return [history(row, settings.level) for row in batch.log_ratio]
    names = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
    names |= {"turn": "turn_sum_k1", "turn_geometric": "turn_mean_k1"}
    return statistic(names[settings.level], batch) if settings.level else [{} for _ in all_of(batch)]


def history(row: dict[int, float], level: str) -> dict[int, float]:
    """Log w of each token from the tokens of its sequence before it."""
    log_weights = {}
    for t, x in row.items():
        before = [row[j] for j in row if j < t]
        log_weights[t] = x + (math.fsum(before) if level == "prefix" else min(before, default=0.0))
    return log_weights


def weigh(batch: Batch, accepted: list[list[int]], settings: Settings) -> tuple[Rows, Rows, Rows, float]:
    """(weights before the bounds, after the bounds, after normalisation, divisor of the normalisation)."""
    logs = weight_log(batch, settings)
    raw = [{t: weight_of(x, settings) for t, x in row.items()} for row in logs]
    level = settings.level or ""
    bounded = [
        {t: bound(raw[i][t], x, settings, batch.widened(i, t, level)) for t, x in row.items()}
        for i, row in enumerate(logs)
    ]
    factor = mean_weight(bounded, accepted if settings.scope == "accepted" else batch.good, settings)
    if not settings.batch_normalize or factor <= SMALLEST_MEAN:
        factor = 1.0
    return raw, bounded, [{t: w / factor for t, w in row.items()} for row in bounded], factor


def weight_of(x: float, settings: Settings) -> float:
    """The weight whose log is x: of a token exp(clamp(x, ±20)), of several tokens exp(clamp(x, -300, 20))."""
    floor = -EXP_LIMIT if settings.level == "token" else -FAR_LIMIT
    return math.exp(max(floor, min(EXP_LIMIT, x)))


def bound(weight: float, x: float, settings: Settings, scale: float) -> float:
    low = settings.low**scale
    high = settings.upper**scale
    if settings.mode == "mask":
        return weight if log(low) <= x <= log(high) else 0.0
    if settings.mode == "clamp":
        return min(max(weight, low), high)
    return min(weight, high)


def mean_weight(bounded: Rows, scope: list[list[int]], settings: Settings) -> float:
    """Mean weight over tokens, or over sequences with a token in the scope, one weight each."""
    if settings.level is None:
        return 0.0
    if settings.level in BY_TOKEN:
        return mean(bounded[i][t] for i, tokens in enumerate(scope) for t in tokens)
    return mean(bounded[i][tokens[0]] for i, tokens in enumerate(scope) if tokens)


# Counts


def count(batch: Batch, accepted: list[list[int]]) -> list[list[float]]:
    """For each mini-batch the tokens and the sequences with a token, under m and under m'."""
    counts = [[0.0] * 4 for _ in range(batch.sides.num_mini_batches)]
    ids = batch.sides.mini_batch_ids
    for i in all_of(batch):
        row = counts[ids[i] if ids is not None else 0]
        for column, tokens in ((0, batch.counted[i]), (2, accepted[i])):
            row[column] += len(tokens)
            row[column + 1] += bool(tokens)
    return counts


# Metrics


def policy_metrics(batch: Batch) -> dict[str, float]:
    x = flat(batch.log_ratio)
    train = [mean(batch.train[i].values()) for i in batch.sequences]
    rollout = [mean(batch.rollout[i].values()) for i in batch.sequences]
    total = [math.fsum(batch.log_ratio[i].values()) for i in batch.sequences]
    difference = [b - a for a, b in zip(train, rollout, strict=True)]
    return {
        "kl": mean(-value for value in x),
        "k3_kl": mean(divergence("k3", value) for value in x),
        "training_ppl": mean(ppl(-value) for value in train),
        "training_log_ppl": mean(-value for value in train),
        "rollout_ppl": mean(ppl(-value) for value in rollout),
        "rollout_log_ppl": mean(-value for value in rollout),
        "log_ppl_diff": mean(difference),
        "log_ppl_abs_diff": mean(map(abs, difference)),
        "log_ppl_diff_max": max(difference, default=0.0),
        "log_ppl_diff_min": min(difference, default=0.0),
        "ppl_ratio": mean(ppl(value) for value in difference),
        "chi2_token": mean(math.expm1(2 * clamp(value)) for value in x),
        "chi2_seq": mean(math.expm1(2 * clamp(value)) for value in total),
        "num_tokens": float(len(x)),
        "num_sequences": float(len(total)),
    }


def ppl(x: float) -> float:
    return math.exp(clamp(x, PPL_LIMIT))


def moments(values: list[float]) -> dict[str, float]:
    squares = math.fsum(value * value for value in values)
    return {
        "mean": mean(values),
        "std": deviation(values),
        "min": min(values, default=0.0),
        "max": max(values, default=0.0),
        "eff_sample_size": math.fsum(values) ** 2 / (len(values) * squares) if squares else 0.0,
    }


def sample_size(logs: list[float], settings: Settings) -> float:
    """(Σ w)² / (n Σ w²) of the unbounded weights: of several tokens w = exp(clamp(x, ±300))."""
    if settings.level == "token":
        weights = [math.exp(clamp(x)) for x in logs]
    else:
        weights = [math.exp(clamp(x, FAR_LIMIT)) for x in logs]
    squares = math.fsum(weight * weight for weight in weights)
    return math.fsum(weights) ** 2 / (len(weights) * squares) if weights else 0.0


def weight_metrics(batch: Batch, raw: Rows, bounded: Rows, applied: Rows, settings: Settings) -> dict[str, float]:
    metrics = {}
    for prefix, rows in (("rollout_is_raw_", raw), ("rollout_is_", bounded), ("rollout_is_applied_", applied)):
        metrics |= {prefix + name: value for name, value in moments(flat(rows)).items()}
    logs = weight_log(batch, settings)
    low = log(settings.low)
    high = log(settings.upper)
    every = flat(logs)
    metrics["rollout_is_raw_eff_sample_size"] = sample_size(every, settings)
    if settings.level not in BY_TOKEN:
        metrics["rollout_is_max"] = weight_of(max(every), settings) if every else 0.0
        metrics["rollout_is_min"] = weight_of(min(every), settings) if every else 0.0
    relative = relative_to_scale(logs, settings.level or "", batch)
    tested_logs = flat(relative)
    if settings.level == "sequence":
        tested_logs = [relative[i][batch.good[i][0]] for i in batch.sequences]
    metrics["rollout_is_ratio_fraction_high"] = mean(x > high for x in tested_logs)
    metrics["rollout_is_ratio_fraction_low"] = mean(x < low for x in tested_logs)
    beyond = [[not low <= x <= high for x in relative[i].values()] for i in batch.sequences]
    fraction = mean(x for row in beyond for x in row)
    sequence_fraction = mean(map(any, beyond))
    if settings.mode in ("mask", "clamp"):
        metrics["rollout_is_oob_ratio"] = fraction
    if settings.mode == "mask":
        metrics |= {"rollout_is_masked_fraction": fraction, "rollout_is_seq_masked_fraction": sequence_fraction}
    return metrics | sequence_weight_metrics(batch, raw, bounded, settings)


def sequence_weight_metrics(batch: Batch, raw: Rows, bounded: Rows, settings: Settings) -> dict[str, float]:
    """Metrics of each sequence's mean weight."""
    before, after = ([mean(rows[i].values()) for i in batch.sequences] for rows in (raw, bounded))
    scales = [batch.oldest[i] for i in batch.sequences]
    return {
        "rollout_is_seq_mean": mean(after),
        "rollout_is_seq_std": deviation(after, lost=1),
        "rollout_is_seq_max": max(after, default=0.0),
        "rollout_is_seq_min": min(after, default=0.0),
        "rollout_is_seq_max_deviation": max((abs(q - 1) for q in after), default=0.0),
        "rollout_is_seq_fraction_high": mean(q > settings.upper**f for q, f in zip(before, scales, strict=True)),
        "rollout_is_seq_fraction_low": mean(q < settings.low**f for q, f in zip(before, scales, strict=True)),
    }


def rejection_metrics(
    batch: Batch, accepted: list[list[int]], rejected: Mapping[str, list[set[int]]], settings: Settings
) -> dict[str, float]:
    lost = [set(batch.good[i]) - set(accepted[i]) for i in all_of(batch)]
    metrics = shares("rollout_rs_", batch, lost)
    ratios = []
    for name, lower, upper in settings.criteria:
        metrics |= shares(f"rollout_rs_{name}_", batch, rejected[name])
        if name.startswith(("token_", "turn_", "seq_")):
            metrics |= statistic_metrics(name, batch, lower, upper)
        if name.startswith(("token_", "turn_", "seq_")) and name.endswith("_k1"):
            metrics |= rho_metrics(name, batch, lower, upper)
            ratios.append(name)
    if len(ratios) == 1:
        metrics["rollout_rs_ratio_fraction_high"] = metrics[f"rollout_rs_{ratios[0]}_rho_fraction_above"]
        metrics["rollout_rs_ratio_fraction_low"] = metrics[f"rollout_rs_{ratios[0]}_rho_fraction_below"]
    if settings.veto is not None:
        below = [[x < log(settings.veto) for x in batch.log_ratio[i].values()] for i in batch.sequences]
        metrics["rollout_is_catastrophic_token_fraction"] = mean(x for row in below for x in row)
        metrics["rollout_is_veto_fraction"] = mean(map(any, below))
    return metrics


def shares(prefix: str, batch: Batch, rejected: list[set[int]]) -> dict[str, float]:
    return {
        f"{prefix}masked_fraction": sum(map(len, rejected)) / batch.num_tokens if batch.num_tokens else 0.0,
        f"{prefix}seq_masked_fraction": mean(bool(rejected[i]) for i in batch.sequences),
    }


def rho_metrics(name: str, batch: Batch, lower: float, upper: float) -> dict[str, float]:
    """Shares of tokens, or of sequences, with ρ above and below the bounds."""
    rows = relative_to_scale(statistic(name, batch), name, batch)
    by_token = name.startswith(("token_", "turn_"))
    values = flat(rows) if by_token else [rows[i][batch.good[i][0]] for i in batch.sequences]
    return {
        f"rollout_rs_{name}_rho_fraction_above": mean(value > upper for value in values),
        f"rollout_rs_{name}_rho_fraction_below": mean(value < lower for value in values),
    }


def relative_to_scale(rows: Rows, name: str, batch: Batch) -> Rows:
    """The values that are compared with the unscaled bounds."""
    aggregation = name.split("_")[0]
    return [{t: x / batch.widened(i, t, aggregation) for t, x in row.items()} for i, row in enumerate(rows)]


def statistic_metrics(name: str, batch: Batch, lower: float, upper: float) -> dict[str, float]:
    """Metrics of a statistic, k1 as -log ρ: over tokens, and over sequences (their token mean for ``token_*``)."""
    is_k1 = name.endswith("k1")
    rows = statistic(name, batch)
    if is_k1:
        rows = [{t: -value for t, value in row.items()} for row in rows]
        lower, upper = -upper, -lower
    tokens = flat(rows)
    sequences = [mean(rows[i].values()) for i in batch.sequences]
    by_token = name.startswith(("token_", "turn_"))
    units = tokens if by_token else sequences
    relative = relative_to_scale(rows, name, batch)
    whole = [value / batch.oldest[i] for i, value in zip(batch.sequences, sequences, strict=True)]
    compared = flat(relative) if by_token else whole
    floor = lower if is_k1 else 0.0
    metrics = {
        "mean": mean(tokens),
        "max": max(units, default=0.0),
        "min": min(units, default=0.0),
        "fraction_high": mean(value > upper for value in compared),
        "fraction_low": mean(value < lower for value in compared),
        "std": deviation(
            value / share * min(max(share, floor), upper) if share else min(max(share, floor), upper)
            for value, share in zip(tokens, flat(relative), strict=True)
        ),
        "seq_mean": mean(sequences),
        "seq_std": deviation(sequences, lost=1),
        "seq_max": max(sequences, default=0.0),
        "seq_min": min(sequences, default=0.0),
        "seq_max_deviation": max(map(abs, sequences), default=0.0),
        "seq_fraction_high": mean(value > upper for value in whole),
    }
    if is_k1:
        metrics["seq_fraction_low"] = mean(value < lower for value in whole)
    return {f"rollout_rs_{name}_{key}": value for key, value in metrics.items()}


# Breakdowns: breakdowns[kind][bucket][quantity]; only buckets with a good token


def break_down(batch: Batch, accepted: list[list[int]]) -> dict[str, dict[Any, dict[str, float]]]:
    """Breakdowns by ``length`` floor(log2(good tokens)), sign of the ``reward``, ``staleness`` and ``turn``.

    The last buckets of staleness and turn are open; turns are left out if all tokens are in the first.
    """

    sides = batch.sides

    def sign(i: int, t: int) -> str:
        return "positive" if sides.rewards[i] > 0 else "negative" if sides.rewards[i] < 0 else "zero"

    def staleness(i: int, t: int) -> int:
        return min(max(sides.current_version - int(at(sides.versions, i, t)), 0), sides.max_staleness)

    buckets = {"length": lambda i, t: len(batch.good[i]).bit_length() - 1}
    if sides.rewards is not None:
        buckets["reward"] = sign
    if sides.versions is not None and sides.current_version is not None:
        buckets["staleness"] = staleness
    if sides.turn_ids is not None:
        buckets["turn"] = lambda i, t: min(max(sides.turn_ids[i][t], 0), 7)
    breakdowns = {name: by_bucket(batch, accepted, bucket) for name, bucket in buckets.items()}
    if set(breakdowns.get("turn", {})) <= {0}:
        breakdowns.pop("turn", None)
    return breakdowns


def by_bucket(
    batch: Batch, accepted: list[list[int]], bucket: Callable[[int, int], Any]
) -> dict[Any, dict[str, float]]:
    tokens: dict[Any, list[tuple[int, int]]] = {}
    for i in all_of(batch):
        for t in batch.good[i]:
            tokens.setdefault(bucket(i, t), []).append((i, t))
    accepted_positions = [set(row) for row in accepted]
    return {
        key: {
            "token_fraction": len(members) / batch.num_tokens,
            "kl": mean(-batch.log_ratio[i][t] for i, t in members),
            "masked_fraction": mean(t not in accepted_positions[i] for i, t in members),
        }
        for key, members in sorted(tokens.items())
    }


# How clearly a batch decides


def distance_to_bounds(
    train: Table, rollout: Table, mask: Table, settings: Settings | Mapping[str, Any], **sides: Any
) -> float:
    """The least distance of a statistic, also of metrics, from one of its bounds, in the statistic's own unit."""
    settings = as_settings(settings)
    batch = read(train, rollout, mask, settings, Sides(**sides))
    distances_so_far = [math.inf]
    for name, lower, upper in settings.criteria:
        if name == "group_any":
            continue
        rows = tested(name, batch)
        distances_so_far += distances(flat(relative_to_scale(rows, name, batch)), lower, upper)
        if name.startswith(("token_", "turn_")):
            distances_so_far += distances(
                [mean(row.values()) / batch.oldest[i] for i, row in enumerate(rows) if row], lower, upper
            )
    if settings.veto is not None:
        distances_so_far += distances(flat(batch.log_ratio), log(settings.veto), math.inf)
    if settings.level is not None:
        logs = weight_log(batch, settings)
        raw = weigh(batch, batch.good, settings)[0]
        relative = relative_to_scale(logs, settings.level, batch)
        distances_so_far += distances(flat(relative), log(settings.low), log(settings.upper))
        means = [mean(row.values()) ** (1 / batch.oldest[i]) for i, row in enumerate(raw) if row]
        distances_so_far += distances(means, settings.low, settings.upper)
    return min(distances_so_far)


def distances(values: Iterable[float], lower: float, upper: float) -> list[float]:
    bounds = [value for value in (lower, upper) if math.isfinite(value)]
    return [abs(value - edge) for value in values for edge in bounds]
