"""Rows and rules for the biases of linear layers in decoders with a gated MLP."""

from __future__ import annotations

from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.conversions import GATE_AND_UP, QUERY_KEY_VALUE, WHOLE
from megatron_rc.launch.weights.entries import File, Flags, Row, UnknownFeatureError, typed
from megatron_rc.launch.weights.family import Rule

_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."


def bias_row(
    *,
    qkv: str | bool,
    output: str | bool = False,
    mlp: str | bool = False,
    default: bool = False,
    unused: tuple[str, ...] = (),
) -> Row:
    """Row of the biases of queries, keys and values, of the attention's output, and of the MLP.

    Args:
        qkv: entry for the biases of queries, keys and values; a bool: all models of the family have them, or none has.
        output: the same for the output projection of the attention; it may be the entry of ``qkv``.
        mlp: the same for the MLP.
        default: ``transformers``' default of ``qkv``; the other entries are false by default.
        unused: entries that the architecture does not have, and that must be false.
    """

    def read(file: File) -> Flags:
        for name in unused:
            if file.get(name):
                raise UnknownFeatureError(f"{name} is {file[name]!r}, not False")
        has_qkv = _value(file, qkv, default)
        has_output = _value(file, output, default and output == qkv)
        has_mlp = _value(file, mlp, False)
        if has_mlp and not (has_qkv and has_output):
            # Megatron gives a bias to no linear layer, to all of them, or to those of the attention.
            raise UnknownFeatureError(f"{mlp} is True, but the attention has not all biases")
        return {
            "disable-bias-linear": typed(str(mlp), "disable-bias-linear", not has_mlp),
            "add-qkv-bias": typed(str(qkv), "add-qkv-bias", has_qkv and not has_mlp),
            "attention-output-bias": typed(str(output), "attention-output-bias", has_output and not has_mlp),
        }

    def write(config: RunConfig) -> dict[str, Any]:
        present = {qkv: has_qkv_bias(config), output: has_output_bias(config), mlp: has_mlp_bias(config)}
        return {name: value for name, value in present.items() if isinstance(name, str)}

    def fits(config: RunConfig) -> bool:
        has_qkv = has_qkv_bias(config)
        has_output = has_output_bias(config)
        return (
            (isinstance(qkv, str) or has_qkv == qkv)
            and (isinstance(output, str) or has_output == output)
            and (isinstance(mlp, str) or has_mlp_bias(config) == mlp)
            and (output != qkv or has_output == has_qkv)
        )

    return Row(read, write, fits)


def _value(file: File, entry: str | bool, default: bool) -> bool:
    """Whether a file has these biases; UnknownFeatureError if its entry is no truth value."""
    if isinstance(entry, bool):
        return entry
    value = file.get(entry)
    if value is None:
        return default
    has_bias: bool = typed(entry, "add-qkv-bias", value)
    return has_bias


def has_qkv_bias(config: RunConfig) -> bool:
    """Whether queries, keys and values of a run's model have biases."""
    return config.transformer.add_qkv_bias or config.transformer.add_bias_linear


def has_output_bias(config: RunConfig) -> bool:
    """Whether the output projection of the attention has a bias."""
    return config.model.attention_output_bias or config.transformer.add_bias_linear


def has_mlp_bias(config: RunConfig) -> bool:
    """Whether the MLP has biases."""
    return config.transformer.add_bias_linear


BIASES_OF_ATTENTION = (
    Rule(
        ("self_attention.linear_qkv.bias",),
        tuple(f"{_ATTENTION}{part}_proj.bias" for part in "qkv"),
        QUERY_KEY_VALUE,
        holds=has_qkv_bias,
    ),
    Rule(("self_attention.linear_proj.bias",), (f"{_ATTENTION}o_proj.bias",), WHOLE, holds=has_output_bias),
)
BIASES_OF_MLP = (
    Rule(("mlp.linear_fc1.bias",), (f"{_MLP}gate_proj.bias", f"{_MLP}up_proj.bias"), GATE_AND_UP, holds=has_mlp_bias),
    Rule(("mlp.linear_fc2.bias",), (f"{_MLP}down_proj.bias",), WHOLE, holds=has_mlp_bias),
)
