"""On thousands of ranks, simulated: which collectives are made, and how large; benchmarks/SCALING.md says so.

Fake process groups stay out of the test session: the traces come from a process of their own.
"""

import itertools
import json
import logging
from typing import NamedTuple
from unittest import mock

import pytest

from benchmarks import scaling, tracing
from benchmarks.scaling import BASE, CASES, LAYOUTS, OTHERS, PHASES, SHOWN, Call
from tests.support.forked import ForkedCall
from tests.support.paths import ROOT
from tests.support.runs import finish

SMALL = LAYOUTS[2]
LARGE = LAYOUTS[3]
LONG = OTHERS[0]
OTHER = OTHERS[2]
BATCHES = (BASE, LONG, OTHER)
PLAN, MICRO, STEP = PHASES
FIRST_STAGE = "first stage"
LAST = "last stage, last rank"
OTHER_SLICE = "last stage, last CP rank"
GATHERING = "token IS, tokens gathered"
# On thousands of ranks: sums, maxima, prompts and the step in the loss.
SOME = (*SHOWN, "token IS, seq_max", "token IS, two group criteria")


class Traced(NamedTuple):
    """What was traced: the ranks of the layout, which of them, the configuration, the batch."""

    world: int
    place: str
    name: str
    batch: int


# Which configurations and batches, by their index, are traced where.
CHOSEN = (
    (SMALL, LAST, tuple(CASES), (0, 2)),
    (LARGE, LAST, SOME, (0,)),
    (LARGE, OTHER_SLICE, SOME, (1,)),
    (LARGE, FIRST_STAGE, SOME, (0, 1)),
)


def rank_of(layout, place):
    """One of the layout's corners: the first of all, or one of the last pipeline stage. The last one has no tokens."""
    corners = layout.corners()
    first = layout.first_of_last_stage
    return {
        FIRST_STAGE: corners[0],
        LAST: corners[-1],
        OTHER_SLICE: first + layout.tp * (layout.cp - 1),
    }[place]


def trace_all():
    """(key, calls) of everything that the tests look at."""
    for layout, place, names, batches in CHOSEN:
        with scaling.fake_groups(layout, rank_of(layout, place)) as (groups, _):
            for name, index in itertools.product(names, batches):
                calls = scaling.trace(CASES[name], BATCHES[index], layout, groups)
                yield Traced(layout.world, place, name, index), calls
    with scaling.fake_groups(SMALL, rank_of(SMALL, LAST)) as (groups, _):
        for index in (0, 1):
            yield Traced(SMALL.world, LAST, GATHERING, index), trace_gathering(BATCHES[index], SMALL, groups)


def trace_gathering(batch, layout, groups):
    """Trace the wrong variant: the whole sequences are gathered on every rank of the CP group."""
    import torch
    import torch.distributed as dist

    masked_loss = tracing.masked_loss

    def gathering_loss(correction, micro_batch, log_probs, **options):
        local_log_probs = log_probs.detach()
        gathered = [torch.empty_like(local_log_probs) for _ in range(layout.cp)]
        dist.all_gather(gathered, local_log_probs, group=groups.cp)
        return masked_loss(correction, micro_batch, log_probs, **options)

    with mock.patch.object(tracing, "masked_loss", gathering_loss):
        return scaling.trace(CASES["token IS"], batch, layout, groups)


def write_traces(path):
    """Write all traces, in a process of its own."""
    logging.disable(logging.WARNING)
    path.write_text(json.dumps(list(trace_all())))


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    path = folder / "traces.json"
    code, _, errors = finish(ForkedCall(folder, write_traces, path))
    assert code == 0, errors
    return {Traced(*key): [Call(*call) for call in calls] for key, calls in json.loads(path.read_text())}


@pytest.fixture(scope="module")
def document():
    return (ROOT / "benchmarks" / "SCALING.md").read_text(encoding="utf-8")


@pytest.mark.processes
@pytest.mark.parametrize("name", SOME)
def test_tokens_and_ranks_change_nothing(traces, name):
    base = traces[Traced(LARGE.world, LAST, name, 0)]
    assert LARGE.world == 8 * SMALL.world
    assert traces[Traced(SMALL.world, LAST, name, 0)] == base
    assert LONG.length == 8 * BASE.length
    assert traces[Traced(LARGE.world, OTHER_SLICE, name, 1)] == base, "on a rank with other tokens, too"
    for index in (0, 1):
        assert traces[Traced(LARGE.world, FIRST_STAGE, name, index)] == [call for call in base if call.group == "pp"]


@pytest.mark.processes
def test_gathered_tokens_would_be_seen(traces):
    """The wrong variant has calls that grow with the tokens."""
    sizes = []
    for index in (0, 1):
        calls = traces[Traced(SMALL.world, LAST, GATHERING, index)]
        assert calls != traces[Traced(SMALL.world, LAST, "token IS", 0)]
        sizes.append([call.elements for call in calls if call.kind == "allgather_"])
    assert len(sizes[0]) == BASE.micro_batches * BASE.mini_batches
    assert sizes[1] == [8 * elements for elements in sizes[0]]


@pytest.mark.processes
def test_the_document_has_the_formulas_of_every_trace(traces, document):
    formulas = scaling.read_formulas(document)
    assert list(formulas) == list(CASES)
    table = scaling.table_of_formulas(formulas)
    assert table in document, "the table of the formulas: python benchmarks/scaling.py --formulas"
    layouts = {layout.world: layout for layout in (SMALL, LARGE)}
    for key, calls in traces.items():
        if key.name == GATHERING:
            continue
        layout = layouts[key.world]
        batch = BATCHES[key.batch]
        expected_calls = scaling.expected(formulas[key.name], batch, layout, key.place != FIRST_STAGE)
        assert calls == expected_calls, f"{key}: print the formulas with python benchmarks/scaling.py --formulas"


@pytest.mark.parametrize("name", SHOWN)
def test_the_document_has_the_bytes_that_follow(document, name):
    table = scaling.table_of_bytes(scaling.read_formulas(document), name, LAYOUTS)
    assert table in document, "the tables of bytes: python benchmarks/scaling.py"


def test_the_document_has_the_times_that_are_estimated(document):
    table = scaling.table_of_times(scaling.read_formulas(document), LAYOUTS)
    assert table in document, "the table of times: python benchmarks/scaling.py"
    call = Call(PLAN, "SUM", "dp_cp", 0, 0)
    # By hand: 256 machines with one rank of the group each, then 2048 with eight.
    assert scaling.microseconds(call, scaling.Layout(8, 8, 8, 32)) == pytest.approx(4.4 + 2 * 8 * 5.0)
    inside = 2 * 7 * 1.8 * 0.52
    assert scaling.microseconds(call, LAYOUTS[-1]) == pytest.approx(4.4 + inside + 2 * 11 * 5.0)
    assert scaling.microseconds(call._replace(kind="BROADCAST", group="pp"), LAYOUTS[-2]) == pytest.approx(25.2)
