"""The directories that the export command writes, as vLLM reads them: what it generates, and how likely that is."""

import subprocess
import sys

import pytest
import torch
import transformers

from megatron_rc.launch.engines.vllm_engine import CPU_DEFAULTS, without_torchrun

GATED = """--group-query-attention --num-query-groups=2 --position-embedding-type=rope --normalization=RMSNorm --swiglu
--disable-bias-linear""".split()
MODELS = {
    "llama": [*GATED, "--use-rope-scaling"],
    "qwen3": [*GATED, "--qk-layernorm", "--untie-embeddings-and-output-weights"],
    "mistral": [*GATED, "--hf-model-type=mistral", "--untie-embeddings-and-output-weights"],
    "gpt2": ["--openai-gelu"],
}
RUN = """--cpu --from-scratch --num-layers=2 --hidden-size=64 --ffn-hidden-size=96 --num-attention-heads=2
--seq-length=64 --lr=1e-3
--max-position-embeddings=256 --init-method-std=0.3 --train-iters=1 --grpo-prompts-per-step=4 --grpo-group-size=4
--grpo-iterations=1 --global-batch-size=16 --micro-batch-size=8 --tensor-model-parallel-size=2""".split()


@pytest.fixture(scope="module", params=MODELS)
def directory(request, tmp_path_factory):
    """A run on two tensor-parallel ranks, one step long, and its checkpoint as a directory."""
    folder = tmp_path_factory.mktemp(request.param)
    arguments = [*MODELS[request.param], *RUN, f"--runs-dir={folder}/runs", f"--save={folder}/ckpt"]
    python = [sys.executable, "-m"]
    subprocess.run([*python, "megatron_rc.launch", "--nproc-per-node=2", *arguments], check=True, timeout=300)
    command = [*python, "megatron_rc.launch.export", "--load", f"{folder}/ckpt", "--save-hf", f"{folder}/out"]
    subprocess.run(command, check=True, timeout=120)
    return folder / "out"


def test_vllm_generates_what_transformers_does(directory, monkeypatch):
    """Greedy answers to text, token by token, and their log-probs."""
    for name, value in CPU_DEFAULTS.items():
        monkeypatch.setenv(name, value)
    prompts = ["0", "12", "345678"]
    with without_torchrun({}):
        from vllm import LLM, SamplingParams

        llm = LLM(model=str(directory), dtype="float32", enforce_eager=True, max_model_len=64)
        params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.llm_engine.engine_core.shutdown()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        assert list(output.prompt_token_ids) == ids
        chosen = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([ids + chosen])).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == chosen
        of_vllm = torch.tensor(
            [step[token].logprob for step, token in zip(output.outputs[0].logprobs, chosen, strict=True)]
        )
        of_transformers = torch.log_softmax(logits, -1).gather(1, torch.tensor(chosen).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(of_vllm, of_transformers, rtol=0, atol=1e-4)
