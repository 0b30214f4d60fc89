"""Print as JSON what the figures of a run depend on: the GPUs and the versions of packages."""

import importlib.metadata
import json
import platform
import sys

PACKAGES = ("torch", "triton", "megatron-core", "transformers", "transformer-engine", "apex", "vllm", "liger-kernel")


def describe():
    """GPUs, Python, packages that are there."""
    import torch

    description = {"python": platform.python_version(), "cuda": torch.version.cuda, "gpus": []}
    for name in PACKAGES:
        try:
            description[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        description["gpus"].append(
            {
                "name": about.name,
                "bytes": about.total_memory,
                "multiprocessors": about.multi_processor_count,
                "capability": f"{about.major}.{about.minor}",
                "l2_bytes": about.L2_cache_size,
            }
        )
    return description


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe()))
