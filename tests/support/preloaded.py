"""The modules that the ranks' server loads before it forks ranks: all that a run's rank on the CPU loads."""

import importlib

from megatron_rc.launch.flags.parser import parser_for
from megatron_rc.launch.training.models.cpu import without_compiler

with without_compiler():
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
parser_for(["--a-flag-of-megatron"])
