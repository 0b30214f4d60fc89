"""Settings of advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rc.advantages.group import GROUP_ESTIMATORS
from megatron_rc.launch.run_config.options import option


@dataclass(frozen=True, kw_only=True)
class AdvantageSection:
    """Estimator of advantages, its baseline, and changes to rewards before it."""

    advantage_estimator: str = option(
        "estimator of advantages from rewards; see docs/advantages.md",
        default="grpo",
        choices=(*GROUP_ESTIMATORS, "reinforce-pp", "reinforce-pp-baseline", "gae", "remax"),
    )
    gamma: float = option(
        "discount of later rewards, 0 to 1",
        default=1.0,
        needs="advantage_estimator=reinforce-pp|gae",
        not_negative=True,
        most=1,
    )
    gae_lambda: float = option(
        "λ of generalized advantage estimation, 0 to 1",
        default=1.0,
        needs="advantage_estimator=gae",
        not_negative=True,
        most=1,
    )
    gpg_f_norm: float = option(
        "divisor of GPG's advantages", default=1.0, needs="advantage_estimator=gpg", positive=True
    )
    advantage_scope: Literal["all", "accepted"] = option(
        "responses in the baselines, and tokens in the whitening of advantages: all, or those that are not rejected",
        default="all",
        needs="!advantage_estimator=remax",
    )
    kl_in_reward: float = option(
        "coefficient of the KL to the reference policy that is subtracted from the reward of each token",
        default=0.0,
        not_negative=True,
    )
    kl_in_reward_estimator: Literal["k1", "k2", "k3"] = option(
        "estimator of the KL in the rewards", default="k1", needs="kl_in_reward"
    )
    reward_scaling: Literal["none", "std", "mean-std"] = option(
        "divide rewards by their standard deviation over the run so far; mean-std subtracts their mean first",
        default="none",
    )
    reward_clip: float | None = option(
        "clip rewards to ± this number, after any scaling; default: no clipping", positive=True
    )

    @property
    def whitens(self) -> bool:
        """Whether advantages get mean 0 and standard deviation 1 over the tokens of a rollout batch."""
        return self.advantage_estimator in ("reinforce-pp", "reinforce-pp-baseline", "gae")
