"""How rewards become advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rc.advantages.group import GROUP_ESTIMATORS
from megatron_rc.launch.run_config.options import option


@dataclass(frozen=True, kw_only=True)
class AdvantageSection:
    """The estimator, what its baselines are made of, and what is done to rewards before it sees them."""

    advantage_estimator: str = option(
        "from rewards to advantages; docs/advantages.md",
        default="grpo",
        choices=(*GROUP_ESTIMATORS, "reinforce-pp", "reinforce-pp-baseline", "gae", "remax"),
    )
    gamma: float = option(
        "discount of later rewards, with --advantage-estimator reinforce-pp or gae", default=1.0, not_negative=True
    )
    gae_lambda: float = option("λ of --advantage-estimator gae", default=1.0, not_negative=True)
    gpg_f_norm: float = option("what --advantage-estimator gpg divides advantages by", default=1.0, positive=True)
    advantage_scope: Literal["all", "accepted"] = option(
        "what a response is measured by: all responses to its prompt (and all tokens, where advantages are whitened), "
        "or those alone that the rejection leaves",
        default="all",
    )
    kl_in_reward: float = option(
        "coefficient of the KL to the reference policy that is taken off the reward of each token",
        default=0.0,
        not_negative=True,
    )
    kl_in_reward_estimator: Literal["k1", "k2", "k3"] = option("of that KL", default="k1")
    reward_scaling: Literal["none", "std", "mean-std"] = option(
        "divide rewards by their standard deviation over the run so far, or take their mean off first", default="none"
    )
    reward_clip: float | None = option(
        "rewards, scaled or not, are clipped to ± this; default: not clipped", positive=True
    )

    @property
    def whitens(self) -> bool:
        """Whether advantages are brought to mean 0 and deviation 1 over the tokens of a rollout batch."""
        return self.advantage_estimator in ("reinforce-pp", "reinforce-pp-baseline", "gae")
