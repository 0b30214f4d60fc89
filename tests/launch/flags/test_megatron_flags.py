"""Flags that Megatron-LM has too mean the same here: its names, types and defaults, written out (August 2026)."""

import pytest

from megatron_rc.launch.flags.parser import LOSS_DEFAULTS, build_parser, defaults, long_options
from megatron_rc.launch.run_config.layer_patterns import expert_layers

# (type, default): names. A switch has no type; what it is when it is not given is its default.
MEGATRON = {
    (int, None): "q-lora-rank moe-shared-expert-intermediate-size moe-router-num-groups moe-router-group-topk "
    "num-layers-per-virtual-pipeline-stage num-layers hidden-size ffn-hidden-size num-attention-heads "
    "kv-channels seq-length max-position-embeddings vocab-size padded-vocab-size num-experts moe-ffn-hidden-size "
    "micro-batch-size global-batch-size train-iters recompute-num-layers lr-decay-iters save-interval eval-interval "
    "save-retain-interval train-samples lr-decay-samples lr-wsd-decay-iters lr-wsd-decay-samples",
    (int, 0): "lr-warmup-iters lr-warmup-samples profile-ranks timing-log-level",
    (int, 1): "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size "
    "expert-model-parallel-size num-query-groups",
    (int, 2): "moe-router-topk grpo-group-size grpo-iterations",
    (int, 10): "distributed-timeout-minutes profile-step-start",
    (int, 12): "profile-step-end",
    (int, 32): "grpo-prompts-per-step kv-lora-rank",
    (int, 64): "qk-pos-emb-head-dim",
    (int, 100): "log-interval",
    (int, 128): "make-vocab-size-divisible-by qk-head-dim v-head-dim",
    (int, 1234): "seed",
    (int, 10000): "rotary-base",
    (float, None): "moe-z-loss-coeff moe-router-topk-scaling-factor lr rl-importance-sampling-truncation-coef "
    + "lr-warmup-fraction start-weight-decay end-weight-decay",
    (float, 0.0): "mscale-all-dim lr-warmup-init moe-aux-loss-coeff min-lr grpo-entropy-term-weight",
    (float, 1e-8): "adam-eps",
    (float, 1e-5): "norm-epsilon",
    (float, 0.001): "grpo-kl-beta moe-router-bias-update-rate",
    (float, 0.01): "weight-decay grpo-clamp-eps-lower grpo-clamp-eps-upper",
    (float, 0.02): "init-method-std",
    (float, 0.1): "attention-dropout hidden-dropout",
    (float, 0.9): "adam-beta1 sgd-momentum",
    (float, 0.999): "adam-beta2",
    (float, 8.0): "rope-scaling-factor",
    (float, 1.0): "rotary-percent rotary-scaling-factor mscale clip-grad rl-default-temperature",
    (str, None): "recompute-granularity recompute-method save load tensorboard-dir wandb-project wandb-exp-name "
    "wandb-entity wandb-save-dir "
    "tokenizer-type tokenizer-model",
    (str, "learned_absolute"): "position-embedding-type",
    (str, "LayerNorm"): "normalization",
    (str, "transformer_engine"): "transformer-impl",
    (str, "aux_loss"): "moe-router-load-balancing-type",
    (str, "allgather"): "moe-token-dispatcher-type",
    (str, "softmax"): "moe-router-score-function",
    (str, "yarn"): "rope-type",
    (str, "adam"): "optimizer",
    (str, "linear"): "lr-decay-style",
    (str, "torch_dist"): "ckpt-format",
    (str, "exponential"): "lr-wsd-decay-style",
    (str, "constant"): "weight-decay-incr-style",
    (None, False): "sequence-parallel use-distributed-optimizer group-query-attention swiglu add-qkv-bias qk-layernorm "
    "untie-embeddings-and-output-weights moe-router-pre-softmax bf16 fp16 calculate-per-token-loss finetune "
    "rl-use-sequence-packing rl-partial-rollouts rl-inference-logprobs-is-correction disable-bias-linear "
    "no-save-optim no-load-optim "
    "use-rope-scaling openai-gelu multi-latent-attention moe-router-enable-expert-bias "
    "moe-enable-routing-replay override-opt-param-scheduler use-checkpoint-opt-param-scheduler check-for-spiky-loss "
    "check-for-large-grads async-save verify-integrity profile record-memory-history log-timers-to-tensorboard",
    (expert_layers, "1"): "moe-layer-freq",
    (None, True): "check-for-nan-in-loss-and-grad",
}
# docs/launching.md says so, with the reason.
DIFFERENT = {
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
    "log-interval": 1,
    "micro-batch-size": 1,
    "moe-router-bias-update-rate": 0.0,
    "transformer-impl": None,
    "verify-integrity": True,
}
# Not given, until the library or the profiler fills in Megatron-LM's default.
FILLED_IN = """rl-inference-logprobs-is-correction profile-step-start
profile-step-end profile-ranks timing-log-level""".split()
SHARED = {name: meaning for meaning, names in MEGATRON.items() for name in names.split()}


@pytest.fixture(scope="module")
def actions():
    return long_options(build_parser())


@pytest.mark.parametrize("name", SHARED)
def test_a_flag_of_megatron_is_megatrons(actions, name):
    action, (kind, default) = actions[name], SHARED[name]
    assert (action.nargs == 0) == (kind is None)
    assert getattr(action.type, "__wrapped__", action.type) in (kind, None if kind is str else kind)
    if name in FILLED_IN:
        assert defaults()[action.dest] is None
    else:
        usual = {**defaults(), **LOSS_DEFAULTS}
        assert usual[action.dest] == DIFFERENT.get(name, default)
        assert name not in DIFFERENT or DIFFERENT[name] != default
    assert action.choices is None or default is None or default in action.choices
