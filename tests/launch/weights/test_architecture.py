"""What a ``config.json`` says, as flags and back: published forms, contradictions, and what is computed otherwise."""

import contextlib

import pytest
import transformers

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.command import NONE_IF_ABSENT, read_command
from megatron_rc.launch.run_config import flag_options
from megatron_rc.launch.tasks.text import CharacterText
from megatron_rc.launch.weights import find_family
from megatron_rc.launch.weights.architecture import read_architecture
from megatron_rc.launch.weights.families import FAMILIES
from tests.support.published_models import LLAMA3, MODELS, YARN, changed, words_of
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, run_config


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The ``config.json`` of each model."""
    results = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, config in MODELS.items():
        config.save_pretrained(results[name])
    return results


# Model, flag, and how the sentence names both sides.
CONTRADICTIONS = [
    ("llama", "--rotary-base=10000", "--rotary-base 10000 contradicts --load-hf"),
    ("llama", "--untie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights contradicts"),
    ("llama", "--hf-model-type=mistral", "--hf-model-type mistral contradicts --load-hf"),
    ("llama-biases", "--disable-bias-linear", "--disable-bias-linear contradicts --load-hf .* has False"),
    ("qwen3", "--num-experts=4", "--num-experts 4 contradicts --load-hf .* has None"),
    ("qwen3_moe", "--num-experts=8", "--num-experts 8 contradicts --load-hf .* has 4"),
    ("qwen3_moe-unnormalised", "--no-moe-router-pre-softmax", "--no-moe-router-pre-softmax contradicts"),
]


@pytest.mark.parametrize(("name", "word", "message"), CONTRADICTIONS)
def test_flags_that_contradict_the_directory_are_refused(folders, name, word, message):
    with pytest.raises(ConfigurationError, match=message):
        read_command(words_of(folders[name], Layout(), word))
    assert read_command(words_of(folders["llama"], Layout(), "--rotary-base=500")).values.rotary_base == 500


def test_the_flags_that_a_file_may_leave_out_are_listed():
    """A flag that is left out, and is not listed, could contradict the file without an error."""
    files = [FAMILIES[config.model_type].read(config.to_dict()) for config in MODELS.values()]
    listed = {name.replace("_", "-") for name in NONE_IF_ABSENT}
    flags_of_files = {flag for words in files for flag in words if flag in flag_options()}
    for words in files:
        unused = {"sliding-window"}  # limits the length, and changes nothing else
        if "num-experts" not in words:
            unused.add("moe-ffn-hidden-size")
        if words["multi-latent-attention"]:
            unused.add("kv-channels")
        for flag in flags_of_files - words.keys() - unused:
            _, option = flag_options()[flag]
            assert option.default is not None or flag in listed


# Model, changed entries of its config.json, and parts of the sentence.
OLDER_LLAMA3 = {"rope_parameters": None, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 4096}}
OTHERWISE = [
    ("llama", {"model_type": "mamba"}, r"model_type 'mamba' .* deepseek_v3, .*glm4_moe_lite, .* \(docs/models\.md\)"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', not 'silu'"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True, but the attention has not all biases"),
    ("llama", {"attention_bias": "yes"}, "attention_bias is 'yes', not true or false"),
    ("mistral", {"attention_bias": True}, "attention_bias is True, not False"),
    ("qwen3", {"mlp_bias": True}, "mlp_bias is True, not False"),
    ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 2.0}}, r"high_freq_factor .* is 2\.0, not 4"),
    ("llama", OLDER_LLAMA3, "original_max_position_embeddings of llama3's rotary embeddings is 4096, not 8192"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        "rotary embeddings of type 'longrope'",
    ),
    (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters has 'full_attention'",
    ),
    ("llama", {"rope_parameters": YARN | {"beta_fast": "32"}}, "beta_fast is '32', not a number"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is None, not a number"),
    ("glm4_moe", {"rope_parameters": YARN}, r"yarn's rotary embeddings have partial_rotary_factor 0\.5"),
    ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5, not 1\.0"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .*'fp8'.*, not None"),
    ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention', not"),
    ("llama", {"hidden_size": "32", "head_dim": 8}, "hidden_size is '32'"),
    ("llama", {"num_attention_heads": 0, "head_dim": None}, "has an entry of the wrong type"),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 2}}, "type 'su'"),
    ("llama", {"use_sliding_window": True}, "use_sliding_window is True"),
    ("llama", {"num_hidden_layers": ...}, "lacks 'num_hidden_layers'"),
    ("phi3", {"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "rotary embeddings of type 'longrope'"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries, not one for each of 4 layers"),
    ("smollm3", {"use_sliding_window": True}, "use_sliding_window is True, not False"),
    ("olmo3", {"layer_types": ["full_attention"] * 4}, "layer_types is .*, not full attention in every fourth layer"),
    ("olmo3", {"rope_scaling": YARN}, "rope_scaling changes the rotary embeddings of the layers with full attention"),
    ("olmo3", {"rope_parameters": ..., "rope_theta": 1e4}, r"full_attention are .*10000\.0\}, those of sliding_att"),
    ("glm4", {"rope_parameters": YARN | {"partial_rotary_factor": 1.0}}, "rotary embeddings of type 'yarn'"),
    ("qwen3_moe", {"decoder_sparse_step": 5}, "no layer has experts, with decoder_sparse_step 5"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, r"no layer has experts, .* mlp_only_layers \[0, 1, 2, 3\]"),
    ("mixtral", {"router_jitter_noise": 0.1}, r"router_jitter_noise is 0\.1, not 0\.0"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2, not the 4 of num_attention_heads"),
    ("deepseek_v3", {"head_dim": 2}, "head_dim is 2, not the 4 of qk_rope_head_dim"),
    ("deepseek_v3", {"norm_topk_prob": None}, "norm_topk_prob is None, not True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True, not False"),
    ("deepseek_v3", {"first_k_dense_replace": 4}, r"first_k_dense_replace is 4, not in \[0, 3\]"),
    ("deepseek_v3", {"n_shared_experts": None}, "n_shared_experts is None"),
    ("deepseek_v3", {"topk_group": 1}, "topk_group is 1, not half of num_experts_per_tok 4"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax', not 'sigmoid'"),
    ("deepseek_v3", {"rope_parameters": YARN | {"mscale": None}}, "have mscale_all_dim without mscale"),
    ("deepseek_v3", {"rope_parameters": YARN | {"attention_factor": 1.0}}, "have an attention_factor, or no"),
    ("deepseek_v3", {"rope_parameters": YARN | {"factor": None}}, "factor is None"),
    ("gpt_oss", {"layer_types": ["sliding_attention"] * 3 + ["chunked_attention"]}, "layer_types is .*'chunked_"),
    ("gpt_oss", {"layer_types": ["full_attention"] * 3}, "layer_types is .* for 4 layers"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window is None, not a number of tokens"),
    ("gpt_oss", {"sliding_window": True}, "sliding_window is True, not a number of tokens"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias is False, not True"),
    ("gpt_oss", {"swiglu_limit": 5.0}, r"swiglu_limit is 5\.0, not 7\.0"),
    ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*'gptq'.*, neither mxfp4"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 3 + ["dense"]}, "not 'dense' and then 'sparse' for 4 layers"),
]


@pytest.mark.parametrize(("name", "change", "message"), OTHERWISE)
def test_models_that_would_be_computed_differently_are_refused(folders, tmp_path, name, change, message):
    with pytest.raises(ConfigurationError, match=message) as refused:
        read_architecture(changed(folders[name], tmp_path, change))
    # Megatron-Core computes some of them: only this program does not.
    assert "GPTModel" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"rope_parameters": None, "rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
        ("qwen3", {"partial_rotary_factor": 0.5}),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 4}),
        ("qwen2", {"quantization_config": {"quant_method": "fp8"}}),
    ],
)
def test_the_reason_is_that_it_is_not_converted_here(folders, tmp_path, name, change):
    with pytest.raises(ConfigurationError, match=r"not converted here \(docs/models\.md\)"):
        read_architecture(changed(folders[name], tmp_path, change))


# The rotary entries of a file whose two forms contradict each other, the flags by which it is read, and the entry that
# the line names; None: they agree.
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
BOTH_FORMS = {
    "equal": ({"rope_theta": 500, "rope_scaling": None, "rope_parameters": PLAIN}, 500, False, None),
    "base": ({"rope_theta": 1e6, "rope_scaling": None, "rope_parameters": PLAIN}, 500, False, "rope_theta"),
    "scaled alike": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | LLAMA3, "rope_parameters": LLAMA3},
        5e5,
        True,
        None,
    ),
    "scaled before": ({"rope_theta": 7e5, "rope_scaling": LLAMA3, "rope_parameters": PLAIN}, 5e5, True, "rope_"),
    "scaled since": ({"rope_scaling": None, "rope_parameters": LLAMA3}, 5e5, True, "rope_type"),
    "base beside scaling": (
        {
            "rope_theta": 7e5,
            "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
            "rope_parameters": LLAMA3,
        },
        7e5,
        True,
        "rope_theta",
    ),
}


@pytest.mark.parametrize(("entries", "base", "scales", "named"), BOTH_FORMS.values(), ids=BOTH_FORMS)
def test_of_two_forms_of_rotary_parameters_that_of_transformers_5_counts(
    folders, tmp_path, caplog, entries, base, scales, named
):
    folder = changed(folders["llama3"], tmp_path, entries)
    flags = read_architecture(folder)
    assert flags["rotary-base"] == base
    assert flags["use-rope-scaling"] == scales
    by_transformers = transformers.AutoConfig.from_pretrained(folder).rope_parameters
    assert by_transformers["rope_theta"] == base
    assert (by_transformers["rope_type"] == "llama3") == scales
    if named is None:
        assert not caplog.messages
    else:
        (line,) = caplog.messages
        assert line.startswith(f"--load-hf {folder}: config.json has {named}")
        assert "used, as by transformers 5" in line


def test_an_original_length_beside_the_rotary_parameters_counts_as_in_transformers(folders, tmp_path):
    folder = changed(folders["llama-yarn"], tmp_path, {"original_max_position_embeddings": 8})
    assert read_architecture(folder)["yarn-original-max-position-embeddings"] == 8
    by_transformers = transformers.AutoConfig.from_pretrained(folder)
    by_transformers.standardize_rope_params()  # as its rotary embeddings do before they are computed
    assert by_transformers.rope_parameters["original_max_position_embeddings"] == 8


def test_a_share_of_rotated_width_is_read_from_either_form(folders, tmp_path, caplog):
    plain = {"rope_type": "default", "rope_theta": 500.0}
    for entries, part, lines in (
        ({"partial_rotary_factor": 0.25, "rope_parameters": ..., "rope_theta": 500}, 0.25, 0),
        ({"partial_rotary_factor": 0.25, "rope_parameters": plain | {"partial_rotary_factor": 0.5}}, 0.5, 1),
        ({"partial_rotary_factor": 0.25, "rope_parameters": plain}, 0.25, 0),
    ):
        caplog.clear()
        folder = changed(folders["glm4_moe"], tmp_path, entries)
        assert read_architecture(folder)["rotary-percent"] == part
        assert transformers.AutoConfig.from_pretrained(folder).rope_parameters["partial_rotary_factor"] == part
        assert len(caplog.messages) == lines


def test_a_tokenizer_of_more_tokens_than_the_model_has_embeddings_is_named(folders, tmp_path):
    CharacterText("".join(map(chr, range(32, 127)))).save(tmp_path)
    arguments = [word for word in words_of(folders["llama"], Layout()) if not word.startswith("--tokenizer-type")]
    with pytest.raises(ConfigurationError, match=r"--load-hf \S+: the model has 30 embeddings .*98.*--tokenizer-model"):
        run_config([*arguments, f"--tokenizer-model={tmp_path}"])
    with pytest.raises(ConfigurationError, match="--vocab-size 5 is smaller than the tokenizer's 13"):
        run_config([*flags(tmp_path), "--vocab-size=5"])


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_what_a_file_lacks_is_what_transformers_takes(family):
    """Other groups of heads would be other numbers, tokens routed otherwise too, and no weight would tell of those."""
    config_class = getattr(transformers, family.config_class)
    whole = config_class().to_dict()
    if family.name not in ("gpt2", "deepseek_v3", "glm4_moe_lite"):
        whole |= {"num_attention_heads": 64, "num_key_value_heads": 2, "head_dim": 96}
    compared = set()
    for entry in whole.keys() - {"model_type"}:
        file = {key: value for key, value in whole.items() if key != entry}
        with contextlib.suppress(KeyError):
            flags = family.read(file)
            assert flags == family.read(config_class.from_dict(file).to_dict()), entry
            compared.add(entry)
    assert compared >= ({"n_inner"} if family.name == "gpt2" else {"num_key_value_heads", "rope_parameters"})


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(("gpt2", "olmo3"))])
def test_both_forms_of_a_config_are_the_same_flags(folders, tmp_path, name):
    """Before transformers 5 there were ``rope_theta`` and ``rope_scaling``."""
    parameters = dict(MODELS[name].rope_parameters)
    older = {"rope_parameters": ..., "rope_theta": parameters.pop("rope_theta")}
    older["rope_scaling"] = None if parameters == {"rope_type": "default"} else parameters
    flags = read_architecture(folders[name])
    assert read_architecture(changed(folders[name], tmp_path, older)) == flags
    assert flags["hf-model-type"] == MODELS[name].model_type
    assert flags["use-rope-scaling"] == (name == "llama3")


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_is_what_is_written(folders, tmp_path, name):
    """Every setting of ``config.json`` that changes what is computed comes back."""
    config = run_config(words_of(folders[name], Layout()))
    written = find_family(config).hugging_face_config(config).to_dict()
    expected = transformers.AutoConfig.from_pretrained(folders[name]).to_dict()
    apart = {"architectures", "dtype", "transformers_version", "_name_or_path", "initializer_range", "n_inner"}
    apart |= {"attn_pdrop", "embd_pdrop", "resid_pdrop", "router_aux_loss_coef", "num_experts", "head_dim"}
    apart |= {"scoring_func", "topk_method", "moe_layer_freq"}  # published, but not known to transformers
    for key in (expected.keys() | written.keys()) - apart:
        assert written.get(key) == expected.get(key), key


def test_kimi_k2_is_read_as_deepseeks_layers(folders, tmp_path):
    """With Kimi's own entries; transformers does not know its name."""
    yarn = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    yarn |= {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    entries = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "model_type": "kimi_k2",
        "moe_layer_freq": 1,
        "n_group": 1,
        "pretraining_tp": 1,
        "rope_parameters": ...,
        "rope_scaling": yarn,
        "rope_theta": 50000.0,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "noaux_tc",
    }
    config = run_config(words_of(changed(folders["deepseek_v3"], tmp_path, entries), Layout()))
    written = find_family(config).hugging_face_config(config)
    assert written.model_type == "deepseek_v3"
    assert written.rope_parameters.items() >= (yarn | {"rope_type": yarn.pop("type"), "rope_theta": 50000.0}).items()


