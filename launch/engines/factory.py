"""The rollout engine that the flags name."""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from megatron_rc.launch.engines import RolloutEngine
from megatron_rc.launch.weights.families import find_family

SERVERS = ("vllm-server", "sglang-server")
ENGINES = ("transformers", "vllm", *SERVERS)
API_KEY = "ROLLOUT_API_KEY"
_MEMORY = "/dev/shm"


def make_engine(
    args: argparse.Namespace, eos_token_id: int, pad_token_id: int, device: torch.device, replica: int
) -> RolloutEngine:
    """The engine of one data-parallel replica, on its first rank.

    Args:
        args: the validated flags.
        eos_token_id: ends a response.
        pad_token_id: fills batches.
        device: of the trainer, for the engine that runs in it.
        replica: data-parallel rank: which server of ``--rollout-url``, and which folder of ``--rollout-weights-dir``.

    Raises:
        EngineError: vLLM cannot run beside this trainer.
        RuntimeError: no Hugging Face architecture describes the model: the flags are not validated.
    """
    family = find_family(args)
    if family is None:
        raise RuntimeError("an engine needs validated flags")
    config = family.hugging_face_config(args)
    if args.rollout_engine == "transformers":
        from megatron_rc.launch.engines.transformers_engine import TransformersEngine

        return TransformersEngine(config, args.rollout_dtype, eos_token_id, pad_token_id, device)
    if args.rollout_engine == "vllm":
        return _vllm(args, config, eos_token_id, replica)
    return _server(args, config, eos_token_id, replica)


def _vllm(args: argparse.Namespace, config: Any, eos_token_id: int, replica: int) -> RolloutEngine:
    from megatron_rc.launch.engines.model_directory import ModelDirectory
    from megatron_rc.launch.engines.vllm_engine import DTYPES, VllmEngine

    folder, dtype, rounded = _weights_folder(args.rollout_weights_dir, replica), args.rollout_dtype, None
    if dtype not in DTYPES:
        # vLLM would round other layers, and other weights at every start: what it reads is rounded already.
        dtype, rounded = "fp32" if args.on_cpu else "bf16", dtype
    directory = ModelDirectory(folder, config, eos_token_id, rounded)
    return VllmEngine(directory, dtype, eos_token_id, args.seq_length)


def _server(args: argparse.Namespace, config: Any, eos_token_id: int, replica: int) -> RolloutEngine:
    from megatron_rc.launch.engines.http_client import HttpClient, Retries
    from megatron_rc.launch.engines.model_directory import ModelDirectory
    from megatron_rc.launch.engines.sglang_server import SglangServerEngine
    from megatron_rc.launch.engines.vllm_server import VllmServerEngine

    url = args.rollout_url.split(",")[replica]
    retries = Retries(attempts=args.rollout_attempts)
    client = HttpClient(url, timeout=args.rollout_timeout, retries=retries, api_key=os.environ.get(API_KEY))
    directory = ModelDirectory(_weights_folder(args.rollout_weights_dir, replica), config, eos_token_id)
    limits = {"concurrency": args.rollout_concurrency, "start_timeout": args.rollout_timeout}
    if args.rollout_engine == "sglang-server":
        return SglangServerEngine(client, directory, eos_token_id, **limits)
    return VllmServerEngine(client, directory, eos_token_id, model=args.rollout_model, **limits)


def _weights_folder(given: str | None, replica: int) -> Path:
    """Where a replica's weights are handed over; a folder of our own, in memory if possible, goes when we end."""
    if given is not None:
        parent = Path(given)
    else:
        parent = Path(tempfile.mkdtemp(prefix="rollout-weights-", dir=_MEMORY if os.path.isdir(_MEMORY) else None))
        atexit.register(shutil.rmtree, parent, ignore_errors=True)
    return parent / f"replica-{replica}"
