"""Checks of HybridModel."""

from __future__ import annotations

from megatron_rc.launch.flags.checks.refuse import refuse
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron_fields import core_folder


def check_hybrid(config: RunConfig) -> None:
    """Check that HybridModel is installed, and can do what the other flags ask for."""
    if not config.model.is_hybrid:
        return
    core = core_folder()
    is_missing = core is None or not (core / "models" / "hybrid").is_dir()
    wrong = {
        "{model} needs megatron-core 0.18 or newer, which needs Python 3.12; the one installed has no HybridModel: "
        "install such a version, or use --model gpt": is_missing,
        "{model} does not go with {defer_embedding_wgrad_compute}, which GPTModel alone reads: drop one of them": (
            config.megatron.given.get("defer_embedding_wgrad_compute")
        ),
    }
    refuse(config, wrong)
