"""The critic, which ``--advantage-estimator gae`` asks for: where it starts, how it learns, what corrects it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rc.launch.run_config.options import option


@dataclass(frozen=True, kw_only=True)
class CriticSection:
    """A second model, cut over the ranks as the policy is, with an optimizer and a schedule of its own.

    A run without a critic has no such section: its flags are refused there.
    """

    critic_lr: float = option("highest learning rate of the critic; default: --lr", positive=True)
    critic_min_lr: float = option("its lowest learning rate; default: --min-lr", not_negative=True)
    critic_lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = option(
        "its schedule", default="constant"
    )
    critic_lr_warmup_iters: int = option("its steps of linear warm-up", default=0, not_negative=True)
    num_critic_only_steps: int = option(
        "first optimizer steps in which the critic alone learns", default=0, not_negative=True
    )
    value_clip: float | None = option(
        "values that go further than this from those before the rollout batch do not lower the loss; default: no bound",
        positive=True,
    )
    critic_load_hf: str | None = option(
        "start the critic from the layers of this Hugging Face directory; default: from the policy's", metavar="DIR"
    )
    critic_offload: bool = option(
        "keep the critic in host memory while it does not work: its weights, gradients and optimizer", default=False
    )
    correct_values: Literal["none", "mask", "weights"] = option(
        "what of the correction the critic's loss has: the rejection (mask), also the importance weights, or nothing; "
        "default: mask, and none where the correction is made in the policy's loss"
    )
