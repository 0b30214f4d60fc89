"""Settings that cannot work: one sentence with the flag, its value and what it collides with."""

import re

import pytest

from megatron_rc.launch.errors import flag
from megatron_rc.launch.flags.checks import rollouts
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.flags.parser import build_parser, needs_of
from megatron_rc.launch.run_config import flag_options
from megatron_rc.launch.run_config.options import is_met
from megatron_rc.records.rollout import save_rollouts
from tests.launch.flags.test_latent_attention import HEADS, LATENT
from tests.support.recorded_training import GPT2, LLAMA, flags, recorded_batch
from tests.support.refusals import refused

USER = "python:tests.support.user_rewards"
# Short forms of words in the rows.
SHORT = {
    "PP": "--pipeline-model-parallel-size=2",
    "ALONE": "--grpo-group-size=1 --grpo-prompts-per-step=16",
    "SERVERS=": "--rollout-weights-dir=w --rollout-url=http://a:1,http://b:1 --rollout-engine=",
}
# Model, words in front, whether the run samples, and rows: [@RANKS] WORDS [:: FRAGMENT | FRAGMENT]. The sentence has
# every fragment; without fragments it has the last flag with its value.
TABLES = {
    "layout": (
        LLAMA,
        "",
        True,
        """
        --tensor-model-parallel-size=2 :: --tensor-model-parallel-size 2 | 2 processes, got 1
        @6 --tensor-model-parallel-size=2 --context-parallel-size=2 :: = 4 | 6 processes
        @4 --tensor-model-parallel-size=4 :: --num-query-groups 2 | --tensor-model-parallel-size = 4
        @3 --pipeline-model-parallel-size=3 :: --num-layers 4 | --pipeline-model-parallel-size = 3
        --num-layers-per-virtual-pipeline-stage=0 :: must be positive
        --num-layers-per-virtual-pipeline-stage=1 :: --pipeline-model-parallel-size above 1
        @2 PP --num-layers-per-virtual-pipeline-stage=3 :: --num-layers 4 | 2 · | = 6
        @2 PP --num-layers-per-virtual-pipeline-stage=1 --micro-batch-size=16 :: of 2 micro
        @2 --context-parallel-size=2 --seq-length=18 :: --seq-length 18 | 2 · --context-parallel-size = 4
        --sequence-parallel :: --sequence-parallel | --tensor-model-parallel-size 1
        @2 --tensor-model-parallel-size=2 --sequence-parallel --seq-length=15 :: --seq-length 15 | --tensor-model
        @2 --padded-vocab-size=15 --tensor-model-parallel-size=2 :: --padded-vocab-size 15 | --tensor-model
        --padded-vocab-size=12 :: --padded-vocab-size 12 | 13
        --vocab-size=5 :: --vocab-size 5 | 13
        --global-batch-size=5 :: --grpo-prompts-per-step 4 · --grpo-group-size 4 = 16 | --global-batch-size 5
        --micro-batch-size=3 :: --global-batch-size 16 | --micro-batch-size 3
        @2 --grpo-prompts-per-step=3 :: --grpo-prompts-per-step 3 | 2 data-parallel
        --rl-use-sequence-packing --rl-sequence-packing-bin-size=8 :: --rl-sequence-packing-bin-size 8 | --seq-length 16
        @2 --rl-use-sequence-packing --rl-sequence-packing-bin-size=18 --context-parallel-size=2 :: bin-size 18
        --seq-length=64 --max-position-embeddings=32 :: --seq-length 64 | --max-position-embeddings 32
        --seq-length=10 :: --max-response-length 10 | --seq-length 10
        --seq-length=11 :: --seq-length 11 | --task count_up | of 2 tokens
        --kv-channels=7 :: --kv-channels 7 | --rotary-percent
        --transformer-impl=transformer_engine
        --recompute-granularity=full :: --recompute-method | --recompute-num-layers
        """,
    ),
    "values": (
        LLAMA,
        "",
        True,
        """
        --attention-dropout=0.1
        --lr=0 :: --lr 0.0 must be positive
        --min-lr=1 :: --min-lr 1.0 | --lr 0.02
        --adam-beta1=1 :: --adam-beta1 1.0 must be below 1
        --tokenizer-type=HuggingFaceTokenizer :: HuggingFaceTokenizer | --tokenizer-model | --load-hf
        --tokenizer-type=CharacterTokenizer --tokenizer-model=DIR :: --tokenizer-model DIR | --tokenizer-type
        --apply-chat-template
        ALONE --dynamic-sampling=2 :: --dynamic-sampling 2 | --grpo-group-size 1
        ALONE --advantage-estimator=grpo-passk :: --advantage-estimator grpo-passk | --grpo-group-size 1
        --rollout-is=batch :: rollout_is='batch'
        --task=chess
        --tokenizer-model=/nowhere :: /nowhere
        --load-rollouts=/nowhere
        --config=/tmp
        --policy-loss=cispo --bypass-mode :: --policy-loss cispo | --loss-type cispo
        --load=/nowhere/at/all
        --save=. --save-interval=6 --save-retain-interval=9 :: --save-retain-interval 9 | --save-interval 6
        --metric-prefix=step :: --metric-prefix 'step'
        --rollout-top-k=1 :: --rollout-top-k 1 | 2 and more
        --entropy-over-support :: --entropy-over-support | --rollout-min-p
        @2 --num-experts=4 --expert-tensor-parallel-size=2 :: --expert-tensor-parallel-size 2 must divide the 1 tensor
        --num-experts=4 --moe-grouped-gemm :: --moe-grouped-gemm | --transformer-impl transformer_engine
        --rollout-staleness=3 :: --rollout-staleness 3 | 2 optimizer steps
        --ref-load-hf=nowhere
        --record-memory-history
        --profile --train-iters=5 :: --profile-step-end 12 | --train-iters 5
        --profile --profile-ranks 4 :: --profile-ranks 4
        --advantage-scope=accepted --bypass-mode :: --advantage-scope accepted | --bypass-mode
        --train-samples=100 --train-iters=6 :: --train-iters 6 | --train-samples
        --train-samples=8 :: --train-samples 8 | --global-batch-size, got 16
        --lr-warmup-iters=100 :: --lr-warmup-iters 100 | --lr-decay-iters 100
        --grpo-prompts-per-step=1000000000 :: = 4000000000 sequences | at most 2097152
        --grpo-prompts-per-step=2048 --global-batch-size=4 --micro-batch-size=1 :: 2048 batches | --global-batch-size 4
        """,
    ),
    "idle": (
        LLAMA,
        "",
        True,
        """
        --save=. --keep-last=2 :: --keep-last 2 | --save-interval
        --rollout-engine=vllm-server --rollout-url=http://a:1 :: --rollout-engine vllm-server | --rollout-weights-dir
        SERVERS=vllm-server :: --rollout-url | 2 servers for 1 data-parallel
        @2 SERVERS=sglang-server --rollout-model=m :: --rollout-model m | --rollout-engine sglang-server | vllm-server
        SERVERS=vllm-server --rollout-url=http://a:1/v1 :: --rollout-url: | 'http://a:1/v1' | http://host:port
        SERVERS=vllm-server --rollout-weight-transfer=nccl :: --rollout-weight-transfer nccl | GPUs | gloo
        SERVERS=sglang-server --rollout-weight-transfer=ipc :: --rollout-weight-transfer ipc | vllm-server | gloo
        SERVERS=sglang-server --rl-partial-rollouts --rollout-staleness=4 :: --rl-partial-rollouts | vllm-server
        --rl-partial-rollouts --rollout-staleness=4 --max-turns=2 :: --rl-partial-rollouts | --max-turns 2
        --rollout-colocate --rollout-staleness=4 :: --rollout-colocate | --rollout-staleness 4
        --ref-update-interval=2 --grpo-kl-beta=0 :: --ref-update-interval 2 | --grpo-kl-beta
        --grpo-clamp-eps-lower=0.1 --policy-loss=reinforce :: --grpo-clamp-eps-lower 0.1 | reinforce | cispo
        --ppo-dual-clip=3 --rollout-correction-preset=bypass_pg_is :: --ppo-dual-clip | algorithm='reinforce'
        --advantage-scope=accepted --rollout-rs=none --rollout-rs-threshold=none :: --advantage-scope | --rollout-rs
        --no-rollout-is-apply --advantage-baseline=weighted --advantage-baseline-weights=correction :: --rollout-is
        @2 --expert-model-parallel-size=2 :: --expert-model-parallel-size 2 | --num-experts
        """,
    ),
    "experts": (
        HEADS,
        "--num-experts=8 --moe-router-topk=4 --moe-ffn-hidden-size=24",
        False,
        """
        @2 --num-experts=3 --expert-model-parallel-size=2 :: --num-experts 3 | --expert-model-parallel-size = 2
        @2 --expert-model-parallel-size=4 :: --expert-model-parallel-size 4 | the 2 tensor · data
        --expert-tensor-parallel-size=2 :: --expert-tensor-parallel-size 2 | the 1 tensor
        --moe-router-topk=1 :: --moe-router-topk 1 | [2, 8]
        @2 --tensor-model-parallel-size=2 :: --sequence-parallel
        @2 --tensor-model-parallel-size=2 --sequence-parallel --moe-ffn-hidden-size=9 :: --moe-ffn-hidden-size 9
        @2 --expert-model-parallel-size=2 --rl-use-sequence-packing :: allgather | --rl-use-sequence-packing
        --moe-token-dispatcher-type=flex
        --moe-aux-loss-coeff=0.1 --bypass-mode --loss-type=reinforce :: rejection_denominator=original
        --moe-layer-freq=[0]+[1]*4 :: --moe-layer-freq [0]*1+[1]*4 | 5 layers | --num-layers is 4
        --moe-layer-freq=[0]*4 :: --moe-layer-freq [0]*4
        --moe-router-num-groups=3 --moe-router-group-topk=2 :: --num-experts 8 | --moe-router-num-groups = 3
        --moe-router-num-groups=4 --moe-router-group-topk=1 :: --moe-router-group-topk 1 | --moe-router-topk 4
        --moe-router-bias-update-rate=0.1
        --moe-router-load-balancing-type=seq_aux_loss --rl-use-sequence-packing :: seq_aux_loss | --rl-use-sequence
        @2 --moe-z-loss-coeff=0.1 --calculate-per-token-loss --rl-use-sequence-packing :: --calculate-per-token-loss
        --moe-enable-routing-replay --moe-router-dtype=fp64 :: --moe-enable-routing-replay | --moe-router-dtype fp64
        --moe-enable-routing-replay --bf16 :: float32 | bfloat16 | --moe-router-dtype fp32
        --moe-enable-routing-replay --bf16 --rollout-engine=vllm --moe-router-score-function=sigmoid :: -dtype fp32
        --moe-enable-routing-replay --bf16 --rollout-engine=vllm --moe-router-dtype=fp32 :: --moe-router-dtype fp32 | bf
        --moe-enable-routing-replay --moe-routing-replay-source=old --bypass-mode :: -source old | --bypass-mode
        --moe-enable-routing-replay --rollout-engine=vllm :: --moe-enable-routing-replay | GPU | --rollout-engine vllm
        """,
    ),
    "biased experts": (
        GPT2,
        "--num-experts=4",
        False,
        "@2 --tensor-model-parallel-size=2 --sequence-parallel :: --disable-bias-linear",
    ),
    "latent": (
        HEADS,
        LATENT,
        False,
        """
        --group-query-attention --num-query-groups=2 :: --group-query-attention | --multi-latent-attention
        --position-embedding-type=learned_absolute
        --rotary-percent=0.5
        --qk-l2-norm :: --qk-l2-norm | --multi-latent-attention
        --qk-pos-emb-head-dim=5
        @2 --tensor-model-parallel-size=2 :: --tensor-model-parallel-size 2 | --sequence-parallel
        """,
    ),
    "critic": (
        LLAMA,
        "--advantage-estimator=gae --rollout-is=none --rollout-is-threshold=none",
        False,
        """
        --correct-values=mask --bypass-mode :: --correct-values mask | --bypass-mode
        --correct-values=weights :: --correct-values weights | --rollout-is
        """,
    ),
    "rewards": (
        LLAMA,
        "",
        True,
        f"""
        --reward=exactly
        --reward={USER}:NUMBER :: --reward | int
        --reward-on-error=nan
        --reward={USER}:too_few :: --reward | prompt, response, label and record
        """,
    ),
    "evaluations": (
        LLAMA,
        f"--task={USER}:Doubles --reward=exact --eval-interval=2",
        True,
        """
        --task=count_up :: --task count_up holds no problems out
        --eval-interval=3 :: --eval-interval 3 | the 2 opt | 4 · --grpo-group-size 4 · --grpo-iterations 2 / --global
        --eval-interval=6 --rollout-staleness=4 :: --eval-interval 6 | --rollout-staleness 4
        @2 --eval-problems=1 :: --eval-problems 1 | 2 data-parallel
        """,
    ),
    "recorded": (
        LLAMA,
        "--load-rollouts=RECORDS --train-iters=2",
        True,
        """
        --overlong=penalise --overlong-buffer=4 :: --overlong penalise | --load-rollouts
        --rollout-engine=vllm :: --rollout-engine vllm | --load-rollouts
        --advantage-estimator=remax :: --advantage-estimator remax | --load-rollouts
        --train-iters=4 :: --train-iters 4 | 1 rollout batches | 2 optimizer steps
        --proximal-interpolation :: --proximal-interpolation | --rollout-staleness
        """,
    ),
    "megatron": (
        LLAMA,
        "",
        False,
        """
        --moe-input-jitter-eps=0.1 --num-experts=4 :: --moe-input-jitter-eps 0.1 | π_old and π_θ
        --fp8-param-gather :: --fp8-param-gather
        --pipeline-model-parallel-layout=Et|L :: --pipeline-model-parallel-size above 1
        @2 PP --pipeline-model-parallel-layout=Et|L :: Et|L with --num-layers 4 | must match
        @2 PP --pipeline-model-parallel-layout=||| :: ||| with --num-layers 4 | Et|ttL
        @2 PP --pipeline-model-parallel-layout=Ettt|tL --num-layers-per-virtual-pipeline-stage=1 :: drop --num-layers-p
        --cuda-graph-impl=local
        --fp16 --bf16 :: --fp16 and --bf16
        --fp16 --num-experts=4 :: --fp16 with --num-experts
        --fp8-format=hybrid :: --fp8-format hybrid | delayed
        --tp-comm-overlap :: --tp-comm-overlap | --transformer-impl transformer_engine
        --optimizer-cpu-offload :: --optimizer-cpu-offload | GPU
        --overlap-param-gather :: --overlap-param-gather | --use-distributed-optimizer
        --recompute-granularity=selective --recompute-modules layernorm :: --recompute-modules layernorm | --transf
        --recompute-granularity=selective --recompute-modules nothing :: Megatron-Core refuses | --recompute-modules
        --defer-embedding-wgrad-compute --fused-linear-log-probs :: --defer-embedding-wgrad-compute | --fused-linear
        --no-initialization :: --no-initialization | --load
        --no-rope-freq=often :: --no-rope-freq | 'often'
        --decoder-first-pipeline-num-layers=1 :: --pipeline-model-parallel-size above 1
        @2 PP --decoder-first-pipeline-num-layers=4 :: --num-layers 4 | leaves 0
        @2 PP --decoder-first-pipeline-num-layers=1 --decoder-last-pipeline-num-layers=2 :: leaves 1
        @2 PP --decoder-first-pipeline-num-layers=2 --num-layers-per-virtual-pipeline-stage=1 :: virtual
        """,
    ),
    "gelu": (GPT2, "", False, "--bias-activation-fusion :: --bias-activation-fusion | --openai-gelu"),
    "exported": (LLAMA, "--save-hf=hf", False, "--add-qkv-bias --qk-layernorm :: no Hugging Face architecture"),
}
ROWS = [
    (model, front, samples, row.strip())
    for model, front, samples, rows in TABLES.values()
    for row in rows.splitlines()
    if row.strip()
]


