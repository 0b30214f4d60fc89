"""Recurrences over sequences that are cut over ranks, against plain loops over the whole sequences."""

import itertools
import math

import pytest
import torch

from megatron_rc.parallel import ParallelGroups, SequenceLayout
from megatron_rc.parallel.recurrence import MINIMA, SUMS, Recurrence, neighbouring_values
from tests.support.on_rank import cp_place, recorded
from tests.support.ranks import Layout

LENGTHS = (16, 8, 0, 24, 8)
TOTAL = sum(LENGTHS)
KINDS = [(backward, algebra) for backward in (False, True) for algebra in ("sums", "minima")]


def draw():
    """Coefficients and offsets of all tokens, for both algebras; some tokens are skipped, some forget all before."""
    generator = torch.Generator().manual_seed(5)
    factors = torch.randn(TOTAL, generator=generator, dtype=torch.float64)
    values = torch.randn(TOTAL, generator=generator, dtype=torch.float64)
    chance = torch.rand(TOTAL, generator=generator)
    factors = torch.where(chance < 0.3, 1.0, torch.where(chance < 0.5, 0.0, factors))
    sums = factors, torch.where(chance < 0.3, 0.0, values)
    minima = torch.where(chance < 0.8, 0.0, math.inf), torch.where(chance < 0.2, math.inf, values)
    return {"sums": sums, "minima": minima}


def looped(coefficients, offsets, backward, algebra):
    """The same with one token after the other, in lists."""
    neighbours = []
    start = 0
    for length in LENGTHS:
        tokens = range(start, start + length)
        value = 0.0 if algebra == "sums" else math.inf
        row = {}
        for t in reversed(tokens) if backward else tokens:
            row[t] = value
            c = coefficients[t].item()
            o = offsets[t].item()
            value = o + c * value if algebra == "sums" else min(o, c + value)
        neighbours += [row[t] for t in tokens]
        start += length
    return torch.tensor(neighbours, dtype=torch.float64)


def on_slices(split, drawn):
    """The values of this rank's tokens of all kinds at once, with their places, and the collectives."""
    where = cp_place()
    local = [length // where["cp_size"] for length in LENGTHS]
    layout = SequenceLayout.packed([0, *itertools.accumulate(local)], split=split, **where)
    algebras = {"sums": SUMS, "minima": MINIMA}
    recurrences = [
        Recurrence(layout, *map(layout.cut, drawn[algebra]), backward, algebras[algebra]) for backward, algebra in KINDS
    ]
    with recorded() as seen:
        values = neighbouring_values(recurrences, ParallelGroups.from_megatron().cp)
    return layout.cut(torch.arange(TOTAL)), values, seen


@pytest.mark.parametrize(
    ("layout", "split"), [(Layout(), "zigzag"), (Layout(cp=2), "zigzag"), (Layout(cp=4), "contiguous")], ids=str
)
def test_slices_give_the_values_of_whole_sequences(ranks, layout, split):
    drawn = draw()
    chunks = 1 if layout.cp == 1 else layout.cp * (2 if split == "zigzag" else 1)
    for places, values, seen in ranks.run(on_slices, layout, split, drawn):
        for (backward, algebra), value in zip(KINDS, values, strict=True):
            expected = looped(*drawn[algebra], backward, algebra)[places]
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        size = len(LENGTHS) * chunks * 2 * len(KINDS)
        assert seen == ([("SUM", layout.cp, size)] if layout.cp > 1 else [])


def test_no_sequence_changes_another_ones_bits():
    layout = SequenceLayout.padded(3, 8)
    values = torch.randn(3, 8, dtype=torch.float64)
    ones = torch.ones_like(values)
    alone = neighbouring_values([Recurrence(layout, ones, values)], None)[0]
    values[1] = 1e300
    beside = neighbouring_values([Recurrence(layout, ones, values)], None)[0]
    assert torch.equal(beside[[0, 2]], alone[[0, 2]])
