#!/usr/bin/env bash
# Bypass mode with PPO's clipping of π_θ / π_rollout, and rejection by two criteria; all else as in bypass.sh. The
# weights are measured, not applied: the clipped ratio is already the correction.
#   MODEL=Qwen2.5-7B TRAIN=train.jsonl examples/launch/bypass_rejection.sh [more flags, as --dry-run]
# After examples/rollout_correction/run_with_rollout_corr_multi_rs.sh of verl, 14 January 2026 (97eac90).
set -eu
flags=(
    --advantage-estimator grpo                            # algorithm.adv_estimator=grpo
    --lr 3e-6                                             # actor_rollout_ref.actor.optim.lr=3e-6
    --ppo-dual-clip 3                                     # actor_rollout_ref.actor.clip_ratio_c, verl's default

    # algorithm.rollout_correction.bypass_mode=true, as in bypass.sh
    --loss-type ppo_clip                                  # algorithm.rollout_correction.loss_type=ppo_clip
    --rollout-is token                                    # algorithm.rollout_correction.rollout_is=token
    --rollout-is-threshold 2                              # algorithm.rollout_correction.rollout_is_threshold=2.0
    # algorithm.rollout_correction.rollout_is_batch_normalize=false
    --no-rollout-is-batch-normalize
    --rollout-rs token_k1,seq_max_k2                      # algorithm.rollout_correction.rollout_rs=token_k1,seq_max_k2
    # algorithm.rollout_correction.rollout_rs_threshold=0.6_1.6,2.5: verl's first pair bounds 1/ρ, this one ρ
    --rollout-rs-threshold 0.625_1.6666666666666667,2.5
    # verl's engines count the tokens of the global batch before the loss rejects any
    --rejection-denominator original
)
exec "$(dirname "$0")/bypass.sh" "${flags[@]}" "$@"
