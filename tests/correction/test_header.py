"""The header: one declaration, from config and counts alone, that writer and reader keep to."""

import dataclasses

import pytest
import torch

from megatron_rc import AgreedCounts, RolloutCorrectionConfig
from megatron_rc.correction.header import HeaderFields, merge_headers, step_fields
from megatron_rc.correction.header_fields import header_fields
from megatron_rc.correction.header_records import BatchHeader, PolicySums, Source
from megatron_rc.correction.token_pass.expressions import ExpressionBlock
from megatron_rc.correction.token_pass.operations import BlockTokens
from megatron_rc.correction.token_pass.terms import block_terms, term_names
from tests.support.correction_cases import CASES, clear_batch, sizes
from tests.support.correction_comparison import config_of, correct


@pytest.mark.parametrize("name", CASES)
def test_positions_follow_from_config_and_counts_alone(name):
    """No tensor is looked at; no field stands twice; what is read has every number of what was written."""
    batch, _ = clear_batch(name)
    result = correct(name, batch)
    fields = header_fields(config_of(name), AgreedCounts(**sizes(batch)))
    assert result.fields == fields
    assert len(result.header) == len(fields)
    names = [name for source in Source for name in fields.names(source)]
    assert len(set(names)) == len(names)
    header = result.on_host()
    assert header.policy.valid == result.metrics()["rollout_corr/num_tokens"]
    assert header.mini_batches == result.denominators.tolist()
    assert set(header.criteria) == {criterion.name for criterion in config_of(name).criteria}


def test_counts_that_change_every_step_move_nothing():
    config = RolloutCorrectionConfig()
    assert header_fields(config, AgreedCounts(current_version=3)) is header_fields(config, AgreedCounts())
    assert len(header_fields(config, AgreedCounts(max_staleness=2))) == len(header_fields(config, AgreedCounts())) + 6


@pytest.mark.parametrize("source", list(Source))
def test_a_field_that_is_missing_or_extra_is_an_error(source):
    fields = header_fields(CONFIG, AgreedCounts())
    values = {name: torch.zeros(3) for name in fields.names(source)}
    assert len(fields.stack(source, values)) == len(values)
    first = next(iter(values))
    with pytest.raises(KeyError, match=f"{first} is missing, nothing is not declared"):
        fields.stack(source, {name: value for name, value in values.items() if name != first})
    with pytest.raises(KeyError, match=r"nothing is missing, policy\.another is not declared"):
        fields.stack(source, values | {"policy.another": torch.zeros(3)})


CONFIG = RolloutCorrectionConfig(
    rollout_is="token", rollout_rs="token_k2,seq_max_k3", rollout_rs_threshold="1,2", rollout_token_veto_threshold=0.1
)


def columns(fields):
    """A header of ones."""
    return tuple(
        {column: torch.ones(shape, dtype=torch.float64) for column, shape in kind.items()}
        for kind in (fields.sums, fields.maxima)
    )


def test_a_column_that_is_missing_or_of_another_size_is_an_error():
    fields = header_fields(CONFIG, AgreedCounts())
    sums, maxima = columns(fields)
    pair = fields.pack(sums, maxima)
    assert (len(pair[0]), len(pair[1])) == (fields.num_sums, fields.num_maxima)
    with pytest.raises(KeyError, match="mini_batches is missing"):
        fields.pack({name: value for name, value in sums.items() if name != "mini_batches"}, maxima)
    with pytest.raises(ValueError, match=r"by_length has shape \(23, 2\): declared are \(24, 2\)"):
        fields.pack(sums | {"by_length": torch.ones(23, 2)}, maxima)


def test_terms_of_a_block_that_are_not_declared_are_an_error():
    names = term_names(CONFIG, token_advantages=False)
    nothing = torch.zeros(1, 4)
    tokens = BlockTokens(nothing, nothing, torch.zeros(1, 4, dtype=torch.bool))
    terms = block_terms(ExpressionBlock(tokens), tokens, CONFIG)
    assert len(terms.unnamed(names).kinds) == len(names)
    del terms.batch["policy.excess_squared"]
    with pytest.raises(KeyError, match=r"policy\.excess_squared is missing"):
        terms.unnamed(names)


def test_a_record_takes_every_field_and_no_other():
    """What a reader asks for is declared: mypy sees it, and so does whoever makes a record."""
    one = {field.name: 0.0 for field in dataclasses.fields(PolicySums)}
    assert PolicySums(**one).valid == 0
    with pytest.raises(TypeError, match="another"):
        PolicySums(**one, another=1.0)
    del one["valid"]
    with pytest.raises(TypeError, match="valid"):
        PolicySums(**one)


def test_headers_merge_by_sums_and_maxima():
    fields = header_fields(CONFIG, AgreedCounts())
    one = torch.cat(fields.pack(*columns(fields)))
    merged = fields.read(merge_headers(fields, [one, 3 * one]).tolist())
    assert (merged.policy.valid, merged.policy.log_ratio_max, merged.policy.log_ratio_min) == (4, 3, -3)
    assert isinstance(merged, BatchHeader)
    assert merged.masked is None
    assert merged.criteria["token_k2"].tested_max == 3


def test_a_step_has_its_own_fields_behind_those_of_the_correction():
    known = header_fields(CONFIG, AgreedCounts())
    step, alone = step_fields(known), step_fields(None)
    assert len(step) == len(known) + len(alone)
    assert isinstance(alone, HeaderFields)
    assert list(step.maxima)[-1] == "factor", "the last number"
