#!/usr/bin/env bash
# Sixteen machines with 8 GPUs each: DAPO on Qwen2.5-32B, with normalised weights of responses, and rejection by their
# geometric mean. On each machine, from 0 to 15:
#   NODE_RANK=0 MASTER=node-0 MODEL=Qwen2.5-32B TRAIN=dapo-math-17k.jsonl examples/launch/multi_node.sh [more flags]
# With NODE_RANK=0, MASTER=localhost and --dry-run it prints on any machine the needs of each rank. Under Slurm
# launch/slurm.sh replaces the last command: it takes a launch file first, such as qwen2_5_7b.yaml, then flags.
# After recipe/dapo/run_dapo_qwen2.5_32b_rollout_corr.sh of verl, 3 December 2025 (2f2996b).
set -eu
engines=http://engines-0:8000,http://engines-1:8000,http://engines-2:8000,http://engines-3:8000
flags=(
    --load-hf "${MODEL:?"a Hugging Face directory"}"      # actor_rollout_ref.model.path
    # verl: FSDP and ulysses_sequence_parallel_size=8; here TP 8 × CP 4, which leaves 4 replicas.
    --tensor-model-parallel-size 8 --sequence-parallel --context-parallel-size 4
    --bf16 --transformer-impl transformer_engine --use-distributed-optimizer --fused-linear-log-probs
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1

    --prompt-data "${TRAIN:?"a file of JSON lines"}"      # data.train_files
    --reward math-verify                                  # reward_model.reward_manager=dapo
    --seq-length 22528                                    # data.max_prompt_length=2048 and
    --max-response-length 20480                           # data.max_response_length=20480
    --grpo-prompts-per-step 512                           # data.train_batch_size=512
    --grpo-group-size 16                                  # actor_rollout_ref.rollout.n=16
    --global-batch-size 512                               # actor_rollout_ref.actor.ppo_mini_batch_size=32 prompts
    --grpo-iterations 1                                   # actor_rollout_ref.actor.ppo_epochs, verl's default
    --train-iters 4800                                    # optimizer steps: 16 for each of 300 rollout batches
    --dynamic-sampling 10                                 # algorithm.filter_groups.max_num_gen_batches=10
    --overlong penalise                                   # reward_model.overlong_buffer.enable=True
    --overlong-buffer 4096                                # reward_model.overlong_buffer.len=4096
    --overlong-penalty-factor 1                           # reward_model.overlong_buffer.penalty_factor=1.0
    --rl-use-sequence-packing                             # actor_rollout_ref.actor.use_dynamic_bsz=True
    --rl-sequence-packing-bin-size 22528                  # actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528
    --advantage-estimator grpo                            # algorithm.adv_estimator=grpo
    --grpo-clamp-eps-lower 0.2                            # actor_rollout_ref.actor.clip_ratio_low=0.2
    --grpo-clamp-eps-upper 0.28                           # actor_rollout_ref.actor.clip_ratio_high=0.28
    --ppo-dual-clip 10                                    # actor_rollout_ref.actor.clip_ratio_c=10.0
    --grpo-kl-beta 0                                      # actor_rollout_ref.actor.kl_loss_coef=0.0
    --loss-aggregation token-mean                         # actor_rollout_ref.actor.loss_agg_mode=token-mean
    --lr 1e-6 --lr-warmup-iters 10                        # actor_rollout_ref.actor.optim.lr, lr_warmup_steps
    --lr-decay-style constant --weight-decay 0.1          # actor_rollout_ref.actor.optim.weight_decay=0.1
    # actor_rollout_ref.rollout.tensor_model_parallel_size=4: four GPUs for each of the servers, one a replica
    --rollout-engine vllm-server                          # actor_rollout_ref.rollout.name=vllm
    --rollout-url "${ENGINES:-$engines}"
    --rollout-weights-dir "${WEIGHTS:-/shared/rollout-weights}"

    --rollout-is sequence                                 # algorithm.rollout_correction.rollout_is=sequence
    --rollout-is-threshold 2                              # algorithm.rollout_correction.rollout_is_threshold=2.0
    --rollout-is-batch-normalize                          # algorithm.rollout_correction.rollout_is_batch_normalize=true
    --rollout-rs seq_mean_k1                              # algorithm.rollout_correction.rollout_rs=geometric
    --rollout-rs-threshold 0.99_1.01                      # algorithm.rollout_correction.rollout_rs_threshold_lower=0.99
                                                          # algorithm.rollout_correction.rollout_rs_threshold=1.01
    # algorithm.rollout_correction.rollout_token_veto_threshold=1e-4
    --rollout-token-veto-threshold 1e-4
)
# Megatron's tensor parallelism needs one queue of work a GPU.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
exec python -m megatron_rc.launch --nnodes "${NODES:-16}" --nproc-per-node "${GPUS:-8}" \
    --node-rank "${NODE_RANK:?"number of this machine, from 0"}" --master-addr "${MASTER:?"address of machine 0"}" \
    "${flags[@]}" "$@"
