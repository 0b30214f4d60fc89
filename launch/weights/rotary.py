"""Rotary embeddings as a ``config.json`` describes them: plain, or stretched as Llama 3.1's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.entries import File, Flags, Row, UnknownFeatureError, as_word

# GPTModel's stretching has a factor of one's choice, and these numbers.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Rotary(Row):
    """``rope_parameters``, which before transformers 5 were ``rope_theta`` and ``rope_scaling``.

    Attributes:
        default_theta: where a file names no base.
    """

    default_theta: float = 10000.0

    def read(self, file: File) -> Flags:
        """See :class:`Row`."""
        parameters = self._parameters(file)
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise UnknownFeatureError(f"rotary embeddings of type {kind!r}")
        for holder in (file, parameters):
            if holder.get("partial_rotary_factor") not in (None, 1, 1.0):
                raise UnknownFeatureError(f"partial_rotary_factor is {holder['partial_rotary_factor']!r}, not 1.0")
        flags = {
            "position-embedding-type": "rope",
            "rotary-base": as_word("rope_theta", "rotary-base", parameters["rope_theta"]),
            "use-rope-scaling": "true" if kind == "llama3" else "false",
        }
        if kind == "llama3":
            for name, value in _LLAMA3.items():
                if parameters.get(name) != value:
                    raise UnknownFeatureError(
                        f"{name} of llama3's rotary embeddings is {parameters.get(name)!r}, not {value}"
                    )
            flags["rope-scaling-factor"] = as_word("factor", "rope-scaling-factor", parameters.get("factor"))
        return flags

    def _parameters(self, file: File) -> dict[str, Any]:
        """Of either form, as the newer one has them."""
        found: dict[str, Any] = {"rope_theta": file.get("rope_theta") or self.default_theta}
        for name in ("rope_scaling", "rope_parameters"):
            value = file.get(name) or {}
            if not isinstance(value, dict):
                raise UnknownFeatureError(f"{name} is {value!r}, not a table of numbers")
            found |= value
        return found

    def write(self, config: RunConfig) -> dict[str, Any]:
        """See :class:`Row`."""
        model = config.model
        parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": float(model.rotary_base)}
        if model.rope_scaling:
            parameters |= {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
        return {"rope_parameters": parameters}

    def fits(self, config: RunConfig) -> bool:
        """See :class:`Row`."""
        return config.model.position_embedding_type == "rope"
