"""Exports of every family, read by transformers 5 and by transformers 4.57: the log-probs of the trainer, in both."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers

from tests.support.paths import ROOT
from tests.support.published_configs import PUBLISHED
from tests.support.published_models import words_of
from tests.support.ranks import Layout
from tests.support.recorded_training import COMMON, make_trainer

EARLIER = "4.57.3"
LENGTH = 48
# A family that transformers 4.57 does not have.
ONLY_IN_5 = ("glm-4.7-flash",)
# How the model's settings are given: the publisher's config.json, the one that transformers 5 writes, or flags alone.
SOURCES = ("published", "saved-by-5", "flags")
# The flags of the same models without a directory, as docs/models.md has them.
SIZES = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --vocab-size 103"
LLAMA = f"""{SIZES} --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear
    --group-query-attention --num-query-groups 2"""
QWEN3 = f"{LLAMA} --qk-layernorm --kv-channels 16 --rotary-base 1000000"
OLMO = "--layer-norms after --qk-layernorm --qk-norm-over all_heads"
SIGMOID = """--num-experts 8 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 24
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias"""
LATENT = f"""{SIZES} --multi-latent-attention --qk-layernorm --normalization RMSNorm --swiglu
    --position-embedding-type rope --disable-bias-linear {SIGMOID} --moe-router-topk 4 --q-lora-rank 12
    --kv-lora-rank 8 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 10"""
FLAGS = {
    "llama-2": LLAMA,
    "llama-3.2": f"""{LLAMA} --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32
        --max-position-embeddings 131072""",
    "mistral-v0.3": f"{LLAMA} --hf-model-type mistral --rotary-base 1000000",
    "qwen2.5": f"{LLAMA} --add-qkv-bias --rotary-base 1000000",
    "qwen3": QWEN3,
    "qwen3-moe": f"{QWEN3} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 24",
    "qwen3-yarn": f"""{QWEN3} --position-embedding-type yarn --yarn-rotary-scaling-factor 4
        --yarn-original-max-position-embeddings 32768 --yarn-attention-factor 1.2
        --max-position-embeddings 131072""",
    "deepseek-coder": f"{LLAMA} --rotary-seq-len-interpolation-factor 4 --add-qkv-bias --attention-output-bias",
    "phi-4": f"{LLAMA} --hf-model-type phi3 --rotary-base 250000",
    "seed-oss": f"{LLAMA} --hf-model-type seed_oss --add-qkv-bias --kv-channels 16 --rotary-base 10000000",
    "smollm3": f"{LLAMA} --no-rope-freq 2 --rotary-base 5000000",
    "olmo-2": f"{LLAMA} {OLMO}",
    "olmo-3": f"{LLAMA} {OLMO} --hf-model-type olmo3 --sliding-window 4096 --rotary-base 500000",
    "glm-4-0414": f"""{LLAMA} --layer-norms around --rotary-interleaved --rotary-percent 0.5 --add-qkv-bias
        --kv-channels 16""",
    "qwen1.5-moe": f"""{LLAMA} --add-qkv-bias --num-experts 8 --moe-router-topk 2 --moe-router-pre-softmax
        --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate""",
    "mixtral": f"{LLAMA} --num-experts 4 --moe-router-topk 2 --rotary-base 50000",
    "deepseek-v3": f"""{LATENT} --rope-type yarn --rotary-scaling-factor 40 --mscale-all-dim 1.0
        --max-position-embeddings 163840""",
    "moonlight": f"{LATENT} --rope-type rope --rotary-base 50000",
    "glm-4.5": f"""{LLAMA} --rotary-percent 0.25 --rotary-base 1000000 --add-qkv-bias --qk-layernorm {SIGMOID}
        --moe-router-topk 2""",
    "glm-4.7-flash": f"{LATENT} --hf-model-type glm4_moe_lite --rope-type rope --rotary-base 1000000",
    "gpt-oss": f"""{SIZES} --normalization RMSNorm --group-query-attention --num-query-groups 2 --kv-channels 16
        --softmax-type learnable --window-size 19,0 --window-attn-skip-freq 2 --quick-geglu --glu-linear-offset 1
        --activation-func-clamp-value 7 --num-experts 8 --moe-router-topk 4 --position-embedding-type yarn
        --rotary-base 150000 --yarn-rotary-scaling-factor 32 --yarn-original-max-position-embeddings 4096
        --no-yarn-correction-range-round-to-int --max-position-embeddings 131072
        --untie-embeddings-and-output-weights""",
    "gpt2": f"{SIZES} --openai-gelu",
}
# The readers' settings that differ between releases by their names alone.
APART = {
    *("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "ignore_keys_at_rope_validation"),
    *("dtype", "torch_dtype", "transformers_version", "base_model_tp_plan", "num_experts", "num_local_experts"),
}


@pytest.fixture(scope="module")
def earlier_transformers(tmp_path_factory):
    """A folder with transformers 4.57 and its packages; PyTorch stays this environment's."""
    folder = tmp_path_factory.mktemp("transformers4")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*command, "--target", folder, f"transformers=={EARLIER}"], check=True)
    return folder


