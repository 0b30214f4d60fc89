"""Tests of ``--model hybrid``, for the versions of Megatron-Core that have a HybridModel."""

import pytest

from megatron_rc.launch.run_config.megatron_fields import core_folder

HYBRID = "--model=hybrid"
IS_THERE = (core_folder() / "models" / "hybrid").is_dir()
needs_hybrid = pytest.mark.skipif(not IS_THERE, reason="this Megatron-Core has no HybridModel")
