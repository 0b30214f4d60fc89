"""What the critic's flags leave open, from the policy's."""

from __future__ import annotations

import argparse

from megatron_rc.launch.run_config.critic import CriticSection
from megatron_rc.launch.run_config.options import options_of
from megatron_rc.settings.config import RolloutCorrectionConfig

WITH_CRITIC = "gae"


def resolve_critic(args: argparse.Namespace, correction: RolloutCorrectionConfig) -> bool:
    """Whether the run has a critic; its flags are then filled in."""
    if args.advantage_estimator != WITH_CRITIC:
        return False
    for option in options_of(CriticSection):
        if getattr(args, option.flag) is None:
            setattr(args, option.flag, option.default)
    args.critic_lr = args.lr if args.critic_lr is None else args.critic_lr
    args.critic_min_lr = min(args.min_lr, args.critic_lr) if args.critic_min_lr is None else args.critic_min_lr
    if args.correct_values is None:
        args.correct_values = "none" if correction.corrects_in_loss else "mask"
    return True
