"""Weights read back from a running rollout server, under their Hugging Face names.

Weights that the server quantised itself are refused: their layout depends on its kernels.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.requests import API_KEY
from megatron_rc.launch.engines.sglang_client import SglangClient
from megatron_rc.launch.engines.vllm_client import VllmClient

# vLLM's layers that join projections: the rows of each projection lie below those of the one before.
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Tied embeddings have several names, of which vLLM writes the first one.
_EMBEDDING = "model.embed_tokens.weight"
_OUTPUT_LAYER = "lm_head.weight"
# Files of vLLM's first process, if there is no other one.
_FILES_OF_FIRST = "model-rank-0-part-*.safetensors"


def read_back(engine: str, url: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights of a server, float32, one at a time.

    Args:
        engine: ``vllm-server`` on this machine, or ``sglang-server``.
        url: the server's address.
        shapes: shapes of all weights by Hugging Face name.

    Raises:
        EngineError: the server does not answer or refuses, lacks a weight, or has another shape of it.
    """
    http = HttpClient(url, api_key=os.environ.get(API_KEY))
    if engine == "sglang-server":
        client = SglangClient(http)
        client.check_readable()
        for name, shape in shapes.items():
            yield name, client.weight(name, shape)
        return
    with tempfile.TemporaryDirectory(prefix="vllm-weights-") as folder:
        VllmClient(http).write_weights(folder)
        yield from weights_of_vllm(Path(folder), shapes)


def weights_of_vllm(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in the files of vLLM's ``save_sharded_state``, float32; see :func:`read_back`."""
    from safetensors import safe_open

    paths = sorted(folder.iterdir())
    if not paths:
        raise EngineError(
            f"the server wrote no weights into {folder}, as this machine sees it: run the command on the server's "
            "machine and as its user"
        )
    if paths != sorted(folder.glob(_FILES_OF_FIRST)):
        raise EngineError(
            "the server has several processes, whose shards are not put together: read weights back from a server "
            "without --tensor-parallel-size and --pipeline-parallel-size"
        )
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in paths:
            file = stack.enter_context(safe_open(str(path), framework="pt"))
            files.update(dict.fromkeys(file.keys(), file))
        for name, shape in shapes.items():
            weight = _weight_of_vllm(files, name, shapes)
            if weight.shape != shape:
                raise EngineError(f"the server's {name} is {tuple(weight.shape)}, expected {shape}: is it this model?")
            yield name, weight.float()


def _weight_of_vllm(files: Mapping[str, Any], name: str, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    """Read a weight from vLLM's files; those of joined projections and of a filled vocabulary have further rows."""
    stored_name = name
    first_row = 0
    path, projection, kind = ("", *name.rsplit(".", 2))[-3:]
    for joined, projections in _JOINED.items():
        if projection in projections:
            stored_name = f"{path}.{joined}.{kind}"
            before = projections[: projections.index(projection)]
            first_row = sum(shapes[f"{path}.{other}.{kind}"][0] for other in before)
    if name == _EMBEDDING and name not in files:
        stored_name = _OUTPUT_LAYER
    if stored_name not in files:
        raise EngineError(
            f"vLLM's weights have no {stored_name}: it is a layer that vLLM stores otherwise, such as experts, or all "
            "linear layers on a CPU"
        )
    stored: Tensor = files[stored_name].get_tensor(stored_name)
    if not stored.is_floating_point() or stored.element_size() == 1:
        dtype = str(stored.dtype).removeprefix("torch.")
        raise EngineError(
            f"the server quantised {stored_name} to {dtype}, in a layout of its kernels: attribute the rounding that "
            "megatron_rc.attribution.quantized makes instead"
        )
    return stored[first_row : first_row + shapes[name][0]]
