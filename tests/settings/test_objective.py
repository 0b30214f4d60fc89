"""Corrections and objectives that cannot be exact together are refused when the correction is made."""

import pytest

from megatron_rc import PolicyLossConfig, RolloutCorrection, RolloutCorrectionConfig
from megatron_rc.parallel import ParallelGroups

BYPASS = {"bypass_mode": True, "loss_type": "reinforce"}
INTERPOLATED = {"rollout_is": "token", "proximal_interpolation": True}
NORMALIZED = {"rollout_is": "token", "rollout_is_batch_normalize": True}
PROMPTS = {"rollout_is": "token", "rollout_rs": "group_any,token_k1", "rollout_rs_threshold": "0.5_2"}
ONE_PASS = {"one_pass": True}
AUXILIARY = {"has_auxiliary_losses": True}


@pytest.mark.parametrize(
    ("fields", "loss", "options", "message"),
    [
        (BYPASS | NORMALIZED, {"entropy_coef": 0.1}, {}, "entropy_coef=0.1"),
        (BYPASS | NORMALIZED, {"kl_coef": 0.1}, {}, "kl_coef=0.1"),
        (BYPASS | NORMALIZED, {}, AUXILIARY, "rejection_denominator"),
        (BYPASS | {"rollout_token_veto_threshold": 0.1}, {}, AUXILIARY, "rejection_denominator"),
        (BYPASS, {"algorithm": "ppo_clip"}, {}, "algorithm='ppo_clip'.*loss_type='reinforce'"),
        (BYPASS, {"dual_clip": 3.0}, {}, "dual_clip=3.0"),
        (INTERPOLATED | NORMALIZED, {"kl_coef": 0.1}, {}, "rollout_is_batch_normalize=True.*proximal_interpolation"),
        (INTERPOLATED | NORMALIZED, {}, AUXILIARY, "proximal_interpolation.*rejection_denominator"),
        ({"rollout_is": "token", "bypass_mode": True}, {}, ONE_PASS, "one_pass=True.*bypass_mode=True"),
        (INTERPOLATED, {}, ONE_PASS, "one_pass=True.*proximal_interpolation=True"),
        (PROMPTS, {}, ONE_PASS, "rollout_rs=group_any"),
        (NORMALIZED, {"kl_coef": 0.1}, ONE_PASS, "rollout_is_batch_normalize=True.*one_pass"),
    ],
)
def test_combinations_that_cannot_be_exact_are_errors(fields, loss, options, message):
    config = RolloutCorrectionConfig(**fields)
    with pytest.raises(ValueError, match=message):
        RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig(**loss), **options)


def test_an_interpolated_policy_goes_with_an_objective_of_sequences():
    config = RolloutCorrectionConfig(**INTERPOLATED)
    RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig(algorithm="gspo"))
