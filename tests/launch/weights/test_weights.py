"""Hugging Face directories in and out of sharded models: the same logits, and every bit back again."""

import itertools
import json
import os
import re
from operator import itemgetter

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rc.launch.weights.load import open_weights
from tests.support.hybrid import HYBRID, needs_hybrid
from tests.support.published_models import MODELS, enlarge_gates, save_random, words_of
from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import build_trainer, make_trainer, recorded_batch, refusal

TENSOR = Layout(tp=2, sp=True)
PIPELINE = Layout(pp=2, vpp=True)
BOTH = Layout(tp=2, sp=True, pp=2)
EXPERTS = Layout(tp=2, sp=True, dp=2, ep=2)
# Experts whose matrices are split over other ranks than the others.
OTHER_RANKS = Layout(tp=2, sp=True, ep=2, etp=1)
# Each family once, on as few ranks as show its tensors, and again only where a layout puts them in another way: tied
# and learned embeddings over stages, layers that differ by their number, experts over every kind of rank.
CASES = [(name, TENSOR) for name in ("llama3", "mistral", "qwen2", "gpt2", "gpt2-untied")]
CASES += [(name, TENSOR) for name in ("llama-biases", "llama-yarn", "qwen3-biases")]
CASES += [(name, TENSOR) for name in ("phi3", "seed_oss", "olmo2")]
CASES += [(name, PIPELINE) for name in ("llama", "llama-untied", "qwen3", "gpt2")]
CASES += [(name, Layout()) for name in ("llama-dynamic", "gpt2-gelu", "moonlight")]
CASES += [("qwen3_moe-unnormalised", Layout(pp=2))]
CASES += [(name, BOTH) for name in ("smollm3", "olmo3", "glm4")]
CASES += [(name, EXPERTS) for name in ("qwen3_moe", "qwen2_moe")]
CASES += [
    ("qwen3_moe", Layout(tp=2, sp=True, dp=2, ep=4, etp=1)),
    ("mixtral", Layout(cp=2, dp=2, ep=2, etp=2)),
    ("deepseek_v3", Layout(pp=2, dp=2, ep=2)),
    ("deepseek_v3", OTHER_RANKS),
    ("glm4_moe", Layout(cp=2, ep=2)),
    ("glm4_moe-air", Layout(pp=2)),
    ("glm4_moe_lite", Layout(pp=2)),
    ("gpt_oss", Layout(cp=2)),
    ("gpt_oss", Layout(pp=2, dp=2, ep=2)),
    ("gpt_oss", OTHER_RANKS),
]
# One layout after the other: each has its process groups made once.
CASES.sort(key=lambda case: str(case[1]))
CASES = [(*case, ()) for case in CASES]
UNEVEN = "--decoder-first-pipeline-num-layers=1"
STAGES = Layout(pp=2, vpp=True, ep=2, cp=2, stages="Et|(t|)*2tL")
CASES += [("qwen3_moe", STAGES, ()), ("qwen3_moe-dense_layers", Layout(pp=2), (UNEVEN,))]
HYBRIDS = [
    ("llama3", TENSOR, (HYBRID,)),
    ("olmo2", TENSOR, (HYBRID,)),
    ("deepseek_v3", TENSOR, (HYBRID,)),
    ("gpt2", PIPELINE, (HYBRID,)),
    ("qwen3_moe", Layout(pp=2), (HYBRID, UNEVEN)),
    ("qwen3_moe", STAGES, (HYBRID,)),
    ("gpt_oss", Layout(pp=2), (HYBRID,)),
]
CASES += [pytest.param(*case, marks=needs_hybrid) for case in HYBRIDS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model of each family."""
    results = {}
    for name, config in MODELS.items():
        results[name] = save_random(config, tmp_path_factory.mktemp(name), 3, "20KB" if name == "qwen3" else "5GB")
    as_published(results["gpt2"])
    enlarge_gates(results["gpt_oss"])
    return results


def as_published(folder):
    """GPT-2's own files: without the head's prefix, and with the causal mask of every layer."""
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(folder / "model.safetensors").items()}
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_and_export(words):
    """Logits of the recorded tokens on the last stage, the weights that come out again, and where this rank is."""
    from megatron_rc.launch.training.batches.micro_batches import cut_batch
    from megatron_rc.launch.weights.converter import export_model
    from megatron_rc.parallel.groups import group_rank, group_size

    trainer = make_trainer(words)
    groups = trainer.groups
    with torch.no_grad():
        batch = cut_batch(recorded_batch(0, group_rank(groups.dp), group_size(groups.dp)), trainer.config, groups)
        logits = trainer.passes.run(
            trainer.model, batch, batch.cuts[0], lambda _model, local, output, non_loss_data: output, forward_only=True
        )
    weights = dict(export_model(trainer.chunks, trainer.config, groups))
    where = (group_rank(groups.dp), group_rank(groups.cp), group_rank(groups.tp))
    return torch.cat(logits) if logits else None, weights, batch.local.positions[0], where


def assembled(results, like):
    """The logits of the whole batch, from the shards of all ranks."""
    got = torch.zeros_like(like)
    ends = sorted(
        ((where, logits, positions) for logits, _, positions, where in results if logits is not None), key=itemgetter(0)
    )
    rows = like.shape[0] // len({dp for (dp, _, _), _, _ in ends})
    for (dp, _), shards in itertools.groupby(ends, key=lambda end: end[0][:2]):
        _, logits, positions = zip(*shards, strict=True)
        own = got[dp * rows : (dp + 1) * rows]
        own[:, positions[0]] = torch.cat(logits, dim=-1)[..., : like.shape[-1]]
    return got


@pytest.mark.parametrize(("name", "layout", "more"), CASES, ids=str)
def test_logits_and_round_trip(ranks, folders, name, layout, more):
    results = ranks.run(load_and_export, layout, [*words_of(folders[name], layout), *more])
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[name])
    for part, module in model.named_modules():
        if part.endswith("_a_layernorm"):  # 1e-6 in transformers; in Megatron and in engines what the file says
            module.variance_epsilon = model.config.rms_norm_eps
    with torch.no_grad():
        expected = model(recorded_batch(0).tokens).logits
    torch.testing.assert_close(assembled(results, expected), expected, rtol=1e-3, atol=1e-4)
    saved = dict(model.named_parameters()) if name == "gpt2" else read_tensors(folders[name])
    engines = [weights for _, weights, _, _ in results if weights]
    assert len(engines) == layout.dp
    for weights in engines:
        assert weights.keys() == saved.keys()
        for key, value in weights.items():
            assert torch.equal(value, saved[key]), key


def logits_of(words, tokens, change):
    """The model's logits of one sequence on one rank, with some of what makes the model replaced."""
    from megatron_rc.launch.run_config import megatron_configs
    from megatron_rc.launch.training.models import build

    with pytest.MonkeyPatch.context() as patch:
        for function, stand_in in change.items():
            patch.setattr(build if hasattr(build, function) else megatron_configs, function, stand_in)
        (chunk,) = make_trainer(words).chunks
    with torch.no_grad():
        return chunk(tokens, torch.arange(tokens.shape[1]).unsqueeze(0), None)[..., :30]


def exact_gelu(hidden):
    return torch.nn.functional.gelu(hidden)


def unstretched(**arguments):
    from megatron.core.models.gpt import GPTModel

    return GPTModel(**arguments | {"rope_scaling": False})


@pytest.mark.parametrize(
    ("name", "length", "wrong"),
    [("gpt2", 16, {"_gelu_by_tanh": exact_gelu}), ("llama3", 1024, {"GPTModel": unstretched})],
)
def test_a_published_detail_shows_in_the_logits(ranks, folders, name, length, wrong):
    """Over a long sequence, where Llama 3's stretched frequencies have turned far enough to be seen."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[name])
    tokens = torch.randint(0, 30, (1, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits
    arguments = [*words_of(folders[name], Layout()), f"--seq-length={length}"]
    right, other = (ranks.run(logits_of, Layout(), arguments, tokens, change)[0] for change in ({}, wrong))
    torch.testing.assert_close(right, expected, rtol=0, atol=2e-5)
    assert (other - expected).abs().max() > 4e-4


def test_the_clamp_of_gpt_oss_shows_in_the_logits(folders):
    """Without it the logits differ by more than the tolerance of the comparison with Megatron's."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["gpt_oss"])
    with torch.no_grad():
        expected = model(recorded_batch(0).tokens).logits
        for layer in model.model.layers:
            assert layer.mlp.experts.limit == 7
            layer.mlp.experts.limit = 1e9
        without_clamp = model(recorded_batch(0).tokens).logits
    assert (without_clamp - expected).abs().max() > 0.1


def read_tensors(folder):
    return {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}


DOWN = "model.layers.3.mlp.down_proj.weight"
EXPERT = "model.layers.3.mlp.experts.3.down_proj.weight"
Q = "model.layers.3.self_attn.q_proj.weight"
WORDS = "model.embed_tokens.weight"
STACK = "model.layers.3.mlp.experts.down_proj"
# Model, a tensor, its wrong shape, and the sentence. On two ranks the second one alone reads the tensor.
ALONE = Layout()
TWO_STAGES = Layout(pp=2)
TWO_OF_EXPERTS = Layout(dp=2, ep=2)
NOT_FITTING = {
    "missing": (TWO_STAGES, "llama", DOWN, None, f"holds no tensor {DOWN}"),
    "shape": (ALONE, "llama", DOWN, (32, 50), f"{DOWN} (32, 50) does not fit"),
    "uncut": (ALONE, "llama", Q, (33, 32), f"{Q} (33, 32), model.layers.3.self_attn.k_proj.weight"),
    "shape of an expert": (
        TWO_OF_EXPERTS,
        "qwen3_moe",
        EXPERT,
        (32, 48),
        f"{EXPERT} (32, 48) does not fit the (32, 24)",
    ),
    "missing stack": (ALONE, "gpt_oss", STACK, None, f"holds no tensor {STACK}"),
    "short stack": (ALONE, "gpt_oss", STACK, (3, 20, 32), f"{STACK} (3, 20, 32) has no entry 3"),
    "vocabulary": (TENSOR, "qwen3_moe", WORDS, (29, 32), f"{WORDS} (29, 32) does not fit the (16, 32)"),
}


@pytest.mark.parametrize(("layout", "name", "tensor", "shape", "message"), NOT_FITTING.values(), ids=NOT_FITTING)
def test_weights_that_do_not_fit_are_one_error(ranks, folders, tmp_path, layout, name, tensor, shape, message):
    tensors = load_file(folders[name] / "model.safetensors")
    tensors.pop(tensor)
    if shape:
        tensors[tensor] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders[name] / "config.json").read_text())
    words = words_of(tmp_path, layout)
    pattern = f"(?s)--load-hf: .*{re.escape(message)}"
    if layout.world == 1:
        (error,) = ranks.run(refusal, layout, words)
        assert re.search(pattern, error)
    else:
        with pytest.raises(RankFailure, match=pattern):
            ranks.run(build_trainer, layout, words)


