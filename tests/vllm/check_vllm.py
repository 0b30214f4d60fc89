"""The vLLM engines against vLLM itself: a tiny Llama and a tiny GPT-2, every log-prob scored again by transformers.

Both models have tied embeddings. In process vLLM starts under the environment of torchrun, beside a process group.
"""

import functools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3MoeConfig

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.publishers import FilePublisher
from megatron_rc.launch.engines.router_record import RouterRecord
from megatron_rc.launch.engines.server import ServerEngine
from megatron_rc.launch.engines.vllm_client import VllmClient
from megatron_rc.launch.engines.vllm_engine import CPU_DEFAULTS, TORCHRUN, VllmEngine
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.records.rollout import SamplingParams
from tests.support.partial_rollouts import CONFIG as LLAMA
from tests.support.partial_rollouts import LONGEST, VOCABULARY

EOS = 1
ENDS = ResponseEnds((EOS,))
TORCHRUN_VALUES = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
GPT2 = GPT2Config(
    vocab_size=VOCABULARY,
    n_embd=64,
    n_layer=2,
    n_head=2,
    n_positions=LONGEST,
    activation_function="gelu",
    tie_word_embeddings=True,
    initializer_range=0.3,
)


class Rig:
    """An engine, the transformers model whose weights it has, and how many prompt tokens it found in its cache."""

    def __init__(self, engine, config, cached_tokens, process):
        self.engine = engine
        self.config = config
        self.cached_tokens = cached_tokens
        self.process = process
        self.model = None

    def sync(self, seed):
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval()
        assert "lm_head.weight" not in dict(self.model.named_parameters())
        self.engine.load_weights(((name, p.detach()) for name, p in self.model.named_parameters()), seed)
        assert self.engine.version == seed

    def check(self, prompts, params, seed=0, tokens=12):
        samples = self.engine.sample(prompts, params, tokens, seed)
        for prompt, sample in zip(prompts, samples, strict=True):
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt + sample.token_ids])).logits[0, len(prompt) - 1 : -1]
            chosen = torch.tensor(sample.token_ids).unsqueeze(1)
            want = torch.log_softmax(logits / params.temperature, -1).gather(1, chosen).squeeze(1)
            torch.testing.assert_close(torch.tensor(sample.log_probs), want, rtol=0, atol=1e-4)
        return samples


def in_process(folder, config, **settings):
    os.environ |= TORCHRUN_VALUES
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    engine = VllmEngine(ModelDirectory(folder / "weights", config, EOS), "fp32", ENDS, LONGEST, **settings)

    def cached_tokens(prompt):
        from vllm import SamplingParams as Params

        (output,) = engine._llm.generate([{"prompt_token_ids": prompt}], Params(max_tokens=1), use_tqdm=False)
        return output.num_cached_tokens

    yield Rig(engine, config, cached_tokens, lambda: id(engine._llm))
    assert {name: os.environ[name] for name in TORCHRUN_VALUES} == TORCHRUN_VALUES
    engine.close()
    dist.destroy_process_group()
    for name in TORCHRUN_VALUES:
        del os.environ[name]


def served(folder, config):
    port = free_port()
    client = HttpClient(f"http://127.0.0.1:{port}", timeout=120)
    publisher = FilePublisher(ModelDirectory(folder / "weights", config, EOS))
    engine = ServerEngine(VllmClient(client), publisher, ENDS, start_timeout=300)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = publisher.directory.write((name, parameter.detach()) for name, parameter in model.named_parameters())
    process = start_server(path, port, folder / "log")
    try:
        yield Rig(engine, config, lambda _prompt: hits(client.url), lambda: process.poll() or process.pid)
    except EngineError:
        sys.stderr.write((folder / "log").read_text()[-4000:])
        raise
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_server(path, port, log, more=(), *, skips_tokenizer=True):
    arguments = f"""--host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --max-model-len {LONGEST}
        --no-enable-chunked-prefill
        --enable-scale-out --logprobs-mode processed_logprobs --served-model-name tiny""".split()
    arguments += ["--skip-tokenizer-init"] * skips_tokenizer
    environment = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN)}
    return subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), *arguments, *more],
        env=environment | CPU_DEFAULTS | {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"},
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def hits(url):
    return number_of(url, "prefix_cache_hits_total")


def number_of(url, name):
    """Sum of one of a server's counters."""
    with urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}"))


