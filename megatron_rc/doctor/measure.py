"""Facts of a recorded batch: the correction's own metrics, and numbers that tell faults apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rc import RolloutCorrectionConfig
from megatron_rc.doctor.facts import Facts, of_tokens
from megatron_rc.doctor.sampled import Sampled
from megatron_rc.measures.shift import measure_shift

MAX_TOKENS = 2**18  # the slower facts use only the first tokens
NOISE = 0.02  # nats; smaller log-ratios are rounding
_FEW = 8  # tokens; shorter sequences are not judged
_UNCERTAIN = 0.25  # nats a token: a probability of 0.78
_CAP = 0.5  # the most that one token adds to its sequence, so that a few far tokens make no far sequence
# Temperatures of the trainer over the engine's that are tried.
_SHARPER = (0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0, 2.5)
_OTHERS = 64  # tokens that share the rest of the probability equally, at most


def facts_of_batch(sampled: Sampled) -> Facts:
    """All facts of a batch on the host; few without ``old_log_probs``."""
    mask = sampled.usable()
    facts = Facts(num_tokens=float(mask.sum()), num_sequences=float(mask.any(dim=1).sum()))
    facts["bad_log_probs"] = float((sampled.response_mask & ~mask).sum())
    facts["zero_sequences"] = _zero_sequences(sampled, mask)
    facts["response_length"] = facts["num_tokens"] / max(facts["num_sequences"], 1)
    facts |= _sampling_facts(sampled)
    if sampled.old_log_probs is None or not mask.any():
        return facts
    facts |= _library_metrics(sampled)
    rollout = sampled.rollout_log_probs.double()
    old = sampled.old_log_probs.double()
    facts |= _token_facts(rollout[mask], old[mask])
    facts |= _sequence_facts(rollout, old, mask)
    if sampled.policy_versions is not None:
        facts |= _version_facts(rollout[mask], old[mask], sampled.policy_versions[mask])
    return facts


def _zero_sequences(sampled: Sampled, mask: Tensor) -> float:
    """Number of sequences of more than 8 tokens whose rollout log-probs are all 0, against the trainer's.

    With top-k 1 they are right: then every sampled token has probability 1.
    """
    top_k = sampled.sampling.top_k if sampled.sampling is not None else 0
    count = mask.sum(dim=1)
    empty = ~(mask & (sampled.rollout_log_probs != 0)).any(dim=1) & (count > _FEW)
    if sampled.old_log_probs is not None:
        empty &= torch.where(mask, sampled.old_log_probs, 0.0).sum(dim=1) < -_UNCERTAIN * count
    return 0.0 if top_k == 1 else float(empty.sum())


def _sampling_facts(sampled: Sampled) -> dict[str, float]:
    how = sampled.sampling
    if how is None:
        return {}
    is_raw = float(how.log_probs_mode == "raw")
    truncation = {"top_p": how.top_p, "top_k": float(how.top_k), "min_p": how.min_p}
    return {"temperature": how.temperature, "raw_log_probs": is_raw, **truncation}


def _library_metrics(sampled: Sampled) -> dict[str, float]:
    """Metrics of the two policies, the effective sample size of sequence weights, and the test for a shift.

    The test compares log-probs of neighbouring positions with log-probs of equal positions.
    """
    config = RolloutCorrectionConfig(bad_log_probs="reject_token", metric_prefix="")
    result = sampled.corrected(config)
    measured = result.metrics()
    shift = measure_shift(result.on_host.tokens)
    # No run has chosen these weights and their bounds.
    facts = {name: value for name, value in measured.items() if not name.startswith(("rollout_is_", "rollout_rs_"))}
    facts |= of_tokens(measured) | {"sequence_eff_sample_size": measured["rollout_is_raw_eff_sample_size"]}
    if shift.is_enough:
        facts |= {"shift_share": shift.share, "shift_lag": float(shift.lag)}
    return facts


def _token_facts(rollout: Tensor, old: Tensor) -> dict[str, float]:
    """Facts of the usable tokens; both arguments are [t] float64."""
    log_ratio = old - rollout
    differences = (old.exp() - rollout.exp()).abs()
    return {
        "abs_log_ratio": float(log_ratio.abs().mean()),
        "probs_diff_mean": float(differences.mean()),
        "mult_prob_error": float(log_ratio.abs().clamp(max=20).exp().mean()),
        "share_above": float((log_ratio > NOISE).double().mean()),
        "share_below": float((log_ratio < -NOISE).double().mean()),
        **_correlation(rollout, old),
        **_temperature_facts(rollout[:MAX_TOKENS], old[:MAX_TOKENS]),
    }


def _temperature_facts(rollout: Tensor, old: Tensor) -> dict[str, float]:
    """The temperature ratio that explains the log-ratios best, and the share of Σ |log ρ| that it leaves.

    At a temperature 1/s of the trainer's, log π_rollout is s log p - log Z with p = π_old and Z = Σ_v π_old(v)^s. Of
    the other tokens only the total 1 - p is known. Z is smallest or largest if one token has all of it, or if
    ``_OTHERS`` tokens have equal parts. The distance from log π_rollout to the interval between these two is
    unexplained.
    """
    total = float((old - rollout).abs().sum())
    if not total:
        return {}
    rest = torch.log1p(-old.exp().clamp(max=1 - 1e-9))
    best = (math.inf, 1.0)
    for sharper in _SHARPER:
        of_one = torch.logaddexp(sharper * old, sharper * rest)
        of_many = torch.logaddexp(sharper * old, sharper * rest + (1 - sharper) * math.log(_OTHERS))
        lower = sharper * old - torch.maximum(of_one, of_many)
        upper = sharper * old - torch.minimum(of_one, of_many)
        outside = (lower - rollout).clamp(min=0) + (rollout - upper).clamp(min=0)
        best = min(best, (float(outside.sum()) / total, sharper))
    return {"temperature_unexplained": best[0], "temperature_ratio": 1 / best[1]}


def _correlation(rollout: Tensor, old: Tensor) -> dict[str, float]:
    """Pearson correlation of the two probabilities of each token; nothing if one of them is constant."""
    probs = torch.stack([rollout.exp(), old.exp()])
    probs = probs - probs.mean(dim=1, keepdim=True)
    norms = probs.norm(dim=1)
    if not norms.min() > 1e-9:
        return {}
    return {"probs_correlation": float((probs[0] * probs[1]).sum() / (norms[0] * norms[1]))}


def _noise(rollout: Tensor, old: Tensor) -> Tensor:
    """[...] |log ρ| over 1 - p, at most ``_CAP``.

    An error in the logits moves the log-prob of a token by (1 - p) times the error. 1.01 instead of 1 avoids a division
    by 0.
    """
    return ((old - rollout).abs() / (1.01 - rollout.exp().clamp(max=1.0))).clamp(max=_CAP)


def _sequence_facts(rollout: Tensor, old: Tensor, mask: Tensor) -> dict[str, float]:
    """Split the sequences by distance into two kinds, near and far, and measure how clear the split is."""
    counts = mask.sum(dim=1)
    noise = torch.where(mask, _noise(rollout, old), 0.0).sum(dim=1)
    levels = (noise / counts)[counts >= _FEW].clamp(min=1e-5).log().sort().values
    number = len(levels)
    least = max(3, number // 20)
    if number < 2 * least:
        return {}
    # The split with the least variance within the two kinds.
    total = levels.sum()
    below = levels.cumsum(0)[least - 1 : number - least]
    sizes = torch.arange(least, number - least + 1, dtype=levels.dtype)
    low = below / sizes
    high = (total - below) / (number - sizes)
    between = sizes * (number - sizes) / number * (high - low).square()
    cut = int(between.argmax())
    variance = float((levels - total / number).square().sum())
    return {
        "two_kinds": float(between[cut]) / variance if variance else 0.0,
        "near_noise": float(low[cut].exp()),
        "far_noise": float(high[cut].exp()),
        "far_sequences": float(number - sizes[cut]) / number,
    }


def _version_facts(rollout: Tensor, old: Tensor, versions: Tensor) -> dict[str, float]:
    """Mean |log ρ| of tokens of the newer and of the older half of the versions."""
    newest = int(versions.max())
    oldest = int(versions.min())
    noise = (old - rollout).abs()
    older = versions <= (newest + oldest) / 2
    facts = {"num_versions": float(newest - oldest + 1)}
    if newest > oldest and (~older).any():
        facts |= {"older_abs_log_ratio": float(noise[older].mean()), "newer_abs_log_ratio": float(noise[~older].mean())}
    return facts
