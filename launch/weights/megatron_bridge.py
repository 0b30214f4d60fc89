"""Models of other families, whose layers and weights the ``AutoBridge`` of Megatron-Bridge makes.

Megatron-Bridge (``megatron-bridge`` 0.6.2) imports Transformer Engine, so it needs a machine with a GPU. A directory
says which model it is; the run's flags add how it is distributed and computed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.errors import ConfigurationError, has_module, one_line
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.layer_patterns import expert_layers, pattern_in_words
from megatron_rc.launch.weights.entries import Flags, typed
from megatron_rc.launch.weights.load import open_weights
from megatron_rc.parallel.groups import ParallelGroups

BRIDGE = "megatron-bridge"
# Flags with numbers and words that the checks of a run need, and the provider's fields. The provider alone makes the
# layers.
_FIELDS = {
    "num-layers": "num_layers",
    "hidden-size": "hidden_size",
    "ffn-hidden-size": "ffn_hidden_size",
    "num-attention-heads": "num_attention_heads",
    "num-query-groups": "num_query_groups",
    "kv-channels": "kv_channels",
    "vocab-size": "vocab_size",
    "max-position-embeddings": "seq_length",
    "normalization": "normalization",
    "norm-epsilon": "layernorm_epsilon",
    "num-experts": "num_moe_experts",
    "moe-ffn-hidden-size": "moe_ffn_hidden_size",
    "moe-router-topk": "moe_router_topk",
}
# Switches, and whether they say the opposite of the provider's field.
_SWITCHES = {
    "swiglu": ("gated_linear_unit", False),
    "disable-bias-linear": ("add_bias_linear", True),
    "add-qkv-bias": ("add_qkv_bias", False),
    "qk-layernorm": ("qk_layernorm", False),
    "untie-embeddings-and-output-weights": ("share_embeddings_and_output_weights", True),
}
# A policy has no noise, is moved by the optimizer alone, and predicts one token.
_OF_A_POLICY = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "moe_router_bias_update_rate": 0.0,
    "mtp_num_layers": None,
}
_log = logging.getLogger("megatron_rc")


def is_installed() -> bool:
    """Whether Megatron-Bridge and the Transformer Engine that it imports are there."""
    return has_module("megatron.bridge") and has_module("transformer_engine")


def is_bridged(config: RunConfig) -> bool:
    """Whether Megatron-Bridge makes the run's model."""
    return config.checkpoints.weights_bridge == BRIDGE


@functools.cache
def auto_bridge(folder: str) -> Any:
    """Megatron-Bridge's ``AutoBridge`` of a directory; ConfigurationError if it does not know the architecture."""
    from megatron.bridge import AutoBridge

    with _its_errors(folder):
        return AutoBridge.from_hf_pretrained(folder, trust_remote_code=False)


def provider_of(folder: str) -> Any:
    """A new provider of a directory's model; ConfigurationError if Megatron-Bridge cannot read its ``config.json``."""
    bridge = auto_bridge(folder)
    with _its_errors(folder):
        return bridge.to_megatron_provider(load_weights=False)


@contextlib.contextmanager
def _its_errors(folder: str) -> Iterator[None]:
    """Make a sentence of the errors by which Megatron-Bridge refuses an architecture or an entry."""
    try:
        yield
    except (AttributeError, KeyError, NotImplementedError, OSError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"--load-hf {folder}: Megatron-Bridge does not read this model ({type(error).__name__}: {one_line(error)})"
        ) from error


