"""Runs whose stages send their weights to servers directly, in every layout, against the weights that the runs save."""

from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import configure
from tests.support.ranks import Layout
from tests.support.recorded_training import flags
from tests.support.rollout_servers import running
from tests.support.stream_server import StreamServer
from tests.support.training_runs import LIVE, rows, run_training

EXPERTS = ["--num-experts=4", "--moe-ffn-hidden-size=24"]
CASES = [
    (Layout(), []),
    (Layout(tp=2, sp=True, pp=2), []),
    (Layout(pp=2, vpp=True), ["--num-layers=4", "--untie-embeddings-and-output-weights"]),
    (Layout(cp=2, pp=2, dp=2), []),
    (Layout(pp=2, dp=2, ep=2), EXPERTS),
    (Layout(tp=2, sp=True, ep=2, etp=1, cp=2), EXPERTS),
]


def words_of(folder, urls, *more):
    engine = f"""--rollout-engine=vllm-server --rollout-url={",".join(urls)} --rollout-weights-dir={folder}/weights
        --rollout-weight-transfer=gloo --rollout-check-tolerance=100 --rollout-rs-threshold=1e-9_1e9,1e9"""
    return flags(folder, *LIVE, "--train-iters=2", *engine.split(), *more)


@pytest.mark.parametrize(("layout", "model"), CASES, ids=str)
def test_each_replicas_server_gets_all_weights(ranks, tmp_path, layout, model):
    save = [f"--save-hf={tmp_path}/hf", "--save-hf-interval=1"]
    with ExitStack() as stack:
        servers = [stack.enter_context(running(kind=StreamServer)) for _ in range(layout.dp)]
        words = words_of(tmp_path, [server.url for server in servers], *layout.flags(), *model, *save)
        assert ranks.run(run_training, layout, words) == [None] * layout.world
        want = load_file(tmp_path / "hf" / "step-1" / "model.safetensors")
        want.setdefault("lm_head.weight", want["model.embed_tokens.weight"])
        for server in servers:
            assert server.version == "1"
            assert server.paths().count("/init_weight_transfer_engine") == layout.pp
            for received in server.received:
                assert received.keys() == want.keys()
                assert [name for name, one in want.items() if not torch.equal(received[name], one)] == []
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    found = [path.relative_to(tmp_path / "weights") for path in (tmp_path / "weights").rglob("*") if path.is_file()]
    assert {path.name for path in found} == {"config.json"}


def test_a_stage_whose_weights_are_refused_ends_the_run_alike_on_every_rank(ranks, tmp_path):
    with running(kind=StreamServer) as server:
        server.faults["/update_weights"] = [lambda answer: answer] * 3 + [(500, {"detail": "no memory"})]
        words = words_of(tmp_path, [server.url], "--pipeline-model-parallel-size=2")
        found = set(ranks.run(run_training, Layout(pp=2), words))
        assert server.version == "incomplete"
    (said,) = found
    assert "refused the weights of step" in said
    assert "no memory" in said


REFUSED = [
    (["--rollout-weight-transfer=nccl"], "--rollout-weight-transfer nccl is for GPUs: give gloo"),
    (
        ["--rollout-engine=sglang-server"],
        "--rollout-weight-transfer gloo does nothing with --rollout-engine sglang-server",
    ),
]


@pytest.mark.parametrize(("more", "message"), REFUSED)
def test_ways_that_cannot_work_are_refused(tmp_path, more, message):
    with pytest.raises(ConfigurationError, match=message):
        configure(words_of(tmp_path, ["http://127.0.0.1:1"], *more), 1)
