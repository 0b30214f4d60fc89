"""Rows for rotary embeddings: plain, with Llama 3.1's scaling, or with YaRN."""

from __future__ import annotations

from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.entries import File, Flags, Row, UnknownFeatureError, as_word

_PART = "partial_rotary_factor"
# GPTModel's RoPE scaling has these constants; only its factor can be chosen.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# YaRN's parameters: names in files with their flags, and transformers' defaults.
_YARN = {
    "factor": "rotary-scaling-factor",
    "original_max_position_embeddings": "original-max-position-embeddings",
    "beta_fast": "beta-fast",
    "beta_slow": "beta-slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale-all-dim",
}
_YARN_DEFAULTS: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}


def rotary_row(default_theta: float = 10000.0, default_part: float | None = None) -> Row:
    """Row of ``rope_parameters``; before transformers 5 they were ``rope_theta`` and ``rope_scaling``.

    Args:
        default_theta: base if the file has none.
        default_part: share of a head's width that is rotated, if the file has none; None: always the whole head.
    """

    def read(file: File) -> Flags:
        parameters, kind, flags = _read(file, "llama3", default_theta, default_part)
        if kind == "llama3":
            flags["use-rope-scaling"] = "true"
            for name, value in _LLAMA3.items():
                if parameters.get(name) != value:
                    raise UnknownFeatureError(
                        f"{name} of llama3's rotary embeddings is {parameters.get(name)!r}, not {value}"
                    )
            flags["rope-scaling-factor"] = as_word("factor", "rope-scaling-factor", parameters.get("factor"))
        return flags

    def write(config: RunConfig) -> dict[str, Any]:
        model = config.model
        parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": float(model.rotary_base)}
        if model.rope_scaling:
            parameters |= {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
        if default_part is not None:
            parameters[_PART] = model.rotary_percent
        return {"rope_parameters": parameters}

    def fits(config: RunConfig) -> bool:
        model = config.model
        return model.position_embedding_type == "rope" and (model.rotary_percent == 1 or default_part is not None)

    return Row(read, write, fits)


def _read_latent(file: File) -> Flags:
    parameters, kind, flags = _read(file, "yarn")
    if kind == "default":
        return flags | {"rope-type": "rope"}
    if parameters.get("attention_factor") is not None or not parameters.get("truncate", True):
        raise UnknownFeatureError("yarn's rotary embeddings have an attention_factor, or no truncate")
    values = _YARN_DEFAULTS | {"original_max_position_embeddings": file.get("max_position_embeddings")}
    values |= {name: parameters[name] for name in _YARN if parameters.get(name) is not None}
    if values["mscale_all_dim"] and not parameters.get("mscale"):
        raise UnknownFeatureError("yarn's rotary embeddings have mscale_all_dim without mscale")
    if not values["mscale_all_dim"]:
        values["mscale"] = 1.0  # transformers ignores mscale here
    words = {flag: as_word(name, flag, values.get(name)) for name, flag in _YARN.items()}
    return flags | words | {"rope-type": "yarn"}


def _write_latent(config: RunConfig) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": float(config.model.rotary_base)}
    if config.value_of("rope-type") == "yarn":
        parameters |= {"rope_type": "yarn"} | {name: config.value_of(flag) for name, flag in _YARN.items()}
    return {"rope_parameters": parameters}


def _fits_latent(config: RunConfig) -> bool:
    latent = config.latent
    if latent is None or config.model.position_embedding_type != "rope":
        return False
    return latent.mscale == 1 or (latent.mscale > 0 and latent.mscale_all_dim > 0)


# Rotary embeddings of DeepSeek's latent attention: plain or with YaRN.
LATENT_ROTARY = Row(_read_latent, _write_latent, _fits_latent)


def contradiction(file: File) -> str | None:
    """Return how a file's two forms of the rotary parameters contradict each other, or None.

    Programs differ in the form that they read. The one that counts here, and in transformers 5, is named.
    """
    earlier = {name: file[name] for name in ("rope_theta", _PART) if file.get(name) is not None}
    if "rope_scaling" in file:
        earlier |= {"rope_type": "default"} | _with_kind(file["rope_scaling"] or {})
    current = _with_kind(file.get("rope_parameters") or {})
    for name, value in earlier.items():
        if name in current and current[name] != value:
            used = _parameters(file).get(name)
            return (
                f"config.json has {name} {current[name]!r} in rope_parameters and {value!r} in its earlier form "
                f"(rope_theta, rope_scaling, {_PART}): {used!r} is used, as by transformers 5; make them equal"
            )
    return None


def _with_kind(parameters: File) -> dict[str, Any]:
    """The parameters, with their kind under its present name: ``rope_type``, which was ``type`` at first."""
    named = dict(parameters)
    earlier_kind = named.pop("type", None)
    if earlier_kind is not None:
        named.setdefault("rope_type", earlier_kind)
    return named


def _parameters(file: File) -> dict[str, Any]:
    """Rotary parameters of a file, by transformers 5's precedence.

    A ``rope_scaling`` that is not empty replaces ``rope_parameters``; ``rope_theta`` and ``partial_rotary_factor``
    beside them count if they lack it.
    """
    parameters = _with_kind(file.get("rope_scaling") or file.get("rope_parameters") or {})
    for name in ("rope_theta", _PART):
        if parameters.get(name) is None and file.get(name) is not None:
            parameters[name] = file[name]
    return parameters


def _read(
    file: File, scaled: str, default_theta: float = 10000.0, default_part: float | None = None
) -> tuple[dict[str, Any], str, Flags]:
    """Rotary parameters of a file in either form, their kind (default or ``scaled``), and flags for plain ones."""
    parameters = _parameters(file)
    kind = parameters.get("rope_type", "default")
    if kind not in ("default", scaled):
        raise UnknownFeatureError(f"rotary embeddings of type {kind!r}")
    part = parameters.get(_PART)
    if part is None:
        part = default_part or 1.0
    if default_part is None and part != 1:
        raise UnknownFeatureError(f"{_PART} is {part!r}, not 1.0")
    theta = parameters.get("rope_theta") or default_theta
    flags = {
        "position-embedding-type": "rope",
        "rotary-base": as_word("rope_theta", "rotary-base", theta),
        "rotary-percent": as_word(_PART, "rotary-percent", part),
        "use-rope-scaling": "false",
    }
    return parameters, kind, flags
