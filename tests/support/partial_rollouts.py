"""Tiny Llamas of several versions, the same on every machine, and responses that one began and another ended.

The log-probs of each token are compared with those of the model of the token's version.
"""

import functools
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.records.rollout import SamplingParams

PROMPTS = [[3 + index, 5, 6] for index in range(8)]
TOKENS = 280
SEED = 1
# Distances in nats: of the same weights, and of others.
CLOSE = 1e-4
FAR = 1e-2
VOCABULARY = 29
LONGEST = 320
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,  # vLLM's CPU attention has no smaller one
    max_position_embeddings=LONGEST,
    tie_word_embeddings=True,
    initializer_range=0.3,
)


@functools.cache
def model_of(version):
    """The model of a version; its numbers follow a formula, because random ones differ between processors."""
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()
    for index, (name, parameter) in enumerate(model.named_parameters()):
        numbers = torch.arange(parameter.numel(), dtype=torch.float64)
        wave = torch.sin(numbers.square() * 0.37 + numbers * (1 + version) * 0.11 + index)
        size = 0.1 if "norm" in name else 0.3
        parameter.data = (("norm" in name) + size * wave).view(parameter.shape).float()
    return model


def weights_of(version):
    """Pairs of a name and a tensor, as an engine takes them."""
    return [(name, parameter.detach()) for name, parameter in model_of(version).named_parameters()]


def scored(version, prompt, tokens):
    """[tokens] float64 log-probs of a response under the weights of a version."""
    with torch.no_grad():
        logits = model_of(version)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)


def farthest(sample, prompt, versions=None):
    """Largest |Δ log-prob| between a sample and the models of its tokens' versions, or of other ``versions``."""
    versions = torch.tensor(versions or sample.versions)
    log_probs = torch.tensor(sample.log_probs, dtype=torch.float64)
    differences = [
        (log_probs - scored(version, prompt, sample.token_ids)).abs()[versions == version].max().item()
        for version in versions.unique().tolist()
    ]
    return max(differences)


def sample_over(engine, updates):
    """Responses to PROMPTS; ``updates`` is called meanwhile, and gives the engine other weights."""
    samples = []
    errors = []

    def sample():
        try:
            samples.extend(engine.sample(PROMPTS, SamplingParams(), TOKENS, SEED))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        updates()
    finally:
        thread.join()
    for error in errors:
        raise error
    return samples


def give(engine, version):
    """Give an engine the weights of a version."""
    engine.load_weights(weights_of(version), version)


def wait_until(is_so, seconds=60):
    """Wait for a condition."""
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun < seconds
        time.sleep(0.002)


def check_versions_of(samples):
    """Each token was sampled by the weights of its version, and not by those of the versions around it."""
    changed = [
        (prompt, sample) for prompt, sample in zip(PROMPTS, samples, strict=True) if len(set(sample.versions)) > 1
    ]
    assert changed, "no response was under way when the weights changed"
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        assert farthest(sample, prompt) < CLOSE
        assert sample.versions == sorted(sample.versions)
    for prompt, sample in changed:
        for version in set(sample.versions):
            assert farthest(sample, prompt, [version] * len(sample.versions)) > FAR


def check_ratios(samples):
    """The breakdown by staleness, against the models of the tokens' versions and the newest, which score all tokens."""
    newest = max(max(sample.versions) for sample in samples)
    length = max(len(sample.token_ids) for sample in samples)
    train, rollout, versions, mask, want = (torch.zeros(len(samples), length, dtype=torch.float64) for _ in range(5))
    for row, (prompt, sample) in enumerate(zip(PROMPTS, samples, strict=True)):
        size = len(sample.token_ids)
        versions_of_sample = torch.tensor(sample.versions)
        mask[row, :size], versions[row, :size] = 1, versions_of_sample.double()
        rollout[row, :size] = torch.tensor(sample.log_probs, dtype=torch.float64)
        train[row, :size] = scored(newest, prompt, sample.token_ids)
        for version in set(sample.versions):
            positions = (versions_of_sample == version).nonzero().squeeze(1)
            want[row, positions] = scored(version, prompt, sample.token_ids)[positions] - train[row, positions]
    ages = newest - versions.long()
    result = correct_rollouts(
        *(train, rollout, mask.bool(), RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)),
        **{"policy_versions": versions.long(), "current_version": newest, "max_staleness": newest},
    )
    metrics = result.metrics()
    for age in ages[mask.bool()].unique().tolist():
        positions = mask.bool() & (ages == age)
        assert metrics[f"rollout_corr/staleness_{age}_token_fraction"] == pytest.approx(
            float(positions.sum() / mask.sum())
        )
        assert metrics[f"rollout_corr/staleness_{age}_kl"] == pytest.approx(float(want[positions].mean()), abs=CLOSE)
        assert (want[positions].abs().mean() > FAR) == (age > 0), "the reference tells the versions apart"
