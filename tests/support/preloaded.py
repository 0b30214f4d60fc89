"""What the server of the ranks has loaded before it forks them: what a rank of a run on the CPU loads."""

import importlib

from megatron_rc.launch.training.cpu import without_compiler

with without_compiler():
    for name in (
        "megatron_rc.launch.training.loop",
        "megatron_rc.launch.engines.transformers_engine",
        "transformers.models.llama.modeling_llama",
        "transformers.models.gpt2.modeling_gpt2",
        "matplotlib.pyplot",
        "reasoning_gym",
        # What the functions that ranks run stand beside.
        "pytest",
    ):
        importlib.import_module(name)
