"""Metrics of memory, time and floating-point operations, and the C library's free memory."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron_configs import build_transformer_config

_GIB = 2**30
_PHASE = "_seconds"
# One forward product needs two in the backward pass: for the gradients of the input and of the weight.
_PASSES = 3
# Dense bf16 TFLOP/s of devices, by a part of their name.
_PEAKS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "GH200": 989, "B200": 2250, "A100": 312, "L40S": 362}
# Steps between two calls of malloc_trim, which take about a millisecond.
_TRIM_INTERVAL = 100


class Machine:
    """Computes the metrics of the machines."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.flops = step_flops(config)
        self.peak = device_peak(config)

    def metrics(self, times: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a step, from its ``perf/<phase>_seconds`` and ``perf/tokens_per_second``.

        Collectives: one all-reduce of one number over all ranks.
        """
        world = self.config.launch.world_size
        phases = {name.removesuffix(_PHASE): value for name, value in times.items() if name.endswith(_PHASE)}
        total = sum(phases.values())
        metrics = {f"{name}_share": value / total for name, value in phases.items()} if total else {}
        metrics["perf/tokens_per_second_per_rank"] = times["perf/tokens_per_second"] / world
        if self.flops is not None and times["perf/update_seconds"]:
            rate = self.flops / times["perf/update_seconds"] / world
            metrics |= {"perf/step_tflop": self.flops / 1e12, "perf/tflops_per_rank": rate / 1e12}
            if self.peak is not None:
                metrics["perf/utilization"] = rate / self.peak
        return metrics | self._memory()

    def _memory(self) -> dict[str, float]:
        """Peak memory over all ranks, and the rank that has it (the lowest of equal ones)."""
        world = self.config.launch.world_size
        device = self.config.launch.device
        most = torch.tensor(_peak_bytes(on_cpu=self.config.launch.on_cpu) * world + world - 1 - dist.get_rank())
        most = most.to(device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
        size, others = divmod(int(most), world)
        return {"perf/peak_memory_gib": size / _GIB, "perf/peak_memory_rank": float(world - 1 - others)}


def _peak_bytes(*, on_cpu: bool) -> int:
    """Peak bytes that PyTorch allocated on this rank's GPU; on a CPU, the process's peak resident memory."""
    if on_cpu:
        # Linux counts in KiB.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated()


def step_flops(config: RunConfig) -> float | None:
    """Operations of one optimizer step on all ranks, critic included, if all sequences have ``--seq-length`` tokens.

    None with packed sequences, whose lengths differ between batches.
    """
    if config.training.rl_use_sequence_packing:
        return None
    transformer = build_transformer_config(config)
    length = config.training.seq_length
    layers = sum(_layer(transformer, length, has_experts) for has_experts in config.layers_with_experts)
    token = 2 * length * transformer.hidden_size
    policy = layers + token * config.model.padded_vocab_size
    critic = layers + token if config.critic else 0
    return float(_PASSES * config.training.global_batch_size * (policy + critic))


def device_peak(config: RunConfig) -> float | None:
    """Peak operations per second of a rank's device: ``--device-peak-tflops``, or a known 16-bit peak; else None."""
    tflops = config.logging.device_peak_tflops
    if tflops is not None:
        return tflops * 1e12
    if config.launch.on_cpu or config.dtype.itemsize != 2:
        return None
    device = torch.cuda.get_device_name()
    return next((peak * 1e12 for name, peak in _PEAKS.items() if name in device), None)


def _layer(transformer: TransformerConfig, length: int, has_experts: bool) -> int:
    """Operations of one layer for one sequence in the forward pass."""
    attention = _latent_attention if transformer.multi_latent_attention else _attention
    return int(2 * length * (attention(transformer, length) + _feed_forward(transformer, has_experts)))


def _attention(transformer: TransformerConfig, length: int) -> int:
    """Multiplications for one token, which attends to half of the sequence on average."""
    hidden = transformer.hidden_size
    heads = transformer.num_attention_heads
    width = transformer.kv_channels
    queries = heads * width
    keys = (transformer.num_query_groups or heads) * width
    return int(hidden * (queries + 2 * keys) + queries * hidden + length * queries)


def _latent_attention(transformer: TransformerConfig, length: int) -> int:
    """Multiplications for one token with multi-latent attention."""
    hidden = transformer.hidden_size
    heads = transformer.num_attention_heads
    latent = transformer.kv_lora_rank
    rotated = transformer.qk_pos_emb_head_dim
    value = transformer.v_head_dim
    queries = heads * (transformer.qk_head_dim + rotated)
    rank = transformer.q_lora_rank
    products = hidden * queries if rank is None else (hidden + queries) * rank
    products += hidden * (latent + rotated) + latent * heads * (transformer.qk_head_dim + value)
    return int(products + heads * value * hidden + length * (queries + heads * value) // 2)


def _feed_forward(transformer: TransformerConfig, has_experts: bool) -> int:
    """Multiplications for one token in the MLP or the experts."""
    hidden = transformer.hidden_size
    matrices = 3 if transformer.gated_linear_unit else 2
    if not has_experts:
        return int(matrices * hidden * transformer.ffn_hidden_size)
    width = transformer.moe_router_topk * transformer.moe_ffn_hidden_size
    width += transformer.moe_shared_expert_intermediate_size or 0
    return int(matrices * hidden * width + hidden * transformer.num_moe_experts)


def trim_heap(step: int) -> None:
    """Call ``malloc_trim`` every 100 steps.

    With glibc 2.36, runs on CPUs were seen to take some kilobytes more from the system in each step, although the
    memory in use stayed equal.
    """
    if step % _TRIM_INTERVAL:
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)
