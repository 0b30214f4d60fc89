"""Flags and launch files: what they mean, and the one sentence for each that cannot work."""

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

MEGATRON = """tensor-model-parallel-size pipeline-model-parallel-size num-layers-per-virtual-pipeline-stage
context-parallel-size sequence-parallel use-distributed-optimizer num-layers hidden-size ffn-hidden-size
num-attention-heads group-query-attention num-query-groups seq-length max-position-embeddings position-embedding-type
rotary-base normalization swiglu untie-embeddings-and-output-weights disable-bias-linear micro-batch-size
global-batch-size train-iters lr min-lr lr-decay-style lr-warmup-iters weight-decay adam-beta1 adam-beta2 clip-grad bf16
seed save load save-interval log-interval tensorboard-dir wandb-project transformer-impl recompute-granularity
calculate-per-token-loss grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-kl-beta grpo-group-size
expert-model-parallel-size num-experts moe-ffn-hidden-size moe-router-topk moe-router-pre-softmax
moe-router-load-balancing-type moe-aux-loss-coeff moe-z-loss-coeff moe-token-dispatcher-type""".split()


def check(tmp_path, *more, world_size=1, model=LLAMA, engine=True):
    return run_config(flags(tmp_path / "runs", *more, model=model), world_size, engine=engine)


@pytest.mark.parametrize("name", MEGATRON)
def test_megatrons_names_are_there_and_explained(name):
    actions = {text: action for action in build_parser()._actions for text in action.option_strings}
    assert actions[f"--{name}"].help


def test_the_help_names_a_default_where_there_is_one():
    text = " ".join(build_parser().format_help().split())
    assert "experts of each token; default: 2 --moe" in text
    assert "responses sampled for each prompt (default: 2)" in text
    assert "(default: None)" not in text