def read_bridged(folder: str | Path) -> Flags:
    """Flags of a model that no table here has, by Megatron-Bridge's provider; ConfigurationError if it has none."""
    provider = provider_of(str(folder))
    flags: Flags = {
        "weights-bridge": BRIDGE,
        "transformer-impl": "transformer_engine",
        "group-query-attention": True,
        # Megatron-Bridge's conversions need embeddings without padding.
        "make-vocab-size-divisible-by": 1,
        # In the run's memory estimate; the provider's own embedding is used.
        "position-embedding-type": "rope",
    }
    for flag, field in _FIELDS.items():
        value = getattr(provider, field, None)
        if value is not None:
            flags[flag] = typed(field, flag, value)
    for flag, (field, is_inverted) in _SWITCHES.items():
        flags[flag] = typed(field, flag, bool(getattr(provider, field)) != is_inverted)
    if "num-query-groups" not in flags:
        flags["num-query-groups"] = flags["num-attention-heads"]
    pattern = getattr(provider, "moe_layer_freq", 1)
    if "num-experts" in flags:
        written = str(pattern) if isinstance(pattern, int) else pattern_in_words(list(pattern))
        flags["moe-layer-freq"] = expert_layers(written)
    return flags


def bridged_transformer(config: RunConfig, fields: dict[str, Any]) -> Any:
    """The provider of the run's model, which is a ``TransformerConfig``, with further fields set and checked.

    ``fields``: how the layers are distributed and computed, by name.
    """
    provider = provider_of(str(config.checkpoints.load_hf))
    for name, value in (fields | _OF_A_POLICY).items():
        setattr(provider, name, value)
    provider.finalize()
    return provider


def provide_chunk(provider: Any, *, is_tied: bool, **place: Any) -> torch.nn.Module:
    """One of this rank's models; ``place``: ``pre_process``, ``post_process`` and ``vp_stage``."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    provider.share_embeddings_and_output_weights = is_tied
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    chunk: torch.nn.Module = provider.provide(**place)
    return chunk


def load_bridged(
    chunks: Sequence[torch.nn.Module], config: RunConfig, groups: ParallelGroups, folder: str | Path
) -> None:
    """Load this rank's weights from a directory of the run's model.

    Names are compared first, on every rank alike: Megatron-Bridge would fail in the middle of its collectives.

    Raises:
        ValueError: the directory lacks a tensor that the model reads.
    """
    bridge = auto_bridge(str(config.checkpoints.load_hf))
    names = _names_read(bridge, chunks)
    with open_weights(folder) as files:
        stored = set(files.names)
    missing = sorted(names - stored)
    if missing:
        raise ValueError(f"{folder} holds no tensor {missing[0]}: it is not a model of this architecture")
    unread = sorted(stored - names)
    if unread and groups.is_first_of_replica:
        _log.warning(
            "%s: %d tensors of the files are not read by Megatron-Bridge, such as %s", folder, len(unread), unread[0]
        )
    bridge.load_hf_weights(list(chunks), hf_path=str(folder))


def export_bridged(
    chunks: Sequence[torch.nn.Module], config: RunConfig, groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Weights by Hugging Face name on the first rank of the replica; every rank must exhaust the iterator.

    Collectives: Megatron-Bridge's, which give every tensor to every rank.
    """
    bridge = auto_bridge(str(config.checkpoints.load_hf))
    tensors = bridge.export_hf_weights(list(chunks), cpu=False, show_progress=False, weight_dtype=config.dtype)
    return _on_first_rank(tensors, is_first=groups.is_first_of_replica)


def _on_first_rank(tensors: Any, *, is_first: bool) -> Iterator[tuple[str, Tensor]]:
    given = set[str]()
    for name, tensor in tensors:
        # Tied embeddings come once from each end of the pipeline.
        if is_first and name not in given:
            given.add(name)
            yield name, tensor.detach().clone(memory_format=torch.contiguous_format)


def _names_read(bridge: Any, chunks: Sequence[torch.nn.Module]) -> set[str]:
    """Names of the tensors in files that the model's parameters are made of, of all ranks that the bridge lists."""
    names = set[str]()
    for task in bridge.get_conversion_tasks(list(chunks)):
        if task is None:
            continue
        read = task.mapping.hf_param
        names.update([read] if isinstance(read, str) else read.values())
    return names


def described_by_directory(config: RunConfig) -> Any:
    """The ``transformers`` config of a bridged run: that of its directory."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(config.checkpoints.load_hf, local_files_only=True, trust_remote_code=False)