@pytest.mark.parametrize(("model", "front", "samples", "row"), ROWS, ids=[row for *_, row in ROWS])
def test_one_sentence_names_the_flag(tmp_path, model, front, samples, row):
    words, _, fragments = row.partition(" :: ")
    ranks, words = words.split(" ", 1) if words.startswith("@") else ("@1", words)
    if "RECORDS" in front + words:
        (tmp_path / "records").mkdir()
        save_rollouts(recorded_batch(0), tmp_path / "records" / "step-0000000-replica-0000.safetensors")
    more = f"{front} {words}"
    for short, long in (SHORT | {"RECORDS": f"{tmp_path}/records"}).items():
        more = re.sub(rf"(?<![A-Z]){short}(?![A-Z])", long, more)
    base = flags(tmp_path / "runs", *more.split(), model=model)
    if "--train-samples" in words and "--train-iters" not in words:
        base.remove("--train-iters=100")
    with refused(fragments or words.split()[-1].replace("=", " ", 1)):
        configure(base, int(ranks[1:]), engine=samples)


DEFAULTS = build_parser().parse_args([])
# Options with the first condition that the defaults do not meet.
UNMET = [
    (option, next((need for need in needs_of(option) if not is_met(need, DEFAULTS)), ""))
    for _, option in flag_options().values()
]


