"""Plan and apply: importance weights and rejection masks for a whole rollout batch, from local shards.

Everything that is global to the batch is computed here, once, before the pipeline schedule. Between the collectives lie
pure functions: ``sequence_sums`` → reduce over CP → ``batch_sums`` → reduce over DP×CP → ``finish``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc import statistics
from megatron_rc.config import RolloutCorrectionConfig
from megatron_rc.metrics import derive_metrics
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum, broadcast
from megatron_rc.parallel.groups import ParallelGroups, group_rank, group_size
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.statistics import Sums, TokenTerms


@dataclass(frozen=True)
class PlanInputs:
    """One rank's part of a rollout batch.

    Attributes:
        train_log_probs: log π_old, the layout's local shape, nats.
        rollout_log_probs: log π_rollout of the same tokens, of the same shape.
        response_mask: bool, True where a token was sampled and trains.
        layout: which tokens these are. Default: ``[b, s]``, whole sequences.
        sequence_ids: [n] int64, unique over DP, below 2²¹; error messages name them. Default: the local index.
        mini_batch_ids: [n] int64 in [0, num_mini_batches): the optimizer step that uses each sequence. Default: 0.
    """

    train_log_probs: Tensor
    rollout_log_probs: Tensor
    response_mask: Tensor
    layout: SequenceLayout | None = None
    sequence_ids: Tensor | None = None
    mini_batch_ids: Tensor | None = None


@dataclass(frozen=True)
class _LocalResult:
    """What a rank keeps of its own tokens and sequences."""

    weights: Tensor | None
    mask: Tensor
    sequence_lengths: Tensor


class CorrectionResult:
    """Weights and mask of the local tokens, and what is known of the whole batch.

    Attributes:
        weights: like ``response_mask``: detached importance weights, 0 where the mask is, or None where no weights are
            asked for (and on pipeline stages without log-probs).
        mask: like ``response_mask``, bool: the accepted tokens m'; None on pipeline stages without log-probs.
        sequence_lengths: [n] float64: tokens of each local sequence in the loss's denominator; None likewise.
        header: 1-D float64, the global sums and maxima that everything else is read from.
    """

    def __init__(
        self,
        config: RolloutCorrectionConfig,
        header: Tensor,
        num_mini_batches: int,
        local: _LocalResult | None = None,
    ) -> None:
        self.config = config
        self.header = header
        self.weights = local.weights if local else None
        self.mask = local.mask if local else None
        self.sequence_lengths = local.sequence_lengths if local else None
        self._num_mini_batches = num_mini_batches
        self._host: list[float] | None = None

    @property
    def denominators(self) -> Tensor:
        """[num_mini_batches, 4] float64: tokens and sequences under the response mask, then under m'."""
        return self.header[: 4 * self._num_mini_batches].view(self._num_mini_batches, 4)

    @property
    def skip(self) -> Tensor:
        """[num_mini_batches] bool: no token is accepted, the optimizer step must not be made."""
        return self.denominators[:, 2] == 0

    def check(self) -> None:
        """Raise the same error on every rank if any rank held a token without a usable log-prob.

        Host synchronisations: one, shared with ``metrics()``.

        Raises:
            ValueError: names the policy, the lowest sample and position, and how many such tokens there are.
        """
        sums, maxima = self._statistics()
        for policy in ("train", "rollout"):
            count, key = sums[f"bad_{policy}"], -maxima[f"-bad_{policy}_key"]
            if count:
                sample, position = divmod(int(key), int(statistics.KEY_STRIDE))
                name = {"train": "training", "rollout": "rollout"}[policy]
                raise ValueError(
                    f"the {name} log-prob of sample {sample}, position {position} is NaN, infinite or positive "
                    f"({int(count)} such tokens in the batch): repair the engine's log-probs or mask these tokens"
                )

    def metrics(self) -> dict[str, float]:
        """Metrics of the whole batch, equal on every rank; see ``docs/metrics.md``. Raises no data error."""
        return derive_metrics(*self._statistics(), self.config)

    def denominators_on_host(self) -> list[list[float]]:
        """``denominators`` as Python floats, from the same host synchronisation as ``check()``."""
        host = self._read()
        return [host[4 * index : 4 * index + 4] for index in range(self._num_mini_batches)]

    def _read(self) -> list[float]:
        if self._host is None:
            self._host = self.header.tolist()
        return self._host

    def _statistics(self) -> tuple[dict[str, float], dict[str, float]]:
        sum_names, max_names = statistic_names(self.config)
        values = self._read()[4 * self._num_mini_batches :]
        sums = dict(zip(sum_names, values[: len(sum_names)], strict=True))
        return sums, dict(zip(max_names, values[len(sum_names) :], strict=True))


