"""A model that no table has, with layers and weights by Megatron-Bridge. Written without a GPU, and never run yet."""

import json

import pytest
import torch
import transformers

from tests.gpu.packages import require
from tests.gpu.training import job, words_for
from tests.support.recorded_training import COMMON

LIMIT = 200  # seconds of the run
# OLMoE: norms of queries and keys over all heads, and experts in all layers.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.timeout(LIMIT + 10)
def test_a_run_starts_from_a_directory_and_exports_another(on_gpu, figures, tmp_path):
    if not on_gpu:
        pytest.skip("Megatron-Bridge imports Transformer Engine")
    require("transformer_engine", "megatron.bridge")
    torch.manual_seed(0)
    source = tmp_path / "source"
    transformers.AutoModelForCausalLM.from_config(transformers.OlmoeConfig(**SIZES)).save_pretrained(source)
    arguments = [word for word in words_for("cuda", COMMON) if not word.startswith("--make-vocab-size-divisible-by")]
    arguments += [f"--load-hf={source}", "--tokenizer-type=CharacterTokenizer", f"--save-hf={tmp_path}/out"]
    arguments += ["--rollout-dtype=fp32", "--train-iters=2", f"--runs-dir={tmp_path}", "--run-name=run"]
    job(["-m", "megatron_rc.launch", "--nproc-per-node=1", *arguments], LIMIT)

    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first = next(row for row in map(json.loads, lines) if "rollout_corr/k3_kl" in row)
    figures(k3=first["rollout_corr/k3_kl"])
    assert first["rollout_corr/k3_kl"] < 1e-5, "engine and trainer have the same weights"
    before = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    (folder,) = (tmp_path / "out").glob("step-*")
    after = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], before[name]) for name in before)
