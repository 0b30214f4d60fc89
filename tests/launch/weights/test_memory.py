"""Memory of weights on their way out and in: about one layer above the model, on every rank, every byte counted."""

import pytest
import torch
import transformers
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.live_bytes import LiveBytes
from tests.support.published_models import words_of
from tests.support.ranks import Layout
from tests.support.recorded_training import make_trainer

# Four heads of a width that makes a layer the largest part: the vocabulary is a third of it.
WIDE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE |= {"vocab_size": 256, "max_position_embeddings": 64, "tie_word_embeddings": False}
MODELS = {
    "llama": transformers.LlamaConfig(**WIDE, intermediate_size=224),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **WIDE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=224, norm_topk_prob=True
    ),
}
# The most is held for gate and up: their block, the half that the receiver still looks at, and the other half. That is
# twice two of the three matrices of an expert, and 1.04 of a layer that has attention too.
LIMITS = {"llama": 1.05, "qwen3_moe": 1.34}


class Allocated(LiveBytes):
    """Storages on a device alone."""

    def _add(self, storage):
        if storage.device.type != "meta":
            super()._add(storage)


def most_alive(function, tries=3):
    """The least of three tries: gloo's threads let go of a tensor a moment later than its sender."""
    results = []
    for _ in range(tries):
        with Allocated() as live:
            function()
        results.append(live.peak)
    return min(results)


def sizes(config):
    """Bytes of the whole model, and of its largest layer without experts, expert, or part outside the layers."""
    from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors
    from megatron_rc.launch.weights.families import find_family
    from megatron_rc.launch.weights.units import units_of

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(find_family(config).hugging_face_config(config))
    tensors = {name: 4 * tensor.numel() for name, tensor in checkpoint_tensors(model).items()}
    units = [sum(tensors[name] for rule in unit.rules for name in unit.names(rule)) for unit in units_of(config)]
    return sum(tensors.values()), max(units)


def weigh(words):
    """(model, largest unit, most that an export adds, that an import adds, that an export adds if all is kept)."""
    from unittest import mock

    from megatron_rc.launch.weights import load
    from megatron_rc.launch.weights.converter import export_model, load_model

    trainer = make_trainer(words)
    model = (trainer.chunks, trainer.config, trainer.groups)
    read = load.WeightFiles.read

    def copy(files, name):
        with _disable_current_modes():
            tensor = read(files, name)
        return tensor.clone()

    def stream():
        for name, tensor in export_model(*model):
            assert name
            assert tensor.is_contiguous()

    out = most_alive(stream)
    kept = most_alive(lambda: dict(export_model(*model)), tries=1)
    # What a file gives is mapped, and no allocation: here it counts as if it were one.
    with mock.patch.object(load.WeightFiles, "read", copy):
        back = most_alive(lambda: load_model(*model, trainer.config.checkpoints.load_hf))
    return *sizes(trainer.config), out, back, kept


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    results = {}
    for name, config in MODELS.items():
        results[name] = tmp_path_factory.mktemp(name)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(results[name])
    return results


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", Layout()),
        ("qwen3_moe", Layout(pp=2, dp=2, ep=2)),
    ],
    ids=str,
)
def test_weights_pass_one_layer_at_a_time(ranks, folders, name, layout):
    results = ranks.run(weigh, layout, words_of(folders[name], layout))
    for model, unit, out, back, _ in results:
        assert model > 4 * unit
        assert out <= LIMITS[name] * unit
        assert back <= LIMITS[name] * unit
    model, unit, out, back, kept = results[0]
    assert min(out, back) > 0.3 * unit, "nothing was counted"
    assert kept >= model, "a receiver that keeps what it gets is seen"
