"""Responses of several turns by vLLM's server: each sampled token is scored again, after the observations before it."""

import pytest
import torch

from megatron_rc.records.rollout import load_rollouts
from tests.support.paths import ROOT
from tests.vllm.check_partial_rollouts import log_probs_of, run_beside_server

# vLLM's attention on CPUs wants heads of 32 numbers; 320 tokens are what the tests' server may read.
WORDS = f"""--config={ROOT}/examples/guessing_game.yaml --cpu --num-attention-heads=2 --rollout-dtype=fp32
    --grpo-prompts-per-step=8 --global-batch-size=128 --micro-batch-size=64 --grpo-iterations=1 --train-iters=3
    --max-position-embeddings=320 --rollout-engine=vllm-server --rollout-timeout=400 --save-hf-interval=1
    --run-name=run"""


@pytest.mark.timeout(1800)  # a whole run beside a server
def test_the_record_of_a_run_of_several_turns(tmp_path):
    status, output = run_beside_server(tmp_path, WORDS.split())
    assert status == 0, output
    turns = set()
    versions = set()
    for file in sorted((tmp_path / "rollouts").glob("*.safetensors")):
        batch = load_rollouts(file)
        turns |= set((batch.turn_ids.amax(1) + 1).tolist())
        for tokens, mask, version, recorded in zip(
            batch.tokens, batch.response_mask, batch.policy_versions, batch.rollout_log_probs, strict=True
        ):
            (number,) = set(version[mask].tolist())
            if number:  # a run saves what its steps made
                log_probs = log_probs_of(tmp_path / "hf" / f"step-{number}", tokens)[mask]
                torch.testing.assert_close(recorded[mask].double(), log_probs, rtol=0, atol=1e-3)
                versions.add(number)
    assert (turns, versions) == ({1, 2, 3}, {1, 2})