def test_what_follows_from_the_flags(tmp_path):
    more = ("--tensor-model-parallel-size=2", "--context-parallel-size=2", "--micro-batch-size=4")
    config = check(tmp_path, *more, world_size=8)
    assert (config.data_parallel_size, config.updates_per_rollout) == (2, 2)
    sizes = (config.transformer.kv_channels, config.model.vocab_size, config.model.padded_vocab_size)
    assert sizes == (8, 13, 16)
    assert find_family(config).name == "llama"
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning-rate: 1\n", r"unknown key 'learning-rate'"),
        ("num_layers: 2\n", "unknown key 'num_layers': did you mean num-layers\\?"),
        ("lr: fast\n", "argument --lr: invalid float value: 'fast'"),
        ("lr: [1, 2]\n", "must be one number or one string"),
        ("lr:\n", "must be one number or one string"),
        ("swiglu: 1\n", "'1' must be true or false"),
        ("lr: 1\nlr: 2\n", "the key 'lr' is given twice"),
        ("- lr\n", "expected lines of `name: value`, got list"),
        ("lr: {\n", "cannot be read as YAML"),
        ("config: other\n", "unknown key 'config'"),
        ("", "expected lines of `name: value`"),
    ],
)
def test_a_wrong_launch_file_is_named(tmp_path, text, message):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        parse_args(["--config", str(tmp_path / "a.yaml")])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "none"], r"--config none: no such file; give a path, or one of the names .*count_up"),
        (["--tensor-model-parallel"], r"unknown flag '--tensor-model-parallel': did you mean"),
        (["--lr"], "expected one argument"),
        (["--num-layers", "two"], "invalid int value: 'two'"),
        (["--normalization", "BatchNorm"], "invalid choice: 'BatchNorm'"),
        (["stray"], "unknown flag 'stray'"),
    ],
)
def test_wrong_words_are_named(words, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_args(words)


@pytest.mark.parametrize(
    ("more", "world_size", "message"),
    [
        ("--tensor-model-parallel-size=2", 1, "needs 2 processes, got 1"),
        ("--tensor-model-parallel-size=2 --context-parallel-size=2", 6, "= 4 does not divide 6 processes"),
        ("--tensor-model-parallel-size=3", 3, "--num-attention-heads 4 must be a multiple of --tensor-model-parallel"),
        ("--tensor-model-parallel-size=4", 4, "--num-query-groups 2 must be a multiple of"),
        ("--tensor-model-parallel-size=2 --ffn-hidden-size=33", 2, "--ffn-hidden-size 33 must be a multiple"),
        ("--pipeline-model-parallel-size=3", 3, "--num-layers 4 must be a multiple of --pipeline-model-parallel-size"),
        ("--num-layers-per-virtual-pipeline-stage=1", 1, "needs --pipeline-model-parallel-size above 1"),
        (
            "--pipeline-model-parallel-size=2 --num-layers-per-virtual-pipeline-stage=3",
            2,
            "--num-layers 4 must be a multiple of 2 · --num-layers-per-virtual-pipeline-stage = 6",
        ),
        (
            "--pipeline-model-parallel-size=2 --num-layers-per-virtual-pipeline-stage=1 --micro-batch-size=16",
            2,
            "virtual stages need a multiple of 2 micro-batches",
        ),
        ("--context-parallel-size=2 --seq-length=18", 2, "--seq-length 18 must be a multiple of 2 · --context"),
        ("--sequence-parallel", 1, "--sequence-parallel needs --tensor-model-parallel-size above 1"),
        (
            "--tensor-model-parallel-size=2 --sequence-parallel --seq-length=15",
            2,
            "must be a multiple of --tensor-model",
        ),
        ("--padded-vocab-size=15 --tensor-model-parallel-size=2", 2, "--padded-vocab-size 15 must be a multiple of"),
        ("--padded-vocab-size=12", 1, "--padded-vocab-size 12 is smaller than the vocabulary of 13"),
        ("--vocab-size=5", 1, "--vocab-size 5 is smaller than the tokenizer's 13 tokens"),
        ("--global-batch-size=5", 1, "= 16 sequences do not split into batches of --global-batch-size 5"),
        ("--micro-batch-size=3", 1, "--global-batch-size 16 must be a multiple of --micro-batch-size 3"),
        ("--grpo-prompts-per-step=3", 2, "--grpo-prompts-per-step 3 must be a multiple of the 2 data-parallel ranks"),
        ("--seq-length=64 --max-position-embeddings=32", 1, "--seq-length 64 is longer than --max-position-embeddings"),
        ("--seq-length=10", 1, "leaves no room for a prompt"),
        ("--seq-length=11", 1, "is too short for --task count_up: a prompt of 2 tokens"),
        ("--hidden-dropout=0.1", 1, "--hidden-dropout 0.1 must be 0"),
        ("--lr=0", 1, "--lr 0.0 must be positive"),
        ("--lr=nan", 1, "--lr nan must be positive"),
        ("--min-lr=1", 1, "--min-lr 1.0 is above --lr"),
        ("--lr-warmup-iters=100", 1, "--lr-warmup-iters 100 must be below --lr-decay-iters 100"),
        ("--adam-beta1=1", 1, "--adam-beta1 1.0 must lie in"),
        ("--train-iters=0", 1, "--train-iters 0 must be positive"),
        ("--grpo-clamp-eps-lower=1.5", 1, "--grpo-clamp-eps-lower"),
        ("--optimizer=sgd --use-distributed-optimizer", 1, "works with --optimizer adam only"),
        ("--normalization=LayerNorm", 1, "no Hugging Face architecture has this combination"),
        ("--transformer-impl=transformer_engine", 1, "needs a CUDA device"),
        ("--recompute-granularity=full", 1, "needs --recompute-method"),
        ("--recompute-method=block", 1, "do nothing without --recompute-granularity full"),
        ("--save-interval=2", 1, "does nothing without --save"),
        ("--train-iters=4 --doctor-interval=5", 1, "--doctor-interval 5 does nothing in a run of 4 optimizer steps"),
        ("--doctor-interval=0", 1, "--doctor-interval"),
        ("--finetune", 1, "--finetune does nothing without --load"),
        ("--keep-last=2", 1, "--keep-last 2 does nothing without --save"),
        ("--save=. --keep-last=2", 1, "--keep-last does nothing without --save-interval"),
        ("--save=. --save-interval=6 --save-retain-interval=9", 1, "--save-retain-interval 9 must be a multiple of"),
        ("--save=. --async-save", 1, "--async-save does nothing without --save-interval"),
        ("--continue-after-failed-save", 1, "--continue-after-failed-save does nothing without --save"),
        ("--load-last-valid", 1, "--load-last-valid does nothing without --load"),
        ("--no-verify-integrity", 1, "--no-verify-integrity does nothing without --load"),
        ("--override-opt-param-scheduler", 1, "--override-opt-param-scheduler does nothing without --load"),
        (
            "--load=. --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
            1,
            "--override-opt-param-scheduler contradicts --use-checkpoint-opt-param-scheduler",
        ),
        ("--load=. --override-opt-param-scheduler --finetune", 1, "does nothing with --finetune: this run's numbers"),
        ("--no-save-optim", 1, "does nothing without --save"),
        ("--load=/nowhere/at/all", 1, "--load /nowhere/at/all: no such folder"),
        ("--save=/dev/null/x", 1, "--save /dev/null/x cannot be written to"),
        ("--runs-dir=/dev/null/x", 1, "--runs-dir /dev/null/x cannot be written to"),
        ("--task=chess", 1, "--task chess is unknown"),
        ("--task=count_up:x", 1, "takes no variant"),
        ("--task=reasoning_gym:nothing", 1, "no such data set"),
        ("--wandb-exp-name=x", 1, "does nothing without --wandb-project"),
        ("--rollout-is=batch", 1, "rollout_is='batch' is unknown"),
        ("--rollout-correction-preset=best", 1, "preset='best' is unknown"),
        ("--num-query-groups=0", 1, "--num-query-groups 0 must be positive"),
    ],
)
def test_combinations_that_cannot_work_are_one_sentence(tmp_path, more, world_size, message):
    with pytest.raises(ConfigurationError) as caught:
        check(tmp_path, *more.split(), world_size=world_size)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    words = [f"--save={tmp_path}/save", f"--save-rollouts={tmp_path}/a/b", "--save-hf=/dev/null/x"]
    with pytest.raises(ConfigurationError, match="--save-hf /dev/null/x cannot be written to"):
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
    assert check(tmp_path).experts is None


@pytest.mark.parametrize(
    ("more", "world_size", "message"),
    [
        ("--moe-router-topk=2", 1, "--moe-router-topk 2 does nothing without --num-experts"),
        ("--moe-aux-loss-coeff=0", 1, "--moe-aux-loss-coeff 0.0 does nothing without --num-experts"),
        ("--moe-z-loss-coeff=0.1", 1, "--moe-z-loss-coeff 0.1 does nothing without --num-experts"),
        ("--moe-ffn-hidden-size=8", 1, "--moe-ffn-hidden-size 8 does nothing without --num-experts"),
        ("--moe-token-dispatcher-type=alltoall", 1, "alltoall does nothing without --num-experts"),
        ("--moe-router-load-balancing-type=none", 1, "none does nothing without --num-experts"),
        ("--expert-model-parallel-size=2", 2, "--expert-model-parallel-size 2 does nothing without --num-experts"),
        ("--moe-router-pre-softmax", 1, "--moe-router-pre-softmax does nothing without --num-experts"),
        ("--num-experts=4 --moe-router-pre-softmax --moe-router-topk=5", 1, "5 must lie in [1, 4]: there are --num-ex"),
        ("--num-experts=0", 1, "--num-experts 0 must be positive"),
        ("--num-experts=3 --expert-model-parallel-size=2", 2, "--num-experts 3 must be a multiple of --expert-model"),
        ("--num-experts=4 --expert-model-parallel-size=4", 2, "4 must divide the 2 data · context parallel ranks"),
        ("--num-experts=4 --expert-model-parallel-size=2 --pipeline-model-parallel-size=2", 2, "divide the 1 data"),
        ("--num-experts=4 --moe-router-topk=1", 1, "--moe-router-topk 1 must lie in [2, 4]"),
        ("--num-experts=4 --moe-router-topk=5", 1, "--moe-router-topk 5 must lie in [2, 4]"),
        ("--num-experts=4 --moe-aux-loss-coeff=-1", 1, "--moe-aux-loss-coeff -1.0 must be 0 or more"),
        ("--num-experts=4 --moe-z-loss-coeff=nan", 1, "--moe-z-loss-coeff nan must be 0 or more"),
        (
            "--num-experts=4 --moe-router-load-balancing-type=none --moe-aux-loss-coeff=0.1",
            1,
            "--moe-aux-loss-coeff 0.1 does nothing with --moe-router-load-balancing-type none",
        ),
        ("--num-experts=4 --tensor-model-parallel-size=2", 2, "needs --sequence-parallel"),
        (
            "--num-experts=4 --moe-z-loss-coeff=0.1 --calculate-per-token-loss --rl-use-sequence-packing"
            " --moe-token-dispatcher-type=alltoall",
            2,
            "weighs the experts' auxiliary losses by the tokens of each data-parallel rank",
        ),
        (
            "--num-experts=4 --tensor-model-parallel-size=2 --sequence-parallel --moe-ffn-hidden-size=9",
            2,
            "--moe-ffn-hidden-size 9 must be a multiple of --tensor-model-parallel-size = 2",
        ),
        (
            "--num-experts=4 --expert-model-parallel-size=2 --rl-use-sequence-packing",
            2,
            "--moe-token-dispatcher-type allgather needs equally many tokens on all data-parallel ranks",
        ),
        (
            "--num-experts=4 --moe-aux-loss-coeff=0.1 --bypass-mode --loss-type=reinforce",
            1,
            "use rejection_denominator=original",
        ),
    ],
)
def test_experts_that_cannot_work_are_one_sentence(tmp_path, more, world_size, message):
    with pytest.raises(ConfigurationError) as caught:
        check(tmp_path, *more.split(), world_size=world_size, engine=False)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_with_a_bias_cannot_be_split(tmp_path):
    more = ("--num-experts=4", "--tensor-model-parallel-size=2", "--sequence-parallel")
    with pytest.raises(ConfigurationError, match="needs --disable-bias-linear"):
        check(tmp_path, *more, world_size=2, model=GPT2, engine=False)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (GPT2, ["--num-experts=4"]),
        (LLAMA, ["--num-experts=4", "--add-qkv-bias"]),
        (LLAMA, ["--num-experts=4", "--moe-router-pre-softmax"]),
    ],
    ids=["gpt2", "qwen2", "mixtral-pre-softmax"],
)
def test_experts_that_no_engine_knows_need_one_of_your_own(tmp_path, model, more):
    with pytest.raises(ConfigurationError, match=r"no Hugging Face architecture has .*--num-experts.* Mixtral"):
        check(tmp_path, *more, model=model)
    assert find_family(check(tmp_path, *more, model=model, engine=False)) is None


