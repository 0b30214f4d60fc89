"""The modules that the ranks' server loads before it forks ranks: all that a run's rank on the CPU loads."""

import gc
import importlib

# Modules make many objects and little garbage: looking for it takes a sixth of the start.
gc.disable()

with importlib.import_module("megatron_rc.launch.training.models.cpu").without_compiler():
    for name in (
        "megatron_rc.launch.training.loop",
        "megatron_rc.launch.engines.transformers_engine",
        "transformers.models.llama.modeling_llama",
        "transformers.models.gpt2.modeling_gpt2",
        "matplotlib.pyplot",
        # Modules beside the functions that ranks run, and modules with such functions.
        "pytest",
        "tests.support.correction_comparison",
        "tests.support.forked",
        "tests.support.training_cases",
        "tests.support.training_runs",
    ):
        importlib.import_module(name)

# Ranks have the parser, and Megatron's fields.
importlib.import_module("megatron_rc.launch.flags.parser").parser_for(["--a-flag-of-megatron"])
# Forks look through none of these objects, and so share their memory.
gc.freeze()
gc.enable()
