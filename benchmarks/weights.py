"""Weights to the engine and back: peak memory beside the model, in layers, and seconds.

    python benchmarks/weights.py [--hidden 512] [--layers 8]

A Llama and a mixture of experts in float32, on one process and on several of one thread each. The receiver looks at
each tensor and drops it. Files are read from the page cache; their tensors count as memory, though they are mapped.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import transformers

from tests.launch.weights.test_memory import weigh
from tests.support.published_models import words_of
from tests.support.ranks import Layout, RankPool
from tests.support.recorded_training import make_trainer

CASES = [
    *(("llama", layout) for layout in (Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2))),
    *(("qwen3_moe", layout) for layout in (Layout(), Layout(dp=2, ep=2), Layout(tp=2, sp=True, dp=2, ep=2))),
]


def configs(hidden: int, layers: int) -> dict[str, Any]:
    """The configs of both models; the MLP is three and a half times as wide as the model, as in Llama 3."""
    common = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": hidden // 8,
        "vocab_size": 4 * hidden,
        "tie_word_embeddings": False,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden, "norm_topk_prob": True}
    return {
        "llama": transformers.LlamaConfig(**common, intermediate_size=7 * hidden // 2),
        "qwen3_moe": transformers.Qwen3MoeConfig(**common, **experts),
    }


def seconds(words: list[str]) -> tuple[float, float]:
    """Seconds of an export and of an import, the best of three each, on this rank of the pool."""
    from megatron_rc.launch.weights.converter import export_model, load_model

    trainer = make_trainer(words)
    model = (trainer.chunks, trainer.config, trainer.groups)
    results = []
    folder = trainer.config.checkpoints.load_hf
    for attempt in (lambda: sum(1 for _ in export_model(*model)), lambda: load_model(*model, folder)):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            attempt()
            times.append(time.perf_counter() - start)
        results.append(min(times))
    return results[0], results[1]


def main() -> None:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512, help="hidden size; default: 512")
    parser.add_argument("--layers", type=int, default=8, help="layers; default: 8")
    args = parser.parse_args()
    pool = RankPool()
    head = "| model | layout | model, MB | unit, MB | export / unit | import / unit | export, s | import, s |"
    sys.stdout.write(f"{head}\n{'|---' * 8}|\n")
    with tempfile.TemporaryDirectory() as name:
        for family, config in configs(args.hidden, args.layers).items():
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(f"{name}/{family}")
        for family, layout in CASES:
            words = words_of(f"{name}/{family}", layout)
            weights = pool.run(weigh, layout, words)
            times = pool.run(seconds, layout, words)
            out, back = (max(rank[index] for rank in weights) / weights[0][1] for index in (2, 3))
            slowest = [max(rank[index] for rank in times) for index in (0, 1)]
            sizes = [f"{weights[0][index] / 1e6:.1f}" for index in (0, 1)]
            ratios = [f"{value:.2f}" for value in (out, back)]
            cells = [family, str(layout), *sizes, *ratios, *(f"{value:.2f}" for value in slowest)]
            sys.stdout.write(f"| {' | '.join(cells)} |\n")
            sys.stdout.flush()
    pool.close()


if __name__ == "__main__":
    main()
