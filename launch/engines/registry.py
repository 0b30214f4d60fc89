"""Table of rollout engines, with a constructor and the flags of each."""

from __future__ import annotations

import atexit
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rc.launch.engines import EngineError, RolloutEngine
from megatron_rc.launch.engines.requests import API_KEY, Retries
from megatron_rc.launch.engines.vllm_args import read_engine_args
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.rollouts import EngineSection
from megatron_rc.launch.tasks import Text
from megatron_rc.launch.weights.converter import described_model

if TYPE_CHECKING:
    from megatron_rc.launch.engines.http_client import HttpClient
    from megatron_rc.launch.engines.model_directory import ModelDirectory
    from megatron_rc.launch.engines.server_client import ServerClient
    from megatron_rc.launch.engines.weight_sender import WeightSender

_FIELDS = {field.name for field in dataclasses.fields(EngineSection)}


@dataclass(frozen=True)
class EngineInputs:
    """Arguments of an engine's constructor, for one data-parallel replica."""

    config: RunConfig
    model: Any  # ``transformers`` config of the model
    text: Text  # the tokenizer, which knows what ends a response
    replica: int  # chooses the server of ``--rollout-url`` and the folder in ``--rollout-weights-dir``


@dataclass(frozen=True)
class EngineKind:
    """One engine of the table; ValueError if a setting does not exist. Settings of other engines are refused."""

    make: Callable[[EngineInputs], RolloutEngine]  # called on the first rank of a replica; imports packages
    needs: tuple[str, ...] = ()  # required settings of the engine section
    takes: tuple[str, ...] = ()  # optional settings of that section
    package: str = ""  # required package, which the extra of the same name installs; empty: none
    reports_kept_on_cpu: bool = True  # whether truncated samples have their kept tokens on a CPU too

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of the engine section that this engine uses, and not every engine."""
        return (*self.needs, *self.takes)

    def __post_init__(self) -> None:
        odd = {*self.settings} - _FIELDS
        if odd:
            raise ValueError(f"an engine needs {', '.join(sorted(odd))}: no field of the engine section has that name")


def make_engine(config: RunConfig, text: Text, replica: int) -> RolloutEngine:
    """Make the engine of one data-parallel replica, on its first rank."""
    model = described_model(config)
    return ENGINES[config.engine.rollout_engine].make(EngineInputs(config, model, text, replica))


def _transformers(inputs: EngineInputs) -> RolloutEngine:
    from megatron_rc.launch.engines.transformers_engine import TransformersEngine

    config = inputs.config
    return TransformersEngine(
        inputs.model,
        config.engine.rollout_dtype,
        inputs.text.ends,
        inputs.text.pad,
        config.launch.device,
        reports_experts=config.replays_rollouts,
        reports_support=config.rollouts.replays_sampling,
    )


def _vllm(inputs: EngineInputs) -> RolloutEngine:
    from megatron_rc.launch.engines.vllm_engine import DTYPES, VllmEngine

    engine = inputs.config.engine
    dtype = engine.rollout_dtype
    rounded_to = None
    if dtype not in DTYPES:
        # vLLM would round other layers, and differently at each start; so the files hold rounded weights.
        rounded_to = dtype
        dtype = "fp32" if inputs.config.launch.on_cpu else "bf16"
    return VllmEngine(
        _directory(inputs, rounded_to),
        dtype,
        inputs.text.ends,
        inputs.config.training.seq_length,
        reports_experts=inputs.config.replays_rollouts,
        reports_support=inputs.config.rollouts.replays_sampling,
        # On a CPU vLLM packs the experts' weights at its start; vLLM 0.32 computes wrong log-probs after a reload.
        takes_weights=not inputs.config.launch.on_cpu or inputs.config.experts is None,
        processes=engine.rollout_tensor_parallel_size,
        sleeps=engine.rollout_colocate,
        more=read_engine_args(engine.rollout_engine_args),
    )


def _vllm_server(inputs: EngineInputs) -> RolloutEngine:
    from megatron_rc.launch.engines.vllm_client import VllmClient

    engine = inputs.config.engine
    http_without_retries = None
    if engine.rollout_weight_transfer != "files":
        http_without_retries = _http_client(inputs.config, inputs.replica, attempts=1)
    client = VllmClient(
        _http_client(inputs.config, inputs.replica, engine.rollout_attempts),
        experts_shape=_experts_shape(inputs.config),
        reports_support=inputs.config.rollouts.replays_sampling,
        model=engine.rollout_model,
        needs_versions=engine.rl_partial_rollouts,
        max_versions=engine.rollout_max_versions,
        http_without_retries=http_without_retries,
    )
    return _server_engine(inputs, client)


def _sglang_server(inputs: EngineInputs) -> RolloutEngine:
    from megatron_rc.launch.engines.sglang_client import SglangClient

    engine = inputs.config.engine
    client = SglangClient(
        _http_client(inputs.config, inputs.replica, engine.rollout_attempts),
        experts_shape=_experts_shape(inputs.config),
        reports_support=inputs.config.rollouts.replays_sampling,
        takes_streams=engine.rollout_weight_transfer != "files",
    )
    return _server_engine(inputs, client)


def _server_engine(inputs: EngineInputs, client: ServerClient) -> RolloutEngine:
    """The engine of a server, with the publisher that ``--rollout-weight-transfer`` names."""
    from megatron_rc.launch.engines.publishers import FilePublisher, Publisher, StreamPublisher
    from megatron_rc.launch.engines.server import ServerEngine

    engine = inputs.config.engine
    directory = _directory(inputs)
    publisher: Publisher = FilePublisher(directory)
    if engine.rollout_weight_transfer != "files":
        publisher = StreamPublisher(directory, inputs.config.dtype)
    return ServerEngine(
        client,
        publisher,
        inputs.text.ends,
        concurrency=engine.rollout_concurrency,
        start_timeout=engine.rollout_timeout,
        partial_rollouts=engine.rl_partial_rollouts,
        max_versions=engine.rollout_max_versions,
    )


def _experts_shape(config: RunConfig) -> tuple[int, int] | None:
    """(layers, top_k) of the model, if samples must have the experts of their tokens."""
    if config.experts is None or not config.replays_rollouts:
        return None
    return config.transformer.num_layers, config.experts.moe_router_topk


def _http_client(config: RunConfig, replica: int, attempts: int) -> HttpClient:
    """Client of a replica's server."""
    from megatron_rc.launch.engines.http_client import HttpClient

    url = str(config.engine.rollout_url).split(",")[replica]
    return HttpClient(url, config.engine.rollout_timeout, Retries(attempts), api_key=os.environ.get(API_KEY))


