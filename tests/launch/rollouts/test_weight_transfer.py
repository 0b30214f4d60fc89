"""Runs whose ranks send their weights to servers directly, in every layout, against the weights that the runs save."""

import re
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import flags
from tests.support.rollout_servers import running
from tests.support.stream_server import SglangStreamServer, StreamServer
from tests.support.training_runs import LIVE, rows, run_training

EXPERTS = ["--num-experts=4", "--moe-ffn-hidden-size=24"]
VLLM = StreamServer
SGLANG = SglangStreamServer
CASES = [
    (VLLM, Layout(tp=2, sp=True, pp=2, vpp=True), ["--num-layers=4", "--untie-embeddings-and-output-weights"]),
    (VLLM, Layout(tp=2, sp=True, dp=2, ep=2, etp=2), [*EXPERTS, "--rollout-weight-transfer=ipc"]),
    (SGLANG, Layout(pp=2, dp=2, ep=2), EXPERTS),
]


def words_of(folder, servers, *more):
    name = "sglang-server" if type(servers[0]) is SGLANG else "vllm-server"
    engine = f"""--rollout-engine={name} --rollout-weights-dir={folder}/weights
        --rollout-url={",".join(server.url for server in servers)}
        --rollout-weight-transfer=gloo --rollout-check-tolerance=100 --rollout-rs-threshold=1e-9_1e9,1e9"""
    return flags(folder, *LIVE, "--train-iters=2", *engine.split(), *more)


@pytest.mark.parametrize(("kind", "layout", "model"), CASES, ids=lambda one: getattr(one, "__name__", str(one)))
def test_each_replicas_server_gets_all_weights(ranks, tmp_path, kind, layout, model):
    save = [f"--save-hf={tmp_path}/hf", "--save-hf-interval=1"]
    with ExitStack() as stack:
        servers = [stack.enter_context(running(kind=kind)) for _ in range(layout.dp)]
        arguments = words_of(tmp_path, servers, *layout.flags(), *model, *save)
        assert ranks.run(run_training, layout, arguments) == [None] * layout.world
        want = load_file(tmp_path / "hf" / "step-1" / "model.safetensors")
        want.setdefault("lm_head.weight", want["model.embed_tokens.weight"])
        for server in servers:
            assert server.version == "1"
            assert sum(server.buckets) == 2 * sum(one.nbytes for one in want.values()), "once in each sync"
            for received in server.received:
                assert received.keys() == want.keys()
                assert [name for name, one in want.items() if not torch.equal(received[name], one)] == []
        if kind is VLLM and layout.ep > 1:
            assert_experts_have_one_sender(servers, layout)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    results = [path.relative_to(tmp_path / "weights") for path in (tmp_path / "weights").rglob("*") if path.is_file()]
    assert {path.name for path in results} == {"config.json", "tokenizer.json", "tokenizer_config.json"}


def assert_experts_have_one_sender(servers, layout):
    """The experts of one expert-parallel rank come from one rank alone, which serves all servers."""
    senders = {}
    for server in servers:
        for told in [body["update_info"] for path, body in server.seen if path == server.takes]:
            for layer, expert in re.findall(r"layers\.(\d+)\.\w+\.experts\.(\d+)\.", " ".join(told["names"])):
                senders.setdefault((layer, int(expert) // (4 // layout.ep)), set()).add(told["sender"])
    assert {len(results) for results in senders.values()} == {1}
    assert len(set.union(*senders.values())) == layout.pp * layout.ep


@pytest.mark.parametrize("kind", [VLLM, SGLANG])
def test_a_stage_whose_weights_are_refused_ends_its_rank(ranks, tmp_path, kind):
    with running(kind=kind) as server:
        server.faults[kind.takes] = [lambda answer: answer] * 3 + [(500, {"detail": "no memory"})]
        arguments = words_of(tmp_path, [server], "--pipeline-model-parallel-size=2")
        with pytest.raises(RankFailure, match=r"refused the weights of step[^$]*no memory"):
            ranks.run(run_training, Layout(pp=2), arguments)
        assert server.version == "incomplete"