def test_no_option_has_lost_its_need():
    assert sum(bool(need) for _, need in UNMET) >= 100


@pytest.mark.parametrize(
    ("option", "need"), [pair for pair in UNMET if pair[1]], ids=lambda part: getattr(part, "flag", part)
)
def test_a_flag_without_the_one_that_it_needs_is_refused(tmp_path, option, need):
    word = flag(f"no_{option.flag}" if option.default is True else option.flag)
    value = (*option.choices, "{}" if option.metavar == "JSON" else "0.5" if option.kind is float else "1")[0]
    words = [word] if option.kind is bool else [word, value]
    name, _, values = need.removeprefix("!").partition("=")
    with refused(f"{word} | {flag(name)} | {values.replace('|', ' | ')}"):
        configure([*flags(tmp_path, model=GPT2), *words], 1, engine=False)


def test_what_does_nothing_in_megatron_passes(tmp_path):
    """Such flags go into its configs, as every other field does; nor is a switch refused that is off anyway."""
    words = "--optimizer=sgd --adam-beta1=0.8 --cross-entropy-loss-fusion --tp-comm-overlap-ag --moe-grouped-gemm "
    words += "--qk-clip --muon-momentum=0.5 --overlap-p2p-communication --recompute-modules mlp --fp8-recipe=mxfp8 "
    assert configure(flags(tmp_path, *f"{words} --no-critic-offload --no-async-save".split()), 1)


def test_an_engine_that_does_not_report_its_kept_tokens_is_refused(tmp_path, monkeypatch):
    """vLLM in this process, which need not be installed here."""
    monkeypatch.setattr(rollouts, "require", lambda *_: None)
    with refused("--rollout-top-p | --rollout-engine vllm | on a GPU alone"):
        configure(flags(tmp_path, "--rollout-engine=vllm", "--rollout-top-p=0.9"), 1)
