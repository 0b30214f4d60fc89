"""Meaning of flags and launch files: defaults, values that follow, and keys that a typed flag makes idle."""

import importlib.util
from operator import attrgetter

import pytest
import torch

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks import experts as expert_checks
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.flags.parser import build_parser
from megatron_rc.records.rollout import save_rollouts
from tests.support.checkpoint_outline import outline_of_checkpoint
from tests.support.recorded_training import GPT2, LLAMA, flags, recorded_batch, run_config
from tests.support.refusals import refused


def check(tmp_path, *more, world_size=1, model=LLAMA, engine=True):
    return run_config(flags(tmp_path / "runs", *more, model=model), world_size, engine=engine)


def test_the_help_names_defaults_and_conditions():
    text = " ".join(build_parser(with_megatron=False).format_help().split()).replace("- ", "-")
    for flag, end_of_help in (
        ("--moe-router-topk", "; needs --num-experts; default: 2 --"),
        ("--grpo-iterations", "; default: 2 --"),
        ("--rope-scaling-factor", "; needs --use-rope-scaling; default: 8.0 --"),
        ("--no-openai-gelu", "; needs layers without --swiglu and --quick-geglu --"),
        ("--rollout-model", "; needs --rollout-engine vllm-server --"),
    ):
        assert end_of_help in text.rpartition(f" {flag} ")[2][:300]
    assert "default: None" not in text


SAMPLES = "--train-samples=100 --lr-decay-style=cosine"
GAE = "--rollout-is=none --rollout-is-threshold=none --advantage-estimator=gae"
USER = "python:tests.support.user_rewards"
# [@RANKS] FLAGS :: settings that follow from them.
FOLLOWS = f"""
--seed=1 :: experts=None critic=None rewards.reward=None rewards.reward_workers=None rewards.reward_timeout=10.0
@8 --tensor-model-parallel-size=2 --context-parallel-size=2 :: data_parallel_size=2 updates_per_rollout=2
@2 --tensor-model-parallel-size=2 :: transformer.kv_channels=8 model.vocab_size=13 model.padded_vocab_size=16
@2 EXPERTS :: experts.moe_ffn_hidden_size=48 experts.moe_router_topk=2 experts.moe_router_pre_softmax=False
@2 EXPERTS --context-parallel-size=2 --rl-use-sequence-packing :: data_parallel_size=1
{GAE} --min-lr=1e-3 :: critic.critic_lr=0.02 critic.critic_min_lr=0.001 critic.correct_values=mask
{GAE} --min-lr=1e-3 --critic-lr=1e-4 :: critic.critic_lr=0.0001 critic.critic_min_lr=0.0001
{GAE} --bypass-mode :: critic.correct_values=none
SAMPLES=64 --lr-warmup-samples=32 :: training.train_iters=6 schedule.lr_decay_iters=4 schedule.lr_warmup_iters=2
SAMPLES=60 --lr-warmup-samples=5 :: schedule.lr_decay_iters=3.75 schedule.warmup_steps=0.3125
--reward={USER}:parts --reward-workers=2 --reward-timeout=0.5 --reward-on-error=-1 :: rewards.reward={USER}:parts
--task={USER}:Doubles --max-response-length=2 --reward-timeout=3 :: model.vocab_size=13 rewards.reward_timeout=3.0
--overlong=mask --train-iters=2 --load-rollouts=RECORDS :: rewards.overlong=mask
"""


