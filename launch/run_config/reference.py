"""The reference policy of a KL penalty: what it starts from, and when it follows the policy."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rc.launch.run_config.options import option


@dataclass(frozen=True, kw_only=True)
class ReferenceSection:
    """Where there is a KL penalty; else the reference is the policy as it begins."""

    ref_load: str | None = option(
        "compare with the newest checkpoint here; default: the policy as it begins", metavar="DIR"
    )
    ref_load_hf: str | None = option("compare with the model of this Hugging Face directory", metavar="DIR")
    ref_update_interval: int | None = option(
        "compare with the policy of every N optimizer steps; default: the reference stays", metavar="N", positive=True
    )
