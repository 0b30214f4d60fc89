"""Tests of the rules, each a function of the facts. A comparison with an unknown fact is False."""

from __future__ import annotations

import math

from megatron_rc.doctor.facts import Facts

MIN_TOKENS = 256  # the fewest tokens for which shares and means are judged
K3 = 2e-3  # nats; a smaller distance is rounding to bfloat16
# Limits of other distances, used if k3 is unknown.
OTHER_DISTANCES = {"probs_diff_mean": 0.01, "mult_prob_error": 1.05, "abs_log_ratio": 0.1, "kl": 0.1}
# Shares of tokens that a threshold rejects, gives weight 0, moves to a bound, or truncates.
CUTS = (
    "rollout_rs_masked_fraction",
    "rollout_is_masked_fraction",
    "rollout_is_oob_ratio",
    "rollout_is_ratio_fraction_high",
)
SYMPTOMS = ("rollout_is_eff_sample_size", "rollout_is_std", "rollout_is_mean")  # of weights that few tokens carry


def ratio_error(facts: Facts) -> float:
    """Four standard errors of the mean ratio, and at least 0.01."""
    error = facts["ratio_std"] / math.sqrt(max(facts["num_tokens"], 1.0))
    return 0.01 if math.isnan(error) else max(0.01, 4 * error)


def is_enough(facts: Facts) -> bool:
    """Whether there are enough tokens for shares and means, or their number is unknown."""
    return not facts["num_tokens"] < MIN_TOKENS


def is_truncated(facts: Facts) -> bool:
    """No ratio is above 1, as if the engine normalised over a part of the vocabulary."""
    if facts["top_p"] < 1 or facts["top_k"] > 0 or facts["min_p"] > 0:
        return True
    cut = facts["ratio_mean"] < 1 - ratio_error(facts) and is_enough(facts)
    one_sided = not facts["share_above"] > 0.2 * facts["share_below"]
    tight = facts["log_ratio_p99"] < 0.2 and facts["log_ratio_p01"] > -1.5 and facts["log_ratio_p25"] < 0
    return cut and one_sided and tight


def is_other_temperature(facts: Facts) -> bool:
    """One temperature explains the log-ratios."""
    explained = facts["temperature_unexplained"] < 0.9
    return explained and facts["k3_kl"] > 5e-4 and is_enough(facts) and not is_of_two_kinds(facts)


def is_raw(facts: Facts) -> bool:
    """A temperature explains the log-ratios, and the engine did not sample from the log-probs that it reports."""
    if facts["raw_log_probs"] == 1 and facts["temperature"] != 1:
        return True
    return is_other_temperature(facts) and facts["ratio_mean"] > 1 + ratio_error(facts)


def is_of_two_kinds(facts: Facts) -> bool:
    """Some sequences are near, the others far, and none is in between."""
    apart = facts["two_kinds"] > 0.85 and facts["far_noise"] > 8 * facts["near_noise"]
    return apart and facts["far_noise"] > 0.15 and not differs_by_version(facts)


def differs_by_version(facts: Facts) -> bool:
    """Tokens of older weights are farther off than tokens of newer weights."""
    return facts["older_abs_log_ratio"] > 2 * facts["newer_abs_log_ratio"] and facts["older_abs_log_ratio"] > 0.02


def is_stale(facts: Facts) -> bool:
    """The mismatch grows with the age of the weights."""
    late = facts["staleness_mean"] >= 0.5 and facts["k3_kl"] > K3
    return differs_by_version(facts) or late or (facts["staleness_kl_growth"] > 2 and facts["k3_kl"] > K3 / 2)


def is_drifting(facts: Facts) -> bool:
    """k3 has grown, and training suffers; k3 alone may grow in a healthy run."""
    # The effective sample size of sequence weights falls when responses grow.
    smaller = facts["ess_fall"] > 0.1 and facts["of_sequences"] != 1
    suffers = facts["reward_fall"] > 3 or smaller or facts["grad_norm_growth"] > 3
    return facts["k3_growth"] > 10 and facts["k3_kl"] > K3 / 10 and suffers


def grows(facts: Facts) -> bool:
    """Responses and χ² of sequences grow, and the weights may be of sequences."""
    apart = facts["chi2_seq_growth"] > 2 and facts["chi2_seq"] > 1
    return apart and facts["response_length_growth"] > 1.3 and facts["of_sequences"] != 0


def are_long_products(facts: Facts) -> bool:
    """Few sequences carry the weights although tokens are near."""
    near = facts["chi2_token"] < 0.3 if facts.has("chi2_token") else facts["k3_kl"] <= K3
    small = facts["rollout_is_mean"] < 0.5 and not facts["ratio_mean"] < 0.7
    few = small or facts["rollout_is_eff_sample_size"] < 0.3 or facts["rollout_is_std"] > 1
    return near and few and facts["of_sequences"] != 0


def has_tails(facts: Facts) -> bool:
    """A few tokens carry most of k3."""
    width = facts["log_ratio_p95"] - facts["log_ratio_p05"]
    # k3 of a normal log-ratio with these quantiles, which are 3.29 deviations apart.
    usual = (width / 3.29) * (width / 3.29) / 2
    return facts["k3_kl"] > max(K3, 8 * usual) and width < 0.2


def is_noisy(facts: Facts) -> bool:
    """The policies differ by more than rounding to bfloat16."""
    if facts.has("k3_kl"):
        return facts["k3_kl"] > K3
    return any(abs(facts[name]) > limit for name, limit in OTHER_DISTANCES.items())


def is_moved_by_entropy(facts: Facts) -> bool:
    """The entropy rises again beside small token weights, which do not reduce the entropy bonus."""
    small = facts["token_weights"] == 1 and facts["rollout_is_applied_mean"] < 0.9
    return small and facts["entropy_bonus"] > 0 and facts["entropy_rise"] > 1.75 and facts["entropy"] > 0.3
