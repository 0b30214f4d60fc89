"""Rollouts with one fault, made of tokens that are sampled from a softmax over real logits and scored by two policies.

Both policies are an output layer over the same hidden states. A fault changes the engine's weights, its samples or its
report. Imports nothing of the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

HIDDEN = 48


@dataclass(frozen=True)
class Setting:
    """Sizes of a batch; ``noise`` is the rounding of the healthy engine."""

    sequences: int = 64
    length: int = 48
    vocab: int = 256
    noise: str = "bf16"
    sharpness: float = 3.0


def round_weight(weight: Tensor, kind: str) -> Tensor:
    """A weight rounded to nearest as in engines: bf16, fp8 (e4m3, one scale), int8 by row, int4 in groups of 16."""
    if kind == "bf16":
        return weight.bfloat16().float()
    if kind == "fp8":
        scale = 448 / weight.abs().max()
        return (weight * scale).to(torch.float8_e4m3fn).float() / scale
    if kind == "int8":
        step = weight.abs().amax(1, keepdim=True) / 127
        return (weight / step).round() * step
    if kind == "int4":
        groups = weight.view(len(weight), -1, 16)
        step = groups.abs().amax(2, keepdim=True) / 7
        return ((groups / step).round() * step).view_as(weight)
    return weight


class Maker:
    """A batch in the making: hidden states, the trainer's output layer, and the responses' lengths."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.generator = torch.Generator().manual_seed(seed)
        n = setting.sequences
        s = setting.length
        # Most tokens of a language model are nearly certain, some are open.
        scale = setting.sharpness * self.normal(n, s, 1).mul(0.7).add(1.4).exp()
        self.hidden = self.normal(n, s, HIDDEN) * scale
        self.weight = self.normal(setting.vocab, HIDDEN) / math.sqrt(HIDDEN)
        self.lengths = torch.randint(max(2, s // 4), s + 1, (n,), generator=self.generator)
        self.mask = torch.arange(s) < self.lengths.unsqueeze(1)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def log_probs(self, weight: Tensor, temperature: float = 1.0, noise: bool = False) -> Tensor:
        """[n, s, v]: log-probs of a policy; ``noise``: computed in bfloat16."""
        hidden = self.hidden.bfloat16().float() if noise else self.hidden
        return (hidden @ weight.T / temperature).log_softmax(-1)

    def engine(self, kind: str = "bf16", temperature: float = 1.0) -> Tensor:
        """[n, s, v]: log-probs of an engine that rounds its weights and computes in bfloat16."""
        return self.log_probs(round_weight(self.weight, kind), temperature, noise=True)

    def sample(self, log_probs: Tensor) -> Tensor:
        """[n, s]: a token from each distribution."""
        # The first of exponential clocks with these rates.
        clocks = torch.empty_like(log_probs).exponential_(generator=self.generator)
        return (log_probs - clocks.log_()).argmax(-1)

    def drifted(self, steps: float) -> Tensor:
        """The engine's weights at a distance of this many optimizer steps, each an update of low rank."""
        change = self.normal(self.setting.vocab, 4) @ self.normal(4, HIDDEN) / math.sqrt(4 * HIDDEN)
        return self.weight + 0.012 * steps * change


def pick(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def result(maker: Maker, rollout: Tensor, old: Tensor, **more: Any) -> dict[str, Any]:
    return {"rollout_log_probs": rollout, "old_log_probs": old, "response_mask": maker.mask, **more}


def sampled(maker: Maker, engine: Tensor, reported: Tensor | None = None, trained_at: float = 1.0) -> dict[str, Any]:
    """Tokens of an engine's distributions with the log-probs that it reports, and the trainer's at a temperature."""
    tokens = maker.sample(engine)
    trainer = maker.log_probs(maker.weight, trained_at)
    return result(maker, pick(engine if reported is None else reported, tokens), pick(trainer, tokens))


def healthy(maker: Maker) -> dict[str, Any]:
    """The engine rounds by the setting and computes in bfloat16."""
    return sampled(maker, maker.engine(maker.setting.noise))


def shifted(maker: Maker) -> dict[str, Any]:
    """The engine's log-probs are one position late."""
    made = healthy(maker)
    late = made["rollout_log_probs"].roll(1, dims=1)
    late[:, 0] = -1.0
    return made | {"rollout_log_probs": late}


def truncated(maker: Maker, top_p: float) -> dict[str, Any]:
    """The engine samples from the fewest tokens that hold ``top_p``, and reports their probabilities among these."""
    engine = maker.engine()
    order = engine.argsort(-1, descending=True)
    sorted_probs = engine.gather(-1, order).exp()
    out = sorted_probs.cumsum(-1) - sorted_probs > top_p
    return sampled(maker, engine.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -torch.inf).log_softmax(-1))


def stale(maker: Maker, oldest: int = 6) -> dict[str, Any]:
    """Each sequence comes from weights of some version; the trainer has the newest."""
    versions = torch.randint(0, oldest + 1, (maker.setting.sequences,), generator=maker.generator)
    newest = oldest
    full = maker.drifted(float(oldest)) - maker.weight
    rollout = torch.empty(maker.mask.shape)
    tokens = torch.empty(maker.mask.shape, dtype=torch.long)
    for version in range(oldest + 1):
        rows = versions == version
        weight = round_weight(maker.weight + full * (newest - version) / oldest, "bf16")
        engine = maker.log_probs(weight, noise=True)
        sampled = maker.sample(engine)
        rollout[rows], tokens[rows] = pick(engine, sampled)[rows], sampled[rows]
    old = pick(maker.log_probs(maker.weight), tokens)
    return result(maker, rollout, old, policy_versions=versions.unsqueeze(1).expand_as(maker.mask))


def stale_cache(maker: Maker) -> dict[str, Any]:
    """A third of the prompts is answered with a cache of much older weights."""
    older = maker.log_probs(maker.drifted(30.0), noise=True)
    cached = (torch.arange(len(maker.mask)) // 4 % 3 == 0).view(-1, 1, 1)
    return sampled(maker, torch.where(cached, older, maker.engine()))


def tails(maker: Maker) -> dict[str, Any]:
    """Healthy, except for a few improbable tokens that are impossible under the trainer."""
    made = healthy(maker)
    rollout = made["rollout_log_probs"]
    old = made["old_log_probs"].clone()
    improbable = maker.mask & (rollout < -3.5)
    hit = improbable & (torch.rand(rollout.shape, generator=maker.generator) < 0.12)
    old[hit] -= 4 + 5 * torch.rand(int(hit.sum()), generator=maker.generator)
    return made | {"old_log_probs": old}


FAULTS: dict[str, tuple[str, Callable[[Maker], dict[str, Any]]]] = {
    "shift": ("shift", shifted),
    # The engine samples at another temperature than the trainer's, and reports its own log-probs.
    "temperature 0.7": ("temperature", lambda maker: sampled(maker, maker.engine(temperature=0.7))),
    "temperature 1.4": ("temperature", lambda maker: sampled(maker, maker.engine(temperature=1.4))),
    # Engine and trainer use the same temperature, and the engine reports log-probs before it.
    "raw at 0.6": ("log_prob_mode", lambda maker: sampled(maker, maker.engine(temperature=0.6), maker.engine(), 0.6)),
    "raw at 1.3": ("log_prob_mode", lambda maker: sampled(maker, maker.engine(temperature=1.3), maker.engine(), 1.3)),
    "top_p 0.8": ("truncated_sampling", partial(truncated, top_p=0.8)),
    "top_p 0.9": ("truncated_sampling", partial(truncated, top_p=0.9)),
    "fp8": ("precision", lambda maker: sampled(maker, maker.engine("fp8"))),
    "int4": ("precision", lambda maker: sampled(maker, maker.engine("int4"))),
    "staleness": ("staleness", stale),
    "stale cache": ("stale_cache", stale_cache),
    "tails": ("tails", tails),
}


@lru_cache(maxsize=64)
def _made(fault: str | None, seed: int, setting: Setting) -> dict[str, Any]:
    maker = Maker(setting, seed)
    return healthy(maker) if fault is None else FAULTS[fault][1](maker)


def made(fault: str | None, seed: int, setting: Setting = Setting()) -> dict[str, Any]:
    """A batch with a fault of ``FAULTS``, or without one."""
    return {name: value.clone() for name, value in _made(fault, seed, setting).items()}