def write_model(source, name):
    """A random model with a publisher's ``config.json``."""
    config_class = transformers.CONFIG_MAPPING[PUBLISHED[name]["model_type"]]
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config_class.from_dict(PUBLISHED[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                # Not negative: transformers 4.57 would choose experts of groups that were not chosen.
                buffer.uniform_()
    # Log-probs are compared in float32.
    model.float().save_pretrained(source)


def words(source, name, origin):
    """The flags of a run of a model."""
    if origin == "published":
        entries = PUBLISHED[name] | {"torch_dtype": "float32"}
        (source / "config.json").write_text(json.dumps(entries))
    arguments = [*words_of(source, Layout()), f"--seq-length={LENGTH}"]
    if origin == "flags":
        launch = [*COMMON, f"--seq-length={LENGTH}", f"--runs-dir={source}/runs"]
        arguments = ["--from-scratch", *FLAGS[name].split(), *launch]
    return arguments


def export(arguments, tokens, target):
    """Write the model of these flags, and return the trainer's log-probs of the tokens."""
    from megatron_rc.launch.tasks.text import CharacterText
    from megatron_rc.launch.training.hugging_face import write_directory
    from megatron_rc.launch.weights.converter import export_model

    trainer = make_trainer(arguments)
    (chunk,) = trainer.chunks
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    with torch.no_grad():
        logits = chunk(tokens, positions, None)[..., : trainer.config.model.vocab_size]
    log_probs = logits.float().log_softmax(dim=-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    weights = export_model(trainer.chunks, trainer.config, trainer.groups)
    write_directory(target, trainer.config, CharacterText("0123456789"), weights)
    return log_probs


def read_by(python_path, tokens_file, folders):
    """What a release of transformers reads from the directories."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(python_path or "")}
    reader = ROOT / "tests" / "support" / "read_exports.py"
    command = [sys.executable, reader, tokens_file, *folders]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


@pytest.fixture(scope="module")
def read(ranks, earlier_transformers, tmp_path_factory):
    """What both releases read, and the trainer's log-probs: by family and source."""
    home = tmp_path_factory.mktemp("exports")
    tokens = torch.randint(0, 103, (4, LENGTH), generator=torch.Generator().manual_seed(3))
    torch.save(tokens, home / "tokens.pt")
    trained = {}
    for name in PUBLISHED:
        source = home / f"{name}-source"
        write_model(source, name)
        for origin in ("saved-by-5", "published", "flags"):
            target = home / f"{name}-{origin}"
            (trained[target],) = ranks.run(export, Layout(), words(source, name, origin), tokens, target)
    by_5 = read_by(None, home / "tokens.pt", list(trained))
    by_4 = read_by(earlier_transformers, home / "tokens.pt", list(trained))
    assert (by_5["version"].partition(".")[0], by_4["version"]) == ("5", EARLIER)
    return home, trained, by_5, by_4


@pytest.mark.parametrize("origin", SOURCES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_both_read_what_was_trained(read, name, origin):
    home, trained, by_5, by_4 = read
    folder = home / f"{name}-{origin}"
    releases = [by_5] if name in ONLY_IN_5 else [by_5, by_4]
    for release in releases:
        outcome = release[str(folder)]
        assert "error" not in outcome, outcome
        assert outcome["left_out"] == []
        assert outcome["dtype"] == "torch.float32"
        log_probs = torch.load(folder / f"log_probs-{release['version']}.pt")
        torch.testing.assert_close(log_probs, trained[folder], rtol=0, atol=2e-6)
    assert by_5[str(folder)]["said"] == []
    if name not in ONLY_IN_5:
        check_settings(by_5[str(folder)], by_4[str(folder)])


def check_settings(found_5, found_4):
    """Compare the settings that both releases have."""
    for part in ("tokenizer", "generation"):
        assert found_4[part] == found_5[part]
    settings_5 = found_5["config"]
    settings_4 = found_4["config"]
    for name in (settings_5.keys() & settings_4.keys()) - APART:
        if name == "sliding_window":  # Qwen2-MoE without windows: 0 since transformers 5, None before
            assert (settings_4[name] or None) == (settings_5[name] or None)
        else:
            assert settings_4[name] == settings_5[name], name
    assert found_4["said"] == []
