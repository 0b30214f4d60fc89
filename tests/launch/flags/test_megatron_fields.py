"""Every plain field of Megatron-Core's configs is a flag that goes unchanged into them, or is refused by name."""

import dataclasses
import re
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_rc.launch import distributed
from megatron_rc.launch.errors import ConfigurationError, missing_packages_noted
from megatron_rc.launch.flags.checks import megatron
from megatron_rc.launch.flags.configure import configure, parse_args
from megatron_rc.launch.run_config import RunConfig, passed_through, sections_of
from megatron_rc.launch.run_config.layer_patterns import number_or_pattern
from megatron_rc.launch.run_config.megatron_configs import (
    build_ddp_config,
    build_optimizer_config,
    build_transformer_config,
)
from megatron_rc.launch.run_config.megatron_fields import NOT_FLAGS, megatron_fields
from megatron_rc.launch.run_config.options import options_of
from tests.support.paths import ROOT
from tests.support.recorded_training import GPT2, LLAMA, flags, run_config

BUILDERS = (build_transformer_config, build_ddp_config, build_optimizer_config)
# Megatron-LM's parser has these defaults, its dataclasses others.
OF_THE_PARSER = {"grad_reduce_in_fp32", "optimizer_offload_fraction"}
SPLIT = "--tensor-model-parallel-size=2 --sequence-parallel"
EXPERTS = "--num-experts=4 --moe-ffn-hidden-size=16"


def config_of(tmp_path, words, model=LLAMA, engine=False):
    return run_config(flags(tmp_path, *words.split(), model=model), engine=engine)


def megatrons():
    """Every field of Megatron's dataclasses, by name."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    kinds = (OptimizerConfig, DistributedDataParallelConfig, TransformerConfig)
    return {field.name: field for kind in kinds for field in dataclasses.fields(kind)}


def test_every_field_is_a_flag_or_has_a_reason():
    """What remains is no word that anybody could type: functions, types, pairs, and one library's own objects."""
    declared = {option.field for _, section, _ in sections_of(RunConfig) for option in options_of(section)}
    left = {name: field.type for name, field in megatrons().items() if name not in {*passed_through(), *NOT_FLAGS}}
    plain = [name for name, kind in left.items() if name not in declared and not name.startswith("_")]
    no_word = re.compile("Callable|dtype|Tuple|RecipeConfig|tuple|CudaGraph")
    assert [name for name in plain if not no_word.search(str(left[name]))] == []
    assert all(NOT_FLAGS.values())


def test_defaults_are_those_of_the_dataclasses():
    theirs = megatrons()
    wrong = []
    for name, field in passed_through().items():
        default = theirs[name].default
        if isinstance(default, torch.dtype):
            default = {torch.float32: "fp32"}[default]
        default = None if default is dataclasses.MISSING else getattr(default, "name", default)
        is_refused = any(re.fullmatch(names, name) for names, _ in megatron._REFUSED)
        if field.default != default and name not in OF_THE_PARSER and not is_refused:
            wrong.append((name, field.default, default))
    assert wrong == []
    assert all(field.help for field in passed_through().values() if not field.title.endswith("data parallelism"))


GIVEN = {
    "--overlap-grad-reduce --ddp-bucket-size=5": {"overlap_grad_reduce": True, "bucket_size": 5},
    "--overlap-param-gather --use-distributed-optimizer": {"overlap_param_gather": True},
    "--bf16 --grad-reduce-in-bf16": {"grad_reduce_in_fp32": False},
    "--accumulate-allreduce-grads-in-fp32": {"grad_reduce_in_fp32": True},
    "--no-bias-swiglu-fusion --no-rope-fusion": {"bias_activation_fusion": False, "apply_rope_fusion": False},
    "--no-masked-softmax-fusion --attention-softmax-in-fp32": {"masked_softmax_fusion": False},
    "--no-gradient-accumulation-fusion": {"gradient_accumulation_fusion": False},
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl=te": {"cross_entropy_fusion_impl": "te"},
    "--recompute-granularity=selective --recompute-modules core_attn mlp": {"recompute_modules": ["core_attn", "mlp"]},
    "--decoupled-lr=0.5 --decoupled-min-lr=0.25": {"decoupled_lr": 0.5, "decoupled_min_lr": 0.25},
    "--disable-clone-scatter-output-in-embedding": {"clone_scatter_output_in_embedding": False},
    f"{EXPERTS} --moe-router-dtype=fp32": {"moe_router_dtype": "fp32"},
    "--no-rope-freq=[0]*3+[1]": {"no_rope_freq": [0, 0, 0, 1]},
    "--fp16 --initial-loss-scale=65536 --hysteresis=1": {"initial_loss_scale": 65536.0, "hysteresis": 1},
    "--no-decoupled-weight-decay --deterministic-mode": {"decoupled_weight_decay": False, "deterministic_mode": True},
}


