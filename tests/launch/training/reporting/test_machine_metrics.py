"""Metrics of the machines: operations as PyTorch counts them, memory of the rank that needs most, shares of time."""

import re

import psutil
import pytest
import torch

from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.training.reporting.machine_metrics import trim_heap
from tests.support.documented import undocumented
from tests.support.ranks import Layout
from tests.support.recorded_training import GPT2, LLAMA, flags, make_trainer, recorded_batch, run_config
from tests.support.training_runs import LIVE, rows, run_training

EXPERTS = "--num-experts=4 --moe-ffn-hidden-size=16 --moe-token-dispatcher-type=alltoall --moe-router-topk=2"
MODELS = {
    "llama": (LLAMA, ""),
    "gpt2": (GPT2, ""),
    "experts": (LLAMA, f"{EXPERTS} --moe-shared-expert-intermediate-size=8"),
}


# Megatron-LM's names, of the levels 1 and 2.
TIMERS = "forward-backward forward-compute backward-compute all-grads-sync optimizer optimizer-inner-step".split()


def counted(words):
    """(operations of a step by the formula, as PyTorch counts them, of these the half that the causal mask hides)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from megatron_rc.launch.training.reporting.machine_metrics import step_flops

    trainer = make_trainer(words)
    prepared = trainer.prepare(recorded_batch(0))
    # The counter does not know what the other kernels of attention do.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        trainer.accumulate(prepared, 0)
    config = trainer.config
    transformer = config.transformer
    length = config.training.seq_length
    width = transformer.num_attention_heads * transformer.kv_channels
    hidden = 3 * config.training.global_batch_size * transformer.num_layers * 2 * length**2 * width
    return step_flops(config), counter.get_total_flops(), hidden


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_that_pytorch_counts(ranks, tmp_path, name):
    model, more = MODELS[name]
    told, results, masked = ranks.run(counted, Layout(), flags(tmp_path, *more.split(), model=model))[0]
    assert told == results - masked


def test_every_step_tells_of_the_machines(ranks, tmp_path):
    arguments = flags(tmp_path, *LIVE, "--train-iters=2", "--tensor-model-parallel-size=2", "--device-peak-tflops=0.5")
    arguments += ["--log-timers-to-tensorboard", "--timing-log-level=2"]
    assert ranks.run(run_training, Layout(tp=2), arguments) == [None, None]
    for row in rows(tmp_path):
        shares = [value for name, value in row.items() if re.fullmatch(r"perf/\w+_share", name)]
        assert sum(shares) == pytest.approx(1)
        assert row["perf/rollout_share"] > 0
        assert row["perf/tokens_per_second_per_rank"] == row["perf/tokens_per_second"] / 2
        assert row["perf/tflops_per_rank"] * 2 * row["perf/update_seconds"] == pytest.approx(row["perf/step_tflop"])
        assert row["perf/utilization"] == pytest.approx(row["perf/tflops_per_rank"] / 0.5)
        assert row["perf/peak_memory_rank"] in (0, 1)
        assert 0.05 < row["perf/peak_memory_gib"] < 100
        timed = {name: value for name, value in row.items() if name.endswith("-time")}
        assert timed.keys() >= {f"{name}-time" for name in TIMERS}
        iteration = timed["iteration-time"]
        shares = {f"{name.removesuffix('-time')}-share": value / iteration for name, value in timed.items()}
        logged = {name: value for name, value in row.items() if name.endswith("-share")}
        assert logged == pytest.approx({name: value for name, value in shares.items() if name != "iteration-share"})
        assert 0 < timed["optimizer-inner-step-time"] < timed["optimizer-time"] < timed["iteration-time"]
        assert 0 < timed["forward-compute-time"] < timed["forward-backward-time"] < timed["iteration-time"]
    names = {name for row in rows(tmp_path) for name in row}
    assert len([name for name in names if name.startswith("perf/")]) > 12
    assert undocumented(names) == []


def highest(words):
    """Metrics of ranks that have needed 100 bytes, and rank 1 two GiB."""
    from unittest import mock

    import torch

    from megatron_rc.launch.training.reporting import machine_metrics

    config = run_config(words, torch.distributed.get_world_size(), engine=False)
    most = 2 * 2**30 if torch.distributed.get_rank() == 1 else 100
    with mock.patch.object(machine_metrics, "_peak_bytes", return_value=most):
        return machine_metrics.Machine(config).metrics({"perf/update_seconds": 2.0, "perf/tokens_per_second": 8.0})


def test_the_rank_that_needs_most_is_named_on_all(ranks, tmp_path):
    metrics_of_ranks = ranks.run(highest, Layout(dp=4), flags(tmp_path))
    peaks = [(metrics["perf/peak_memory_gib"], metrics["perf/peak_memory_rank"]) for metrics in metrics_of_ranks]
    assert peaks == [(2.0, 1.0)] * 4
    assert "perf/utilization" not in metrics_of_ranks[0], "nobody knows what this processor can do at best"
    arguments = flags(tmp_path, "--rl-use-sequence-packing")
    metrics_of_ranks = ranks.run(highest, Layout(dp=2), arguments)
    names = {name for metrics in metrics_of_ranks for name in metrics}
    assert not [name for name in names if "flop" in name], "what the formula does not know is not told"


@pytest.mark.parametrize(("words", "peak"), [("--bf16", 989e12), ("--fp16", 989e12), ("", None)])
def test_a_known_device_has_its_peak_in_16_bits(tmp_path, monkeypatch, words, peak):
    from megatron_rc.launch.training.reporting.machine_metrics import device_peak

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    words = [*flags(tmp_path, *words.split(), "--transformer-impl=local"), "--no-cpu"]
    assert device_peak(configure(words, 1, engine=False, elsewhere=True)[0]) == peak


def test_free_memory_between_blocks_in_use_goes_back_to_the_system():
    process = psutil.Process()
    tensors = [torch.ones(4000) for _ in range(8000)]
    del tensors[1::2], tensors[::8]
    full = process.memory_info().rss
    trim_heap(7)
    assert full - process.memory_info().rss < 20 * 2**20
    trim_heap(200)
    assert full - process.memory_info().rss > 30 * 2**20
