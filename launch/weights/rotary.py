"""Rows for rotary embeddings: plain, scaled linearly, dynamically, as Llama 3.1's, or with YaRN."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.entries import File, Flags, Row, UnknownFeatureError, typed

_PART = "partial_rotary_factor"
_ORIGINAL_LENGTH = "original_max_position_embeddings"
# Kinds of scaling that the plain attention of GPTModel has.
_KINDS = ("llama3", "linear", "dynamic", "yarn")
# GPTModel's RoPE scaling has these constants; only its factor can be chosen.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Parameters of YaRN for latent attention: names in files with their flags, and transformers' defaults.
_YARN = {
    "factor": "rotary-scaling-factor",
    "original_max_position_embeddings": "original-max-position-embeddings",
    "beta_fast": "beta-fast",
    "beta_slow": "beta-slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale-all-dim",
}
_YARN_DEFAULTS: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
# Parameters of YaRN for plain attention.
_PLAIN_YARN = {
    "factor": "yarn-rotary-scaling-factor",
    "original_max_position_embeddings": "yarn-original-max-position-embeddings",
    "beta_fast": "yarn-beta-fast",
    "beta_slow": "yarn-beta-slow",
    "mscale": "yarn-mscale",
    "mscale_all_dim": "yarn-mscale-all-dim",
    "attention_factor": "yarn-attention-factor",
    "truncate": "yarn-correction-range-round-to-int",
}
# Their values in ``transformers`` if a file lacks them.
_USUAL: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
_USUAL |= dict.fromkeys(("mscale", "mscale_all_dim", "attention_factor"))


def rotary_row(
    default_theta: float = 10000.0, default_part: float | None = None, kinds: Collection[str] = _KINDS
) -> Row:
    """Row of ``rope_parameters``; before transformers 5 they were ``rope_theta`` and ``rope_scaling``.

    Args:
        default_theta: base if the file has none.
        default_part: share of a head's width that is rotated, if the file has none; None: always the whole head.
        kinds: kinds of scaling that the family has.
    """

    def read(file: File) -> Flags:
        parameters, kind, flags = _read(file, kinds, default_theta, default_part)
        if kind == "llama3":
            flags |= _read_llama3(parameters)
        elif kind == "linear":
            flags |= _read_factor(parameters, "rotary-seq-len-interpolation-factor")
        elif kind == "dynamic":
            flags |= _read_factor(parameters, "rope-dynamic-factor")
        elif kind == "yarn":
            part = flags["rotary-percent"]
            if part != 1:
                raise UnknownFeatureError(f"yarn's rotary embeddings have {_PART} {part}, not 1.0")
            flags |= _read_yarn(parameters, file)
        return flags

    def write(config: RunConfig) -> dict[str, Any]:
        parameters = {"rope_type": "default", "rope_theta": float(config.model.rotary_base)} | _scaling(config)
        if default_part is not None:
            parameters[_PART] = config.model.rotary_percent
        return {"rope_parameters": parameters}

    def fits(config: RunConfig) -> bool:
        model = config.model
        kind = _scaling(config).get("rope_type")
        # YaRN of GPTModel rotates whole heads.
        has_part = default_part is not None and config.yarn is None
        return model.is_rotary and kind in (None, *kinds) and (model.rotary_percent == 1 or has_part)

    return Row(read, write, fits)


def _scaling(config: RunConfig) -> dict[str, Any]:
    """Entries of a file for the scaling of a run's frequencies; empty: there is none."""
    model = config.model
    if config.yarn is not None:
        values = {name: config.value_of(flag) for name, flag in _PLAIN_YARN.items()}
        chosen = {name: value for name, value in values.items() if value != _USUAL.get(name, ...)}
        return {"rope_type": "yarn"} | chosen
    if model.rope_scaling:
        return {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
    if model.rotary_seq_len_interpolation_factor is not None:
        return {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    if model.rope_dynamic_factor is not None:
        return {"rope_type": "dynamic", "factor": model.rope_dynamic_factor}
    return {}


def _read_llama3(parameters: File) -> Flags:
    for name, value in _LLAMA3.items():
        if parameters.get(name) != value:
            raise UnknownFeatureError(f"{name} of llama3's rotary embeddings is {parameters.get(name)!r}, not {value}")
    return {"use-rope-scaling": True} | _read_factor(parameters, "rope-scaling-factor")


def _read_factor(parameters: File, flag: str) -> Flags:
    return {flag: typed("factor", flag, parameters.get("factor"))}


def _read_yarn(parameters: File, file: File) -> Flags:
    """Flags of YaRN for plain attention, with transformers' defaults for null and missing parameters."""
    values = {name: parameters.get(name) for name in _PLAIN_YARN}
    length = file.get("max_position_embeddings")
    if values["original_max_position_embeddings"] is None:
        values["original_max_position_embeddings"] = length
    if values["factor"] is None and length is not None:
        values["factor"] = length / values["original_max_position_embeddings"]
    for name in ("beta_fast", "beta_slow"):
        values[name] = values[name] or _USUAL[name]
    # transformers uses both or none, and none beside an attention factor.
    if values["attention_factor"] is not None or not (values["mscale"] and values["mscale_all_dim"]):
        values["mscale"] = values["mscale_all_dim"] = None
    scaling = {flag: typed(name, flag, values[name]) for name, flag in _PLAIN_YARN.items() if values[name] is not None}
    return {"position-embedding-type": "yarn"} | scaling


def _read_latent(file: File) -> Flags:
    parameters, kind, flags = _read(file, ("yarn",))
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
    scaling = {flag: typed(name, flag, values.get(name)) for name, flag in _YARN.items()}
    return flags | scaling | {"rope-type": "yarn"}


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
    beside them count if they lack it. An original length beside them counts first, if the frequencies are scaled by it.
    """
    parameters = _with_kind(file.get("rope_scaling") or file.get("rope_parameters") or {})
    for name in ("rope_theta", _PART):
        if parameters.get(name) is None and file.get(name) is not None:
            parameters[name] = file[name]
    if parameters.get("rope_type") in ("llama3", "yarn") and file.get(_ORIGINAL_LENGTH) is not None:
        parameters[_ORIGINAL_LENGTH] = file[_ORIGINAL_LENGTH]
    return parameters


def _read(
    file: File, kinds: Collection[str], default_theta: float = 10000.0, default_part: float | None = None
) -> tuple[dict[str, Any], str, Flags]:
    """Rotary parameters of a file in either form, their kind (default or in ``kinds``), and flags for plain ones."""
    parameters = _parameters(file)
    for name, value in parameters.items():
        if isinstance(value, dict):
            raise UnknownFeatureError(f"rope_parameters has {name!r}, parameters for some layers alone")
    kind = parameters.get("rope_type") or "default"
    if kind not in ("default", *kinds):
        raise UnknownFeatureError(f"rotary embeddings of type {kind!r}")
    part = parameters.get(_PART)
    if part is None:
        part = default_part or 1.0
    if default_part is None and part != 1:
        raise UnknownFeatureError(f"{_PART} is {part!r}, not 1.0")
    theta = parameters.get("rope_theta") or default_theta
    flags = {
        "position-embedding-type": "rope",
        "rotary-base": typed("rope_theta", "rotary-base", theta),
        "rotary-percent": typed(_PART, "rotary-percent", part),
        "use-rope-scaling": False,
    }
    return parameters, kind, flags
