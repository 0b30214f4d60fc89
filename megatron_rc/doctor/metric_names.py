"""How other programs, and older releases, call the numbers of ``docs/metrics.md``."""

from __future__ import annotations

import re

STEP_NAMES = ("step", "_step", "Step", "global_step", "training/global_step", "trainer/global_step")

# The end of a name, whatever stands before it (train/, actor/): what it is here.
OTHER_NAMES = {
    # verl beside its rollout_corr/ metrics
    "training/rollout_probs_diff_mean": "probs_diff_mean",
    "training/rollout_actor_probs_pearson_corr": "probs_correlation",
    "response_length/mean": "response_length",
    "fully_async/staleness/mean": "staleness_mean",
    # this project's own, outside the correction
    "rollout/response_length": "response_length",
    "rollout/staleness_mean": "staleness_mean",
    "policy/entropy": "entropy",
    # slime
    "train_rollout_logprob_abs_diff": "abs_log_ratio",
    "rollout/response_len/mean": "response_length",
    "train/tis": "rollout_is_raw_mean",
    "train/tis_clipfrac": "rollout_is_ratio_fraction_high",
    "mis_mean_is_weight_before_clip": "rollout_is_raw_mean",
    "mis_truncate_fraction": "rollout_is_ratio_fraction_high",
    "mis_clip_fraction_high": "rollout_is_ratio_fraction_high",
    "mis_clip_fraction_low": "rollout_is_ratio_fraction_low",
    "mis_catastrophic_seq_fraction": "rollout_is_veto_fraction",
    # NeMo-RL
    "token_mult_prob_error": "mult_prob_error",
    "gen_kl_error": "k3_kl",
    "sampling_importance_ratio": "rollout_is_raw_mean",
    "mean_gen_tokens_per_sample": "response_length",
    "avg_trajectory_age": "staleness_mean",
}
_PREFIXED = re.compile(r"(?:^|/)(?:rollout_corr|mismatch)/(?:mismatch_)?([^/]+)$")
_BARE = re.compile(r"(?:^|/)mismatch_([^/]+)$")  # slime's


def own_name(name: str) -> str | None:
    """What a metric is called here, without a prefix; None for one that says nothing of the two policies.

    Args:
        name: as a file spells it; W&B's exports put the run and `` - `` before it.
    """
    name = name.rpartition(" - ")[2].strip()
    for pattern in (_PREFIXED, _BARE):
        match = pattern.search(name)
        if match:
            return match[1]
    for other, own in OTHER_NAMES.items():
        if name == other or name.endswith(f"/{other}"):
            return own
    return None