def test_a_window_of_attention_is_carried_and_kept_to(folders, tmp_path):
    folder = changed(folders["mistral"], tmp_path, {"sliding_window": 16})
    config = run_config(words_of(folder, Layout()))
    assert find_family(config).hugging_face_config(config).sliding_window == 16
    with pytest.raises(ConfigurationError, match="--seq-length 20 is longer than --sliding-window 16"):
        run_config([*words_of(folder, Layout()), "--seq-length=20"])
    folder = changed(folders["mistral"], tmp_path, {"sliding_window": ...})
    assert run_config(words_of(folder, Layout())).model.sliding_window == 4096


# Kinds of gpt-oss's layers, and the flags that say so; published are alternating ones.
WINDOWS = [
    (["sliding_attention", "full_attention"] * 2, {"window-size": "4,0", "window-attn-skip-freq": "2"}),
    (["full_attention"] * 3 + ["sliding_attention"], {"window-size": "4,0", "window-attn-skip-freq": "[0]*3+[1]*1"}),
    (["sliding_attention"] * 4, {"window-size": "4,0"}),
    (["full_attention"] * 4, {}),
]


@pytest.mark.parametrize(("kinds", "expected"), WINDOWS)
def test_layers_with_a_window_are_read_and_written(folders, tmp_path, kinds, expected):
    folder = changed(folders["gpt_oss"], tmp_path, {"layer_types": kinds})
    arguments = {name: word for name, word in read_architecture(folder).items() if "window" in name}
    assert arguments == expected
    config = run_config(words_of(folder, Layout()))
    written = find_family(config).hugging_face_config(config)
    assert written.layer_types == kinds
    if expected:
        assert written.sliding_window == 5


def test_a_model_of_two_families_is_what_is_asked_for(folders):
    arguments = words_of(folders["llama"], Layout())
    assert find_family(run_config(arguments)).name == "llama"
    plain = flags(folders["llama"] / "runs")
    assert find_family(run_config([*plain, "--hf-model-type=mistral"])).name == "mistral"
    with pytest.raises(ConfigurationError, match=r"--hf-model-type qwen3 .*llama or mistral"):
        run_config([*plain, "--hf-model-type=qwen3"])


def test_a_directory_that_is_not_there_is_named(tmp_path):
    """As where a name of the model hub is given."""
    with pytest.raises(ConfigurationError, match=r"^--load-hf Qwen/Qwen3-8B: there is no such directory here, and no"):
        read_architecture("Qwen/Qwen3-8B")
    with pytest.raises(ConfigurationError, match=r"--load-hf .*: config\.json cannot be read"):
        read_architecture(tmp_path)
