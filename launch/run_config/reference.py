"""Settings of the reference policy."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rc.launch.run_config.options import option


@dataclass(frozen=True, kw_only=True)
class ReferenceSection:
    """Weights of the reference policy; without any of these flags it is the policy at the start of the run."""

    ref_load: str | None = option(
        "checkpoints whose newest one is the reference policy of the KL; default: the policy at the start",
        needs="!ref_load_hf",
        metavar="DIR",
    )
    ref_load_hf: str | None = option(
        "Hugging Face directory of the reference policy of the KL; default: the policy at the start", metavar="DIR"
    )
    ref_update_interval: int | None = option(
        "optimizer steps after which the reference becomes the current policy; default: it never changes",
        metavar="N",
        positive=True,
    )
