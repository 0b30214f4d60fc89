"""Names that other programs and older releases give to the metrics of ``docs/metrics.md``."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from megatron_rc.attribution.verdict import PREFIX as ATTRIBUTION

STEP_NAMES = ("step", "_step", "Step", "global_step", "training/global_step", "trainer/global_step")

# For each program: the end of its name, whatever stands before it (train/, actor/), and our name.
NAMES_OF = {
    "verl": {
        "training/rollout_probs_diff_mean": "probs_diff_mean",
        "training/rollout_actor_probs_pearson_corr": "probs_correlation",
        "response_length/mean": "response_length",
        "fully_async/staleness/mean": "staleness_mean",
        "critic/score/mean": "reward",
        "actor/grad_norm": "grad_norm",
    },
    "megatron_rc": {  # outside the correction
        "rollout/response_length": "response_length",
        "rollout/staleness_mean": "staleness_mean",
        "policy/entropy": "entropy",
        "reward/mean": "reward",
        "reward/nonzero_advantages": "nonzero_advantages",
    },
    "slime": {
        "train_rollout_logprob_abs_diff": "abs_log_ratio",
        "rollout/response_len/mean": "response_length",
        "rollout/raw_reward": "reward",
        "train/tis": "rollout_is_raw_mean",
        "train/tis_clipfrac": "rollout_is_ratio_fraction_high",
        "mis_mean_is_weight_before_clip": "rollout_is_raw_mean",
        "mis_truncate_fraction": "rollout_is_ratio_fraction_high",
        "mis_clip_fraction_high": "rollout_is_ratio_fraction_high",
        "mis_clip_fraction_low": "rollout_is_ratio_fraction_low",
        "mis_catastrophic_seq_fraction": "rollout_is_veto_fraction",
    },
    "nemo-rl": {
        "token_mult_prob_error": "mult_prob_error",
        "gen_kl_error": "k3_kl",
        "sampling_importance_ratio": "rollout_is_raw_mean",
        "mean_gen_tokens_per_sample": "response_length",
        "avg_trajectory_age": "staleness_mean",
        "train/reward": "reward",
    },
}
_OF_VERL = ("actor/", "training/", "timing_s/")  # prefixes of verl's other metrics
_WHOLE = {"grad_norm": "grad_norm", "train/grad_norm": "grad_norm"}  # not critic/grad_norm
_PREFIXED = re.compile(r"(?:^|/)(?:rollout_corr|mismatch)/(?:mismatch_)?([^/]+)$")
_BARE = re.compile(r"(?:^|/)mismatch_([^/]+)$")  # slime's


@functools.lru_cache(maxsize=4096)  # a long run repeats its names a million times
def own_name(name: str) -> str | None:
    """Our name of a metric, without a prefix; None for a metric that the rules do not use.

    W&B's exports put the run and `` - `` before a name.
    """
    name = _shown_as(name)
    if name.startswith(ATTRIBUTION):
        return name
    for pattern in (_PREFIXED, _BARE):
        match = pattern.search(name)
        if match:
            return match[1]
    names = ((other, own) for names in NAMES_OF.values() for other, own in names.items())
    return next((own for other, own in names if _ends_with(name, other)), _WHOLE.get(name))


def program_of(names: Iterable[str]) -> str | None:
    """Dialect of the program that writes metrics of these names; None if it is not known."""
    found = [_shown_as(name) for name in names]
    for program, known in NAMES_OF.items():
        if any(_ends_with(name, other) for name in found for other in known):
            return program
    if any(name.startswith(_OF_VERL) for name in found):
        return "verl"
    if any(_BARE.search(name) for name in found):
        return "slime"
    return "verl-2025-10" if any(name.startswith("mismatch/") for name in found) else None


def _shown_as(name: str) -> str:
    """The name without the run that W&B's exports put before it."""
    return name.rpartition(" - ")[2].strip()


def _ends_with(name: str, other: str) -> bool:
    return name == other or name.endswith(f"/{other}")