def test_a_bias_that_is_there_already_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="--add-qkv-bias does nothing without --disable-bias-linear"):
        check(tmp_path, "--add-qkv-bias", model=GPT2)


def test_packed_experts_of_one_replica_may_be_gathered(tmp_path):
    more = "--num-experts=4 --expert-model-parallel-size=2 --context-parallel-size=2 --rl-use-sequence-packing"
    check(tmp_path, *more.split(), world_size=2, engine=False)


@pytest.mark.parametrize("old", [True, False])
def test_router_losses_that_megatron_would_weaken_are_refused(tmp_path, monkeypatch, old):
    monkeypatch.setattr(expert_checks, "weakens_auxiliary_losses", lambda: old)
    more = "--num-experts=4 --moe-z-loss-coeff=0.1 --context-parallel-size=2 --calculate-per-token-loss".split()
    if not old:
        check(tmp_path, *more, world_size=2, engine=False)
        return
    with pytest.raises(ConfigurationError, match=r"auxiliary losses by 2, .* before 0\.19: drop it"):
        check(tmp_path, *more, world_size=2, engine=False)


def test_experts_on_a_gpu_need_transformer_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", without("transformer_engine"))
    with pytest.raises(ConfigurationError, match="--num-experts 4 on a GPU needs transformer_engine, which is not"):
        check(tmp_path, "--num-experts=4", "--no-cpu", engine=False)


