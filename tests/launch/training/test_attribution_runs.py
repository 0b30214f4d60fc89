"""Runs with ``--attribution-interval``: the engine's rounding explains the mismatch, and the steps are the same."""

import functools

import pytest

from tests.support.ranks import Layout
from tests.support.recorded_training import LLAMA, flags, run_config
from tests.support.refusals import refused
from tests.support.training_runs import LIVE, rows, run_training

RUN = [*LIVE, "--train-iters=3", "--init-method-std=0.3", "--rollout-rs-threshold=0.001_1000,100"]
RUN += ["--rollout-dtype=fp8-e4m3", "--rollout-check-tolerance=5"]
ATTRIBUTED = ["--attribution-interval=2", "--attribution-check"]
EXPERTS = [*LLAMA, "--num-experts=8", "--moe-ffn-hidden-size=24", "--untie-embeddings-and-output-weights"]
EXPERTS += ["--qk-layernorm", "--kv-channels=16"]


EXPERT_PARALLEL = Layout(dp=2, ep=2)
REPLAYED = ["--moe-enable-routing-replay", "--moe-token-dispatcher-type=alltoall", "--moe-aux-loss-coeff=0.1"]
REPLAYED += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--grpo-kl-beta=0"]


def steps_of(ranks, folder, layout, model, *more):
    arguments = flags(folder, *RUN, *more, *layout.flags(), model=model)
    assert set(ranks.run(run_training, layout, arguments)) == {None}
    return rows(folder)


@pytest.fixture(scope="module")
def attributed_runs(ranks, tmp_path_factory):
    """The folder and the metrics of a run with attribution; each run is made once."""

    def run(layout, model, more):
        folder = tmp_path_factory.mktemp("attributed")
        return folder, steps_of(ranks, folder, layout, model, *more, *ATTRIBUTED)

    return functools.cache(run)


@pytest.mark.parametrize(
    ("layout", "model", "more"),
    [
        (Layout(tp=2, pp=2), LLAMA, ["--rl-use-sequence-packing"]),
        (Layout(dp=2), LLAMA, ["--use-distributed-optimizer", "--bypass-mode", "--loss-type=reinforce"]),
        (EXPERT_PARALLEL, EXPERTS, REPLAYED),
    ],
    ids=["tp2-pp2-packed", "dp2-distributed-bypass", "ep2-replay"],
)
def test_a_rounded_engines_mismatch_is_in_its_weights(attributed_runs, layout, model, more):
    folder, results = attributed_runs(layout, tuple(model), tuple(more))
    assert (folder / "run" / "attribution.png").read_bytes().startswith(b"\x89PNG")
    shares = [{name: value for name, value in row.items() if name.startswith("attribution/")} for row in results]

    # Steps 1 and 3 begin at a multiple of the interval.
    assert [bool(each) for each in shares] == [True, False, True]
    for each in (shares[0], shares[2]):
        assert each["attribution/explained"] == pytest.approx(1, abs=0.05)
        assert each["attribution/completeness"] == pytest.approx(1, abs=0.05)
        assert each["attribution/rest"] == pytest.approx(1 - each["attribution/explained"])
        kinds = [value for name, value in each.items() if name.rpartition("/")[2] in KINDS]
        assert sum(kinds) == pytest.approx(each["attribution/explained"], abs=1e-6)
        assert {"attribution/layer_0", "attribution/layer_1"} <= set(each)
        assert ("attribution/experts" in each) == (model is EXPERTS)


def test_the_steps_are_those_of_a_run_without_it(ranks, tmp_path, attributed_runs):
    """Also if a later step gathers the weights, routers have losses, and their experts are replayed."""
    _, results = attributed_runs(EXPERT_PARALLEL, tuple(EXPERTS), tuple(REPLAYED))
    without = steps_of(ranks, tmp_path, EXPERT_PARALLEL, EXPERTS, *REPLAYED)
    for row, other in zip(results, without, strict=True):
        for name in other:
            if not name.startswith(("perf/", "time", "machine/")):
                assert row[name] == other[name], name


KINDS = ("embedding", "attention", "mlp", "router", "experts", "norms", "head", "other")


@pytest.mark.parametrize(
    "more",
    [["--attribution-interval=0"], ["--attribution-interval=1", "--attribution-nodes=0"]],
    ids=["interval", "nodes"],
)
def test_numbers_out_of_range_are_refused(tmp_path, more):
    with refused(more[-1].replace("=", " ")):
        run_config(flags(tmp_path, *more))
