#!/usr/bin/env bash
# The weight of a response is the geometric mean of its ratios if that is close to 1, else 0; all else as in
# token_weights.sh. (The mode "clip" of 13 October is "mask" today.)
#   MODEL=Qwen2.5-7B TRAIN=train.jsonl examples/launch/geometric_weights.sh [more flags, as --dry-run]
# After examples/rollout_importance_sampling/README.md of verl, example 3, 13 October 2025 (21271aa).
set -eu
flags=(
    # algorithm.rollout_is=true: the weights are applied, which is the default here
    --rollout-is geometric                                # algorithm.rollout_is_level=geometric
    --rollout-is-mode mask                                # algorithm.rollout_is_mode=clip
    --rollout-is-threshold 0.9998_1.0002                  # algorithm.rollout_is_threshold_lower=0.9998 and
                                                          # algorithm.rollout_is_threshold=1.0002
    --rollout-token-veto-threshold 1e-4                   # algorithm.rollout_is_veto_threshold=1e-4
)
exec "$(dirname "$0")/token_weights.sh" "${flags[@]}" "$@"
