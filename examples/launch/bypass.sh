#!/usr/bin/env bash
# Bypass mode: π_old is the engine's policy, and no forward pass computes it. REINFORCE with weights of responses, on
# one machine with 8 GPUs.
#   MODEL=Qwen2.5-7B TRAIN=train.jsonl examples/launch/bypass.sh [more flags, as --dry-run]
# After examples/rollout_correction/run_with_rollout_corr.sh of verl, 14 January 2026 (97eac90).
set -eu
flags=(
    --config "$(dirname "$0")/qwen2_5_7b.yaml"
    --load-hf "${MODEL:?"a Hugging Face directory"}"      # actor_rollout_ref.model.path
    --prompt-data "${TRAIN:?"a file of JSON lines"}"      # data.train_files
    --reward math-verify
    --seq-length 6144                                     # data.max_prompt_length=2048 and
    --max-response-length 4096                            # data.max_response_length=4096
    --advantage-estimator rloo                            # algorithm.adv_estimator=rloo
    # RLOO compares responses to one prompt. The script leaves actor_rollout_ref.rollout.n at 1; this is 4 of them.
    --grpo-group-size 4
    --global-batch-size 128                               # actor_rollout_ref.actor.ppo_mini_batch_size=32 prompts
    --lr 5e-7                                             # actor_rollout_ref.actor.optim.lr=5e-7

    --bypass-mode                                         # algorithm.rollout_correction.bypass_mode=true
    --loss-type reinforce                                 # algorithm.rollout_correction.loss_type=reinforce
    --rollout-is sequence                                 # algorithm.rollout_correction.rollout_is=sequence
    --rollout-is-threshold 2                              # algorithm.rollout_correction.rollout_is_threshold=2.0
    --rollout-is-batch-normalize                          # algorithm.rollout_correction.rollout_is_batch_normalize=true
    # algorithm.rollout_correction.rollout_rs=null, which is the default here
)
# Megatron's tensor parallelism needs one queue of work a GPU.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
exec python -m megatron_rc.launch --nproc-per-node "${GPUS:-8}" "${flags[@]}" "$@"
