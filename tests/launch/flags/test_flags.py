"""Meaning of flags and launch files: defaults, values that follow, and keys that a typed flag makes idle."""

import importlib.util
import re

import pytest
import torch

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks import experts as expert_checks
from megatron_rc.launch.flags.configure import configure, parse_args
from megatron_rc.launch.flags.launch_file import CONFIGS
from megatron_rc.launch.flags.parser import build_parser
from megatron_rc.launch.weights import find_family
from tests.support.recorded_training import GPT2, LLAMA, flags, run_config


def check(tmp_path, *more, world_size=1, model=LLAMA, engine=True):
    return run_config(flags(tmp_path / "runs", *more, model=model), world_size, engine=engine)


def test_the_help_names_a_default_where_there_is_one():
    text = " ".join(build_parser().format_help().split()).replace("- ", "-")
    for flag, words in (
        ("--moe-router-topk", "; needs --num-experts; default: 2 --"),
        ("--grpo-group-size", "(default: 2) --"),
        ("--rope-scaling-factor", "; needs --use-rope-scaling (default: 8.0) --"),
        ("--no-openai-gelu", "; not with --swiglu (default: False) --"),
    ):
        assert words in text.rpartition(f" {flag} ")[2][:300]
    assert "(default: None)" not in text


def test_what_follows_from_the_flags(tmp_path):
    more = ("--tensor-model-parallel-size=2", "--context-parallel-size=2", "--micro-batch-size=4")
    config = check(tmp_path, *more, world_size=8)
    assert (config.data_parallel_size, config.updates_per_rollout) == (2, 2)
    sizes = (config.transformer.kv_channels, config.model.vocab_size, config.model.padded_vocab_size)
    assert sizes == (8, 13, 16)
    assert (find_family(config).name, config.experts) == ("llama", None)
    assert find_family(check(tmp_path, model=GPT2)).name == "gpt2"


# Those for many GPUs are tried in tests/launch/dry_run, and smollm2_sums in tests/examples, which makes its prompts.
SMALL = [path.stem for path in sorted((CONFIGS / "launch").glob("*.yaml")) if not path.match("*gpus.yaml")]
SMALL.remove("smollm2_sums")


@pytest.mark.parametrize("name", SMALL)
def test_every_launch_file_works(name, tmp_path):
    config = run_config(["--config", name, f"--runs-dir={tmp_path}"], 4)
    assert config.launch.run_name == name


def test_flags_override_the_launch_file(tmp_path):
    (tmp_path / "a.yaml").write_text("lr: 1e-3\nsequence-parallel: true\nrollout-rs-threshold: 0.5_2\nswiglu: false\n")
    args = parse_args(["--config", str(tmp_path / "a.yaml"), "--no-sequence-parallel", "--seed", "7"])
    assert (args.lr, args.sequence_parallel, args.seed, args.swiglu) == (1e-3, False, 7, False)
    assert args.rollout_rs_threshold == "0.5_2"


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    words = [f"--save={tmp_path}/save", f"--save-rollouts={tmp_path}/a/b", "--save-hf=/dev/null/x"]
    with pytest.raises(ConfigurationError, match="--save-hf /dev/null/x"):
        check(tmp_path / "runs", *words)
    assert not list(tmp_path.iterdir())


def test_what_follows_from_experts(tmp_path):
    config = check(tmp_path, "--num-experts=4", "--expert-model-parallel-size=2", world_size=2, engine=False)
    experts = config.experts
    assert (experts.moe_ffn_hidden_size, experts.moe_router_topk) == (48, 2)
    assert (experts.moe_router_load_balancing_type, experts.moe_token_dispatcher_type) == ("aux_loss", "allgather")
    assert (experts.moe_aux_loss_coeff, experts.moe_z_loss_coeff) == (0.0, None)
    assert experts.moe_router_pre_softmax is False
    assert find_family(config).name == "mixtral"
    # Packed experts of one replica may be gathered.
    more = "--num-experts=4 --expert-model-parallel-size=2 --context-parallel-size=2 --rl-use-sequence-packing"
    check(tmp_path, *more.split(), world_size=2, engine=False)


@pytest.mark.parametrize("old", [True, False])
def test_router_losses_that_megatron_would_weaken_are_refused(tmp_path, monkeypatch, old):
    monkeypatch.setattr(expert_checks, "weakens_auxiliary_losses", lambda: old)
    more = "--num-experts=4 --moe-z-loss-coeff=0.1 --context-parallel-size=2 --calculate-per-token-loss".split()
    if not old:
        check(tmp_path, *more, world_size=2, engine=False)
        return
    with pytest.raises(ConfigurationError, match=r"--calculate-per-token-loss .* 2, .*0\.19"):
        check(tmp_path, *more, world_size=2, engine=False)


