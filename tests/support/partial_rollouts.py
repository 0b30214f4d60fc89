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
    for place, (name, parameter) in enumerate(model.named_parameters()):
        numbers = torch.arange(parameter.numel(), dtype=torch.float64)
        wave = torch.sin(numbers.square() * 0.37 + numbers * (1 + version) * 0.11 + place)
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
    found = torch.tensor(sample.log_probs, dtype=torch.float64)
    differences = [
        (found - scored(version, prompt, sample.token_ids)).abs()[versions == version].max().item()
        for version in versions.unique().tolist()
    ]
    return max(differences)


def sample_over(engine, updates):
    """Responses to PROMPTS; ``updates`` is called meanwhile, and gives the engine other weights."""
    found = []
    errors = []

    def sample():
        try:
            found.extend(engine.sample(PROMPTS, SamplingParams(), TOKENS, SEED))
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
    return found


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
    changed = [(prompt, one) for prompt, one in zip(PROMPTS, samples, strict=True) if len(set(one.versions)) > 1]
    assert changed, "no response was under way when the weights changed"
    for prompt, one in zip(PROMPTS, samples, strict=True):
        assert farthest(one, prompt) < CLOSE
        assert one.versions == sorted(one.versions)
    for prompt, one in changed:
        for version in set(one.versions):
            assert farthest(one, prompt, [version] * len(one.versions)) > FAR


def check_ratios(samples):
    """The breakdown by staleness, against the models of the tokens' versions and the newest, which score all tokens."""
    newest = max(max(one.versions) for one in samples)
    length = max(len(one.token_ids) for one in samples)
    train, rollout, versions, mask, want = (torch.zeros(len(samples), length, dtype=torch.float64) for _ in range(5))
    for row, (prompt, one) in enumerate(zip(PROMPTS, samples, strict=True)):
        size = len(one.token_ids)
        own = torch.tensor(one.versions)
        mask[row, :size], versions[row, :size] = 1, own.double()
        rollout[row, :size] = torch.tensor(one.log_probs, dtype=torch.float64)
        train[row, :size] = scored(newest, prompt, one.token_ids)
        for version in set(one.versions):
            here = (own == version).nonzero().squeeze(1)
            want[row, here] = scored(version, prompt, one.token_ids)[here] - train[row, here]
    ages = newest - versions.long()
    result = correct_rollouts(
        *(train, rollout, mask.bool(), RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)),
        **{"policy_versions": versions.long(), "current_version": newest, "max_staleness": newest},
    )
    metrics = result.metrics()
    for age in ages[mask.bool()].unique().tolist():
        here = mask.bool() & (ages == age)
        assert metrics[f"rollout_corr/staleness_{age}_token_fraction"] == pytest.approx(float(here.sum() / mask.sum()))
        assert metrics[f"rollout_corr/staleness_{age}_kl"] == pytest.approx(float(want[here].mean()), abs=CLOSE)
        assert (want[here].abs().mean() > FAR) == (age > 0), "the reference tells the versions apart"
