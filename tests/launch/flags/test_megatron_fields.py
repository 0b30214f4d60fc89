"""Plain fields of Megatron-Core's configs are flags that go unchanged into them."""

import dataclasses
import re
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_rc.launch import distributed
from megatron_rc.launch.errors import ConfigurationError, missing_packages_noted
from megatron_rc.launch.flags.command import read_command
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.run_config import RunConfig, passed_through, sections_of
from megatron_rc.launch.run_config.layer_patterns import number_or_pattern
from megatron_rc.launch.run_config.megatron_configs import (
    build_ddp_config,
    build_optimizer_config,
    build_transformer_config,
)
from megatron_rc.launch.run_config.megatron_fields import NOT_FLAGS
from megatron_rc.launch.run_config.options import options_of
from tests.support.recorded_training import LLAMA, flags, run_config

BUILDERS = (build_transformer_config, build_ddp_config, build_optimizer_config)
# Megatron-LM's parser has these defaults, its dataclasses others.
OF_THE_PARSER = {"grad_reduce_in_fp32", "optimizer_offload_fraction"}
# Refused fields of releases after 0.16, which the page describes in words.
NEWER = set(
    "moe_router_force_biased moe_expert_rank_capacity_factor moe_paged_stash use_layer_wise_distributed_optimizer "
    "grad_norm_skip_threshold optimizer_cuda_graph use_mup".split()
)
SPLIT = "--tensor-model-parallel-size=2 --sequence-parallel"


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


def test_defaults_are_those_of_the_dataclasses():
    theirs = megatrons()
    wrong = []
    for name, field in passed_through().items():
        default = theirs[name].default
        if isinstance(default, torch.dtype):
            default = {torch.float32: "fp32"}[default]
        default = None if default is dataclasses.MISSING else getattr(default, "name", default)
        if field.default != default and name not in OF_THE_PARSER and name not in NEWER:
            wrong.append((name, field.default, default))
    assert wrong == []
    assert all(field.help for field in passed_through().values() if not field.title.endswith("data parallelism"))


GIVEN = {
    "--overlap-grad-reduce --ddp-bucket-size=5": {"overlap_grad_reduce": True, "bucket_size": 5},
    "--bf16 --grad-reduce-in-bf16": {"grad_reduce_in_fp32": False},
    "--no-bias-swiglu-fusion --no-rope-fusion": {"bias_activation_fusion": False, "apply_rope_fusion": False},
    "--no-masked-softmax-fusion --attention-softmax-in-fp32": {"masked_softmax_fusion": False},
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl=te": {"cross_entropy_fusion_impl": "te"},
    "--recompute-granularity=selective --recompute-modules core_attn mlp": {"recompute_modules": ["core_attn", "mlp"]},
    "--disable-clone-scatter-output-in-embedding": {"clone_scatter_output_in_embedding": False},
    "--fp16 --initial-loss-scale=65536 --hysteresis=1": {"initial_loss_scale": 65536.0, "hysteresis": 1},
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


def test_a_launch_file_has_the_same_names_and_flags_override_it(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "overlap-grad-reduce: true\nno-rope-fusion: true\nrecompute-modules: [core_attn, mlp]\nfp8-wgrad: false\n"
        "lr: 1e-3\nswiglu: false\n"
    )
    values = read_command(["--config", str(tmp_path / "a.yaml"), "--no-overlap-grad-reduce", "--lr=2"]).values
    assert (values.overlap_grad_reduce, values.apply_rope_fusion, values.fp8_wgrad) == (False, False, False)
    assert (values.recompute_modules, values.lr, values.swiglu) == (("core_attn", "mlp"), 2.0, False)


@pytest.mark.parametrize("words", ["--bf16", SPLIT, f"{SPLIT} --bf16 --rl-use-sequence-packing", f"{SPLIT} --bf16"])
def test_overlapped_tensor_parallelism_needs_buffers_that_fit(tmp_path, words):
    fits = words == f"{SPLIT} --bf16"
    words = f"--tp-comm-overlap --transformer-impl=transformer_engine --no-cpu {words}".split()
    with missing_packages_noted(), nullcontext() if fits else pytest.raises(ConfigurationError, match="--tp-comm-over"):
        configure(flags(tmp_path, *words), 2, engine=False, elsewhere=True)


@pytest.mark.parametrize("is_new", [True, False])
def test_user_buffers_are_made_with_the_arguments_of_megatron_lm(tmp_path, monkeypatch, is_new):
    """A stand-in takes them: Transformer Engine is for GPUs."""
    modes = SimpleNamespace(FP8="fp8", NONE="none")
    made = []
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


# The last one would fill the memory.
@pytest.mark.parametrize("word", ["", "[a]", "[1]*[2]", "[1]+1", "__import__('os')", "[1]*99999999999"])
def test_another_pattern_is_refused(word):
    with pytest.raises(ValueError, match="number, or a list"):
        number_or_pattern(word)
