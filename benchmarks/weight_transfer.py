"""Weights to two servers by files, gloo and ipc: seconds of a sync, and bytes that the trainer sends, writes and keeps.

    python benchmarks/weight_transfer.py [--hidden 1024] [--layers 8]

A Llama in float32 on four processes of one thread each, two pipeline stages in each of two data-parallel replicas. The
servers are threads of this process: each maps the files, receives over gloo, or reads memory, twice, as for two
processes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from safetensors.torch import load_file

from tests.support.published_models import words_of
from tests.support.ranks import Layout, RankPool
from tests.support.recorded_training import make_trainer
from tests.support.rollout_servers import running
from tests.support.stream_server import StreamServer

LAYOUT = Layout(pp=2, dp=2)
ROUNDS = 5


class ReadingServer(StreamServer):
    """Maps the files that it is told of into memory."""

    def answer(self, path: str, body: Any) -> Any:
        """Answer one request."""
        if path == "/collective_rpc":
            folder = Path(body["kwargs"]["weights_path"])
            for _ in range(self.processes):
                self.received = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
        return super().answer(path, body)


def syncs(words: list[str]) -> tuple[list[float], float]:
    """Seconds of each sync but the first, and the growth of this rank's largest memory in MB."""
    import resource

    from megatron_rc.launch.flags.configure import configure
    from megatron_rc.launch.rollouts.collector import RolloutCollector

    trainer = make_trainer(words)
    collector = RolloutCollector(*configure(words, LAYOUT.world), trainer.groups)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for version in range(ROUNDS + 1):
        torch.distributed.barrier()
        begun = time.perf_counter()
        collector.sync_weights(trainer.chunks, version)
        times.append(time.perf_counter() - begun)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    collector.close()
    return times[1:], (after - before) / 1e3


def main() -> None:
    """Measure all ways and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size; default: 1024")
    parser.add_argument("--layers", type=int, default=8, help="layers; default: 8")
    args = parser.parse_args()
    config = transformers.LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=7 * args.hidden // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=8 * args.hidden,
        tie_word_embeddings=False,
    )
    with tempfile.TemporaryDirectory() as name:
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(f"{name}/model")
        size = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
        head = "| way | sync, s | memory of a first rank, MB | files, MB |"
        sys.stdout.write(f"{size:.0f} MB of weights\n{head}\n|---|---|---|---|\n")
        for way in ("files", "gloo", "ipc"):
            with ExitStack() as stack:
                pool = RankPool()
                stack.callback(pool.close)
                servers = [stack.enter_context(running(kind=ReadingServer)) for _ in range(LAYOUT.dp)]
                engine = f"""--rollout-engine=vllm-server --rollout-url={",".join(server.url for server in servers)}
                    --rollout-weights-dir={name}/{way} --rollout-weight-transfer={way} --task=count_up"""
                results = pool.run(syncs, LAYOUT, [*words_of(f"{name}/model", LAYOUT), *engine.split()])
                median = sorted(max(times) for times in zip(*(times for times, _ in results), strict=True))[ROUNDS // 2]
                files = sum(file.stat().st_size for file in Path(name, way).rglob("*.safetensors")) / 1e6
                memory = max(more for _, more in results)
                sys.stdout.write(f"| {way} | {median:.2f} | {memory:.0f} | {files:.0f} |\n")


if __name__ == "__main__":
    main()
