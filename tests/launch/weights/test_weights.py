"""Hugging Face directories in and out of sharded models: the same logits, and every bit back again."""

import importlib.util
import itertools
import json
import sys
import types
from operator import itemgetter
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import parse_args
from megatron_rc.launch.weights import find_family, from_gguf
from megatron_rc.launch.weights.architecture import read_architecture
from megatron_rc.launch.weights.from_gguf import unpack
from tests.support.ranks import Layout
from tests.support.recorded_training import COMMON, GPT2, flags, make_trainer, recorded_batch, run_config

GATED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SMALL_GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 30}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16, "tie_word_embeddings": False}
MODELS = {
    "llama": transformers.LlamaConfig(**GATED, tie_word_embeddings=True),
    "llama-untied": transformers.LlamaConfig(**GATED, tie_word_embeddings=False, rms_norm_eps=1e-4),
    "llama3": transformers.LlamaConfig(
        **GATED | {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}, head_dim=16, tie_word_embeddings=True
    ),
    "mistral": transformers.MistralConfig(**GATED, head_dim=16, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**GATED, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**GATED, head_dim=16, tie_word_embeddings=False),
    "gpt2": transformers.GPT2Config(**SMALL_GPT2),
    "gpt2-gelu": transformers.GPT2Config(**SMALL_GPT2, activation_function="gelu"),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **GATED, **EXPERTS, num_experts=4, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "qwen3_moe-unnormalised": transformers.Qwen3MoeConfig(
        **GATED, **EXPERTS, num_experts=4, moe_intermediate_size=24, norm_topk_prob=False
    ),
    "mixtral": transformers.MixtralConfig(**GATED, **EXPERTS, num_local_experts=4),
}
DENSE = ("llama", "llama-untied", "llama3", "mistral", "qwen2", "qwen3", "gpt2")
SPREAD = (
    *(Layout(dp=2, ep=2), Layout(cp=2, ep=2), Layout(dp=4, ep=2), Layout(cp=2, dp=2, ep=4)),
    *(Layout(tp=2, sp=True, dp=2, ep=2), Layout(pp=2, dp=2, ep=2), Layout(pp=2, vpp=True, cp=2, ep=2)),
)
CASES = [(name, layout) for name in DENSE for layout in (Layout(tp=2, sp=True), Layout(pp=2, vpp=True))]
CASES += [("llama", Layout()), ("gpt2-gelu", Layout()), ("gpt2", Layout(tp=2, pp=2, cp=2))]
CASES += [("qwen3_moe", layout) for layout in (Layout(), Layout(tp=2, sp=True), Layout(pp=2), *SPREAD)]
CASES += [
    ("qwen3_moe-unnormalised", Layout(dp=2, ep=2)),
    ("mixtral", Layout(tp=2, sp=True, dp=2, ep=2)),
    ("mixtral", Layout(pp=2)),
]
# One layout after the other: each has its process groups made once.
CASES.sort(key=lambda case: str(case[1]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model of each family, with norms and biases that are neither 1 nor 0, as transformers saves it."""
    found = {}
    for name, config in MODELS.items():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name], max_shard_size="20KB" if name == "qwen3" else "5GB")
    as_published(found["gpt2"])
    return found


def as_published(folder):
    """GPT-2's own files: without the head's prefix, and with the causal mask of every layer."""
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(folder / "model.safetensors").items()}
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_and_export(words):
    """Logits of the recorded tokens on the last stage, the weights that come out again, and where this rank is."""
    from megatron_rc.launch.training.micro_batches import cut_batch
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


def words_of(folder, layout, *more):
    size = f"--micro-batch-size={min(8, 16 // layout.dp)}"
    return [
        *COMMON,
        f"--load-hf={folder}",
        "--tokenizer-type=CharacterTokenizer",
        f"--runs-dir={folder}/runs",
        size,
        *layout.flags(),
        *more,
    ]


def assembled(found, like):
    """The logits of the whole batch, from the shards of all ranks."""
    got = torch.zeros_like(like)
    ends = sorted(
        ((where, logits, positions) for logits, _, positions, where in found if logits is not None), key=itemgetter(0)
    )
    rows = like.shape[0] // len({dp for (dp, _, _), _, _ in ends})
    for (dp, _), shards in itertools.groupby(ends, key=lambda end: end[0][:2]):
        _, logits, positions = zip(*shards, strict=True)
        own = got[dp * rows : (dp + 1) * rows]
        own[:, positions[0]] = torch.cat(logits, dim=-1)[..., : like.shape[-1]]
    return got


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_logits_and_round_trip(ranks, folders, name, layout):
    found = ranks.run(load_and_export, layout, words_of(folders[name], layout))
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[name])
    with torch.no_grad():
        expected = model(recorded_batch(0).tokens).logits
    torch.testing.assert_close(assembled(found, expected), expected, rtol=1e-3, atol=1e-4)
    saved = dict(model.named_parameters()) if name == "gpt2" else read_tensors(folders[name])
    engines = [weights for _, weights, _, _ in found if weights]
    assert len(engines) == layout.dp
    for weights in engines:
        assert weights.keys() == saved.keys()
        for key, value in weights.items():
            assert torch.equal(value, saved[key]), key


def logits_of(words, tokens, change):
    """The model's logits of one sequence on one rank, with some functions of ``model.py`` replaced."""
    from megatron_rc.launch.training import model

    with pytest.MonkeyPatch.context() as patch:
        for function, stand_in in change.items():
            patch.setattr(model, function, stand_in)
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
    words = [*words_of(folders[name], Layout()), f"--seq-length={length}"]
    right, other = (ranks.run(logits_of, Layout(), words, tokens, change)[0] for change in ({}, wrong))
    torch.testing.assert_close(right, expected, rtol=0, atol=2e-5)
    assert (other - expected).abs().max() > 4e-4


def read_tensors(folder):
    return {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}


def start(words):
    from megatron_rc.launch.distributed import AgreedError

    try:
        make_trainer(words)
    except AgreedError as error:
        return str(error)


def spoilt(folder, target, change):
    """The directory with other tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.3.mlp.down_proj.weight"), "holds no tensor model.layers.3.mlp.down_proj.weight"),
        (
            lambda t: t.update({"model.layers.3.mlp.down_proj.weight": torch.zeros(32, 50)}),
            "model.layers.3.mlp.down_proj.weight (32, 50) does not fit",
        ),
        (
            lambda t: t.update({"model.layers.3.self_attn.q_proj.weight": torch.zeros(33, 32)}),
            "model.layers.3.self_attn.q_proj.weight (33, 32), model.layers.3.self_attn.k_proj.weight",
        ),
    ],
    ids=["missing", "shape", "uncut"],
)
def test_weights_that_do_not_fit_are_one_error_on_all_ranks(ranks, folders, tmp_path, change, message):
    """Only the last stage reads the tensor that is wrong."""
    folder = spoilt(folders["llama"], tmp_path, change)
    messages = ranks.run(start, Layout(pp=2), words_of(folder, Layout(pp=2)))
    assert set(messages) == {messages[0]}
    assert messages[0].startswith("--load-hf: ")
    assert message in messages[0]


EXPERT = "model.layers.3.mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(EXPERT), f"holds no tensor {EXPERT}"),
        (lambda t: t.update({EXPERT: torch.zeros(32, 48)}), f"{EXPERT} (32, 48) does not fit the (32, 12)"),
        (
            lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.zeros(5, 32)}),
            "model.layers.0.mlp.gate.weight (5, 32) does not fit the (4, 32)",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.zeros(29, 32)}),
            "model.embed_tokens.weight (29, 32) does not fit the (16, 32)",
        ),
    ],
    ids=["missing", "shape", "router", "vocabulary"],
)
def test_experts_that_do_not_fit_are_one_error_on_all_ranks(ranks, folders, tmp_path, change, message):
    """The last expert is on the second rank alone."""
    folder = spoilt(folders["qwen3_moe"], tmp_path, change)
    layout = Layout(tp=2, sp=True, dp=2, ep=2)
    messages = ranks.run(start, layout, words_of(folder, layout))
    assert set(messages) == {messages[0]}
    assert messages[0].startswith("--load-hf: ")
    assert message in messages[0]


def without_a_group(words):
    """The errors of an export and an import that are not told who has the other experts."""
    from megatron_rc.launch.weights.export import export_weights
    from megatron_rc.launch.weights.load import load_weights

    trainer = make_trainer(words)
    model = (trainer.chunks, trainer.config, trainer.groups)
    messages = []
    for attempt in (
        lambda: list(export_weights(*model)),
        lambda: load_weights(*model, trainer.config.checkpoints.load_hf),
    ):
        try:
            attempt()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_spread_experts_need_their_group(ranks, folders):
    layout = Layout(dp=2, ep=2)
    for messages in ranks.run(without_a_group, layout, words_of(folders["qwen3_moe"], layout)):
        assert messages == ["ep_group has 1 ranks, expected the 2 of --expert-model-parallel-size"] * 2


def test_files_that_cannot_be_read_are_named(ranks, folders, tmp_path):
    config = (folders["llama"] / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    (message,) = ranks.run(start, Layout(), words_of(tmp_path, Layout()))
    assert "holds neither model.safetensors nor model.safetensors.index.json" in message
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    (message,) = ranks.run(start, Layout(), words_of(tmp_path, Layout()))
    assert "model.safetensors cannot be read as safetensors" in message
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    (message,) = ranks.run(start, Layout(), words_of(tmp_path, Layout()))
    assert "is no index of safetensors files" in message


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--rotary-base=10000", "--rotary-base 10000 contradicts --load-hf"),
        ("--num-layers=8", "--num-layers 8 contradicts --load-hf"),
        ("--untie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights True contradicts"),
        ("--norm-epsilon=1e-3", r"--norm-epsilon 0\.001 contradicts"),
        ("--no-swiglu", "--swiglu False contradicts"),
    ],
)
def test_flags_that_contradict_the_directory_are_refused(folders, word, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_args(words_of(folders["llama"], Layout(), word))
    assert parse_args(words_of(folders["llama"], Layout(), "--rotary-base=500")).rotary_base == 500


@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        ("qwen3", "--num-experts=4", "--num-experts 4 contradicts --load-hf .* has None"),
        ("qwen3_moe", "--num-experts=8", "--num-experts 8 contradicts --load-hf .* has 4"),
        ("qwen3_moe", "--moe-ffn-hidden-size=48", "--moe-ffn-hidden-size 48 contradicts"),
        ("qwen3_moe", "--moe-router-topk=3", "--moe-router-topk 3 contradicts"),
        ("qwen3_moe", "--moe-router-pre-softmax", "--moe-router-pre-softmax True contradicts"),
        ("qwen3_moe-unnormalised", "--no-moe-router-pre-softmax", "--moe-router-pre-softmax False contradicts"),
        ("mixtral", "--qk-layernorm", "--qk-layernorm True contradicts"),
    ],
)
def test_flags_that_contradict_the_directorys_experts_are_refused(folders, name, word, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_args(words_of(folders[name], Layout(), word))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "mamba"},
            "model_type 'mamba' is not known; known are gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', not 'silu'"),
        ({"attention_bias": True}, "attention_bias is True, not False"),
        (
            {"rope_parameters": LLAMA3 | {"high_freq_factor": 2.0}},
            r"high_freq_factor of llama3's rotary embeddings is 2\.0, not 4\.0",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
            r"low_freq_factor of llama3's rotary embeddings is None, not 1\.0",
        ),
        (
            {"rope_parameters": None, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 4096}},
            "original_max_position_embeddings of llama3's rotary embeddings is 4096, not 8192",
        ),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "factor is None, not a number"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rotary embeddings of type 'yarn'"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\], not a table of numbers"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5, not 1\.0"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            r"quantization_config is \{'quant_method': 'fp8'\}, not None",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention', not"),
        ({"layer_types": 5}, "has an entry of the wrong kind"),
        ({"num_hidden_layers": [4]}, r"num_hidden_layers is \[4\], not a whole number"),
        ({"hidden_size": "32", "head_dim": 8}, "hidden_size is '32', not a whole number"),
        ({"num_attention_heads": 0, "head_dim": None}, "has an entry of the wrong kind"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, not true or false"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "embeddings of type 'linear'"),
        ({"rope_parameters": {"rope_theta": 0.5}}, r"rope_theta is 0\.5, not a whole number"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"num_hidden_layers": ...}, "lacks 'num_hidden_layers'"),
    ],
)
def test_models_that_would_be_computed_differently_are_refused(folders, tmp_path, change, message):
    with pytest.raises(ConfigurationError, match=message):
        read_architecture(changed(folders["llama"], tmp_path, change))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, not 1"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], not \[\]"),
        ("qwen3_moe", {"num_experts": ..., "num_local_experts": ...}, "lacks 'num_experts'"),
        ("qwen3_moe", {"moe_intermediate_size": ...}, "lacks 'moe_intermediate_size'"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias is True, not False"),
        ("mixtral", {"router_jitter_noise": 0.1}, r"router_jitter_noise is 0\.1, not 0\.0"),
        ("mixtral", {"num_experts_per_tok": ...}, "lacks 'num_experts_per_tok'"),
    ],
)
def test_experts_that_would_be_computed_differently_are_refused(folders, tmp_path, name, change, message):
    with pytest.raises(ConfigurationError, match=message):
        read_architecture(changed(folders[name], tmp_path, change))


def changed(folder, target, change):
    """A directory with another ``config.json``; what is ``...`` there is left out."""
    config = json.loads((folder / "config.json").read_text()) | change
    kept = {key: value for key, value in config.items() if value is not ...}
    (target / "config.json").write_text(json.dumps(kept))
    return target


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("gpt2")])
def test_both_forms_of_a_config_are_the_same_flags(folders, tmp_path, name):
    """Before transformers 5 there were ``rope_theta`` and ``rope_scaling``."""
    parameters = dict(MODELS[name].rope_parameters)
    older = {"rope_parameters": ..., "rope_theta": parameters.pop("rope_theta")}
    older["rope_scaling"] = None if parameters == {"rope_type": "default"} else parameters
    flags = read_architecture(folders[name])
    assert read_architecture(changed(folders[name], tmp_path, older)) == flags
    assert flags["hf-model-type"] == MODELS[name].model_type
    assert flags["use-rope-scaling"] == str(name == "llama3").lower()


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_is_what_is_written(folders, tmp_path, name):
    """Every setting of ``config.json`` that changes what is computed comes back."""
    config = run_config(words_of(folders[name], Layout()))
    written = find_family(config).hugging_face_config(config).to_dict()
    wanted = transformers.AutoConfig.from_pretrained(folders[name]).to_dict()
    apart = {"architectures", "dtype", "transformers_version", "_name_or_path", "initializer_range", "n_inner"}
    apart |= {"attn_pdrop", "embd_pdrop", "resid_pdrop", "router_aux_loss_coef", "num_experts", "head_dim"}
    for key in (wanted.keys() | written.keys()) - apart:
        assert written.get(key) == wanted.get(key), key


def test_a_window_of_attention_is_carried_and_kept_to(folders, tmp_path):
    folder = changed(folders["mistral"], tmp_path, {"sliding_window": 16})
    config = run_config(words_of(folder, Layout()))
    assert find_family(config).hugging_face_config(config).sliding_window == 16
    with pytest.raises(ConfigurationError, match="--seq-length 20 is longer than --sliding-window 16, beyond which"):
        run_config([*words_of(folder, Layout()), "--seq-length=20"])
    folder = changed(folders["mistral"], tmp_path, {"sliding_window": ...})
    assert run_config(words_of(folder, Layout())).model.sliding_window == 4096


def test_a_model_of_two_families_is_what_is_asked_for(folders):
    words = words_of(folders["llama"], Layout())
    assert find_family(run_config(words)).name == "llama"
    plain = flags(folders["llama"] / "runs")
    assert find_family(run_config([*plain, "--hf-model-type=mistral"])).name == "mistral"
    with pytest.raises(ConfigurationError, match=r"--hf-model-type qwen3 is not what .* use llama or mistral"):
        run_config([*plain, "--hf-model-type=qwen3"])
    with pytest.raises(ConfigurationError, match="--hf-model-type mistral contradicts --load-hf"):
        run_config([*words, "--hf-model-type=mistral"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--use-rope-scaling"], "--use-rope-scaling does nothing with --position-embedding-type learned_absolute"),
        (["--openai-gelu", "--swiglu"], "--openai-gelu does nothing with --swiglu"),
        (["--rope-scaling-factor=8"], r"--rope-scaling-factor 8\.0 does nothing without --use-rope-scaling"),
    ],
)
def test_flags_that_change_nothing_are_refused(tmp_path, words, message):
    with pytest.raises(ConfigurationError, match=message):
        run_config(flags(tmp_path, *words, model=GPT2))


def test_older_directories_are_read(tmp_path):
    """Before transformers 5 the base of the rotary frequencies stood by itself."""
    config = {**GATED, "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6}
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(tmp_path)["rotary-base"] == "1000000"


def test_a_directory_that_is_not_there_is_named():
    with pytest.raises(ConfigurationError, match=r"--load-hf nowhere: config\.json cannot be read"):
        read_architecture(Path("nowhere"))


def test_a_gguf_file_that_cannot_be_unpacked_is_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"none\.gguf: no such file; give a model in the GGUF format"):
        unpack(tmp_path / "none.gguf", tmp_path / "out")
    (tmp_path / "a.gguf").write_bytes(b"not one")
    right = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else right(name, *a))
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    with pytest.raises(
        ConfigurationError, match=r"a GGUF file needs .*, which is not installed: .*megatron-rc\[gguf\]"
    ):
        unpack(tmp_path / "a.gguf", tmp_path / "out")
    with pytest.raises(SystemExit, match=r"usage: python -m megatron_rc\.launch\.weights\.from_gguf"):
        from_gguf.main(["a.gguf"])
    with pytest.raises(SystemExit, match=r"error: .*no such file"):
        from_gguf.main([str(tmp_path / "none.gguf"), str(tmp_path / "out")])


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"")
    loaded = types.SimpleNamespace(save_pretrained=lambda folder: Path(folder).mkdir(), config=types.SimpleNamespace())
    monkeypatch.setattr(from_gguf, "require", lambda *_: None)
    for kind in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
        monkeypatch.setattr(kind, "from_pretrained", lambda **_: loaded)
    with pytest.raises(ConfigurationError, match=r"a\.gguf/out cannot be written to: .*Not a directory"):
        unpack(file, file / "out")


def test_a_folder_that_holds_a_model_is_not_unpacked_again(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    unpack(tmp_path / "gone.gguf", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