@pytest.mark.parametrize("words", GIVEN)
def test_a_flag_goes_unchanged_into_the_config(tmp_path, words):
    config = config_of(tmp_path, words)
    built = [vars(build(config)) for build in BUILDERS]
    for name, value in GIVEN[words].items():
        assert config.megatron.given[name] == value
        reached = [one[name] for one in built if name in one]
        assert reached
        assert all(one == value for one in reached)


def test_a_launch_file_has_the_same_names(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "overlap-grad-reduce: true\nno-rope-fusion: true\nrecompute-modules: [core_attn, mlp]\nfp8-wgrad: false\n"
    )
    args = parse_args(["--config", str(tmp_path / "a.yaml"), "--no-overlap-grad-reduce"])
    assert (args.overlap_grad_reduce, args.apply_rope_fusion, args.fp8_wgrad) == (False, False, False)
    assert args.recompute_modules == ["core_attn", "mlp"]


REFUSED = {
    "--moe-input-jitter-eps=0.1 --num-experts=4": r"--moe-input-jitter-eps 0\.1 makes the router random: π_old and π_θ",
    "--mtp-num-layers=1": "--mtp-num-layers 1 adds layers that are trained by the loss of further tokens, and PPO",
    "--fp16 --bf16": "--fp16 and --bf16 are two types of the same weights: drop one of them",
    "--fp16 --num-experts=4": "--fp16 with --num-experts: Megatron-Core scales the loss once",
    "--loss-scale=8": r"--loss-scale 8\.0 does nothing without --fp16: give both, or neither",
    "--fp16 --loss-scale=8 --hysteresis=1": "--hysteresis 1 does nothing with --loss-scale, which never changes",
    "--fp16 --loss-scale=-1": r"--loss-scale -1\.0 must be positive",
    "--fp16 --loss-scale-window=0": r"--loss-scale-window 0\.0 must be positive",
    "--fp16 --min-loss-scale=8 --initial-loss-scale=4": r"--min-loss-scale 8\.0 is above --initial-loss-scale 4\.0",
    "--use-megatron-fsdp": "--use-megatron-fsdp belongs to Megatron-FSDP, which is not here",
    "--decoder-first-pipeline-num-layers=1": "1 does nothing without --pipeline-model-parallel-size above 1",
    "--pipeline-model-parallel-layout=Et|L": "--pipeline-model-parallel-layout .* spreads layers in a way that is not",
    "--window-attn-skip-freq=2": "--window-attn-skip-freq 2 makes another kind of model than the GPT",
    "--cuda-graph-impl=local": "--cuda-graph-impl local captures CUDA graphs",
    "--apply-residual-connection-post-layernorm": "--apply-residual-connection-post-layernorm is what Megatron-Core",
    "--moe-grouped-gemm": "--moe-grouped-gemm does nothing without --num-experts: give both, or neither",
    "--moe-grouped-gemm --num-experts=4": "--moe-grouped-gemm does nothing with --transformer-impl local",
    "--moe-shared-expert-gate --num-experts=4": "does nothing without --moe-shared-expert-intermediate-size",
    "--fp8-format=hybrid": "--fp8-format hybrid does nothing with --transformer-impl local: use transformer_engine",
    "--fp8-recipe=mxfp8": "--fp8-recipe mxfp8 does nothing without --fp8-format",
    "--attention-backend=flash": "--attention-backend flash does nothing with --transformer-impl local",
    "--tp-comm-overlap": "--tp-comm-overlap does nothing with --transformer-impl local",
    "--no-tp-comm-bulk-wgrad": "--no-tp-comm-bulk-wgrad does nothing without --tp-comm-overlap",
    "--optimizer-cpu-offload": "--optimizer-cpu-offload does nothing on the CPU: it is for GPUs",
    "--optimizer-offload-fraction=0.5": "does nothing without --optimizer-cpu-offload: give both",
    "--use-precision-aware-optimizer": "--use-precision-aware-optimizer does nothing on the CPU",
    "--exp-avg-dtype=bf16": "--exp-avg-dtype bf16 does nothing without --use-precision-aware-optimizer",
    "--overlap-param-gather": "--overlap-param-gather does nothing without --use-distributed-optimizer",
    "--ddp-bucket-size=4": "--ddp-bucket-size 4 does nothing without --overlap-grad-reduce",
    "--grad-reduce-in-bf16": "--grad-reduce-in-bf16 does nothing without --bf16",
    "--recompute-modules mlp": "--recompute-modules mlp does nothing without --recompute-granularity selective",
    "--recompute-granularity=selective --recompute-modules nothing": "Megatron-Core refuses --recompute-modules",
    "--recompute-granularity=selective --recompute-modules layernorm": "--recompute-modules layernorm needs --transf",
    "--defer-embedding-wgrad-compute": "Megatron-Core refuses --defer-embedding-wgrad-compute: Cannot defer embedding",
    "--no-initialization": "--no-initialization does nothing good without --load or --load-hf",
    "--expert-tensor-parallel-size=2 --num-experts=4": "must divide the 1 tensor · data · context parallel ranks",
    "--moe-token-dispatcher-type=flex --num-experts=4": "--moe-token-dispatcher-type flex needs a CUDA device",
    "--embedding-init-method-std=-1": r"--embedding-init-method-std -1\.0 must be positive",
    "--decoupled-lr=-1": r"--decoupled-lr -1\.0 must be positive",
    "--glu-linear-offset=nan": "--glu-linear-offset nan must be a finite number",
    "--num-experts=4 --moe-router-topk-scaling-factor=0": r"--moe-router-topk-scaling-factor 0\.0 must be positive",
    "--num-experts=4 --moe-apply-probs-on-input": "--moe-apply-probs-on-input needs --moe-router-topk 1, got 2",
    "--cross-entropy-fusion-impl=te": "does nothing without --cross-entropy-loss-fusion: give both, or neither",
    "--apply-wd-to-qk-layernorm": "--apply-wd-to-qk-layernorm does nothing without --qk-layernorm: give both",
    "--no-rope-freq=often": "argument --no-rope-freq: expected a number, or a list such as .*, got 'often'",
    "--ddp-bucket-size=many": "argument --ddp-bucket-size: invalid int value: 'many'",
    "--fp8-format=e5m2": "argument --fp8-format: invalid choice: 'e5m2'",
    "--recompute-modules": "argument --recompute-modules: expected at least one argument",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused_in_a_sentence(tmp_path, words):
    with pytest.raises(ConfigurationError, match=REFUSED[words]) as caught:
        config_of(tmp_path, words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--decoder-first-pipeline-num-layers=4", "--num-layers 4 less --decoder-first-pipeline-num-layers 4 leaves 0"),
        ("--decoder-last-pipeline-num-layers=0", "--decoder-last-pipeline-num-layers 0 must be positive"),
        ("--decoder-last-pipeline-num-layers=-1", "--decoder-last-pipeline-num-layers -1 must be positive"),
        ("--decoder-first-pipeline-num-layers=1 --decoder-last-pipeline-num-layers=2", "leaves 1 layers, which"),
        ("--decoder-first-pipeline-num-layers=2 --num-layers-per-virtual-pipeline-stage=1", "drop one of them"),
    ],
)
def test_layers_that_stages_cannot_have_are_refused(tmp_path, words, reason):
    with pytest.raises(ConfigurationError, match=reason):
        configure(flags(tmp_path, "--pipeline-model-parallel-size=2", *words.split()), 2, engine=False)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--bf16", "--tp-comm-overlap does nothing without --sequence-parallel: give both, or neither"),
        (f"{SPLIT}", "--tp-comm-overlap has bfloat16 buffers of micro-batch-size · seq-length tokens"),
        (f"{SPLIT} --bf16 --rl-use-sequence-packing", "--tp-comm-overlap has bfloat16 buffers"),
        (f"{SPLIT} --bf16", None),
    ],
)
def test_overlapped_tensor_parallelism_needs_buffers_that_fit(tmp_path, words, reason):
    words = f"--tp-comm-overlap --transformer-impl=transformer_engine --no-cpu {words}".split()
    with missing_packages_noted(), nullcontext() if reason is None else pytest.raises(ConfigurationError, match=reason):
        configure(flags(tmp_path, *words), 2, engine=False, elsewhere=True)


