"""Memory of the rollout engine on the devices of the training ranks."""

from __future__ import annotations

import torch

from megatron_rc.launch.dry_run.batches import batch_numbers
from megatron_rc.launch.engines.vllm_args import SHARE, read_engine_args
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights import find_family
from megatron_rc.launch.weights.checkpoint_names import empty_model
from megatron_rc.launch.weights.named_weights import named_weights

# vLLM's default of gpu_memory_utilization, a share of the whole device.
VLLM_FRACTION = 0.92


def engine_bytes(config: RunConfig, device_bytes: float | None) -> int | None:
    """Bytes of the engine on the first rank of each replica, the only one that has an engine.

    A server runs on other devices, and with ``--rollout-colocate`` vLLM sleeps while the trainer works, so they take
    nothing. None if the engine takes a share of a device of unknown size.
    """
    name = config.engine.rollout_engine
    if config.rollouts.load_rollouts or name.endswith("-server") or config.engine.rollout_colocate:
        return 0
    if name == "transformers":
        return _transformers_bytes(config)
    return None if device_bytes is None else round(vllm_share(config) * device_bytes)


def vllm_share(config: RunConfig) -> float:
    """Share of a device's memory that vLLM takes."""
    return float(read_engine_args(config.engine.rollout_engine_args).get(SHARE, VLLM_FRACTION))


def _transformers_bytes(config: RunConfig) -> int:
    """Bytes of the whole model, and of keys and values for all sequences of a replica at full length."""
    family = find_family(config)
    layers = config.transformer
    if family is None:
        raise RuntimeError("an engine needs a model of a Hugging Face architecture")
    lower = not config.launch.on_cpu and config.engine.rollout_dtype != "fp32"
    itemsize = (torch.bfloat16 if lower else torch.float32).itemsize
    model = empty_model(family.hugging_face_config(config))
    weights = sum(tensor.numel() for tensor in named_weights(model).values())
    tokens = batch_numbers(config)["sequences_of_a_replica"] * config.training.seq_length
    of_token = 2 * layers.num_query_groups * layers.kv_channels
    if config.latent is not None:
        # transformers caches the latent of keys and values, and the rotated part of the key.
        of_token = config.latent.kv_lora_rank + config.latent.qk_pos_emb_head_dim
    cache = layers.num_layers * of_token * tokens
    return int(itemsize * (weights + cache))
