"""Settings of rewards, advantages, the critic and the reference policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rc.advantages.estimators import GROUP_ESTIMATORS
from megatron_rc.launch.python_specs import is_python_spec
from megatron_rc.launch.run_config.options import Section, option

# Estimators of tokens, and of responses whose advantages are whitened over tokens; launch/training/batches has them.
TOKEN_ESTIMATORS = ("optimal-token-baseline", "reinforce-pp", "reinforce-pp-baseline", "gae", "remax", "distillation")


def known_estimator(word: str) -> str:
    """Return the value of --advantage-estimator; ValueError unless it is an estimator or a ``python:`` object."""
    estimators = (*GROUP_ESTIMATORS, *TOKEN_ESTIMATORS)
    if word not in estimators and not is_python_spec(word):
        raise ValueError(f"invalid choice: {word!r} (choose from {', '.join(estimators)}, or python:pkg.module:OBJECT)")
    return word


@dataclass(frozen=True, kw_only=True)
class RewardSection(Section):
    """Rule that scores responses, its processes, and responses without an end."""

    reward: str | None = option(
        "rule that scores responses: exact, math-verify or python:pkg.module:function; default: the task's",
        metavar="RULE",
    )
    reply: str | None = option(
        "function that replies to a turn, python:pkg.module:function, if --max-turns is above 1; default: the task's "
        "method reply",
        metavar="FUNCTION",
    )
    reward_workers: int | None = option(
        "scoring processes of each replica, except for exact and the rule of count_up, and as many for replies with "
        "--max-turns above 1; default: CPU cores per rank, at most 8"
    )
    reward_timeout: float = option("seconds that scoring one response, or one reply, may take", default=10.0)
    reward_errors: Literal["continue", "stop"] = option(
        "for a response that cannot be scored: use --reward-on-error, or end the run", default="continue"
    )
    reward_on_error: float = option("reward of a response that cannot be scored", default=0.0, any_sign=True)
    overlong: Literal["keep", "mask", "penalise"] = option(
        "a response that is cut at --max-response-length: train on it, leave it out, or subtract a penalty that grows "
        "over the last --overlong-buffer tokens",
        default="keep",
    )
    overlong_buffer: int | None = option("tokens before --max-response-length over which the penalty grows")
    overlong_penalty_factor: float = option("penalty at --max-response-length", default=1.0)

    def __post_init__(self) -> None:
        """Check that a penalty has tokens over which it grows."""
        super().__post_init__()
        if self.overlong == "penalise" and self.overlong_buffer is None:
            self.refuse("overlong", because="needs --overlong-buffer")


@dataclass(frozen=True, kw_only=True)
class AdvantageSection(Section):
    """Estimator of advantages, its baseline, and changes to rewards before it."""

    advantage_estimator: str = option(
        "estimator of advantages from rewards, or python:pkg.module:OBJECT; see docs/presets.md",
        default="grpo",
        choices=(*GROUP_ESTIMATORS, *TOKEN_ESTIMATORS),
        read=known_estimator,
    )
    gamma: float = option("discount of later rewards, 0 to 1", default=1.0, not_negative=True, most=1)
    gae_lambda: float = option("λ of generalized advantage estimation, 0 to 1", default=1.0, not_negative=True, most=1)
    gpg_f_norm: float = option("divisor of GPG's advantages", default=1.0)
    advantage_scope: Literal["all", "accepted"] = option(
        "responses in the baselines, and tokens in the whitening: all, or those that are not rejected", default="all"
    )
    advantage_baseline: Literal["group", "weighted"] = option(
        "each response counts alike in the baseline of its prompt, or by its importance weight: the mean reward of the "
        "engine's policy, or an estimate of the trainer's",
        default="group",
    )
    advantage_baseline_weights: Literal["ratio", "correction"] = option(
        "importance weight of a response in its prompt's baseline: the ratio of the whole response, or the mean of the "
        "correction's weights over its tokens",
        default="ratio",
    )
    advantage_baseline_bound: float = option("upper bound of a response's ratio in its prompt's baseline", default=10.0)
    kl_in_reward: float = option(
        "coefficient of the KL to the reference policy, subtracted from each token's reward",
        default=0.0,
        not_negative=True,
    )
    kl_in_reward_estimator: Literal["k1", "k2", "k3", "abs"] = option(
        "estimator of the KL in the rewards", default="k1"
    )
    reward_scaling: Literal["none", "std", "mean-std"] = option(
        "divide rewards by their std over the run so far; mean-std subtracts their mean first", default="none"
    )
    reward_clip: float | None = option("clip rewards to ± this number, after any scaling; default: no clipping")

    @property
    def needs_the_correction(self) -> bool:
        """Whether advantages are estimated again when the correction of the rollout batch is known."""
        by_correction = self.advantage_baseline == "weighted" and self.advantage_baseline_weights == "correction"
        return self.advantage_scope == "accepted" or by_correction or self.needs_squares

    @property
    def needs_squares(self) -> bool:
        """Whether the estimator needs Σπ² of every token's distribution."""
        return self.advantage_estimator == "optimal-token-baseline"

    @property
    def needs_teachers(self) -> bool:
        """Whether the advantages are the teachers' log-probs of the sampled tokens minus the policy's."""
        return self.advantage_estimator == "distillation"

    @property
    def kl_metric(self) -> str:
        """Name of the metric with the mean KL of the sampled tokens that the advantages are made with."""
        return "distillation/sampled_kl" if self.needs_teachers else "reward/kl"

    @property
    def whitens(self) -> bool:
        """Whether advantages get mean 0 and standard deviation 1 over the tokens of a rollout batch."""
        return self.advantage_estimator in ("reinforce-pp", "reinforce-pp-baseline", "gae")