class RolloutCorrection:
    """The correction for a trainer: a config and the groups of this rank.

    Args:
        config: what to correct.
        groups: ``cp`` and ``dp_cp`` carry the reductions of the last stage, ``pp`` the header to the other stages.
    """

    def __init__(self, config: RolloutCorrectionConfig, groups: ParallelGroups) -> None:
        self.config = config
        self.groups = groups

    def plan(
        self, inputs: PlanInputs | None, *, num_mini_batches: int = 1, device: torch.device | None = None
    ) -> CorrectionResult:
        """Correct a rollout batch, alike on all pipeline stages.

        Args:
            inputs: this rank's part; None on the stages that hold no log-probs.
            num_mini_batches: optimizer steps that share the batch, equal on every rank.
            device: of the header, where ``inputs`` is None.

        Collectives: those of :func:`correct_rollouts` on the last stage, then one broadcast over ``pp``.

        Raises:
            ValueError: shapes or ids that do not fit. Bad data is reported by ``check()`` of the result.
        """
        last = group_size(self.groups.pp) - 1
        if inputs is None:
            names = statistic_names(self.config)
            length = 4 * num_mini_batches + sum(map(len, names))
            header = torch.zeros(length, dtype=torch.float64, device=device)
            return CorrectionResult(self.config, broadcast(header, last, self.groups.pp), num_mini_batches)
        result = correct_rollouts(
            inputs.train_log_probs,
            inputs.rollout_log_probs,
            inputs.response_mask,
            self.config,
            inputs.layout,
            self.groups,
            sequence_ids=inputs.sequence_ids,
            mini_batch_ids=inputs.mini_batch_ids,
            num_mini_batches=num_mini_batches,
        )
        result.header = broadcast(result.header, last, self.groups.pp)
        return result


def correct_rollouts(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
    layout: SequenceLayout | None = None,
    groups: ParallelGroups | None = None,
    *,
    sequence_ids: Tensor | None = None,
    mini_batch_ids: Tensor | None = None,
    num_mini_batches: int = 1,
) -> CorrectionResult:
    """Importance weights, accepted mask, denominators and metrics of a whole rollout batch.

    Args:
        train_log_probs: log π_old, the layout's local shape, nats; detached.
        rollout_log_probs: log π_rollout of the same tokens, of the same shape.
        response_mask: bool, of the same shape; what stands elsewhere changes no bit of any result.
        config: what to correct.
        layout: which tokens these are. Default: padded ``[b, s]``, whole sequences.
        groups: ``cp`` and ``dp_cp`` hold the other tokens. Default: this process alone.
        sequence_ids: [n] int64, unique over DP, below 2²¹; error messages name them. Default: the local index.
        mini_batch_ids: [n] int64 in [0, num_mini_batches). Default: 0.
        num_mini_batches: optimizer steps that share the batch, equal on every rank.

    Returns:
        The result; call its ``check()`` before any optimizer step.

    Collectives: one SUM over ``cp``, one SUM and one MAX over ``dp_cp``; none for a group of size 1. The sizes do not
    depend on the number of tokens.

    Raises:
        ValueError: shapes or dtypes that do not fit together (alike on all ranks).
    """
    groups = groups or ParallelGroups()
    layout = layout or _default_layout(response_mask, groups)
    inputs = PlanInputs(train_log_probs, rollout_log_probs, response_mask, layout, sequence_ids, mini_batch_ids)
    ids, mini_batches = _check_inputs(inputs, layout, num_mini_batches)
    terms = statistics.token_terms(train_log_probs, rollout_log_probs, response_mask)
    by_token = statistics.accepted_tokens(terms, config.criteria)
    sequences = _reduce_sequences(statistics.sequence_sums(terms, by_token, config.criteria, layout), groups)
    decision = _decide(terms, by_token, sequences, layout, config)
    sums, maxima = _batch_sums(terms, sequences, decision, ids, layout, config)
    counts = _mini_batch_counts(sequences["tokens"], decision.accepted, mini_batches, num_mini_batches, layout)
    header = _reduce_batch(counts, sums, maxima, groups)
    lengths = decision.accepted if config.rejection_denominator == "accepted" else sequences["tokens"]
    return CorrectionResult(config, header, num_mini_batches, _LocalResult(decision.weights, decision.mask, lengths))