@pytest.mark.parametrize("row", FOLLOWS.strip().splitlines())
def test_what_follows_from_the_flags(tmp_path, row):
    arguments, _, settings = row.partition(" :: ")
    ranks, more = arguments.split(" ", 1) if arguments.startswith("@") else ("@1", arguments)
    if "RECORDS" in more:
        (tmp_path / "records").mkdir()
        save_rollouts(recorded_batch(0), tmp_path / "records" / "step-0000000-replica-0000.safetensors")
    more = more.replace("RECORDS", f"{tmp_path}/records").replace("SAMPLES", f"{SAMPLES} --lr-decay-samples")
    base = flags(tmp_path, *more.replace("EXPERTS", "--num-experts=4 --expert-model-parallel-size=2").split())
    if "SAMPLES" in row:
        base.remove("--train-iters=100")
    config = run_config(base, int(ranks[1:]), engine="EXPERTS" not in row)
    expected = dict(setting.split("=") for setting in settings.split())
    assert {name: str(attrgetter(name)(config)) for name in expected} == expected


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    arguments = [f"--save={tmp_path}/save", f"--save-rollouts={tmp_path}/a/b", "--save-hf=/dev/null/x"]
    with pytest.raises(ConfigurationError, match="--save-hf /dev/null/x"):
        check(tmp_path / "runs", *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("old", [True, False])
def test_router_losses_that_megatron_would_weaken_are_refused(tmp_path, monkeypatch, old):
    monkeypatch.setattr(expert_checks, "weakens_auxiliary_losses", lambda: old)
    more = "--num-experts=4 --moe-z-loss-coeff=0.1 --context-parallel-size=2 --calculate-per-token-loss".split()
    if not old:
        check(tmp_path, *more, world_size=2, engine=False)
        return
    with pytest.raises(ConfigurationError, match=r"--calculate-per-token-loss .* 2, .*0\.19"):
        check(tmp_path, *more, world_size=2, engine=False)


@pytest.mark.parametrize(
    ("words", "missing"),
    [("--num-experts=4 --no-cpu", "transformer_engine"), ("--reward=math-verify", r"math_verify.*\[math\]")],
)
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, words, missing):
    results = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    absent = ("transformer_engine", "math_verify")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in absent else results(name, *a))
    named = words.split(" --no-cpu")[0].replace("=", " ")
    with pytest.raises(ConfigurationError, match=f"{named} .*{missing}"):
        check(tmp_path, *words.split(), engine="reward" in words)


# The model, flags, and parts of the sentence.
WITHOUT_ARCHITECTURE = [
    (GPT2, "--num-experts=4", "--num-experts | docs/models.md"),
    (LLAMA, "--qk-l2-norm", "--qk-l2-norm | --load-rollouts"),
]


@pytest.mark.parametrize(("model", "words", "parts"), WITHOUT_ARCHITECTURE)
def test_a_model_without_an_architecture_trains_on_foreign_rollouts(tmp_path, model, words, parts):
    assert check(tmp_path, *words.split(), model=model, engine=False)
    with refused(f"no Hugging Face architecture | {parts}"):
        check(tmp_path, *words.split(), model=model)


def test_another_runs_checkpoints_are_not_saved_among(tmp_path):
    """Those of one that was killed while it wrote its first are none."""
    save = f"--save={tmp_path}/save"
    for name in ("iter_0000003.partial", "iter_0000003"):
        check(tmp_path, save)
        (tmp_path / "save" / name).mkdir(parents=True)
        (tmp_path / "save" / name / "metadata.json").touch()
    check(tmp_path, save, f"--load={tmp_path}/save/../save/")
    for load in ([], [f"--load={outline_of_checkpoint(tmp_path / 'other')}"]):
        with pytest.raises(ConfigurationError, match=r"--save .*save .*--load"):
            check(tmp_path, save, *load)


# Keys of a launch file that do nothing beside a flag.
IN_A_FILE = {
    "rollout-url: http://a\n": "--rollout-engine=transformers",
    "kl-estimator: k1\ngrpo-kl-beta: 0.1\n": "--grpo-kl-beta=0",
    "kl-importance-weight: true\ngrpo-kl-beta: 0.1\n": "--grpo-kl-beta=0",
    "openai-gelu: true\n": "--swiglu",
    "sequence-parallel: true\ntensor-model-parallel-size: 2\n": "--tensor-model-parallel-size=1",
}


@pytest.mark.parametrize("text", IN_A_FILE)
def test_what_a_launch_file_says_may_do_nothing_beside_a_flag(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    arguments = [*flags(tmp_path, "--train-iters=2", model=GPT2), f"--config={path}", IN_A_FILE[text]]
    config, _ = configure(arguments, 1, engine=False)
    assert len(config.unused) == 1
    assert config.unused[0].startswith(f"--{text.partition(':')[0]}")


def test_what_is_missing_is_named(tmp_path):
    arguments = [word for word in flags(tmp_path) if not word.startswith("--lr=")]
    with pytest.raises(ConfigurationError, match="--lr is missing"):
        configure(arguments, 1)
