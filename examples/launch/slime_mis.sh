#!/usr/bin/env bash
# slime's example against the mismatch: normalised weights of tokens, and rejection of tokens and of whole responses
# with a token that is far off. Qwen3-4B with long answers, on one machine with 8 GPUs.
#   MODEL=Qwen3-4B TRAIN=dapo-math-17k.jsonl examples/launch/slime_mis.sh [more flags, as --dry-run]
# After run-qwen3-4b-mis.sh and mis.yaml in slime's examples/train_infer_mismatch_helper, 21 August 2026 (624b824).
set -eu
flags=(
    --load-hf "${MODEL:?"a Hugging Face directory"}"      # --hf-checkpoint
    --tensor-model-parallel-size 2 --sequence-parallel    # as in slime, like the next four
    --context-parallel-size 2
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --bf16 --transformer-impl transformer_engine --use-distributed-optimizer --fused-linear-log-probs

    --prompt-data "${TRAIN:?"a file of JSON lines"}"      # --prompt-data
    --input-key prompt --label-key label --apply-chat-template
    --reward math-verify                                  # --rm-type deepscaler
    --grpo-prompts-per-step 32                            # --rollout-batch-size 32
    --grpo-group-size 8                                   # --n-samples-per-prompt 8
    --max-response-length 8192                            # --rollout-max-response-len 8192
    --seq-length 9216                                     # --max-tokens-per-gpu 9216
    --rl-default-temperature 1                            # --rollout-temperature 1
    --global-batch-size 256 --grpo-iterations 1
    --train-iters 3000                                    # --num-rollout 3000, each one optimizer step
    --rl-use-sequence-packing                             # --use-dynamic-batch-size
    --rl-sequence-packing-bin-size 18432                  # --max-tokens-per-gpu 9216 on each of two context ranks
    --advantage-estimator grpo
    --grpo-clamp-eps-lower 0.2                            # --eps-clip 0.2
    --grpo-clamp-eps-upper 0.28                           # --eps-clip-high 0.28
    --grpo-kl-beta 0                                      # --kl-loss-coef 0.00
    # --rollout-num-gpus-per-engine 1: one server for each of the two replicas
    --rollout-engine sglang-server
    --rollout-url "${ENGINES:-http://engines:8000,http://engines:8001}"
    --rollout-weights-dir "${WEIGHTS:-/shared/rollout-weights}"

    --rollout-is token                                    # use_tis: true, tis_level: token
    # tis_mode: truncate, the meaning of one number as threshold; slime does not use tis_lower_bound: 0.5
    --rollout-is-threshold 2                              # tis_upper_bound: 2.0
    --rollout-is-batch-normalize                          # tis_batch_normalize: true; here over the global batch
    --rollout-rs token_k1                                 # use_rs: true, rs_level: token
    --rollout-rs-threshold 0.5_2.0                        # rs_lower_bound: null, rs_upper_bound: null, so the weights'
    --rollout-token-veto-threshold 1e-4                   # rs_veto_threshold: 1.0e-4
    --rejection-denominator original                      # slime divides by the tokens before rejection
)
# Megatron's tensor parallelism needs one queue of work a GPU.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
exec python -m megatron_rc.launch --nproc-per-node "${GPUS:-8}" "${flags[@]}" "$@"