# Two processes that hold half of the model each, and an argument of --rollout-engine-args.
SPREAD = functools.partial(in_process, processes=2, more={"max_num_seqs": 3})
RIGS = {
    "llama": (in_process, LLAMA),
    "llama-spread": (SPREAD, LLAMA),
    "gpt2": (in_process, GPT2),
    "llama-served": (served, LLAMA),
}


@pytest.fixture(scope="module", params=RIGS)
def rig(request, tmp_path_factory):
    make, config = RIGS[request.param]
    yield from make(Path(tmp_path_factory.mktemp(request.param)), config)


def test_log_probs_are_those_of_transformers(rig):
    rig.sync(0)
    prompts = [[5], [3, 4, 5, 6], [7, 8], list(range(2, 28))] * 4
    reasons = set()
    for temperature in (1.0, 0.7):
        samples = rig.check(prompts, SamplingParams(temperature=temperature))
        for sample in samples:
            ended = sample.token_ids[-1] == EOS
            assert EOS not in sample.token_ids[:-1]
            assert sample.finish_reason == ("stop" if ended else "length")
            assert ended or len(sample.token_ids) == 12
            reasons.add(sample.finish_reason)
    assert reasons == {"stop", "length"}


def test_the_seed_gives_the_responses(rig):
    rig.sync(0)
    first, again, of_other_seed = (rig.engine.sample([[4], [5]] * 4, SamplingParams(), 8, seed=s) for s in (1, 1, 2))
    assert [s.token_ids for s in first] == [s.token_ids for s in again]
    assert [s.token_ids for s in first] != [s.token_ids for s in of_other_seed]
    assert len({tuple(s.token_ids) for s in first[::2]}) > 1, "equal prompts must not get equal responses"


def test_more_prompt_tokens_than_vllm_reads_at_once(rig):
    """A prompt that is cut into pieces is where requests with seeds fail on a CPU."""
    rig.sync(0)
    rig.check([[2 + (3 * i + shift) % 25 for i in range(250)] for shift in range(25)], SamplingParams(), tokens=2)


def test_a_sync_changes_the_weights_in_place(rig):
    """The same prompts before and after; the prompts are long enough to lie in the prefix cache."""
    prompts = [[2 + (7 * i + shift) % 25 for i in range(300)] for shift in range(4)]
    rig.sync(0)
    before = rig.check(prompts, SamplingParams(), seed=3)
    process = rig.process()
    count = rig.cached_tokens(prompts[0])
    rig.check(prompts, SamplingParams(), seed=4)
    assert rig.cached_tokens(prompts[0]) > (count if rig.engine.__class__ is ServerEngine else 0), "the cache is used"
    for version in (1, 2):
        rig.sync(version)
        after = rig.check(prompts, SamplingParams(), seed=3)
        assert [s.token_ids for s in before] != [s.token_ids for s in after]
    assert rig.process() == process


def test_truncated_sampling_has_the_log_probs_of_what_was_sampled(rig):
    rig.sync(0)
    samples = rig.engine.sample([[4, 5]] * 8, SamplingParams(top_k=1), 4, seed=0)
    assert all(value == 0 for sample in samples for value in sample.log_probs)


def test_a_sequence_longer_than_the_engine_takes_is_an_error(rig):
    rig.sync(0)
    with pytest.raises((EngineError, ValueError), match=rf"{LONGEST}|raise the engine's longest sequence"):
        rig.engine.sample([[4] * (LONGEST - 2)], SamplingParams(), 8, seed=0)


def test_an_argument_that_vllm_does_not_have_is_named_with_its_flag(tmp_path):
    directory = ModelDirectory(tmp_path / "weights", LLAMA, EOS)
    engine = VllmEngine(directory, "fp32", ENDS, LONGEST, more={"gpu_memory_utilisation": 0.5})
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.float32)
    with pytest.raises(EngineError, match=r"gpu_memory_utilisation.*--rollout-engine-args"):
        engine.load_weights(model.named_parameters(), 0)