def statistic_names(config: RolloutCorrectionConfig) -> tuple[list[str], list[str]]:
    """Names of the sums and of the maxima in the header: those that a batch without sequences has too."""
    nothing, layout = torch.zeros(0, 0), SequenceLayout.padded(0, 0)
    terms = statistics.token_terms(nothing, nothing, nothing.bool())
    by_token = statistics.accepted_tokens(terms, config.criteria)
    sequences = statistics.sequence_sums(terms, by_token, config.criteria, layout)
    decision = _decide(terms, by_token, sequences, layout, config)
    sums, maxima = _batch_sums(terms, sequences, decision, torch.zeros(0), layout, config)
    return list(sums), list(maxima)


@dataclass(frozen=True)
class _Decision:
    """What is done with the local tokens.

    Attributes:
        raw: importance weights before truncation, 0 where nothing is counted; None without weights.
        weights: the same after truncation.
        mask: bool, the accepted tokens m'.
        accepted_by: for each criterion the counted tokens that it accepts.
        accepted: [n] float64, accepted tokens of each whole sequence.
    """

    raw: Tensor | None
    weights: Tensor | None
    mask: Tensor
    accepted_by: dict[str, Tensor]
    accepted: Tensor


def _decide(
    terms: TokenTerms,
    by_token: dict[str, Tensor],
    sequences: Sums,
    layout: SequenceLayout,
    config: RolloutCorrectionConfig,
) -> _Decision:
    accept = torch.ones_like(sequences["tokens"], dtype=torch.bool)
    accepted_by = dict(by_token)
    for criterion in config.criteria:
        if criterion.aggregation != "token":
            verdict = statistics.within(criterion, statistics.sequence_statistic(criterion, sequences))
            accepted_by[criterion.name] = terms.counted & layout.expand(verdict)
            accept = accept & verdict
    mask = terms.counted
    for accepted in accepted_by.values():
        mask = mask & accepted
    raw, weights = _weights(terms, sequences, layout, config)
    return _Decision(raw, weights, mask, accepted_by, torch.where(accept, sequences["kept"], 0))


def _weights(
    terms: TokenTerms, sequences: Sums, layout: SequenceLayout, config: RolloutCorrectionConfig
) -> tuple[Tensor | None, Tensor | None]:
    """(raw, truncated) importance weights of the local tokens, 0 where nothing is counted."""
    if config.rollout_is is None:
        return None, None
    total = sequences["train"] - sequences["rollout"]
    level: dict[str, Callable[[], Tensor]] = {
        "token": lambda: terms.log_ratio,
        "sequence": lambda: layout.expand(total),
        "geometric": lambda: layout.expand(total / sequences["tokens"].clamp(min=1)),
    }
    ratio = statistics.exp_ratio(level[config.rollout_is]()).to(terms.log_ratio.dtype)
    raw = torch.where(terms.counted, ratio, 0)
    return raw, raw.clamp(max=config.is_threshold)


def _batch_sums(
    terms: TokenTerms,
    sequences: Sums,
    decision: _Decision,
    sequence_ids: Tensor,
    layout: SequenceLayout,
    config: RolloutCorrectionConfig,
) -> tuple[Sums, Sums]:
    """(sums, maxima) of the local part of the batch, by name, in an order that no data changes."""
    sums = statistics.token_batch_sums(terms)
    maxima = statistics.bad_token_maxima(terms, sequence_ids, layout)
    sums["accepted_tokens"] = decision.mask.sum()
    sums |= {f"accepted_by_{name}": accepted.sum() for name, accepted in decision.accepted_by.items()}
    whole = statistics.sequence_batch_sums(sequences)
    whole["sequences_with_rejected"] = (decision.accepted < sequences["tokens"]).sum()
    sums |= {name: value * _counts_sequences(layout) for name, value in whole.items()}
    maxima |= statistics.sequence_batch_maxima(sequences)
    if decision.raw is not None and decision.weights is not None:
        more = statistics.weight_sums(decision.raw, decision.weights, terms.counted, config)
        sums, maxima = sums | more[0], maxima | more[1]
    return sums, maxima


