"""Several end tokens and a stop string with vLLM itself, in this process and behind its server."""

import os
import signal
import string

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.publishers import FilePublisher
from megatron_rc.launch.engines.server import ServerEngine
from megatron_rc.launch.engines.vllm_client import VllmClient
from megatron_rc.launch.engines.vllm_engine import VllmEngine
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.launch.tasks.text import CharacterText
from megatron_rc.records.rollout import SamplingParams
from tests.support.partial_rollouts import CONFIG as LLAMA
from tests.support.partial_rollouts import LONGEST, VOCABULARY
from tests.vllm.check_vllm import free_port, start_server

TEXT = CharacterText(string.ascii_lowercase[: VOCABULARY - 3])
A, B, C = TEXT.tokens_of("abc")
TOKENS = ResponseEnds((TEXT.eos, A, B), decode=TEXT.decode)
STRINGS = ResponseEnds((TEXT.eos, A), ("bb", "c"), TEXT.decode)
PROMPTS = [[5], [3, 4, 5, 6], [7, 8]] * 16


def directory(folder, ends):
    return ModelDirectory(folder / "weights", LLAMA, ends.eos_token_id, save_tokenizer=TEXT.save)


def check_ends(engine, ends):
    """Every response stops at the first end that it has, and its log-probs are those of transformers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.float32).eval()
    engine.load_weights(((name, parameter.detach()) for name, parameter in model.named_parameters()), 0)
    lasts = set()
    for prompt, sample in zip(PROMPTS, engine.sample(PROMPTS, SamplingParams(), 12, 0), strict=True):
        length = ends.length_of(sample.token_ids)
        assert length == (len(sample.token_ids) if sample.finish_reason == "stop" else None)
        assert length is not None or len(sample.token_ids) == 12
        lasts.add(sample.token_ids[-1])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + sample.token_ids])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(sample.token_ids).unsqueeze(1)
        want = logits.log_softmax(-1).gather(1, chosen).squeeze(1)
        torch.testing.assert_close(torch.tensor(sample.log_probs), want, rtol=0, atol=1e-4)
    assert lasts >= set(ends.token_ids)
    if ends.strings:
        assert lasts >= {A, C}


def test_vllm_in_this_process_stops_at_every_end(tmp_path):
    engine = VllmEngine(directory(tmp_path, STRINGS), "fp32", STRINGS, LONGEST)
    try:
        check_ends(engine, STRINGS)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("ends", "skips_tokenizer"),
    [(TOKENS, True), (STRINGS, False), (STRINGS, True)],
    ids=["tokens", "strings", "strings without a tokenizer"],
)
def test_vllms_server_stops_at_every_end(tmp_path, ends, skips_tokenizer):
    """Without a tokenizer the server ignores stop strings, and the check of its answers says so."""
    port = free_port()
    client = HttpClient(f"http://127.0.0.1:{port}", timeout=120)
    publisher = FilePublisher(directory(tmp_path, ends))
    engine = ServerEngine(VllmClient(client), publisher, ends, start_timeout=300)
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.float32)
    path = publisher.directory.write((name, parameter.detach()) for name, parameter in model.named_parameters())
    process = start_server(path, port, tmp_path / "log", skips_tokenizer=skips_tokenizer)
    try:
        if ends.strings and skips_tokenizer:
            with pytest.raises(EngineError, match=r"goes on after the stop string '(bb|c)': .*--skip-tokenizer-init"):
                check_ends(engine, ends)
        else:
            check_ends(engine, ends)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
