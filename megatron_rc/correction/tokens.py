"""The decisions on each token alone: is it valid, what is its ratio, is it rejected, what is its weight.

The tokens of a rank are cut into blocks, so that the memory of the arithmetic does not grow with their number. The same
expressions run on a CPU, on a GPU and inside ``torch.compile``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rc.correction.history import HistoryValues
from megatron_rc.correction.inputs import Part, Shards
from megatron_rc.correction.weights import Weights, bounded_weights
from megatron_rc.numerics import exp_ratio, exp_weight, is_log_prob
from megatron_rc.parallel.layout import Block
from megatron_rc.settings.config import RolloutCorrectionConfig

# Shards of up to WHOLE tokens are one block. A CPU takes larger ones in blocks of 1/38, so that the scratch stays below
# a tensor of the shard's size, and near MIN_BLOCK within the processor's cache. A GPU takes as many tokens at once as
# keep it busy while the host asks for the next operation.
WHOLE = 2**18
MIN_BLOCK = 2**14
GPU_BLOCK = 2**21


@dataclass(frozen=True)
class Tokens:
    """A block of tokens as it was given; tensors of tokens have one shape: [n, length], or flat [t]."""

    log_probs: Tensor  # [2, …] log π_train and log π_rollout, float32 or float64
    mask: Tensor  # the response mask, bool
    negative: Tensor | None = None  # bool, the advantage is below 0; None unless advantages are one a token
    staleness_step: Tensor | None = None  # int64, index of the staleness step that applies; None without a scale
    log_weight: Tensor | None = None  # float64, log w, unbounded; None: it is log ρ, or weights are of sequences
    statistics: dict[str, Tensor] = field(default_factory=dict)  # float64, by the name of each criterion on turns


def blocks_of(part: Part, *, compile: bool = False) -> list[Block]:
    """Cut one micro-batch into blocks of whole sequences, at most as large as the arithmetic has memory for."""
    num_tokens = part.mask.numel()
    if part.mask.device.type != "cpu":
        return part.layout.blocks(GPU_BLOCK, part.mask.device)
    largest = num_tokens
    if num_tokens > WHOLE:
        # A compiled block has less scratch, and more to do for each call.
        largest = max(num_tokens // (16 if compile else 38), MIN_BLOCK)
    return part.layout.blocks(largest, part.mask.device)


def token_blocks(
    shards: Shards,
    config: RolloutCorrectionConfig,
    history: Sequence[HistoryValues] | None = None,
    *,
    compile: bool = False,
) -> Iterator[tuple[int, Block, Tokens]]:
    """Yield (index of the micro-batch, block, its tokens) for all local tokens; at least one."""
    for index, part in enumerate(shards.parts):
        for block in blocks_of(part, compile=compile):
            log_weight = None
            statistics = {}
            if history is not None:
                values = history[index]
                log_weight = None if values.log_weight is None else block.take(values.log_weight)
                statistics = {name: block.take(statistic) for name, statistic in values.statistics.items()}
            train = block.take(part.train).to(shards.dtype)
            rollout = block.take(part.rollout).to(shards.dtype)
            tokens = Tokens(
                log_probs=torch.stack([train, rollout]),
                mask=block.take(part.mask),
                negative=None if part.advantages is None else block.take(part.advantages) < 0,
                staleness_step=_staleness_steps(part, block, shards, config),
                log_weight=log_weight,
                statistics=statistics,
            )
            yield index, block, tokens


def _staleness_steps(part: Part, block: Block, shards: Shards, config: RolloutCorrectionConfig) -> Tensor | None:
    """Return the index of the staleness step that applies to each token; None without a staleness scale."""
    if config.staleness_scale is None:
        return None
    if part.versions is not None:
        versions = block.take(part.versions)
    else:
        versions = block.expand(shards.policy_versions[part.sequences])  # type: ignore[index]
    return config.staleness_scale.levels(shards.counts.staleness(versions))


@dataclass(frozen=True)
class TokenTest:
    """The test of each token by one criterion on tokens or turns."""

    tested: Tensor  # the number that is held against the bounds, 0 if invalid
    accepted: Tensor  # bool: the valid tokens that the criterion accepts


@dataclass(frozen=True)
class TokenDecisions:
    """Decisions on each token alone; every tensor has the tokens' shape."""

    valid: Tensor  # bool: in the response mask, with two usable log-probs
    bad: Tensor  # bool: in the response mask, without two usable log-probs
    zero: Tensor  # 0-D, 0 in the dtype of the log-probs: the value of invalid tokens
    train: Tensor  # log π_train, 0 if invalid
    rollout: Tensor  # log π_rollout, 0 if invalid
    log_ratio: Tensor  # log ρ, 0 if invalid
    ratio: Tensor  # ρ, clamped, 1 if invalid
    bound_scale: Tensor | None  # the factor of the token's bounds, in nats; None without a staleness scale
    divergences: dict[str, Tensor]  # x of each divergence that a criterion needs, float64 (log ρ in its own dtype)
    tests: dict[str, TokenTest]  # of each criterion on tokens or turns, by its name
    passed: Tensor  # bool: the valid tokens that all criteria on tokens and turns accept
    # Of an invalid token all are 0. Float64 for weights of several tokens. None unless token-level.
    weights: Weights | None


