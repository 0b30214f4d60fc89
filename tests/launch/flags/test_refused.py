"""Settings that cannot work: one sentence with the flag, its value and what it collides with."""

import dataclasses
import re

import pytest

from megatron_rc.launch.checkpoint_folders import TRACKER
from megatron_rc.launch.errors import missing_packages_noted
from megatron_rc.launch.flags.checks import rollouts
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.flags.unused import Rule
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
        --tensor-model-parallel-size=2 :: --tensor-model-parallel-size 2 | of 2 processes, got 1
        @6 --tensor-model-parallel-size=2 --context-parallel-size=2 :: a multiple of 4 processes, got 6
        @4 --tensor-model-parallel-size=4 :: --num-query-groups 2 | --tensor-model-parallel-size = 4
        @3 --pipeline-model-parallel-size=3 :: --num-layers 4 | --pipeline-model-parallel-size = 3
        @2 PP --num-layers-per-virtual-pipeline-stage=0 :: must be positive
        @2 PP --num-layers-per-virtual-pipeline-stage=3 :: --num-layers 4 | 2 · | = 6
        @2 PP --num-layers-per-virtual-pipeline-stage=1 --micro-batch-size=16 :: of 2 micro
        @2 --context-parallel-size=2 --seq-length=18 :: --seq-length 18 | 2 · --context-parallel-size = 4
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
        --kv-channels=7 :: --kv-channels 7 | --rotary-percent
        --seq-length=11 :: --seq-length 11 | --task count_up | of 2 tokens
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
        --lr -1e-3 :: --lr -0.001 must be positive
        --lr-warmup-init -1.e-3 :: --lr-warmup-init -0.001 must be 0 or more
        --run-name=a/../../b :: --run-name a/../../b | --runs-dir
        --run-name=/tmp/a :: --run-name /tmp/a | --runs-dir
        --min-lr=1 :: --min-lr 1.0 | --lr 0.02
        --adam-beta1=1 :: --adam-beta1 1.0 must be below 1
        --tokenizer-type=HuggingFaceTokenizer :: HuggingFaceTokenizer | --tokenizer-model | --load-hf
        --tokenizer-type=CharacterTokenizer --tokenizer-model=DIR :: --tokenizer-model DIR | --tokenizer-type
        --apply-chat-template
        ALONE --advantage-estimator=grpo-passk :: --advantage-estimator grpo-passk | --grpo-group-size 1
        --rollout-is=batch :: rollout_is='batch'
        --task=chess
        --tokenizer-model=/nowhere :: /nowhere
        --load-rollouts=/nowhere
        --config=/tmp
        --policy-loss=cispo --bypass-mode :: --policy-loss cispo | --loss-type cispo
        --load=/nowhere/at/all
        --load=EMPTY :: --load EMPTY: the folder holds no checkpoint: name another one
        --ref-load=EMPTY :: --ref-load EMPTY: the folder holds no checkpoint: name another one
        --load=HF :: --load HF: the folder holds no checkpoint | --load-hf HF
        --ref-load=HF :: --ref-load HF: the folder holds no checkpoint | --ref-load-hf HF
        --load=HALF :: --load HALF | names checkpoint 3, which is not complete
        --save=. --save-interval=6 --save-retain-interval=9 :: --save-retain-interval 9 | --save-interval 6
        --metric-prefix=step :: --metric-prefix 'step'
        --rollout-top-k=1 :: --rollout-top-k 1 | 2 and more
        @2 --num-experts=4 --expert-tensor-parallel-size=2 :: --expert-tensor-parallel-size 2 must divide the 1 tensor
        --num-experts=4 --moe-grouped-gemm :: --moe-grouped-gemm | --transformer-impl transformer_engine
        --rollout-staleness=3 :: --rollout-staleness 3 | 2 optimizer steps
        --ref-load-hf=nowhere
        --seed=9223372036854775808 :: --seed 9223372036854775808 must be at most 9223372036854775807
        --advantage-scope=accepted --bypass-mode :: --advantage-scope accepted | --bypass-mode
        --train-samples=100 --train-iters=6 :: --train-iters 6 | --train-samples
        --train-samples=8 :: --train-samples 8 | --global-batch-size, got 16
        --lr-warmup-iters=100 :: --lr-warmup-iters 100 | --lr-decay-iters 100
        --lr-warmup-iters=2 --lr-warmup-fraction=0.1 :: --lr-warmup-iters 2 | --lr-warmup-fraction 0.1
        --lr-warmup-init=1 :: --lr-warmup-init 1.0 | --lr 0.02
        --lr-decay-style=WSD :: --lr-decay-style WSD | --lr-wsd-decay-iters
        --weight-decay-incr-style=cosine :: --weight-decay-incr-style cosine | --start-weight-decay
        --optimizer=sgd --use-distributed-optimizer :: --use-distributed-optimizer | --optimizer sgd
        --save-interval=2 :: --save-interval 2 | --save DIR
        --ckpt-step=2 :: --ckpt-step 2 | --load DIR
        --ref-load=a --ref-load-hf=b :: --ref-load a | --ref-load-hf b
        --overlong=penalise :: --overlong penalise | --overlong-buffer
        --overlong=penalise --overlong-buffer=11 :: --overlong-buffer 11 | --max-response-length 10
        --load=. --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler :: --override-opt-param-scheduler
        @2 --profile --profile-ranks 0 2 :: --profile-ranks 2 | 0 to 1
        @2 --expert-tensor-parallel-size=2 :: --expert-tensor-parallel-size 2 | --num-experts
        --stop-if lr :: --stop-if 'lr'
        --stop-if lr>1e999 :: --stop-if 'lr>1e999' | 1e999 is no finite number
        """,
    ),
    "engines": (
        LLAMA,
        "",
        True,
        """
        --rollout-engine=vllm-server --rollout-url=http://a:1 :: --rollout-engine vllm-server | --rollout-weights-dir
        SERVERS=vllm-server :: --rollout-url | 2 servers for 1 data-parallel
        SERVERS=vllm-server --rollout-url=http://a:1/v1 :: --rollout-url: | 'http://a:1/v1' | http://host:port
        SERVERS=vllm-server --rollout-weight-transfer=nccl :: --rollout-weight-transfer nccl | GPUs | gloo
        SERVERS=sglang-server --rollout-weight-transfer=ipc :: --rollout-weight-transfer ipc | vllm-server | gloo
        SERVERS=vllm-server --rl-partial-rollouts --rollout-staleness=4 --max-turns=2 :: --rl-partial | --max-turns 2
        SERVERS=vllm-server --rl-partial-rollouts :: --rl-partial-rollouts | --rollout-staleness
        --ppo-dual-clip=3 --rollout-correction-preset=bypass_pg_is :: --ppo-dual-clip | algorithm='reinforce'
        --advantage-scope=accepted --rollout-rs=none --rollout-rs-threshold=none :: --advantage-scope | --rollout-rs
        --no-rollout-is-apply --advantage-baseline=weighted --advantage-baseline-weights=correction :: --rollout-is
        """,
    ),
    "experts": (
        HEADS,
        "--num-experts=8 --moe-router-topk=4 --moe-ffn-hidden-size=24",
        False,
        """
        @2 --num-experts=5 --expert-model-parallel-size=2 :: --num-experts 5 | --expert-model-parallel-size = 2
        @2 --expert-model-parallel-size=4 :: --expert-model-parallel-size 4 | the 2 tensor · data
        --expert-tensor-parallel-size=2 :: --expert-tensor-parallel-size 2 | the 1 tensor
        --moe-router-topk=1 :: --moe-router-topk 1 | [2, 8]
        --num-experts=1 :: --num-experts 1 must be at least 2 | the weight of a single expert is always 1
        @2 --tensor-model-parallel-size=2 :: --sequence-parallel
        @2 --tensor-model-parallel-size=2 --sequence-parallel --moe-ffn-hidden-size=9 :: --moe-ffn-hidden-size 9
        @2 --expert-model-parallel-size=2 --rl-use-sequence-packing :: allgather | --rl-use-sequence-packing
        --moe-token-dispatcher-type=flex
        --moe-layer-freq=[0]*4 :: --moe-layer-freq [0]*4
        --moe-aux-loss-coeff=0.1 --bypass-mode --loss-type=reinforce :: rejection_denominator=original
        --moe-layer-freq=[0]+[1]*4 :: --moe-layer-freq [0]*1+[1]*4 | 5 layers | --num-layers is 4
        --moe-router-num-groups=3 :: --moe-router-num-groups 3 | --moe-router-group-topk
        --moe-router-num-groups=3 --moe-router-group-topk=2 :: --num-experts 8 | --moe-router-num-groups = 3
        --moe-router-num-groups=4 --moe-router-group-topk=1 :: --moe-router-group-topk 1 | --moe-router-topk 4
        --moe-router-bias-update-rate=0.1
        --moe-router-load-balancing-type=seq_aux_loss --rl-use-sequence-packing :: seq_aux_loss | --rl-use-sequence
        @2 --moe-z-loss-coeff=0.1 --calculate-per-token-loss --rl-use-sequence-packing :: --calculate-per-token-loss
        --moe-enable-routing-replay --bf16 --moe-router-dtype=fp64 :: --moe-enable-routing-replay | float64
        --moe-enable-routing-replay --bf16 :: float32 | bfloat16 | --moe-router-dtype fp32
        --moe-enable-routing-replay --bf16 --rollout-engine=vllm --moe-router-score-function=sigmoid :: -dtype fp32
        --moe-enable-routing-replay --bf16 --rollout-engine=vllm --moe-router-dtype=fp32 :: --moe-router-dtype | bf
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
        --position-embedding-type=learned_absolute
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
        --critic-min-lr=1 --critic-lr-decay-style=linear :: --critic-min-lr 1.0 | --critic-lr 0.02
        --num-critic-only-steps=100 :: --num-critic-only-steps 100 | --train-iters 100
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
        --pipeline-model-parallel-layout=Et|L :: --pipeline-model-parallel-layout | --pipeline-model-parallel-size 1
        @2 PP --pipeline-model-parallel-layout=Et|L :: Et|L with --num-layers 4 | must match
        @2 PP --pipeline-model-parallel-layout=||| :: ||| with --num-layers 4 | Et|ttL
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
        --window-size=5 :: --window-size | 127,0 | '5'
        --window-size=4,0 --window-attn-skip-freq=[1]*3 :: --window-attn-skip-freq [1]*3 is of 3 layers
        @2 PP --decoder-first-pipeline-num-layers=4 :: --decoder-first-pipeline-num-layers 4 | --num-layers 4
        @2 PP --decoder-first-pipeline-num-layers=5 :: --decoder-first-pipeline-num-layers 5 | --num-layers 4
        @3 --pipeline-model-parallel-size=3 --decoder-last-pipeline-num-layers=1 :: --decoder-last-pipeline-num-layers 1
        @2 PP --decoder-first-pipeline-num-layers=1 --decoder-last-pipeline-num-layers=2 :: -first-pipeline-num-layers 1
        @2 PP --decoder-first-pipeline-num-layers=2 --num-layers-per-virtual-pipeline-stage=1 :: virtual
        """,
    ),
    "gelu": (
        GPT2,
        "",
        False,
        """
        --bias-activation-fusion :: --bias-activation-fusion | --openai-gelu
        --recompute-granularity=selective --recompute-modules mlp :: --recompute-modules mlp | --disable-bias-linear
        """,
    ),
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
    arguments, _, fragments = row.partition(" :: ")
    ranks, arguments = arguments.split(" ", 1) if arguments.startswith("@") else ("@1", arguments)
    folders = made_folders(tmp_path)
    if "RECORDS" in front + arguments:
        save_rollouts(recorded_batch(0), tmp_path / "records" / "step-0000000-replica-0000.safetensors")
    more = with_long_forms(f"{front} {arguments}", SHORT | folders)
    fragments = with_long_forms(fragments, folders)
    base = flags(tmp_path / "runs", *more.split(), model=model)
    if "--train-samples" in arguments and "--train-iters" not in arguments:
        base.remove("--train-iters=100")
    with refused(fragments or arguments.split()[-1].replace("=", " ", 1)):
        configure(base, int(ranks[1:]), engine=samples)


def made_folders(tmp_path):
    """Folders by their words in the rows: of records, an empty one, a Hugging Face directory, half a checkpoint."""
    folders = {word: tmp_path / word.lower() for word in ("RECORDS", "EMPTY", "HF", "HALF")}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    (folders["HF"] / "config.json").write_text("{}")
    (folders["HALF"] / TRACKER).write_text("3")
    return {word: str(folder) for word, folder in folders.items()}


def with_long_forms(text, forms):
    for short, long in forms.items():
        text = re.sub(rf"(?<![A-Z]){short}(?![A-Z])", long, text)
    return text


def test_a_run_does_not_read_the_folder_of_its_own_bad_batches(tmp_path):
    """It renames this folder at its start."""
    with refused(f"--load-rollouts {tmp_path}/a/../run/bad | --run-name than run"):
        configure(flags(tmp_path, "--run-name=run", f"--load-rollouts={tmp_path}/a/../run/bad"), 1)


def test_what_does_nothing_in_megatron_passes(tmp_path):
    """Such flags go into its configs, as every other field does; nor is a switch refused that is off anyway."""
    arguments = "--optimizer=sgd --adam-beta1=0.8 --cross-entropy-loss-fusion --tp-comm-overlap-ag --moe-grouped-gemm "
    arguments += "--qk-clip --muon-momentum=0.5 --overlap-p2p-communication --recompute-modules mlp --fp8-recipe=mxfp8 "
    assert configure(flags(tmp_path, *f"{arguments} --no-critic-offload --no-async-save".split()), 1)


def test_stages_that_leave_layers_out_are_refused_for_machines_with_transformer_engine(tmp_path):
    """Megatron-Core cannot check them here: Transformer Engine is not installed."""
    arguments = "--no-cpu --transformer-impl=transformer_engine --pipeline-model-parallel-size=4 --num-layers=27"
    ends = "--decoder-first-pipeline-num-layers"
    with missing_packages_noted(), refused(f"{ends} 4 | --num-layers 27 | --pipeline-model-parallel-size 4"):
        configure(flags(tmp_path, *arguments.split(), f"{ends}=4"), 4, engine=False, elsewhere=True)
    # 3 layers, and three stages of 8.
    with missing_packages_noted():
        assert configure(flags(tmp_path, *arguments.split(), f"{ends}=3"), 4, engine=False, elsewhere=True)


def test_memory_is_not_shared_with_an_engine_that_samples_ahead(tmp_path):
    arguments = (
        "--no-cpu --transformer-impl=local --rollout-engine=vllm --rollout-colocate --rollout-staleness=4".split()
    )
    with missing_packages_noted(), refused("--rollout-colocate | --rollout-staleness 4"):
        configure(flags(tmp_path, *arguments), 1, elsewhere=True)


def test_an_engine_that_does_not_report_its_kept_tokens_is_refused(tmp_path, monkeypatch):
    """vLLM in this process, which need not be installed here."""
    monkeypatch.setattr(rollouts, "require", lambda *_: None)
    with refused("--rollout-top-p | --rollout-engine vllm | on a GPU alone"):
        configure(flags(tmp_path, "--rollout-engine=vllm", "--rollout-top-p=0.9"), 1)


# The model, flags that do nothing, flags beside them, and what the line says that they need.
UNUSED = [
    (
        GPT2,
        "--rope-scaling-factor=4 --moe-router-topk=4 --beta-fast=3",
        "",
        "--use-rope-scaling | --num-experts | --mul",
    ),
    (GPT2, "--openai-gelu", "--quick-geglu", "--swiglu and --quick-geglu"),
    (
        GPT2,
        "--openai-gelu --sequence-parallel --num-query-groups=2",
        "--swiglu",
        "--swiglu | tensor parallel | --group-query",
    ),
    (LLAMA, "--keep-last=2 --profile-ranks=0 --critic-lr=1", "--save=save", "--save-interval | --profile | gae"),
    (LLAMA, "--kl-estimator=k1 --ref-update-interval=2", "--grpo-kl-beta=0", "--grpo-kl-beta above 0 | --kl-in-reward"),
    (LLAMA, "--grpo-clamp-eps-lower=0.1", "--policy-loss=reinforce", "an objective with bounds"),
    (LLAMA, "--rollout-engine=vllm --rollout-url=a --max-turns=3", "--load-rollouts=RECORDS", "not --load-rollouts"),
    (LLAMA, "--rollout-stop=a --rollout-skip-special-tokens", "--load-rollouts=RECORDS", "not --load-rollouts"),
    (
        LLAMA,
        "--rollout-model=m --rollout-max-versions=2 --eval-samples=4",
        "",
        "vllm-server | --rl-partial | --eval-in",
    ),
    (LLAMA, "--rl-partial-rollouts --rollout-url=http://a:1", "--rollout-engine=transformers", "vllm-server"),
    (LLAMA, "--tools-key=tools --chat-template-kwargs={}", "", "--prompt-data | --apply-chat-template"),
    (
        LLAMA,
        "--always-score --doctor-interval=1000",
        "--proximal-interpolation --rollout-staleness=2",
        "before the loss | --train-iters",
    ),
    (LLAMA, "--attribution-check --attribution-nodes=2", "", "--attribution-interval"),
    (LLAMA, "--moe-enable-routing-replay", "", "--num-experts"),
    (
        LLAMA,
        "--attribution-interval=1 --attribution-nodes=2",
        "--load-rollouts=RECORDS",
        "not --load-rollouts | --attribution-interval",
    ),
    (LLAMA, "--attribution-interval=1", "--rollout-staleness=1", "no --rollout-staleness"),
    (LLAMA, "--profile", "", "--train-iters"),
    (LLAMA, "--no-async-save --rotary-percent=1.0 --critic-lr-decay-style=constant", "", ""),
]


@pytest.mark.parametrize(("model", "unused", "more", "needs"), UNUSED, ids=[words for _, words, _, _ in UNUSED])
def test_flags_that_do_nothing_are_one_line_and_change_nothing(tmp_path, caplog, model, unused, more, needs):
    """Given values that are the defaults are not named."""
    (tmp_path / "records").mkdir()
    save_rollouts(recorded_batch(0), tmp_path / "records" / "step-0000000-replica-0000.safetensors")
    base = [word for word in flags(tmp_path, "--train-iters=2", model=model) if "clamp-eps" not in word]
    base += more.replace("RECORDS", f"{tmp_path}/records").split()
    with caplog.at_level("WARNING"):
        config, _ = configure([*base, *unused.split()], 1, engine=False)
    lines = [record.message for record in caplog.records if "do nothing" in record.message]
    without, _ = configure(base, 1, engine=False)
    # Unused flags of the loss keep their values.
    assert config == dataclasses.replace(without, loss=config.loss)
    assert without.unused == ()
    assert len(lines) == bool(needs)
    for word in unused.split() if needs else ():
        assert f"{word.partition('=')[0]} " in lines[0]
    assert all(part in lines[0] for part in needs.split(" | ") if part)


def test_a_misspelt_name_in_a_rule_is_an_error():
    with pytest.raises(ValueError, match="eval_intervall"):
        Rule("an engine", lambda run: True, "eval_interval eval_intervall kl_estimator")
