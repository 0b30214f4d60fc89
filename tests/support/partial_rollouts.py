"""Tiny Llamas of several versions, the same on every machine, and the log-probs that each gives to tokens."""

import functools

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

VOCABULARY, LONGEST = 29, 320
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