@dataclass(frozen=True, kw_only=True)
class CriticSection(Section):
    """Value model with the policy's layout, and an optimizer and a schedule of its own; absent without GAE."""

    critic_lr: float = option("highest learning rate of the critic; default: --lr")
    critic_min_lr: float = option("lowest learning rate of the critic; default: --min-lr", not_negative=True)
    critic_lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = option(
        "schedule of the critic's learning rate", default="constant"
    )
    critic_lr_warmup_iters: int = option("optimizer steps of the critic's linear warm-up", default=0, not_negative=True)
    num_critic_only_steps: int = option(
        "first optimizer steps, in which only the critic learns", default=0, not_negative=True
    )
    value_clip: float | None = option(
        "largest change of a value over a rollout batch that still lowers the critic's loss; default: no bound"
    )
    critic_load_hf: str | None = option(
        "Hugging Face directory of the critic's layers at the start; default: the policy's layers", metavar="DIR"
    )
    critic_offload: bool = option(
        "keep the critic's weights, gradients and optimizer in host memory while it does not work"
    )
    correct_values: Literal["none", "mask", "weights"] = option(
        "correction of the critic's loss: none, the rejection mask, or mask and importance weights; default: mask, or "
        "none if the policy's loss makes the correction"
    )

    def __post_init__(self) -> None:
        """Check that the learning rate falls."""
        super().__post_init__()
        if self.critic_min_lr > self.critic_lr:
            self.refuse("critic_min_lr", because=f"must be at most {self.typed('critic_lr')}")


@dataclass(frozen=True, kw_only=True)
class ReferenceSection(Section):
    """Weights of the reference policy; without any of these flags it is the policy at the start of the run."""

    ref_load: str | None = option(
        "checkpoints of the reference policy, of which the newest is read; default: the policy at the start",
        metavar="DIR",
    )
    ref_load_hf: str | None = option(
        "Hugging Face directory of the reference policy of the KL; default: the policy at the start", metavar="DIR"
    )
    ref_update_interval: int | None = option(
        "optimizer steps after which the reference becomes the current policy; default: never"
    )

    def __post_init__(self) -> None:
        """Check that one flag names the weights."""
        super().__post_init__()
        if self.ref_load and self.ref_load_hf:
            self.refuse("ref_load", "ref_load_hf", because="are two reference policies: drop one of them")