@pytest.mark.parametrize("is_new", [True, False])
def test_user_buffers_are_made_with_the_arguments_of_megatron_lm(tmp_path, monkeypatch, is_new):
    """A stand-in takes them: Transformer Engine is for GPUs."""
    modes, made = SimpleNamespace(FP8="fp8", NONE="none"), []
    base = SimpleNamespace(initialize_ub=lambda **arguments: made.append(arguments))
    if is_new:
        base.UserBufferQuantizationMode = modes
    words = f"{SPLIT} --bf16 --context-parallel-size=2 --tp-comm-overlap --transformer-impl=transformer_engine --no-cpu"
    words += " --fp8-format=hybrid --fp8-recipe=tensorwise --tp-comm-bootstrap-backend=gloo"
    with missing_packages_noted():
        config, _ = configure(flags(tmp_path, *words.split()), 4, engine=False, elsewhere=True)
    for name in ("", ".pytorch", ".pytorch.module"):
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", ModuleType("transformer_engine"))
    sys.modules["transformer_engine.pytorch.module"].base = base
    distributed._make_user_buffers(config)
    kind = {"quantization_modes": ["fp8"]} if is_new else {"use_fp8": True}
    shape = {"shape": [4 * 16 // 2, 32], "tp_size": 2}
    assert made == [shape | kind | {"ub_cfgs": {}, "bootstrap_backend": "gloo"}]


def test_gelu_and_its_approximation_are_not_mixed(tmp_path):
    with pytest.raises(ConfigurationError, match="--bias-activation-fusion without --swiglu would make GELU"):
        config_of(tmp_path, "--bias-activation-fusion", model=GPT2)


@pytest.mark.parametrize("words", ["--qk-l2-norm", "--rotary-interleaved", "--no-rope-freq=2"])
def test_a_model_that_no_engine_knows_needs_recorded_rollouts(tmp_path, words):
    with pytest.raises(ConfigurationError, match="is in no Hugging Face architecture here, so no engine can have"):
        config_of(tmp_path, words, engine=True)
    assert config_of(tmp_path, words)


def test_every_row_is_of_a_field():
    """What no release has would be refused for nothing."""
    for names, *_ in (*megatron._REFUSED, *megatron._NEEDS):
        assert [name for name in megatron_fields() if re.fullmatch(names, name)], names


@pytest.mark.parametrize(
    ("word", "value"), [("2", 2), ("[0,1]", [0, 1]), ("([0]*2+[1])*2", [0, 0, 1, 0, 0, 1]), ("[1]*3+[0]", [1, 1, 1, 0])]
)
def test_a_pattern_of_layers_is_read(word, value):
    assert number_or_pattern(word) == value


@pytest.mark.parametrize(
    "word", ["", "a", "[a]", "[1]*[2]", "1+1", "[1]+1", "[[1]]", "__import__('os')", "[1.5]", "True"]
)
def test_another_pattern_is_refused(word):
    with pytest.raises(ValueError, match="expected a number, or a list"):
        number_or_pattern(word)


@pytest.mark.parametrize("word", ["[1]*99999999999", "99999999999*[0,1]", "[0]" + "+[1]" * 30000], ids=len)
def test_a_pattern_that_fills_the_memory_is_refused(word):
    with pytest.raises(ValueError, match="expected a number, or a list"):
        number_or_pattern(word)


def test_the_page_says_what_is_refused(tmp_path):
    """Each flag that its table names, with the value that it names, or any."""
    text = (ROOT / "docs" / "megatron_flags.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `--")]
    named = [flag for row in rows for flag in re.findall("`(--[a-z0-9-]+)(?: delayed)?`", row)]
    assert len(named) > 10
    known = {f"--{flag}": field for field in passed_through().values() for flag in field.on}
    others = {"--attention-dropout", "--hidden-dropout", "--fp8-recipe", "--moe-router-bias-update-rate"}
    for flag in set(named) - others:
        assert any(re.fullmatch(names, known[flag].name) for names, _ in megatron._REFUSED), flag
