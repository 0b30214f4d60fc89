"""Megatron-Core's HybridModel with the layers, the weights and the checkpoints of the GPTModel of the same flags.

HybridModel counts a layer's attention and its MLP as two layers of a pattern: ``*-*-`` stands for two layers. Here each
half keeps the number of the whole layer, as Megatron's settings of single layers, the routers and checkpoints want it.
What HybridModel of megatron-core 0.19.2 lacks of GPTModel is added in this module; ``output.py`` calls the
``output_processor``, as it does for older models.
"""

from __future__ import annotations

import copy
import dataclasses
from itertools import islice
from typing import Any

from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.utils import sharded_state_dict_default

from megatron_rc.launch.run_config import RunConfig

ATTENTION = "*"
MLP = "-"
EXPERTS = "E"


def layer_pattern(config: RunConfig) -> str:
    """Return the pattern of all layers, in order, with a bar between two model chunks: ``*-*-|*-*E`` on two stages."""
    layers = iter(ATTENTION + (EXPERTS if has_experts else MLP) for has_experts in config.layers_with_experts)
    return "|".join("".join(islice(layers, size)) for size in config.layers_of_chunks)


def whole(transformer: TransformerConfig) -> TransformerConfig:
    """The config of all layers on one pipeline stage, for the layers' spec."""
    copied = copy.copy(transformer)
    copied.pipeline_model_parallel_size = 1
    copied.virtual_pipeline_model_parallel_size = None
    copied.pipeline_model_parallel_layout = None
    return copied


class Hybrid(HybridModel):  # type: ignore[misc]
    """HybridModel of a run's layers, with Llama 3's rotary frequencies, and a GPTModel's form of checkpoints.

    Args:
        run: settings of the run.
        block: Megatron's spec of a GPTModel's layers, all of them.
        common: arguments that GPTModel and HybridModel share.
    """

    def __init__(self, run: RunConfig, block: Any, **common: Any) -> None:
        layers = [layer.submodules for layer in block.layer_specs]
        kinds = dict(zip(run.layers_with_experts, layers, strict=True))
        halves = {"moe_layer" if has_experts else "mlp_layer": _mlp_half(kind) for has_experts, kind in kinds.items()}
        halves["attention_layer"] = _attention_half(layers[0])
        params = {"norm": block.layer_norm, "alike": common["config"].moe_layer_freq == 1}
        stack = ModuleSpec(Stack, params=params, submodules=HybridStackSubmodules(**halves))
        super().__init__(hybrid_stack_spec=stack, hybrid_layer_pattern=layer_pattern(run), **common)
        if run.yarn is None and hasattr(self, "rotary_pos_emb"):
            # HybridModel has no arguments for scaled or interleaved frequencies.
            self.rotary_pos_emb = RotaryEmbedding(
                kv_channels=self.config.kv_channels,
                rotary_percent=run.model.rotary_percent,
                rotary_interleaved=self.config.rotary_interleaved,
                seq_len_interpolation_factor=run.model.rotary_seq_len_interpolation_factor,
                rotary_base=run.model.rotary_base,
                rope_scaling=run.model.rope_scaling,
                rope_scaling_factor=run.model.rope_scaling_factor,
                use_cpu_initialization=self.config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )

    def sharded_state_dict(self, prefix: str = "", *args: Any, **more: Any) -> dict[str, Any]:
        """The sharded state, without an entry that GPTModel leaves out."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, *args, **more)
        state.pop(f"{prefix}output_layer._extra_state", None)
        return state


def _attention_half(layer: Any) -> ModuleSpec:
    """Spec of a layer's attention with its norm."""
    parts = dataclasses.replace(layer, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    return ModuleSpec(HalfLayer, submodules=parts)


def _mlp_half(layer: Any) -> ModuleSpec:
    """Spec of a layer's MLP or experts with their norm."""
    parts = dataclasses.replace(
        layer, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp
    )
    return ModuleSpec(HalfLayer, submodules=parts)


class HalfLayer(TransformerLayer):  # type: ignore[misc]
    """A layer's attention or its MLP, with the number of the whole layer."""

    def __init__(self, config: TransformerConfig, submodules: Any, layer_number: int, **more: Any) -> None:
        super().__init__(config, submodules, (layer_number + 1) // 2, **more)


class Stack(HybridStack):  # type: ignore[misc]
    """Megatron's stack of layers with any last norm, and a GPTModel's form of checkpoints.

    Args:
        norm: class of the last norm.
        alike: whether all layers have the same parts; a GPTModel then stores them as one tensor.
        args, more: arguments of HybridStack.
    """

    def __init__(self, *args: Any, norm: Any, alike: bool, **more: Any) -> None:
        # HybridStack would always make Transformer Engine's norm.
        super().__init__(*args, post_layer_norm=False, **more)
        self.post_layer_norm = True
        self.alike = alike
        if self.post_process:
            width = self.config.hidden_size
            epsilon = self.config.layernorm_epsilon
            self.final_norm = norm(config=self.config, hidden_size=width, eps=epsilon)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sharded state, stored as :class:`TransformerBlock` stores it, so that either model can load it."""
        state: dict[str, Any] = {}
        layers = self.config.num_layers
        alike = self.alike
        for index, half in enumerate(self.layers):
            own = f"{prefix}layers.{index}."
            number = half.layer_number - 1
            offsets = [(0, number, layers)] if alike else []
            found = half.sharded_state_dict(own, offsets, metadata)
            replace_prefix_for_sharding(found, own, f"{prefix}layers." if alike else f"{prefix}layers.{number}.")
            state |= found
        if self.post_process:
            own = f"{prefix}final_norm."
            found = sharded_state_dict_default(self.final_norm, own, sharded_offsets, metadata, tp_group=self.tp_group)
            replace_prefix_for_sharding(found, own, f"{prefix}final_layernorm.")
            state |= found
        return state
