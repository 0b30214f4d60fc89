"""The memory that a dry run names is what PyTorch allocates when the same rank runs: real ranks, on a CPU."""

from functools import cache

import pytest
import transformers

from megatron_rc.launch.dry_run.memory import stage_memories
from megatron_rc.launch.flags.configure import configure
from tests.support.allocated import peak_bytes
from tests.support.fake_ranks import built_chunks, fake_groups, first_rank_of_stage
from tests.support.ranks import Layout
from tests.support.recorded_training import GPT2, LLAMA, run_config

COMMON = """--cpu --task=count_up --max-response-length=32 --seq-length=64 --vocab-size=2000 --micro-batch-size=4
--grpo-prompts-per-step=8 --grpo-group-size=2 --global-batch-size=16 --grpo-iterations=1 --train-iters=8 --lr=1e-4
--hidden-size=128 --ffn-hidden-size=384 --grpo-kl-beta=0 --rollout-is=token""".split()
EXPERTS = "--num-experts=4 --moe-ffn-hidden-size=192 --moe-token-dispatcher-type=alltoall".split()
LATENT = [word for word in LLAMA if "group" not in word]
LATENT += """--num-layers=5 --multi-latent-attention --q-lora-rank=48 --kv-lora-rank=32 --qk-head-dim=32
--qk-pos-emb-head-dim=16 --v-head-dim=24 --qk-layernorm --moe-layer-freq=[0]*2+[1]*3
--moe-shared-expert-intermediate-size=192 --moe-router-score-function=sigmoid --moe-router-enable-expert-bias""".split()
SINKS = [word for word in LLAMA if word not in ("--disable-bias-linear", "--swiglu")]
SINKS += """--softmax-type=learnable --window-size=15,0 --window-attn-skip-freq=2 --quick-geglu --glu-linear-offset=1
--activation-func-clamp-value=7""".split()
# Two micro-batches.
FEW = ["--grpo-prompts-per-step=4", "--global-batch-size=8"]
RECOMPUTED = "--recompute-granularity=full --recompute-method=uniform --recompute-num-layers=1".split()

CASES = {
    "llama": (Layout(), LLAMA, []),
    "gpt2-reference": (Layout(), GPT2, ["--grpo-kl-beta=0.01"]),
    "packed-sgd": (Layout(), LLAMA, ["--rl-use-sequence-packing", "--optimizer=sgd"]),
    "pipeline-untied": (Layout(pp=2), LLAMA, ["--untie-embeddings-and-output-weights"]),
    "virtual": (Layout(pp=2, vpp=True), LLAMA, []),
    "bf16-distributed": (Layout(dp=2), LLAMA, ["--bf16", "--use-distributed-optimizer"]),
    "tensor-sequence": (Layout(tp=2, sp=True), LLAMA, []),
    "critic": (Layout(pp=2), LLAMA, ["--advantage-estimator=gae", "--untie-embeddings-and-output-weights"]),
    "context-recomputed": (Layout(cp=2), LLAMA, RECOMPUTED),
    "latent": (Layout(pp=2, dp=2, ep=2), LATENT, [*EXPERTS, "--decoder-first-pipeline-num-layers=3"]),
    "latent-small": (Layout(), LATENT, [*EXPERTS, *FEW, "--hidden-size=256", "--num-attention-heads=8"]),
    "biases": (Layout(pp=2), LLAMA, ["--add-qkv-bias", "--qk-layernorm", "--kv-channels=24"]),
    "sinks": (Layout(dp=2, ep=2), SINKS, EXPERTS),
    "sinks-packed": (Layout(cp=2), SINKS, [*EXPERTS, "--rl-use-sequence-packing"]),
    "experts-fused": (Layout(dp=2, ep=2), LLAMA, [*EXPERTS, "--fused-linear-log-probs"]),
}
IN_SUITE = ("gpt2-reference", "virtual", "experts-fused", "latent-small")
MEASURED = [pytest.param(name, marks=[] if name in IN_SUITE else pytest.mark.long) for name in CASES]


def words_of(name, *more):
    layout, model, more_flags = CASES[name]
    return layout, [*model, *COMMON, *more_flags, *layout.flags(), *more]


@cache
def predicted(name, *more):
    layout, arguments = words_of(name, *more)
    return stage_memories(run_config(arguments, layout.world, engine=False))


def configured(name, *more):
    """For another machine, which may have GPUs."""
    layout, arguments = words_of(name, *more)
    return configure(arguments, layout.world, engine=False, elsewhere=True)[0]