def make_sender(config: RunConfig, replica: int, number: int) -> WeightSender:
    """Make the sender to a replica's server; ``number`` is this rank's own."""
    from megatron_rc.launch.engines.weight_sender import MemorySender, SglangSender, VllmSender

    engine = config.engine
    client = _http_client(config, replica, attempts=1)  # a part of an update must not be repeated
    if engine.rollout_weight_transfer == "ipc":
        return MemorySender(client, number)
    kind = VllmSender if engine.rollout_engine == "vllm-server" else SglangSender
    return kind(client, number, engine.rollout_weight_transfer)


def served_model(config: RunConfig, text: Text, replica: int) -> ModelDirectory:
    """The description of the model that a replica's engine has."""
    from megatron_rc.launch.engines.model_directory import ModelDirectory

    model = described_model(config)
    return ModelDirectory(
        _replica_folder(str(config.engine.rollout_weights_dir), replica), model, text.ends.eos_token_id
    )


_TO_SERVERS = ("rollout_url", "rollout_weights_dir")
_OF_SERVERS = ("rollout_concurrency", "rollout_timeout", "rollout_attempts", "rollout_weight_transfer")
_OF_VLLM = ("rollout_weights_dir", "rollout_tensor_parallel_size", "rollout_engine_args", "rollout_colocate")
_OF_VLLM_SERVERS = ("rollout_model", "rl_partial_rollouts", "rollout_max_versions")
ENGINES = {
    "transformers": EngineKind(_transformers),
    "vllm": EngineKind(_vllm, takes=_OF_VLLM, package="vllm", reports_kept_on_cpu=False),
    "vllm-server": EngineKind(_vllm_server, needs=_TO_SERVERS, takes=(*_OF_SERVERS, *_OF_VLLM_SERVERS)),
    "sglang-server": EngineKind(_sglang_server, needs=_TO_SERVERS, takes=_OF_SERVERS),
}


def _memory() -> str:
    """A folder in memory, if the system has one; else the folder for temporary files."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def _directory(inputs: EngineInputs, dtype: str | None = None) -> ModelDirectory:
    """The replica's directory of weights, rounded to ``dtype``; without ``--rollout-weights-dir`` removed at exit."""
    from megatron_rc.launch.engines.model_directory import ModelDirectory

    weights_dir = inputs.config.engine.rollout_weights_dir
    if weights_dir is None:
        weights_dir = str(_folder_in_memory(inputs.config, inputs.replica))
    path = _replica_folder(weights_dir, inputs.replica)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = inputs.text
    return ModelDirectory(path, inputs.model, text.ends.eos_token_id, dtype, save_tokenizer=text.save)


def _replica_folder(weights_dir: str, replica: int) -> Path:
    """Path of a replica's directory of weights."""
    return Path(weights_dir) / f"replica-{replica}"


def _folder_in_memory(config: RunConfig, replica: int) -> Path:
    """Make a folder in memory for a replica's weights, which is removed at exit.

    Its name follows from the run's folder, so that the next start of a killed run replaces what that run left. The
    numbers of device and file also tell containers apart that share memory. Only one live run has a run's folder, see
    :func:`~megatron_rc.launch.training.checks.folder_locks.in_use`.

    Raises:
        EngineError: the folder cannot be made, as when another user has one of that name.
    """
    run_folder = Path(config.launch.runs_dir) / config.launch.run_name
    try:
        run_folder.mkdir(parents=True, exist_ok=True)  # on machines that do not share it
        status = run_folder.stat()
        folder = Path(_memory()) / f"rollout-weights-{status.st_dev}-{status.st_ino}-{replica}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise EngineError(f"no folder in memory for rollout weights ({error}): give --rollout-weights-dir") from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
