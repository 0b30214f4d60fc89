#!/usr/bin/env bash
# Everything is measured and nothing corrected; all else as in token_weights.sh.
#   MODEL=Qwen2.5-7B TRAIN=train.jsonl examples/launch/metrics_only.sh [more flags, as --dry-run]
# After examples/rollout_importance_sampling/README.md of verl, example 2, 13 October 2025 (21271aa).
set -eu
flags=(
    --no-rollout-is-apply                                 # algorithm.rollout_is=false
    --rollout-is token                                    # algorithm.rollout_is_level=token
    # algorithm.rollout_is_mode=truncate, the meaning of one number as threshold
    --rollout-is-threshold 2                              # algorithm.rollout_is_threshold=2.0
)
exec "$(dirname "$0")/token_weights.sh" "${flags[@]}" "$@"
