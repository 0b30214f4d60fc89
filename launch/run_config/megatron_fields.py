"""Flags for the fields of the installed Megatron-Core's configs: names, types, defaults and help.

The fields are those of Megatron's dataclasses, which are imported: a second or two, which only runs with such a flag
and ``--help-all`` wait for.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_origin, get_type_hints

import torch

from megatron_rc.launch.errors import has_module
from megatron_rc.launch.run_config.layer_patterns import number_or_pattern
from megatron_rc.launch.run_config.options import kind_of, parts_of

# Fields without a flag: the launcher sets them, or another flag says the same.
NOT_FLAGS = frozenset(
    "virtual_pipeline_model_parallel_size variable_seq_lengths batch_p2p_comm batch_p2p_sync enable_autocast "
    "deallocate_pipeline_outputs check_for_nan_in_grad check_for_large_grads barrier_with_L1_time "
    "num_microbatches_with_partial_activation_checkpoints log_num_zeros_in_grad fp8_param_gather fp4_param_gather "
    "moe_token_dropping is_hybrid_model heterogeneous_block_specs softmax_scale test_mode".split()
)
# Flags whose names do not follow from the field: names that set it or turn it on | names that turn it off, if these are
# others than with "no-" in front.
_NAMES = {
    "overlap_p2p_comm": "overlap-p2p-communication",
    "bias_activation_fusion": "bias-activation-fusion"
    " | no-bias-activation-fusion no-bias-swiglu-fusion no-bias-gelu-fusion",
    "apply_rope_fusion": "apply-rope-fusion | no-apply-rope-fusion no-rope-fusion",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "fp8_param": "fp8-param-gather",
    "fp4_param": "fp4-param-gather",
    "grad_reduce_in_fp32": "accumulate-allreduce-grads-in-fp32 | grad-reduce-in-bf16",
    "bucket_size": "ddp-bucket-size",
    "num_buckets": "ddp-num-buckets",
    "pad_buckets_for_high_nccl_busbw": "ddp-pad-buckets-for-high-nccl-busbw",
    "reduce_scatter_with_fp32_accumulation": "ddp-reduce-scatter-with-fp32-accumulation",
    "average_in_collective": "ddp-average-in-collective",
    "nccl_ub": "use-nccl-ub",
    "use_te_rng_tracker": "te-rng-tracker",
    "muon_split_qkv": "muon-split-qkv | muon-no-split-qkv",
    "muon_use_nesterov": "muon-nesterov",
}
# Values of the flags of fields of type torch.dtype.
_DTYPES = {
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "fp16", "bf16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "fp16", "bf16", "fp8"),
}
# Defaults of Megatron-LM's parser that differ from the dataclass and are used here.
_DEFAULTS: dict[str, Any] = {"grad_reduce_in_fp32": True, "optimizer_offload_fraction": 1.0}
_PLAIN = (int, float, str, bool)


@dataclass(frozen=True, kw_only=True)
class MegatronField:
    """Field of Megatron's configs, and its flag."""

    title: str  # title of its group in ``--help-all``
    name: str  # name of the field; one flag serves all configs that have it
    kind: Callable[[str], Any]  # function that makes a value of a word; bool: a switch
    choices: tuple[str, ...] = ()  # all values, if there are few
    many: bool = False  # the flag takes one value or more
    single: bool = False  # a single value stands for itself, not for a list of one
    default: Any = None  # value if the flag is not given; also None if Megatron computes it
    help: str = ""  # Megatron's own text
    on: tuple[str, ...]  # names without dashes that set the field or turn it on; the first is its key in a launch file
    off: tuple[str, ...] = ()  # names that turn it off

    def as_flag(self, value: Any) -> str:
        """Return the flag with this value, as typed."""
        if self.kind is bool:
            return f"--{(self.on if value else self.off)[0]}"
        text = " ".join(map(str, value)) if self.many and isinstance(value, list) else str(value)
        return f"--{self.on[0]} {text}"