@pytest.mark.parametrize("name", MEASURED)
def test_the_peak_is_that_of_a_real_rank(name, ranks):
    layout, arguments = words_of(name)
    measured = ranks.run(peak_bytes, layout, arguments)
    of_stage = layout.world // layout.pp
    for memory in predicted(name):
        for rank in range(memory.stage * of_stage, (memory.stage + 1) * of_stage):
            assert memory.peak == pytest.approx(measured[rank], rel=0.1), f"rank {rank}: {memory}"


def test_the_alignment_of_a_teachers_hidden_states_counts(ranks, tmp_path):
    """Many tokens and a wide teacher: its hidden states are more than the activations of a micro-batch."""
    teacher = transformers.LlamaConfig(
        vocab_size=2000, hidden_size=512, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.AutoModelForCausalLM.from_config(teacher).save_pretrained(tmp_path)
    arguments = [*LLAMA, *COMMON, "--grpo-prompts-per-step=64", "--num-layers=1", "--fused-linear-log-probs"]
    arguments += ["--policy-loss=distill", f"--teacher-load-hf={tmp_path}"]
    arguments += ["--teacher-prompt=python:tests.support.teacher_servers:with_hint"]
    (memory,) = stage_memories(run_config(arguments, 1, engine=False))
    (peak,) = ranks.run(peak_bytes, Layout(), arguments)
    assert memory.peak == pytest.approx(peak, rel=0.1), memory


# Each form of a layer, of embeddings and of an output layer once; recomputation, packing and optimizers change none.
BUILT = ["gpt2-reference", "pipeline-untied", "virtual", "tensor-sequence", "latent", "biases", "sinks"]


@pytest.mark.parametrize("name", BUILT)
def test_the_parameters_are_those_of_the_built_model(name):
    layout, arguments = words_of(name)
    config = run_config(arguments, layout.world, engine=False)
    for stage, memory in enumerate(predicted(name)):
        with fake_groups(config, first_rank_of_stage(config, stage)):
            parameters = [weight.numel() for chunk in built_chunks(config) for weight in chunk.parameters()]
        assert memory.parameters == sum(parameters), stage


def test_what_is_away_on_a_gpu_adds_what_its_own_work_needs_more():
    """Weights and gradients beside activations, or an optimizer alone; on a CPU there is nowhere else to go."""
    on_gpu = ("--transformer-impl=local", "--no-cpu")
    on_cpu = predicted("critic")
    with_critic, with_optimizer = (
        stage_memories(configured("critic", *on_gpu, away)) for away in ("--critic-offload", "--optimizer-offload")
    )
    without_offload = stage_memories(configured("critic", *on_gpu))
    for stays, critic, optimizer in zip(without_offload, with_critic, with_optimizer, strict=True):
        # Half of a critic's bytes are weights and gradients.
        dynamic = critic.activations + critic.logits
        at_work = max(stays.critic // 2 + critic.activations, stays.critic)
        assert critic.critic == max(0, at_work - dynamic) < stays.critic
        assert optimizer.optimizer == max(0, stays.optimizer - optimizer.activations - optimizer.logits)
        assert optimizer.optimizer < stays.optimizer
    assert predicted("critic", "--critic-offload")[0].critic == on_cpu[0].critic
    assert predicted("critic", "--optimizer-offload")[0].optimizer == on_cpu[0].optimizer
    config = configured("gpt2-reference", *on_gpu)
    assert [memory.reference for memory in stage_memories(config)] == [0], "a reference policy waits in host memory"


def test_what_each_part_is():
    (memory,) = predicted("gpt2-reference")
    assert memory.weights == memory.gradients == memory.reference == 4 * memory.parameters
    assert memory.optimizer == 8 * memory.parameters
    tokens = 4 * 64
    assert memory.logits == 2 * tokens * 2048 * 4, "and their gradient; the vocabulary is padded"
    assert predicted("packed-sgd")[0].optimizer == 4 * predicted("packed-sgd")[0].parameters
    half = predicted("bf16-distributed")[0]
    assert (half.optimizer, half.weights) == (12 * half.parameters // 2, 2 * half.parameters)
    # A critic's head is one row; the policy's output layer is a matrix.
    first, last = predicted("critic")
    assert first.critic == 16 * first.parameters
    assert last.critic == 16 * (last.parameters - 2048 * 128 + 128)
    pipeline = predicted("pipeline-untied")
    assert [(stage.critic, stage.in_flight) for stage in pipeline] == [(0, 2), (0, 1)]


def test_uneven_stages_hold_what_their_layers_hold():
    first, last = predicted("pipeline-untied", "--decoder-first-pipeline-num-layers=1")
    even = predicted("pipeline-untied")
    assert first.parameters + last.parameters == sum(stage.parameters for stage in even)
    assert first.parameters < even[0].parameters
