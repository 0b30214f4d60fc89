"""The table of rollout engines: how each is made, and which flags it needs."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rc.launch.engines import RolloutEngine
from megatron_rc.launch.engines.requests import API_KEY, Retries
from megatron_rc.launch.own_folders import own_folder, remove_left_behind
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.rollouts import EngineSection
from megatron_rc.launch.weights.families import find_family

_PREFIX = "rollout-weights-"
_FIELDS = {field.name for field in dataclasses.fields(EngineSection)}


@dataclass(frozen=True)
class EngineInputs:
    """What an engine of one data-parallel replica is made of.

    Attributes:
        config: of the run.
        model: the same model as a ``transformers`` config.
        eos_token_id: ends a response.
        pad_token_id: fills batches.
        replica: data-parallel rank: which server of ``--rollout-url``, and which folder of ``--rollout-weights-dir``.
    """

    config: RunConfig
    model: Any
    eos_token_id: int
    pad_token_id: int
    replica: int


@dataclass(frozen=True)
class EngineKind:
    """One engine of the table.

    Attributes:
        make: the engine, on the first rank of a replica; imports what it needs.
        needs: settings of the engine section that it cannot do without.
        takes: settings of that section that it can do without. Others of the kind would do nothing, and are refused.
        package: that must be installed, named like the extra that brings it; empty: none.

    Raises:
        ValueError: a setting that does not exist.
    """

    make: Callable[[EngineInputs], RolloutEngine]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    package: str = ""

    @property
    def settings(self) -> tuple[str, ...]:
        """What of the engine section it uses, besides what all engines do."""
        return (*self.needs, *self.takes)

    def __post_init__(self) -> None:
        odd = {*self.settings} - _FIELDS
        if odd:
            raise ValueError(f"an engine needs {', '.join(sorted(odd))}: no field of the engine section has that name")


def make_engine(config: RunConfig, eos_token_id: int, pad_token_id: int, replica: int) -> RolloutEngine:
    """The engine of one data-parallel replica, on its first rank.

    Raises:
        EngineError: vLLM cannot run beside this trainer.
        RuntimeError: no Hugging Face architecture describes the model: the checks were not asked for an engine.
    """
    family = find_family(config)
    if family is None:
        raise RuntimeError("an engine needs a model of a Hugging Face architecture")
    # A whole model in memory each, whichever engine needed it.
    remove_left_behind(_memory(), _PREFIX)
    model = family.hugging_face_config(config)
    return ENGINES[config.engine.rollout_engine].make(EngineInputs(config, model, eos_token_id, pad_token_id, replica))


def _transformers(inputs: EngineInputs) -> RolloutEngine:
    from megatron_rc.launch.engines.transformers_engine import TransformersEngine

    config = inputs.config
    return TransformersEngine(
        inputs.model, config.engine.rollout_dtype, inputs.eos_token_id, inputs.pad_token_id, config.launch.device
    )


def _vllm(inputs: EngineInputs) -> RolloutEngine:
    from megatron_rc.launch.engines.vllm_engine import DTYPES, VllmEngine

    dtype, rounded = inputs.config.engine.rollout_dtype, None
    if dtype not in DTYPES:
        # vLLM would round other layers, and other weights at every start: what it reads is rounded already.
        dtype, rounded = "fp32" if inputs.config.launch.on_cpu else "bf16", dtype
    directory = _directory(inputs, rounded)
    return VllmEngine(directory, dtype, inputs.eos_token_id, inputs.config.training.seq_length)


def _vllm_server(inputs: EngineInputs) -> RolloutEngine:
    from megatron_rc.launch.engines.vllm_server import VllmServerEngine

    return VllmServerEngine(
        _client(inputs),
        _directory(inputs),
        inputs.eos_token_id,
        model=inputs.config.engine.rollout_model,
        concurrency=inputs.config.engine.rollout_concurrency,
        start_timeout=inputs.config.engine.rollout_timeout,
    )


def _sglang_server(inputs: EngineInputs) -> RolloutEngine:
    from megatron_rc.launch.engines.sglang_server import SglangServerEngine

    return SglangServerEngine(
        _client(inputs),
        _directory(inputs),
        inputs.eos_token_id,
        concurrency=inputs.config.engine.rollout_concurrency,
        start_timeout=inputs.config.engine.rollout_timeout,
    )


_TO_SERVERS = ("rollout_url", "rollout_weights_dir")
_OF_SERVERS = ("rollout_concurrency", "rollout_timeout", "rollout_attempts")
ENGINES = {
    "transformers": EngineKind(_transformers),
    "vllm": EngineKind(_vllm, takes=("rollout_weights_dir",), package="vllm"),
    "vllm-server": EngineKind(_vllm_server, needs=_TO_SERVERS, takes=(*_OF_SERVERS, "rollout_model")),
    "sglang-server": EngineKind(_sglang_server, needs=_TO_SERVERS, takes=_OF_SERVERS),
}


def _memory() -> str:
    """A folder in memory, if there is one."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def _client(inputs: EngineInputs) -> Any:
    from megatron_rc.launch.engines.http_client import HttpClient

    engine = inputs.config.engine
    if engine.rollout_url is None:
        raise RuntimeError("a server needs an address: the settings were not checked")
    url = engine.rollout_url.split(",")[inputs.replica]
    retries = Retries(attempts=engine.rollout_attempts)
    return HttpClient(url, timeout=engine.rollout_timeout, retries=retries, api_key=os.environ.get(API_KEY))


def _directory(inputs: EngineInputs, dtype: str | None = None) -> Any:
    """Where a replica's weights are handed over, rounded to ``dtype``; without one of their own they go when we end."""
    from megatron_rc.launch.engines.model_directory import ModelDirectory

    given = inputs.config.engine.rollout_weights_dir
    if given is not None:
        parent = Path(given)
        parent.mkdir(parents=True, exist_ok=True)
    else:
        folders = contextlib.ExitStack()
        parent = folders.enter_context(own_folder(_memory(), _PREFIX))
        atexit.register(folders.close)
    return ModelDirectory(parent / f"replica-{inputs.replica}", inputs.model, inputs.eos_token_id, dtype)