def test_experts_on_a_gpu_need_transformer_engine(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    missing = "transformer_engine"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == missing else found(name, *a))
    with pytest.raises(ConfigurationError, match=r"--num-experts 4 .* transformer_engine"):
        check(tmp_path, "--num-experts=4", "--no-cpu", engine=False)


# The model, flags, and parts of the sentence.
WITHOUT_ARCHITECTURE = [
    (LLAMA, "--normalization=LayerNorm", "--normalization | docs/models.md"),
    (GPT2, "--num-experts=4", "--num-experts | docs/models.md"),
    (LLAMA, "--num-experts=4 --add-qkv-bias", "--num-experts | docs/models.md"),
    (LLAMA, "--num-experts=4 --moe-router-pre-softmax", "--num-experts | docs/models.md"),
    (LLAMA, "--qk-l2-norm", "--qk-l2-norm | --load-rollouts"),
    (LLAMA, "--rotary-interleaved", "--rotary-interleaved | --load-rollouts"),
    (LLAMA, "--no-rope-freq=2", "--no-rope-freq 2 | --load-rollouts"),
]


@pytest.mark.parametrize(("model", "words", "parts"), WITHOUT_ARCHITECTURE)
def test_a_model_without_an_architecture_trains_on_foreign_rollouts(tmp_path, model, words, parts):
    assert check(tmp_path, *words.split(), model=model, engine=False)
    with pytest.raises(ConfigurationError, match="no Hugging Face architecture") as error:
        check(tmp_path, *words.split(), model=model)
    assert [part for part in parts.split(" | ") if part not in str(error.value)] == []


def test_another_runs_checkpoints_are_not_saved_among(tmp_path):
    """Those of one that was killed while it wrote its first are none."""
    save = f"--save={tmp_path}/save"
    for name in ("iter_0000003.partial", "iter_0000003"):
        check(tmp_path, save)
        (tmp_path / "save" / name).mkdir(parents=True)
        (tmp_path / "save" / name / "metadata.json").touch()
    check(tmp_path, save, f"--load={tmp_path}/save/../save/")
    for load in ([], [f"--load={tmp_path}"]):
        with pytest.raises(ConfigurationError, match=r"--save .*save .*--load"):
            check(tmp_path, save, *load)


# Keys of a launch file that are idle with the typed flag, and with which nothing is wrong beside other flags.
IN_A_FILE = {
    "rollout-url: http://a\n": ("--rollout-engine=transformers", "--rollout-engine"),
    "rollout-concurrency: 8\n": ("--rollout-engine=transformers", "--rollout-engine"),
    "kl-estimator: k1\ngrpo-kl-beta: 0\n": ("--grpo-kl-beta=0", "--grpo-kl-beta 0"),
    "num-query-groups: 2\nno-group-query-attention: true\n": ("--no-group-query-attention", "--group-query-attention"),
    "grpo-clamp-eps-lower: 0.1\npolicy-loss: reinforce\n": ("--policy-loss=reinforce", "reinforce"),
    "recompute-method: block\nrecompute-granularity: selective\n": ("--recompute-granularity=selective", "selective"),
    "openai-gelu: true\nswiglu: true\n": ("--swiglu", "--swiglu"),
}


@pytest.mark.parametrize(("text", "more", "because"), [(text, *found) for text, found in IN_A_FILE.items()])
def test_what_a_launch_file_says_is_idle_only_by_a_flag(tmp_path, text, more, because):
    """By itself it is refused like a flag; beside one that was typed it may serve another choice."""
    path, key = tmp_path / "a.yaml", text.splitlines()[0]
    path.write_text(text)
    words = [word for word in flags(tmp_path, model=GPT2) if not word.startswith("--grpo-clamp")]
    with pytest.raises(ConfigurationError, match=f"^--config {re.escape(f'{path}: {key} ')}.*{because}"):
        configure([*words, f"--config={path}"], 1, engine=False)
    config, _ = configure([*words, f"--config={path}", more], 1, engine=False)
    assert key.split(":")[0] not in [flag.name for flag in config.flags]


def test_a_wrong_value_in_a_launch_file_names_the_file(tmp_path):
    (tmp_path / "a.yaml").write_text("num-layers: two\n")
    with pytest.raises(ConfigurationError, match=r"--config .*a\.yaml: .*--num-layers.* 'two'"):
        check(tmp_path, f"--config={tmp_path}/a.yaml")


@pytest.mark.parametrize("name", ["num-layers", "hidden-size", "lr", "train-iters", "global-batch-size"])
def test_what_is_missing_is_named(tmp_path, name):
    words = [word for word in flags(tmp_path) if not word.startswith(f"--{name}=")]
    with pytest.raises(ConfigurationError, match=f"--{name} is missing"):
        configure(words, 1)
