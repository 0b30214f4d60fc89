"""Settings of the critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron_rc.launch.run_config.options import option


@dataclass(frozen=True, kw_only=True)
class CriticSection:
    """Value model with the policy's layout, and an optimizer and a schedule of its own; absent without GAE."""

    NEEDS: ClassVar[str] = "advantage_estimator=gae"

    critic_lr: float = option("highest learning rate of the critic; default: --lr", positive=True)
    critic_min_lr: float = option(
        "lowest learning rate of the critic; default: --min-lr",
        needs="critic_lr_decay_style=linear|cosine|inverse-square-root",
        not_negative=True,
        most="critic_lr",
    )
    critic_lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = option(
        "schedule of the critic's learning rate", default="constant"
    )
    critic_lr_warmup_iters: int = option(
        "optimizer steps of the critic's linear warm-up", default=0, not_negative=True, below="lr_decay_iters"
    )
    num_critic_only_steps: int = option(
        "optimizer steps at the start in which only the critic learns",
        default=0,
        not_negative=True,
        below="train_iters",
    )
    value_clip: float | None = option(
        "a value further than this from its value before the rollout batch does not lower the critic's loss; default: "
        "no bound",
        positive=True,
    )
    critic_load_hf: str | None = option(
        "start the critic from the layers of this Hugging Face directory; default: from the policy's layers",
        metavar="DIR",
    )
    critic_offload: bool = option(
        "keep the critic's weights, gradients and optimizer in host memory while it does not work", default=False
    )
    correct_values: Literal["none", "mask", "weights"] = option(
        "correction of the critic's loss: the rejection mask, mask and importance weights, or none; default: mask, or "
        "none if the policy's loss makes the correction"
    )
