"""The numbers that travel: records of tensors, whose form follows from config and counts alone."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_rc import AgreedCounts, RolloutCorrectionConfig
from megatron_rc.batch.chain import empty_header
from megatron_rc.measures.header import SideCounts
from megatron_rc.parallel.collectives import flatten, largest, map_record, on_host, pack, rebuild, smallest, unpack
from tests.support.correction_cases import CASES, clear_batch, sizes
from tests.support.correction_comparison import config_of, correct


@pytest.mark.parametrize("name", CASES)
def test_the_form_follows_from_config_and_counts_alone(name):
    """A rank without a token, and a pipeline stage without log-probs, has the header of every rank."""
    batch, _ = clear_batch(name)
    result = correct(name, batch)
    empty = empty_header(config_of(name), AgreedCounts(**sizes(batch)))
    for found, wanted in zip(flatten(empty), flatten(result.header), strict=True):
        assert [value.shape for value in found] == [value.shape for value in wanted]
    header = result.on_host
    assert header.policy.valid == result.metrics()["rollout_corr/num_tokens"]
    assert header.denominators.counts == result.denominators.tolist()
    assert set(header.criteria) == {criterion.name for criterion in config_of(name).criteria}


def test_counts_that_change_every_step_move_nothing():
    config = RolloutCorrectionConfig()
    lengths = [
        len(torch.cat(pack(empty_header(config, AgreedCounts(current_version=version, max_staleness=staleness)))))
        for version, staleness in ((3, 0), (4, 0), (4, 2))
    ]
    assert lengths == [lengths[0], lengths[0], lengths[0] + 6]


def test_the_version_of_the_weights_needs_no_new_header():
    """A stage without log-probs asks for one in every plan."""
    config, third, fourth = RolloutCorrectionConfig(), AgreedCounts(current_version=3), AgreedCounts(current_version=4)
    assert empty_header(config, third) is empty_header(config, fourth)
    assert empty_header(config, third) is not empty_header(config, AgreedCounts())


@dataclass(frozen=True)
class Inner:
    some: Tensor | None
    most: Tensor = largest()


@dataclass(frozen=True)
class Outer:
    table: Tensor
    inner: dict[str, Inner]
    pair: tuple[Tensor, Tensor]
    least: Tensor = smallest()


def made(value):
    number = torch.tensor(float(value))
    inner = {"a": Inner(number, number + 1), "b": Inner(None, number + 2)}
    return Outer(number.expand(2, 3), inner, (number + 3, number + 4), number + 5)


def test_records_add_up_in_the_order_of_their_fields():
    """Sums add, of a largest field the largest counts, of a smallest one the smallest."""
    (sums, maxima), (more, higher) = pack(made(1)), pack(made(10))
    merged = on_host(unpack(made(0), (sums + more, torch.maximum(maxima, higher))))
    assert merged.table == [[11.0] * 3] * 2
    assert (merged.inner["a"].some, merged.inner["a"].most) == (11, 11)
    assert (merged.inner["b"].some, merged.inner["b"].most) == (None, 12)
    assert merged.pair == (17, 19)
    assert merged.least == 6
    # A record is rebuilt from its own parts, and takes every field and no other.
    record = made(2)
    assert on_host(rebuild(record, flatten(record))) == on_host(record)
    assert on_host(map_record(record, torch.neg)).least == -on_host(record).least
    assert SideCounts(above=1.0, below=0.0).above == 1
    with pytest.raises(TypeError, match="another"):
        SideCounts(above=1.0, below=0.0, another=1.0)
    with pytest.raises(TypeError, match="below"):
        SideCounts(above=1.0)