def regrouped(words, folder):
    """The exported weights, and again with the names of Transformer Engine's grouped experts, and after a load."""
    from megatron_rc.launch.weights.converter import export_model, load_model

    trainer = make_trainer(words)
    model = (trainer.chunks, trainer.config, trainer.groups)
    results = [dict(export_model(*model))]
    for chunk in trainer.chunks:
        for layer in chunk.decoder.layers:
            layer.mlp.experts = as_grouped(layer.mlp.experts)
    results.append(dict(export_model(*model)))
    for chunk in trainer.chunks:
        for parameter in chunk.parameters():
            parameter.data.zero_()
    load_model(*model, folder)
    return [*results, dict(export_model(*model))]


def as_grouped(experts):
    """A module with the names of Transformer Engine's grouped linear layers, and the experts' parameters."""
    grouped = torch.nn.Module()
    for name in ("linear_fc1", "linear_fc2"):
        linear = torch.nn.Module()
        for number, expert in enumerate(experts.local_experts):
            linear.register_parameter(f"weight{number}", getattr(expert, name).weight)
        setattr(grouped, name, linear)
    return grouped


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(tp=2, sp=True, ep=2, etp=1)], ids=str)
def test_grouped_experts_have_the_same_weights_in_files(ranks, folders, layout):
    """A CPU has no grouped products, so the layers' parameters are put under the names that these have."""
    everywhere = ranks.run(regrouped, layout, words_of(folders["qwen3_moe"], layout), folders["qwen3_moe"])
    for alone, grouped, loaded in everywhere:
        assert alone.keys() == grouped.keys() == loaded.keys()
        for name, tensor in alone.items():
            assert torch.equal(tensor, grouped[name])
            assert torch.equal(tensor, loaded[name])
    assert any(alone for alone, _, _ in everywhere)


def test_files_that_cannot_be_read_are_named(tmp_path):
    single = tmp_path / "model.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    os.mkfifo(tmp_path / "part.safetensors")  # safetensors would open it with the interpreter's lock held
    for path, text, message in (
        (None, "", r"holds neither model\.safetensors nor model\.safetensors\.index\.json"),
        (index, "[]", "is no index of safetensors files"),
        (index, json.dumps({"weight_map": {"x": "part.safetensors"}}), r"part\.safetensors is no regular file"),
        (single, "not safetensors", r"model\.safetensors cannot be read as safetensors"),
    ):
        if path is not None:
            path.write_text(text)
        with pytest.raises(ValueError, match=message), open_weights(tmp_path):
            pass


def test_of_one_file_and_several_those_are_read_that_transformers_reads(tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(MODELS["llama"])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    name = "model.norm.weight"
    stored = model.state_dict() | {"model.norm.weight": torch.full((32,), 7.0)}
    save_file(
        {key: tensor for key, tensor in stored.items() if key != "lm_head.weight"}, tmp_path / "model.safetensors"
    )
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()[name]
    with open_weights(tmp_path) as files:
        torch.testing.assert_close(files.read(name), expected, rtol=0, atol=0)
