"""Stand-in for ``megatron.bridge``: the parts of ``AutoBridge`` (0.6.2) that the launcher calls, for Llama's layers.

Its one architecture is called ``MysteryForCausalLM``. Layers are Megatron's local ones; this project's tables move the
weights.
"""

import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import silu

from megatron_rc.launch.training.models.local_layers import LocalNorm, use_local_layers
from megatron_rc.launch.weights.export import export_weights
from megatron_rc.launch.weights.load import load_weights
from megatron_rc.launch.weights.units import ExpertGroups, units_of
from megatron_rc.parallel.groups import ParallelGroups

ARCHITECTURE = "MysteryForCausalLM"


@dataclass
class Provider(TransformerConfig):
    """A ``TransformerConfig`` that makes models, and that checks itself when it is finalized."""

    vocab_size: int = 0
    seq_length: int = 0
    rotary_base: int = 10000
    share_embeddings_and_output_weights: bool = True
    should_pad_vocab: bool = False

    def __post_init__(self):
        """Wait for ``finalize``."""

    def finalize(self):
        """Check the fields, as ``TransformerConfig`` does when it is made."""
        super().__post_init__()

    def provide(self, pre_process, post_process, vp_stage):
        """One model, without padding of its vocabulary."""
        assert not self.should_pad_vocab
        block = get_gpt_decoder_block_spec(self, use_transformer_engine=False, normalization="RMSNorm")
        for spec in block.layer_specs:
            use_local_layers(spec.submodules, self)
        block.layer_norm = LocalNorm
        return GPTModel(
            config=self,
            transformer_layer_spec=block,
            vocab_size=self.vocab_size,
            max_sequence_length=self.seq_length,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
            position_embedding_type="rope",
            rotary_base=self.rotary_base,
            vp_stage=vp_stage,
        )


class AutoBridge:
    """Bridge of one directory."""

    # Settings of the same model with a name that this project's tables have; a test sets them.
    run_config = None

    def __init__(self, entries):
        self.entries = entries

    @classmethod
    def from_hf_pretrained(cls, path, *, trust_remote_code):
        """Read ``config.json``; ValueError for an unknown architecture."""
        assert not trust_remote_code
        entries = json.loads((Path(path) / "config.json").read_text())
        if entries["architectures"] != [ARCHITECTURE]:
            raise ValueError(f"Model architecture {entries['architectures']} is not supported")
        return cls(entries)

    def to_megatron_provider(self, *, load_weights):
        """The provider of the model, without weights."""
        assert not load_weights
        return Provider(
            num_layers=self.entries["num_hidden_layers"],
            hidden_size=self.entries["hidden_size"],
            ffn_hidden_size=self.entries["intermediate_size"],
            num_attention_heads=self.entries["num_attention_heads"],
            num_query_groups=self.entries["num_key_value_heads"],
            kv_channels=self.entries["hidden_size"] // self.entries["num_attention_heads"],
            layernorm_epsilon=self.entries["rms_norm_eps"],
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=silu,
            add_bias_linear=False,
            vocab_size=self.entries["vocab_size"],
            seq_length=self.entries["max_position_embeddings"],
            rotary_base=int(self.entries["rope_parameters"]["rope_theta"]),
            share_embeddings_and_output_weights=self.entries["tie_word_embeddings"],
        )

    def get_conversion_tasks(self, model):
        """What each parameter is made of: one name, or several by their part."""
        tasks = [None]
        for unit in units_of(self.run_config):
            for rule in unit.rules:
                names = unit.names(rule)
                read = names[0] if len(names) == 1 else dict(enumerate(names))
                tasks.append(types.SimpleNamespace(mapping=types.SimpleNamespace(hf_param=read)))
        return tasks

    def load_hf_weights(self, model, *, hf_path):
        """Load this rank's weights."""
        groups = ParallelGroups.from_megatron()
        load_weights(model, self.run_config, groups, hf_path, ExpertGroups.of_megatron())

    def export_hf_weights(self, model, *, cpu, show_progress, weight_dtype):
        """Yield weights; the real bridge yields all of them on every rank, and tied embeddings twice."""
        assert not cpu
        assert not show_progress
        weights = list(
            export_weights(model, self.run_config, ParallelGroups.from_megatron(), ExpertGroups.of_megatron())
        )
        yield from (weight for weight in [*weights, *weights[:1]])


def install(run_config=None):
    """Put the stand-in where the package would be."""
    AutoBridge.run_config = run_config
    module = types.ModuleType("megatron.bridge")
    module.AutoBridge = AutoBridge
    sys.modules[module.__name__] = module
