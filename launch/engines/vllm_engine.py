"""vLLM in a process that the trainer starts: no server to run, no restart between steps."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import Ask, make_asks, make_sample
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.records.rollout import SamplingParams

_log = logging.getLogger("megatron_rc")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# Names and prefixes of torchrun's variables. With them vLLM's processes would join the trainer's job and wait for it.
TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "TORCHELASTIC_",
)
CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class VllmEngine:
    """Samples from ``vllm.LLM``, which starts at the first :meth:`load_weights` and usually stays.

    vLLM runs its model in a process of its own and leaves the trainer's torch.distributed and random state alone.

    Args:
        directory: directory of weights, for this engine alone, best in memory (``/dev/shm``).
        dtype: ``fp32`` or ``bf16``.
        ends: what ends a response; for stop strings vLLM loads the directory's tokenizer.
        max_model_len: largest number of tokens of a prompt with its response.
        reports_experts: whether samples have the experts of their tokens; on a GPU alone.
        reports_support: whether truncated samples have the tokens that were kept; on a GPU alone.
        takes_weights: whether a running vLLM takes new weights; if not, each :meth:`load_weights` starts it anew.
        processes: number of processes that vLLM spreads the model over, on this rank's GPU and the next ones;
            EngineError if the rank sees too few.
        sleeps: whether :meth:`sleep` gives vLLM's GPU memory back, until the next :meth:`load_weights`.
        more: further arguments of ``vllm.LLM``; see :mod:`vllm_args`.
    """

    is_elsewhere = True

    def __init__(
        self,
        directory: ModelDirectory,
        dtype: str,
        ends: ResponseEnds,
        max_model_len: int,
        *,
        reports_experts: bool = False,
        reports_support: bool = False,
        takes_weights: bool = True,
        processes: int = 1,
        sleeps: bool = False,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.directory = directory
        self.ends = ends
        self.version = -1
        self._devices = _devices(processes) if torch.cuda.is_available() else None
        self._takes_weights = takes_weights
        self._sleeps = sleeps
        self._is_asleep = False
        self._has_more = bool(more)
        self._options = {
            "dtype": DTYPES[dtype],
            "max_model_len": max_model_len,
            "enforce_eager": not torch.cuda.is_available(),
            # On a CPU vLLM ends at a request with a seed whose prompt is read in chunks.
            "enable_chunked_prefill": torch.cuda.is_available(),
            "max_num_seqs": 64,
            "skip_tokenizer_init": not ends.strings,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "tensor_parallel_size": processes,
            "enable_sleep_mode": sleeps,
            **more,
        }
        if reports_support:
            self._options["return_sampling_mask"] = True
        if reports_experts:
            self._options["enable_return_routed_experts"] = True
        self._llm: Any = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the weights; start vLLM with them, or let it read them in place. See :class:`RolloutEngine`."""
        if not self._takes_weights:
            self.close()
        self.version = -1
        path = str(self.directory.write(weights))
        is_clean = True
        try:
            if self._llm is None:
                self._llm = self._start(path)
            else:
                if self._is_asleep:
                    self._llm.wake_up(tags=["weights"])
                self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
                if self._is_asleep:
                    self._llm.wake_up(tags=["kv_cache"])
                    self._is_asleep = False
                is_clean = self._llm.reset_prefix_cache()
        except Exception as error:  # vLLM's own exceptions, which the trainer does not know
            hint = ": check --rollout-engine-args" if self._llm is None and self._has_more else ""
            raise EngineError(f"vLLM did not take the weights over: {type(error).__name__}: {error}{hint}") from error
        if not is_clean:
            raise EngineError("vLLM kept its prefix cache, made with old weights: are requests still running?")
        self.version = version

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """Sample one response for each prompt, in their order; see :class:`RolloutEngine`."""
        if self.version < 0:
            raise EngineError("vLLM holds no weights of this trainer: call load_weights first")
        asks = make_asks(prompts, params, max_new_tokens, seed, self.ends)
        vllm = importlib.import_module("vllm")
        inputs = [{"prompt_token_ids": ask.prompt} for ask in asks]
        sampling = [vllm.SamplingParams(**ask.sampling_of_vllm) for ask in asks]
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        return [_to_sample(ask, output) for ask, output in zip(asks, outputs, strict=True)]

    def sleep(self) -> None:
        """Give the GPU's memory back until the next :meth:`load_weights`, if the engine was made so."""
        if self._sleeps and self._llm is not None and not self._is_asleep:
            self._llm.sleep(level=2)  # without a copy of the weights, because the next ones replace them
            self.version = -1
            self._is_asleep = True

    def close(self) -> None:
        """End vLLM's process and free its memory."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            self.version = -1
            self._is_asleep = False

    def _start(self, path: str) -> Any:
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork would inherit the trainer's threads
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # otherwise a hundred lines at each start
        settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # else vLLM would join the trainer's process group
        if self._devices is not None:
            settings["CUDA_VISIBLE_DEVICES"] = self._devices
            if self._sleeps or "," in self._devices:
                _log.warning(
                    "--rollout-colocate and --rollout-tensor-parallel-size follow vLLM's documentation, and have not "
                    "been run on GPUs yet"
                )
        else:
            for name, value in CPU_DEFAULTS.items():
                os.environ.setdefault(name, value)
            # All cores, because the trainer's ranks usually wait while vLLM samples.
            settings["OMP_NUM_THREADS"] = str(os.cpu_count() or 1)
        with without_torchrun(settings):
            return importlib.import_module("vllm").LLM(model=path, **self._options)


@contextlib.contextmanager
def without_torchrun(settings: Mapping[str, str]) -> Iterator[None]:
    """Context without torchrun's variables and with ``settings`` in the environment, for processes started inside."""
    before = {name: value for name, value in os.environ.items() if name.startswith(TORCHRUN) or name in settings}
    for name in before:
        del os.environ[name]
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]
        os.environ.update(before)


def _devices(number: int) -> str:
    """CUDA_VISIBLE_DEVICES of vLLM's processes: this rank's GPU and the next ones; EngineError if it sees fewer."""
    first = torch.cuda.current_device()
    count = torch.cuda.device_count()
    if first + number > count:
        raise EngineError(
            f"--rollout-tensor-parallel-size {number} needs as many GPUs from GPU {first} on, this rank sees {count}: "
            "give fewer, or show it more with CUDA_VISIBLE_DEVICES"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    return ",".join(names[first : first + number])


def _to_sample(ask: Ask, output: Any) -> Sample:
    """Read and check vLLM's response to one request, with its experts and kept tokens if vLLM was asked for them."""
    if list(output.prompt_token_ids) != ask.prompt or len(output.outputs) != 1:
        raise EngineError(f"vLLM, prompt {ask.index}: {len(output.outputs)} responses to another prompt, expected 1")
    (answer,) = output.outputs
    token_ids = list(answer.token_ids)
    log_probs = [entry[token].logprob for token, entry in zip(token_ids, answer.logprobs or [], strict=True)]
    experts = getattr(answer, "routed_experts", None)
    kept_tokens = getattr(answer, "sampling_mask", None)
    return make_sample(
        ask,
        token_ids,
        log_probs,
        answer.finish_reason,
        "vLLM",
        experts=None if experts is None else torch.from_numpy(experts.astype("int32")),
        kept=None if kept_tokens is None else kept_tokens.token_ids,
    )