@functools.cache
def megatron_fields() -> dict[str, MegatronField]:
    """Return every plain field of the installed Megatron-Core by name; empty if Megatron-Core is not installed."""
    if not has_module("megatron.core"):
        return {}
    with warnings.catch_warnings():
        # Of optional packages that are missing.
        warnings.simplefilter("ignore")
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import TransformerConfig

    configs = {
        "Megatron-Core's transformer": TransformerConfig,
        "Megatron-Core's data parallelism": DistributedDataParallelConfig,
        "Megatron-Core's optimizer": OptimizerConfig,
    }
    fields: dict[str, MegatronField] = {}
    for title, config in configs.items():
        hints = get_type_hints(config)
        texts = _texts_of_fields(config)
        for field in dataclasses.fields(config):
            flag = _flag_of(title, field, hints[field.name], texts.get(field.name, ""))
            if flag is not None:
                fields.setdefault(field.name, flag)
    return fields


def _flag_of(title: str, field: dataclasses.Field[Any], hint: Any, text: str) -> MegatronField | None:
    """Return the flag of a field; None if it has none."""
    name = field.name
    if name in NOT_FLAGS or name.startswith("_"):
        return None
    kind = {"kind": str, "choices": _DTYPES[name]} if name in _DTYPES else _kind_of(hint)
    if kind is None:
        return None
    default = None if field.default is dataclasses.MISSING else field.default
    if isinstance(default, torch.dtype):
        default = "fp32"
    if isinstance(default, enum.Enum):
        default = default.name
    default = _DEFAULTS.get(name, default)
    names_of_megatron = field.metadata.get("argparse_meta", {}).get("arg_names", ())
    on, off = _names_of(name, kind["kind"] is bool, default is True, names_of_megatron)
    return MegatronField(title=title, name=name, default=default, help=text, on=on, off=off, **kind)


def _names_of(
    name: str, is_switch: bool, is_on: bool, names_of_megatron: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names that set a field, and names that turn it off; ``names_of_megatron`` are those of its metadata.

    As in Megatron-LM, a switch that is on by default has ``--no-`` and ``--disable-``. Here each has its opposite too.
    """
    plain = name.replace("_", "-")
    listed = tuple(text.removeprefix("--") for text in names_of_megatron)
    if is_switch and is_on and name not in _NAMES:
        return (plain,), listed or (f"no-{plain}", f"disable-{plain}")
    listed_on, _, listed_off = _NAMES.get(name, "").partition(" | ")
    on = (listed_on,) if listed_on else listed or (plain,)
    if not is_switch:
        return on, ()
    return on, tuple(listed_off.split()) or tuple(f"no-{text}" for text in on)


def _kind_of(hint: Any) -> dict[str, Any] | None:
    """Return the kind of a flag's values from the type of a field; None if no word could be such a value."""
    parts = parts_of(hint)
    if get_origin(parts[0]) is tuple:  # a pair of numbers
        return None
    if isinstance(parts[0], enum.EnumMeta):
        return {"kind": str, "choices": tuple(parts[0].__members__)}
    if len(parts) == 1:
        kind = kind_of(parts[0])
        return kind if kind["kind"] in _PLAIN else None
    if parts[0] is int and kind_of(parts[1]) == {"kind": int, "many": True}:  # a pattern of layers is one word
        return {"kind": number_or_pattern}
    if parts[0] is str and parts[1] is list:
        return {"kind": str}
    if parts[0] is str and any(kind_of(part) == {"kind": str, "many": True} for part in parts):
        return {"kind": str, "many": True, "single": True}
    return None


def _texts_of_fields(config: type) -> dict[str, str]:
    """Return the string below each field in the source of a dataclass and its bases, on one line."""
    texts: dict[str, str] = {}
    for base in config.__mro__[:-1]:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        statements = getattr(body, "body", [])
        for field, below in pairwise(statements):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if is_text and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                texts.setdefault(field.target.id, " ".join(str(below.value.value).split()))
    return texts