def _counts_sequences(layout: SequenceLayout) -> int:
    """Every CP rank knows whole sequences; 1 on the one that counts them, else 0."""
    return int(layout.cp_rank == 0)


def _mini_batch_counts(
    tokens: Tensor, accepted: Tensor, mini_batch_ids: Tensor, num_mini_batches: int, layout: SequenceLayout
) -> Tensor:
    """[num_mini_batches, 4] float64, the local part of ``CorrectionResult.denominators``."""
    columns = torch.stack([tokens, (tokens > 0).double(), accepted, (accepted > 0).double()], dim=1)
    counts = torch.zeros(num_mini_batches, 4, dtype=torch.float64, device=tokens.device)
    return counts.index_add_(0, mini_batch_ids, columns * _counts_sequences(layout))


def _reduce_sequences(sums: Sums, groups: ParallelGroups) -> Sums:
    """One SUM over ``cp``."""
    return dict(zip(sums, all_reduce_sum(torch.stack(list(sums.values())), groups.cp).unbind(), strict=True))


def _reduce_batch(counts: Tensor, sums: Sums, maxima: Sums, groups: ParallelGroups) -> Tensor:
    """The header: one SUM and one MAX over ``dp_cp``."""
    local_sums = torch.cat([counts.flatten(), torch.stack([value.double() for value in sums.values()])])
    local_maxima = torch.stack([value.double() for value in maxima.values()])
    return torch.cat([all_reduce_sum(local_sums, groups.dp_cp), all_reduce_max(local_maxima, groups.dp_cp)])


def _default_layout(response_mask: Tensor, groups: ParallelGroups) -> SequenceLayout:
    if response_mask.dim() != 2:
        raise ValueError(f"response_mask has shape {tuple(response_mask.shape)}: without a layout it must be [b, s]")
    rank, size = group_rank(groups.cp), group_size(groups.cp)
    return SequenceLayout.padded(*response_mask.shape, cp_rank=rank, cp_size=size)


def _check_inputs(inputs: PlanInputs, layout: SequenceLayout, num_mini_batches: int) -> tuple[Tensor, Tensor]:
    """(sequence ids, mini-batch ids), with their defaults."""
    for name in ("train_log_probs", "rollout_log_probs", "response_mask"):
        shape = tuple(getattr(inputs, name).shape)
        if shape != layout.shape:
            raise ValueError(f"{name} has shape {shape}: the layout's local shape is {layout.shape}")
    if inputs.response_mask.dtype != torch.bool:
        raise ValueError(f"response_mask is {inputs.response_mask.dtype}: expected bool, True where a token counts")
    for name in ("train_log_probs", "rollout_log_probs"):
        if not getattr(inputs, name).is_floating_point():
            raise ValueError(f"{name} is {getattr(inputs, name).dtype}: expected a float dtype")
    if num_mini_batches < 1:
        raise ValueError(f"num_mini_batches={num_mini_batches} must be at least 1")
    device = inputs.response_mask.device
    ids = inputs.sequence_ids if inputs.sequence_ids is not None else torch.arange(layout.num_sequences)
    zeros = torch.zeros(layout.num_sequences, dtype=torch.int64)
    mini_batches = inputs.mini_batch_ids if inputs.mini_batch_ids is not None else zeros
    for name, value in (("sequence_ids", ids), ("mini_batch_ids", mini_batches)):
        if value.shape != (layout.num_sequences,) or value.dtype != torch.int64:
            raise ValueError(
                f"{name} is {value.dtype} {tuple(value.shape)}: expected int64, one for each of "
                f"{layout.num_sequences} sequences"
            )
    return ids.to(device), mini_batches.to(device)