EXPERTS = Qwen3MoeConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
    decoder_sparse_step=2,  # a dense layer before each layer with experts
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=LONGEST,
    norm_topk_prob=True,
    initializer_range=0.3,
)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM reports its experts on a GPU alone")
def test_the_experts_are_those_of_transformers(tmp_path):
    """Prompts of several lengths, some with a beginning in common, in several steps; with two sets of weights."""
    directory = ModelDirectory(tmp_path / "weights", EXPERTS, EOS)
    engine = VllmEngine(directory, "fp32", ENDS, LONGEST, reports_experts=True, takes_weights=False)
    prompts = [[5], [3, 4, 5, 6], list(range(2, 28)), list(range(2, 20))] * 20
    try:
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(EXPERTS, dtype=torch.float32).eval()
            model.save_pretrained(tmp_path / "model")  # each expert under a name of its own
            engine.load_weights(load_file(tmp_path / "model" / "model.safetensors").items(), seed)
            samples = engine.sample(prompts, SamplingParams(), 12, seed)
            record = RouterRecord(model)
            for prompt, sample in zip(prompts, samples, strict=True):
                with record.open(), torch.no_grad():
                    model(torch.tensor([prompt + sample.token_ids]))
                (expected,) = record.of_responses([len(prompt)], [len(sample.token_ids)])
                assert sample.routed_experts.shape == (len(prompt) + len(sample.token_ids) - 1, 2, 2)
                assert torch.equal(sample.routed_experts.sort(-1).values, expected.int().sort(-1).values)
    finally:
        engine.close()


# Ways in which vLLM keeps something old, by leaving out what this project does against them.
BREAK = {
    "nothing": "",
    "tied": """
from megatron_rc.launch.engines.model_directory import ModelDirectory
right = ModelDirectory.__init__
def init(self, *args, **more):
    right(self, *args, **more)
    self._tied, self._config.tie_word_embeddings = False, True
ModelDirectory.__init__ = init
""",
    "cache": """
from megatron_rc.launch.engines.vllm_engine import VllmEngine
right = VllmEngine.load_weights
def load_weights(self, weights, version):
    if self._llm is not None:
        self._llm.reset_prefix_cache = lambda: True
    right(self, weights, version)
VllmEngine.load_weights = load_weights
""",
}
LONG_TASK = """
from megatron_rc.launch.tasks import Problem

class Long:  # prompts that begin alike, and are long enough for vLLM to keep
    characters = "0123456789"
    max_response_length = 8

    def __init__(self, seed):
        pass

    def problems(self, start, count, held_out=False):
        return [Problem("0123456789" * 42 + str(number), label="0") for number in range(start, start + count)]
"""
TRAIN = """
import sys
{broken}
from megatron_rc.launch.train_ppo import main
if __name__ == "__main__":
    main(sys.argv[1:])
"""


@pytest.mark.parametrize("broken", BREAK)
def test_the_check_after_a_sync_finds_what_vllm_keeps(tmp_path, broken):
    """Real runs: three steps where nothing is broken, and none behind the sync that left something old."""
    (tmp_path / "long_task.py").write_text(LONG_TASK)
    (tmp_path / "train.py").write_text(TRAIN.format(broken=BREAK[broken]))
    arguments = """--from-scratch --num-layers=2 --hidden-size=64 --num-attention-heads=2
--group-query-attention --num-query-groups=1
        --ffn-hidden-size=96 --position-embedding-type=rope --normalization=RMSNorm --swiglu --disable-bias-linear --cpu
        --seq-length=448 --task=python:long_task:Long --reward=exact --init-method-std=0.2 --lr=3e-3 --train-iters=3
        --grpo-prompts-per-step=4 --grpo-group-size=4 --grpo-iterations=1 --global-batch-size=16 --micro-batch-size=8
        --grpo-entropy-term-weight=0.1 --rollout-engine=vllm --rollout-dtype=fp32 --rollout-is=token"""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command = [*launcher, str(tmp_path / "train.py"), *arguments.split(), f"--runs-dir={tmp_path}/runs"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    printed = run.stderr[-4000:]
    assert (tmp_path / "runs" / "ppo").is_dir(), printed
    rows = (tmp_path / "runs" / "ppo" / "metrics.jsonl").read_text().splitlines()
    whole = broken == "nothing"
    assert ((run.returncode == 0), len(rows)) == (whole, 3 if whole else 1), printed
    disagree = "after the weight sync of step 1 the rollout engine and the trainer disagree by"
    assert (disagree in run.stderr) != whole, printed
