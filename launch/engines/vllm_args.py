"""``--rollout-engine-args``: a YAML file of further arguments of ``vllm.LLM``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHARE = "gpu_memory_utilization"
# Arguments that follow from other flags: another value would sample from another model or distribution.
OWN = {
    "model": "the weights are the trainer's",
    "dtype": "--rollout-dtype decides",
    "max_model_len": "--seq-length decides",
    "tensor_parallel_size": "--rollout-tensor-parallel-size decides",
    "enable_sleep_mode": "--rollout-colocate decides",
    "logprobs_mode": "the correction needs processed_logprobs",
    "skip_tokenizer_init": "prompts and responses are token ids",
    "enable_return_routed_experts": "--moe-enable-routing-replay decides",
    "return_sampling_mask": "--rollout-top-p and the like decide",
    "worker_extension_cls": "--moe-enable-routing-replay decides",
    "load_format": "vLLM reads the trainer's weights from files",
    "pipeline_parallel_size": "vLLM's processes are those of --rollout-tensor-parallel-size",
    "data_parallel_size": "each data-parallel replica of the trainer has a vLLM of its own",
}


def read_engine_args(path: str | None) -> dict[str, Any]:
    """Arguments of the file; none without a file.

    Raises ValueError for a file that is no table of names, or has an argument of :data:`OWN` or a share that is none.
    """
    import yaml

    if path is None:
        return {}
    try:
        arguments = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as problem:
        raise ValueError(f"it cannot be read ({' '.join(str(problem).split())})") from None
    if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
        raise ValueError(f"expected lines of the form gpu_memory_utilization: 0.5, found {str(arguments)[:60]}")
    share = arguments.get(SHARE, 1)
    if not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"it has {SHARE}: {share}, expected a number above 0 and at most 1")
    for name in arguments:
        if name in OWN:
            raise ValueError(f"it has {name}, but {OWN[name]}: drop it")
    return arguments
