"""Whole sequences: sums over their tokens, block by block, and the decisions on sequences and prompts from them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.inputs import Shards
from megatron_rc.correction.tokens import TokenDecisions, Tokens, token_columns
from megatron_rc.correction.weights import Weights, bounded_weights
from megatron_rc.numerics import exp_weight
from megatron_rc.parallel.collectives import largest, smallest
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion, SequenceValues


@dataclass(frozen=True)
class BlockReductions:
    """The reductions of a block, of all rows at once as a table: every operation costs a GPU's host time.

    Attributes:
        lengths: [n] int64, tokens of each sequence of a flat block [t]; None for a block [n, length].
    """

    lengths: Tensor | None = None

    def counts(self, flags: Sequence[Tensor]) -> Tensor:
        """Return for k rows of bools the number of tokens of each sequence that are True, [k, n]."""
        table = torch.stack([*flags])
        return table.sum(-1, dtype=torch.int32) if self.lengths is None else self._segments(table, "sum", 0.0)

    def sums(self, rows: Sequence[Tensor], num_squared: int) -> tuple[Tensor, Tensor]:
        """Return sums over sequences, and sums of squares over all tokens; every addition is made in float64.

        Args:
            rows: k rows of floats.
            num_squared: how many of the rows, the last ones, are squared.

        Returns:
            [k, n] and [num_squared] float64.
        """
        table = torch.empty(len(rows), *rows[0].shape, dtype=torch.float64, device=rows[0].device)
        torch.stack([*rows], out=table)
        sums = table.sum(-1) if self.lengths is None else self._segments(table, "sum", 0.0)
        # In place: a second table would be the largest part of the memory.
        return sums, table[-num_squared:].square_().flatten(1).sum(1)

    def totals(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the sums of k rows over all tokens, [k] float64."""
        return torch.stack([*rows]).flatten(1).sum(1, dtype=torch.float64)

    def extremes(self, rows: Sequence[Tensor], left_out: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest and the smallest values of k rows over all tokens that are not left out, [k] each."""
        return extremes_of(rows, left_out)

    def largest(self, rows: Sequence[Tensor], left_out: Tensor) -> Tensor:
        """Return the largest values of each sequence's tokens, [k, n]; -inf of none."""
        table = torch.stack([*rows]).masked_fill(left_out, -torch.inf)
        return table.amax(-1) if self.lengths is None else self._segments(table, "max", -torch.inf)

    def smallest(self, rows: Sequence[Tensor], left_out: Tensor) -> Tensor:
        """Return the smallest values of each sequence's tokens, [k, n]; +inf of none."""
        table = torch.stack([*rows]).masked_fill(left_out, torch.inf)
        return table.amin(-1) if self.lengths is None else self._segments(table, "min", torch.inf)

    def _segments(self, table: Tensor, how: str, of_nothing: float) -> Tensor:
        """Reduce a table of flat rows, [k, t], over the segments that are sequences: [k, n] float64."""
        lengths = self.lengths
        if lengths is None or not table.numel():
            shape = (len(table), 0 if lengths is None else len(lengths))
            return table.new_full(shape, of_nothing, dtype=torch.float64)
        # The rows one after the other, as one long row: a reduction of one dimension is fast on a GPU.
        flat = table.double().flatten()
        return torch.segment_reduce(flat, how, lengths=lengths.repeat(len(table)), unsafe=True).view(len(table), -1)


def extremes_of(rows: Sequence[Tensor], left_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest value of each row, [k] each; -inf and +inf of no values.

    Args:
        rows: k tensors of the shape of ``left_out``.
        left_out: bool, what does not count.
    """
    if not rows or not left_out.numel():
        nothing = torch.zeros(len(rows), dtype=torch.float64, device=left_out.device)
        return nothing - torch.inf, nothing + torch.inf
    table = torch.stack([*rows]).flatten(1)
    flat = left_out.flatten()
    return table.masked_fill(flat, -torch.inf).amax(1), table.masked_fill(flat, torch.inf).amin(1)


@dataclass(frozen=True)
class SequenceSums:
    """Numbers of each sequence, by name, [n] float64: sums, largest and smallest values over its tokens.

    On one rank they are over its local tokens, and over whole sequences once they are reduced over ``cp``.
    The names are those of :func:`megatron_rc.correction.tokens.token_columns`, and of the measures. The largest and the
    smallest values are x of criteria, ``max_<divergence>`` and ``min_<divergence>``, over valid tokens.
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor] = largest()
    minima: dict[str, Tensor] = smallest()

    @property
    def valid(self) -> Tensor:
        """Number of valid tokens."""
        return self.sums["valid"]

    @property
    def response(self) -> Tensor:
        """Number of tokens in the response mask."""
        return self.sums["response"]

    @property
    def passed(self) -> Tensor:
        """Number of valid tokens that pass all criteria on tokens and turns."""
        return self.sums.get("passed", self.valid)

    @property
    def passed_weight(self) -> Tensor | None:
        """Sum of the weights of these tokens; None unless weights are token-level."""
        return self.sums.get("passed_weight", self.sums.get("weight"))

    @functools.cached_property
    def num_tokens(self) -> Tensor:
        """Number of valid tokens, at least 1: a divisor."""
        return self.valid.clamp(min=1)

    @functools.cached_property
    def log_ratio(self) -> Tensor:
        """Sum of log ρ_t over valid tokens."""
        # Not the sum of float32 differences: these are rounded, which a product of many ratios would show.
        return self.sums["train"] - self.sums["rollout"]

    @functools.cached_property
    def mean_log_ratio(self) -> Tensor:
        """Mean of log ρ_t over valid tokens."""
        return self.log_ratio / self.num_tokens

    @functools.cached_property
    def statistic_values(self) -> SequenceValues:
        """The numbers that the statistics of criteria use."""
        values = {"log_ratio": self.log_ratio, **self.sums, **self.maxima, **self.minima}
        return SequenceValues(self.num_tokens, torch.zeros_like(self.valid), values)


@dataclass(frozen=True)
class MeasuredTokens:
    """Numbers of each token that only metrics need, by name; 0 where they do not count."""

    columns: dict[str, Tensor]  # added up over each sequence
    totals: dict[str, Tensor]  # added up over all tokens
    quantities: dict[str, Tensor]  # added up over all tokens, and their squares too
    extremes: dict[str, Tensor]  # the largest and the smallest value of all valid tokens are needed


@dataclass(frozen=True)
class TokenSums:
    """Sums and extremes over the tokens of a block, or over all local tokens.

    They are a few tensors with a number for each name: a device has little to do for each of them.
    """

    # The rows of ``sums``: first bools, which are counted, then numbers; the quantities are the last ones.
    names: tuple[str, ...]
    column_names: frozenset[str]  # the names whose sums over whole sequences are needed
    total_names: tuple[str, ...]  # the names whose sums over all tokens are needed, besides the quantities
    sums: Tensor  # [names, n] float64, over the tokens of each sequence
    squares: Tensor  # [quantities] float64, Σ x² over all tokens
    extreme_names: tuple[str, ...]
    largest: Tensor  # [extreme_names] over all valid tokens
    smallest: Tensor
    maxima: dict[str, Tensor]  # [n] float64, the largest x of each sequence, by the need's name
    minima: dict[str, Tensor]  # [n] float64, the smallest x of each sequence

    def of_sequences(self) -> SequenceSums:
        """Return the sums and extremes over the tokens of each sequence, by name."""
        sums = {name: row for name, row in zip(self.names, self.sums, strict=True) if name in self.column_names}
        return SequenceSums(sums, self.maxima, self.minima)


def sum_block(
    tokens: Tokens,
    decisions: TokenDecisions,
    measured: MeasuredTokens,
    reductions: BlockReductions,
    config: RolloutCorrectionConfig,
) -> TokenSums:
    """Return the sums and extremes of one block of tokens: over each sequence, and over all its tokens.

    Every addition is made in float64.

    Args:
        tokens: the tokens of the block.
        decisions: the decisions on them.
        measured: the numbers of the tokens that only metrics need.
        reductions: how to reduce a block of this shape, over sequences and over all tokens.
        config: the correction; it says which sums are needed.
    """
    columns = token_columns(tokens, decisions, config) | measured.columns

    # Bools are counted, numbers are added up. The quantities stand last, because their squares are added up too; one
    # that is also a column, such as "weight", is added up once.
    flags: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, values in (columns | measured.totals).items():
        if values.dtype == torch.bool:
            flags[name] = values
        elif name not in measured.quantities:
            numbers[name] = values
    numbers |= measured.quantities

    invalid = ~decisions.valid
    largest, smallest = reductions.extremes([*measured.extremes.values()], invalid)
    sums, squares = reductions.sums([*numbers.values()], len(measured.quantities))
    counts = reductions.counts([*flags.values()])
    return TokenSums(
        names=(*flags, *numbers),
        column_names=frozenset(columns),
        total_names=tuple(measured.totals),
        sums=torch.cat([counts, sums]),
        squares=squares,
        extreme_names=tuple(measured.extremes),
        largest=largest,
        smallest=smallest,
        maxima=_need_extremes("max", decisions, reductions.largest, config),
        minima=_need_extremes("min", decisions, reductions.smallest, config),
    )


def join_blocks(blocks: Sequence[TokenSums]) -> TokenSums:
    """Return the sums and extremes over all local tokens, from those of their blocks."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    return dataclasses.replace(
        first,
        sums=torch.cat([block.sums for block in blocks], dim=1),
        squares=torch.stack([block.squares for block in blocks]).sum(0),
        largest=torch.stack([block.largest for block in blocks]).amax(0),
        smallest=torch.stack([block.smallest for block in blocks]).amin(0),
        maxima={name: torch.cat([block.maxima[name] for block in blocks]) for name in first.maxima},
        minima={name: torch.cat([block.minima[name] for block in blocks]) for name in first.minima},
    )


def _need_extremes(
    how: str,
    decisions: TokenDecisions,
    reduce: Callable[[Sequence[Tensor], Tensor], Tensor],
    config: RolloutCorrectionConfig,
) -> dict[str, Tensor]:
    """Return the largest ("max") or smallest ("min") x of each sequence that criteria need, [n] float64, by name."""
    needs = [need for need in config.needs if need.how == how]
    if not needs:
        return {}
    values = reduce([decisions.divergences[need.divergence.name].double() for need in needs], ~decisions.valid)
    return {need.name: value for need, value in zip(needs, values, strict=True)}


@dataclass(frozen=True)
class SequenceDecisions:
    """Decisions on whole sequences, [n] each, equal on all ranks of a CP group."""

    bound_scale: Tensor | None  # float64, the factor of the bounds, in nats: the one of the oldest valid token
    weights: Weights | None  # float64, the weights that all tokens of a sequence share; None unless they share one
    tokens: Tensor  # number of tokens under m, float64
    accepted: Tensor | None  # bool: no criterion rejects the whole sequence; None: nothing rejects whole sequences
    negative_accepted: Tensor | None  # bool: its tokens with A < 0 are accepted too; None unless A is one a token
    accepted_tokens: Tensor  # number of tokens under m', float64
    accepted_weight: Tensor | None  # sum of their weights, float64; None unless weights are token-level
    by_criterion: dict[str, Tensor]  # bool: for each criterion on sequences or prompts, the sequences it accepts


def decide_sequences(
    sums: SequenceSums, shards: Shards, config: RolloutCorrectionConfig, prompts: Tensor | None = None
) -> SequenceDecisions:
    """Return the weight of each sequence, whether it is accepted, and how many of its tokens are.

    Args:
        sums: the sums over whole sequences.
        shards: the prompt and the advantage of each sequence are read from it.
        config: the correction.
        prompts: the sums over the responses of each prompt: :func:`prompt_columns`, reduced over ranks. None: criteria
            on prompts are left out (there are none, or the sums that they test are yet to be computed).
    """
    bound_scale = _oldest_scale(sums, config)
    weights = None
    if config.level is not None and config.level.unit == "sequence":
        log_weight = sums.mean_log_ratio if config.level.mean else sums.log_ratio
        raw = exp_weight(log_weight)
        weights = Weights(log=log_weight, raw=raw, bounded=bounded_weights(raw, log_weight, config, bound_scale))

    # A verdict has True for each sequence that is accepted, [n].
    verdicts = []  # on whole sequences
    negative_verdicts = []  # on the tokens with A < 0 of each sequence
    by_criterion = {}
    for criterion in config.criteria:
        if criterion.unit == "prompt" and prompts is not None:
            verdict = _prompt_verdict(criterion, prompts, config)[shards.group_ids]
        elif criterion.unit == "sequence":
            # Without a valid token there is nothing to test.
            within_bounds = criterion.within_bounds(criterion.statistic(sums.statistic_values), bound_scale)
            verdict = within_bounds | (sums.valid == 0)
        else:
            continue
        if criterion.only_negative and shards.advantages is not None:
            # Advantages are one a sequence: without A < 0 the sequence is accepted.
            verdict = verdict | ~(shards.advantages < 0)
        by_criterion[criterion.name] = verdict
        if criterion.only_negative and shards.advantages is None:
            # Advantages are one a token: a sequence may have tokens of both kinds.
            negative_verdicts.append(verdict)
        else:
            verdicts.append(verdict)

    if config.rejecting_veto is not None:
        verdicts.append(sums.sums["vetoed"] == 0)
    if config.bad_log_probs == "reject_sequence":
        verdicts.append(sums.response == sums.valid)
    accepted = functools.reduce(torch.logical_and, verdicts) if verdicts else None
    negative_accepted = functools.reduce(torch.logical_and, negative_verdicts) if negative_verdicts else None

    # Of the tokens that pass the criteria on tokens and turns, those that the verdicts reject are taken away.
    accepted_tokens = sums.passed
    accepted_weight = sums.passed_weight
    if negative_accepted is not None:
        lost_tokens = sums.sums["negative_passed"].masked_fill(negative_accepted, 0)
        accepted_tokens = accepted_tokens - lost_tokens
        if accepted_weight is not None:
            lost_weight = sums.sums["negative_passed_weight"].masked_fill(negative_accepted, 0)
            accepted_weight = accepted_weight - lost_weight
    if accepted is not None:
        rejected = ~accepted
        accepted_tokens = accepted_tokens.masked_fill(rejected, 0)
        accepted_weight = None if accepted_weight is None else accepted_weight.masked_fill(rejected, 0)

    return SequenceDecisions(
        bound_scale=bound_scale,
        weights=weights,
        tokens=sums.valid if config.bad_log_probs == "reject_token" else sums.response,
        accepted=accepted,
        negative_accepted=negative_accepted,
        accepted_tokens=accepted_tokens,
        accepted_weight=accepted_weight,
        by_criterion=by_criterion,
    )


def _oldest_scale(sums: SequenceSums, config: RolloutCorrectionConfig) -> Tensor | None:
    """Return the factor of each sequence's bounds, that of its oldest valid token; None without a staleness scale."""
    if config.staleness_scale is None:
        return None
    num_steps = len(config.staleness_scale.steps)
    reached = torch.stack([sums.sums[f"older_{step}"] > 0 for step in range(1, num_steps + 1)])
    return config.staleness_scale.of(reached.sum(0), sums.valid.dtype)


def accepted_masks(passed: Sequence[Tensor], shards: Shards, decisions: SequenceDecisions) -> list[Tensor]:
    """Return the accepted mask m' of each micro-batch: the tokens that pass, of accepted sequences.

    Args:
        passed: for each micro-batch, bool: the valid tokens that pass the criteria on tokens and turns.
        shards: the layouts, and the advantages of tokens.
        decisions: on whole sequences.
    """
    masks = []
    for part, part_passed in zip(shards.parts, passed, strict=True):
        mask = part_passed
        if decisions.accepted is not None:
            mask = mask & part.expand(decisions.accepted)
        if decisions.negative_accepted is not None and part.advantages is not None:
            mask = mask & (part.expand(decisions.negative_accepted) | ~(part.advantages < 0))
        masks.append(mask)
    return masks


def prompt_columns(sums: SequenceSums, shards: Shards, config: RolloutCorrectionConfig) -> Tensor:
    """Return this rank's sums over the responses of each prompt, [num_groups, k] float64.

    The columns: valid tokens; lost responses, of which the other criteria reject every token; the sums that criteria on
    prompts need. Each response counts on the first rank of its CP group.
    """
    accepted_tokens = decide_sequences(sums, shards, config).accepted_tokens
    lost = (sums.response > 0) & (accepted_tokens == 0)
    values = sums.statistic_values.values
    columns = torch.stack([sums.valid, lost, *(values[name] for name in prompt_needs(config))], dim=1)
    columns = columns.masked_fill(shards.counts_elsewhere.unsqueeze(1), 0)
    prompts = columns.new_zeros(shards.counts.num_groups or 0, columns.shape[1])
    return prompts.index_add_(0, shards.group_ids, columns)  # type: ignore[arg-type]


def prompt_needs(config: RolloutCorrectionConfig) -> list[str]:
    """Return the names of the sums that criteria on prompts need, each once."""
    criteria = [criterion for criterion in config.criteria if criterion.unit == "prompt"]
    return list(dict.fromkeys(need.name for criterion in criteria for need in criterion.needs))


def _prompt_verdict(criterion: Criterion, prompts: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """Return which prompts a criterion accepts, [num_groups] bool."""
    valid, num_lost, *sums = prompts.unbind(1)
    by_need = dict(zip(prompt_needs(config), sums, strict=True))
    verdict = criterion.within_bounds(criterion.statistic(SequenceValues(valid.clamp(min=1), num_lost, by_need)))
    if criterion.follows_others:
        # Another criterion on prompts that rejects one rejects all of its responses.
        for other in config.criteria:
            if other.unit == "prompt" and not other.follows_others:
                verdict = verdict & _prompt_verdict(other, prompts, config)
    return verdict
