"""Tests of ``--model hybrid``, for the versions of Megatron-Core that have a HybridModel."""

import pytest

from megatron_rc.launch.errors import has_module

HYBRID = "--model=hybrid"
IS_THERE = has_module("megatron.core.models.hybrid")
needs_hybrid = pytest.mark.skipif(not IS_THERE, reason="this Megatron-Core has no HybridModel")
