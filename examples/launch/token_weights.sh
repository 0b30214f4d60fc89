#!/usr/bin/env bash
# Weights of tokens, at most 2, with a critic: verl's first example, on one machine with 8 GPUs.
#   MODEL=Qwen2.5-7B TRAIN=train.jsonl examples/launch/token_weights.sh [more flags, as --dry-run]
# After examples/rollout_importance_sampling/run_with_rollout_is.sh of verl, 13 October 2025 (21271aa).
set -eu
flags=(
    --config "$(dirname "$0")/qwen2_5_7b.yaml"
    --load-hf "${MODEL:?"a Hugging Face directory"}"      # actor_rollout_ref.model.path
    --prompt-data "${TRAIN:?"a file of JSON lines"}"      # data.train_files
    --reward math-verify
    --seq-length 1536                                     # data.max_prompt_length=512 and
    --max-response-length 1024                            # data.max_response_length=1024
    --grpo-group-size 1                                   # actor_rollout_ref.rollout.n, verl's default
    --global-batch-size 32                                # actor_rollout_ref.actor.ppo_mini_batch_size=32
    --lr 5e-7                                             # actor_rollout_ref.actor.optim.lr=5e-7
    --ppo-dual-clip 3                                     # actor_rollout_ref.actor.clip_ratio_c, verl's default

    --advantage-estimator gae                             # algorithm.adv_estimator=gae
    --gamma 1                                             # algorithm.gamma=1.0
    --gae-lambda 0.95                                     # algorithm.lam=0.95
    --critic-lr 1e-5                                      # critic.optim.lr, verl's default
    --value-clip 0.5                                      # critic.cliprange_value, verl's default

    # algorithm.rollout_is=true: the weights are applied, which is the default here
    --rollout-is token                                    # algorithm.rollout_is_level=token
    # algorithm.rollout_is_mode=truncate, the meaning of one number as threshold
    --rollout-is-threshold 2                              # algorithm.rollout_is_threshold=2.0
    --rollout-token-veto-threshold 1e-4                   # algorithm.rollout_is_veto_threshold=1e-4
    # Defaults of that verl: rejected tokens stay in the denominators, and metrics are mismatch/…
    --rejection-denominator original
    --metric-prefix mismatch/
)
# Megatron's tensor parallelism needs one queue of work a GPU.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
exec python -m megatron_rc.launch --nproc-per-node "${GPUS:-8}" "${flags[@]}" "$@"