def without(module):
    find_spec = importlib.util.find_spec
    return lambda name, *rest: None if name == module else find_spec(name, *rest)


def test_a_model_without_an_architecture_trains_on_foreign_rollouts(tmp_path):
    assert find_family(check(tmp_path, "--normalization=LayerNorm", engine=False)) is None


def test_saving_between_the_steps_of_a_rollout_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="must be a multiple of the 2 optimizer steps"):
        check(tmp_path, f"--save={tmp_path}/save", "--save-interval=3")


def test_another_runs_checkpoints_are_not_saved_among(tmp_path):
    """Those of one that was killed while it wrote its first are none."""
    save = f"--save={tmp_path}/save"
    for name in ("iter_0000003.partial", "iter_0000003"):
        check(tmp_path, save)
        (tmp_path / "save" / name).mkdir(parents=True)
        (tmp_path / "save" / name / "metadata.json").touch()
    check(tmp_path, save, f"--load={tmp_path}/save/../save/")
    for load in ([], [f"--load={tmp_path}"]):
        with pytest.raises(ConfigurationError, match=r"--save .*save holds the checkpoints of another run: name ano"):
            check(tmp_path, save, *load)


@pytest.mark.parametrize("prefix", ["", "/", "step", "none"])
def test_a_prefix_that_other_metrics_could_have_is_refused(tmp_path, prefix):
    with pytest.raises(ConfigurationError, match=f"--metric-prefix '{prefix}' must be a word and a /, such as"):
        check(tmp_path, f"--metric-prefix={prefix}")
    check(tmp_path, "--metric-prefix=mismatch/")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ([], "4 · --grpo-group-size 4 · --grpo-iterations 2 / --global-batch-size 16"),
        (["--rollout-staleness=4"], "(--rollout-staleness 4)"),
    ],
)
def test_the_unit_of_evaluations_is_explained(tmp_path, more, why):
    held_out = ["--task=python:tests.support.user_rewards:Doubles", "--reward=exact"]
    with pytest.raises(ConfigurationError, match="--eval-interval 3 must be a multiple of the ") as caught:
        check(tmp_path, *held_out, "--eval-interval=3", *more)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "--rollout-concurrency=64",
            "--rollout-concurrency 64 does nothing with --rollout-engine transformers",
        ),
        ("--rollout-attempts=2", "or use vllm-server or sglang-server"),
        (
            "--no-group-query-attention --num-query-groups=2",
            "--num-query-groups 2 does nothing without",
        ),
        ("--kl-estimator=k1 --grpo-kl-beta=0", "--kl-estimator k1 does nothing with --grpo-kl-beta 0"),
        (
            "--grpo-clamp-eps-lower=0.1 --policy-loss=reinforce",
            "--grpo-clamp-eps-lower 0.1 does nothing with the objective reinforce, which clips no ratio",
        ),
        (
            "--grpo-clamp-eps-upper=0.1 --rollout-correction-preset=bypass_pg_is",
            "--grpo-clamp-eps-upper 0.1 does nothing with the objective reinforce, which clips no ratio: drop it, or "
            "use one of ppo_clip, gspo, cispo",
        ),
        ("--policy-loss=cispo --bypass-mode", "--policy-loss cispo contradicts ppo_clip, the objective in bypass mode"),
        ("--tokenizer-model=/nowhere", "/nowhere holds no tokenizer (tokenizer.json or"),
        ("--load-rollouts=/nowhere", "--load-rollouts /nowhere: no such folder"),
        ("--config=/tmp", "--config /tmp is a folder: name a file in it"),
    ],
)
def test_flags_that_would_do_nothing_and_paths_that_lead_nowhere_are_one_sentence(tmp_path, more, message):
    with pytest.raises(ConfigurationError) as caught:
        check(tmp_path, *more.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# A launch file that fits together, the flags that make a part of it idle, and what the file alone would have to say.
IN_A_FILE = {
    "rollout-url: http://a\n": ("--rollout-engine=transformers", "rollout-url: http://a does nothing with"),
    "rollout-concurrency: 8\n": ("--rollout-engine=transformers", "rollout-concurrency: 8 does nothing with"),
    "kl-estimator: k1\ngrpo-kl-beta: 0\n": ("--grpo-kl-beta=0", "kl-estimator: k1 does nothing with --grpo-kl-beta 0"),
    "num-query-groups: 2\nno-group-query-attention: true\n": (
        "--no-group-query-attention",
        "num-query-groups: 2 does nothing without --group-query-attention",
    ),
    "grpo-clamp-eps-lower: 0.1\npolicy-loss: reinforce\n": (
        "--policy-loss=reinforce",
        "grpo-clamp-eps-lower: 0.1 does nothing with the objective reinforce",
    ),
}


@pytest.mark.parametrize(("text", "more", "message"), [(text, *found) for text, found in IN_A_FILE.items()])
def test_what_a_launch_file_says_is_idle_only_by_a_flag(tmp_path, text, more, message):
    """By itself it is refused like a flag; beside one that was typed it may serve another choice."""
    (tmp_path / "a.yaml").write_text(text)
    words = [word for word in flags(tmp_path, model=GPT2) if not word.startswith("--grpo-clamp")]
    with pytest.raises(ConfigurationError, match=re.escape(f"--config {tmp_path}/a.yaml: {message}")):
        configure([*words, f"--config={tmp_path}/a.yaml"], 1)
    configure([*words, f"--config={tmp_path}/a.yaml", more], 1)


def test_a_wrong_value_in_a_launch_file_names_the_file(tmp_path):
    (tmp_path / "a.yaml").write_text("num-layers: two\n")
    with pytest.raises(ConfigurationError, match=r"--config .*a\.yaml: argument --num-layers: .* 'two'"):
        check(tmp_path, f"--config={tmp_path}/a.yaml")


@pytest.mark.parametrize("name", ["num-layers", "hidden-size", "lr", "train-iters", "global-batch-size"])
def test_what_is_missing_is_named(tmp_path, name):
    words = [word for word in flags(tmp_path) if not word.startswith(f"--{name}=")]
    with pytest.raises(ConfigurationError, match=f"--{name} is missing"):
        configure(words, 1)