def decide_tokens(tokens: Tokens, config: RolloutCorrectionConfig) -> TokenDecisions:
    """Return everything that a token decides alone.

    log ρ_t = log π_train - log π_rollout; w_t = exp(log ρ_t) within its bounds; it passes if all criteria on tokens and
    turns accept it.
    """
    # Both policies at once, because every operation costs a GPU's host time.
    is_usable = is_log_prob(tokens.log_probs)
    valid = tokens.mask & is_usable[0] & is_usable[1]
    bad = tokens.mask ^ valid
    zero = tokens.log_probs.new_zeros(())
    train, rollout = torch.where(valid, tokens.log_probs, zero).unbind(0)
    log_ratio = train - rollout
    ratio = exp_ratio(log_ratio)

    bound_scale = None
    if tokens.staleness_step is not None and config.staleness_scale is not None:
        bound_scale = config.staleness_scale.of(tokens.staleness_step, log_ratio.dtype)

    divergences = {x.name: x.values(train, rollout, log_ratio) for x in config.divergences}
    tests = {}
    passed = valid
    for criterion in config.criteria:
        if not criterion.of_tokens:
            continue
        tested = tokens.statistics[criterion.name] if criterion.tested is None else divergences[criterion.tested.name]
        tested = tested.to(log_ratio.dtype)
        accepted = valid & criterion.within_bounds(tested, bound_scale)
        tests[criterion.name] = TokenTest(tested, accepted)
        passed = passed & accepted

    weights = None
    if config.weighs_tokens:
        weights = _token_weights(tokens, log_ratio, ratio, valid, zero, bound_scale, config)
    return TokenDecisions(
        valid=valid,
        bad=bad,
        zero=zero,
        train=train,
        rollout=rollout,
        log_ratio=log_ratio,
        ratio=ratio,
        bound_scale=bound_scale,
        divergences=divergences,
        tests=tests,
        passed=passed,
        weights=weights,
    )


def _token_weights(
    tokens: Tokens,
    log_ratio: Tensor,
    ratio: Tensor,
    valid: Tensor,
    zero: Tensor,
    bound_scale: Tensor | None,
    config: RolloutCorrectionConfig,
) -> Weights:
    """Return the weight of each token: ρ_t, or the product over its prefix or turn, within its bounds."""
    log_weight = log_ratio
    raw = ratio
    if tokens.log_weight is not None:
        # A sum over many tokens, float64: float32 would make 0 of weights below e⁻¹⁰³.
        log_weight = torch.where(valid, tokens.log_weight, zero)
        raw = exp_weight(log_weight)
    raw = torch.where(valid, raw, zero)
    bounded = bounded_weights(raw, log_weight, config, bound_scale)
    if config.is_mode == "clamp":
        # The lower bound has moved the zeros.
        bounded = torch.where(valid, bounded, zero)
    return Weights(log=log_weight, raw=raw, bounded=bounded)


def token_columns(tokens: Tokens, decisions: TokenDecisions, config: RolloutCorrectionConfig) -> dict[str, Tensor]:
    """Return the numbers of each token whose sums over whole sequences decide, by name; 0 where they do not count.

    - ``valid``; ``response``: in the response mask; ``train``, ``rollout``: the log-probs; ``weight``: bounded;
    - ``passed``, ``passed_weight``: tokens that pass the criteria on tokens and turns, and their weights (if there are
      such criteria);
    - ``negative``, ``negative_passed``, ``negative_passed_weight``: the same of tokens with A < 0 (if a criterion
      spares the others, and advantages are one a token);
    - ``vetoed``: tokens below the veto's threshold; ``older_1``, …: tokens that reach each step of the staleness scale;
    - ``sum_<divergence>``: x of the criteria's needs.
    """
    valid = decisions.valid
    passed = decisions.passed
    weight = None if decisions.weights is None else decisions.weights.bounded
    columns = {"valid": valid, "response": tokens.mask, "train": decisions.train, "rollout": decisions.rollout}
    if weight is not None:
        columns["weight"] = weight
    if decisions.tests:
        columns["passed"] = passed
        if weight is not None:
            columns["passed_weight"] = torch.where(passed, weight, decisions.zero)
    if tokens.negative is not None and any(criterion.only_negative for criterion in config.criteria):
        negative_passed = passed & tokens.negative
        columns["negative"] = valid & tokens.negative
        columns["negative_passed"] = negative_passed
        if weight is not None:
            columns["negative_passed_weight"] = torch.where(negative_passed, weight, decisions.zero)
    if config.rollout_token_veto_threshold is not None:
        columns["vetoed"] = valid & (decisions.log_ratio < math.log(config.rollout_token_veto_threshold))
    if tokens.staleness_step is not None and config.staleness_scale is not None:
        for step in range(1, len(config.staleness_scale.steps) + 1):
            columns[f"older_{step}"] = valid & (tokens.staleness_step >= step)
    for need in config.needs:
        if need.how == "sum":
            columns[need.name] = decisions.divergences[need.divergence.name]  # 0 where log ρ is 0
    return columns
