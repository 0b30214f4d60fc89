"""Which fields the header of a batch has: from the config and the counts that all ranks agree on."""

from __future__ import annotations

import functools
from typing import Any

from megatron_rc.correction.checks.shift import CELLS, ROWS
from megatron_rc.correction.header import HeaderFields, field_names
from megatron_rc.correction.header_records import (
    CriterionSums,
    DataSums,
    MaskedWeights,
    OwnTokenTest,
    PolicySums,
    SequenceExtremes,
    SequenceTest,
    SharedWeights,
    Source,
    TokenExtremes,
    TokenTest,
    TokenWeights,
    VetoSums,
)
from megatron_rc.correction.histogram import NUM_BINS
from megatron_rc.correction.inputs import AgreedCounts
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion

LENGTH_BUCKETS = 24  # sequences of 2^i to 2^(i+1) - 1 tokens
REWARD_SIGNS = ("negative", "zero", "positive")


def header_fields(config: RolloutCorrectionConfig, counts: AgreedCounts) -> HeaderFields:
    """The fields of a batch's header, from what every rank knows."""
    return _header_fields(config, counts.num_mini_batches, counts.max_staleness)


@functools.lru_cache(maxsize=64)
def _header_fields(config: RolloutCorrectionConfig, num_mini_batches: int, max_staleness: int) -> HeaderFields:
    records = _records(config)
    criteria = {criterion.name: _criterion_record(criterion) for criterion in config.criteria}
    everything = (*records.items(), *criteria.items())

    def vector(source: Source) -> dict[Source | str, tuple[int, ...]]:
        return {source: (len(field_names(everything, source)),)}

    histograms = 0 if config.rollout_is is None else 1 if config.rollout_is == "token" else 2
    sums = {
        **vector(Source.SEQUENCES),
        **vector(Source.FLAGS),
        "by_length": (LENGTH_BUCKETS, 2),
        "by_reward": (len(REWARD_SIGNS), 2),
        "by_staleness": (max_staleness + 1, 3),
        **vector(Source.DATA),
        "mini_batches": (num_mini_batches, 4),
        "weighed": (num_mini_batches * config.may_weigh_nothing,),
        "weight_bins_until": (histograms, NUM_BINS),
        **vector(Source.TOKENS),
        "bins_until": (NUM_BINS,),
        "shift": (ROWS, CELLS),
    }
    maxima = {**vector(Source.SEQUENCE_MAXIMA), **vector(Source.TOKEN_MAXIMA), **vector(Source.KEY)}
    return HeaderFields(records, criteria, sums, maxima)


def _records(config: RolloutCorrectionConfig) -> dict[str, type[Any]]:
    records: dict[str, type[Any]] = {"policy": PolicySums, "data": DataSums}
    by_token = config.rollout_is == "token"
    if config.rollout_is is not None:
        records["weights"] = TokenWeights if by_token else SharedWeights
        if config.is_mode == "mask":
            records["masked"] = MaskedWeights
        # Without these bounds the extremes of weights follow from those of ρ.
        if config.is_mode == "mask" or config.staleness_scale is not None:
            records["extremes"] = TokenExtremes if by_token else SequenceExtremes
    if config.rollout_token_veto_threshold is not None:
        records["veto"] = VetoSums
    return records


def _criterion_record(criterion: Criterion) -> type[CriterionSums]:
    if not criterion.is_measured:
        return CriterionSums
    if criterion.unit == "sequence":
        return SequenceTest
    return TokenTest if criterion.bounds.on_ratio else OwnTokenTest
