"""Flags for the fields of the installed Megatron-Core's configs: names, types, defaults and help.

The fields are read from Megatron's source, because importing Megatron would make ``--help`` seconds slower.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional, Union

from megatron_rc.launch.run_config.layer_patterns import number_or_pattern
from megatron_rc.launch.run_config.options import kind_of, parts_of

# Title of the group in --help, file below megatron/core, class; a base class comes first.
_CONFIGS = (
    ("Megatron-Core's transformer", "model_parallel_config.py", "ModelParallelConfig"),
    ("Megatron-Core's transformer", "transformer/transformer_config.py", "TransformerConfig"),
    (
        "Megatron-Core's data parallelism",
        "distributed/distributed_data_parallel_config.py",
        "DistributedDataParallelConfig",
    ),
    ("Megatron-Core's optimizer", "optimizer/optimizer_config.py", "OptimizerConfig"),
)
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


@dataclass(frozen=True, kw_only=True)
class MegatronField:
    """Field of Megatron's configs, and its flag."""

    title: str  # title of its group in ``--help``
    name: str  # name of the field; one flag serves all configs that have it
    kind: Callable[[str], Any]  # function that makes a value of a word; bool: a switch
    choices: tuple[str, ...] = ()  # all values, if there are few
    many: bool = False  # the flag takes one value or more
    single: bool = False  # a single value stands for itself, not for a list of one
    default: Any = None  # value if the flag is not given; also None if the source computes it
    help: str = ""  # Megatron's own text
    on: tuple[str, ...]  # names without dashes that set the field or turn it on; the first is its key in a launch file
    off: tuple[str, ...] = ()  # names that turn it off

    def as_flag(self, value: Any) -> str:
        """Text of the flag with this value, as typed."""
        if self.kind is bool:
            return f"--{(self.on if value else self.off)[0]}"
        words = " ".join(map(str, value)) if self.many and isinstance(value, list) else str(value)
        return f"--{self.on[0]} {words}"


@functools.cache
def megatron_fields() -> dict[str, MegatronField]:
    """Every plain field of the installed Megatron-Core by name; empty if Megatron-Core is not installed."""
    core = core_folder()
    found: dict[str, MegatronField] = {}
    for title, file, name in _CONFIGS if core else ():
        body = _class_body((core or Path()) / file, name)
        for field, text in _fields(body):
            made = _made(title, field, text, core or Path())
            if made is not None:
                found.setdefault(made.name, made)
    return found


def core_folder() -> Path | None:
    """The folder of Megatron-Core's source; None if it is not installed."""
    try:
        spec = importlib.util.find_spec("megatron")
    except (ImportError, ValueError):
        return None
    folders = [Path(folder) / "core" for folder in (spec.submodule_search_locations if spec else None) or ()]
    return next((folder for folder in folders if folder.is_dir()), None)


def _class_body(path: Path, name: str) -> list[ast.stmt]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), [])


def _fields(body: list[ast.stmt]) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Yield each field with the text below it."""
    for number, node in enumerate(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            below = body[number + 1] if number + 1 < len(body) else None
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            yield node, " ".join(str(below.value.value).split()) if is_text else ""  # type: ignore[union-attr]


def _made(title: str, field: ast.AnnAssign, text: str, core: Path) -> MegatronField | None:
    """Flag of a field; None if it has none."""
    name = field.target.id  # type: ignore[union-attr]
    kind = {"kind": str, "choices": _DTYPES[name]} if name in _DTYPES else _kind_of(field.annotation, core)
    if kind is None or name in NOT_FLAGS or name.startswith("_"):
        return None
    default, names = _default_and_names(field.value)
    default = _DEFAULTS.get(name, "fp32" if name in _DTYPES else default)
    on, off = _names_of(name, kind["kind"] is bool, default is True, names)
    return MegatronField(title=title, name=name, default=default, help=text, on=on, off=off, **kind)


def _names_of(name: str, is_switch: bool, is_on: bool, said: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Names that set a field, and names that turn it off; ``said``: the names that the source gives.

    As in Megatron-LM, a switch that is on by default has ``--no-`` and ``--disable-``. Here each has its opposite too.
    """
    plain = name.replace("_", "-")
    if is_switch and is_on and name not in _NAMES:
        return (plain,), said or (f"no-{plain}", f"disable-{plain}")
    given, _, off = _NAMES.get(name, "").partition(" | ")
    on = (given,) if given else said or (plain,)
    return on, tuple(off.split() or (f"no-{each}" for each in on)) if is_switch else ()


def _default_and_names(value: ast.expr | None) -> tuple[Any, tuple[str, ...]]:
    """Default of a field, and names of the flag from the field's metadata."""
    if not isinstance(value, ast.Call):
        return _constant(value), ()
    given = {keyword.arg: keyword.value for keyword in value.keywords}
    said = _constant(given.get("metadata"))
    names = [name for of_flag in said.values() for name in of_flag.get("arg_names", [])] if said else []
    return _constant(given.get("default")), tuple(name.removeprefix("--") for name in names)


def _constant(node: ast.expr | None) -> Any:
    """Value of a literal, of a product or power of two, or name of an enum's member; else None."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Pow):
        left, right = _constant(node.left), _constant(node.right)
        return left * right if isinstance(node.op, ast.Mult) else left**right
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in _ENUMS:
        return node.attr
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


# Files of Megatron's enums, and other names in annotations that words can be values of.
_ENUMS = {"AttnBackend": "transformer/enums.py"}
_PLAIN = {"int": int, "float": float, "str": str, "bool": bool}
_TYPES: dict[str, Any] = {
    "list": list,
    "List": list,
    "Literal": Literal,
    "Optional": Optional,
    "Union": Union,
    **_PLAIN,
}


class _Unknown:
    """Stands for a type of which no word is a value, such as a function."""

    def __class_getitem__(cls, _: Any) -> type[_Unknown]:
        return cls


def _kind_of(annotation: ast.expr, core: Path) -> dict[str, Any] | None:
    """Kind of a flag's values from an annotation; None if no word could be such a value."""
    names = {node.id: _Unknown for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    enums = {name: Literal[_members(core / _ENUMS[name], name)] for name in names.keys() & _ENUMS.keys()}
    try:
        hint = eval(ast.unparse(annotation), names | _TYPES | enums)
    except (AttributeError, TypeError):  # as torch.dtype
        return None
    parts = parts_of(hint)
    if len(parts) == 1:
        found = kind_of(parts[0])
        return found if found["kind"] in _PLAIN.values() else None
    if parts == [int, list[int]]:  # a pattern is one word
        return {"kind": number_or_pattern}
    if parts[:2] == [str, list]:
        return {"kind": str}
    return {"kind": str, "many": True, "single": True} if str in parts and list[str] in parts else None


def _members(path: Path, name: str) -> tuple[str, ...]:
    members = [node.targets[0] for node in _class_body(path, name) if isinstance(node, ast.Assign)]
    return tuple(member.id for member in members if isinstance(member, ast.Name))
