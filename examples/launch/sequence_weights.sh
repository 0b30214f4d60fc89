#!/usr/bin/env bash
# Weights of whole responses, at most 5; all else as in token_weights.sh.
#   MODEL=Qwen2.5-7B TRAIN=train.jsonl examples/launch/sequence_weights.sh [more flags, as --dry-run]
# After examples/rollout_importance_sampling/README.md of verl, example 4, 13 October 2025 (21271aa).
set -eu
flags=(
    # algorithm.rollout_is=true: the weights are applied, which is the default here
    --rollout-is sequence                                 # algorithm.rollout_is_level=sequence
    # algorithm.rollout_is_mode=truncate, the meaning of one number as threshold
    --rollout-is-threshold 5                              # algorithm.rollout_is_threshold=5.0
    --rollout-token-veto-threshold 1e-4                   # algorithm.rollout_is_veto_threshold=1e-4
)
exec "$(dirname "$0")/token_weights.sh" "${flags[@]}" "$@"
