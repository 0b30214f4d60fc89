"""The table of rules: facts, threshold, sentence, remedy and source of each fault.

A rule explains numbers that would make rules below it hold too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from string import Formatter

from megatron_rc.doctor.facts import Facts
from megatron_rc.doctor.programs import WORDS
from megatron_rc.doctor.series import K3
from megatron_rc.measures.shift import SHIFT_RATIO

REPAIR = "repair"  # the data are wrong, and no correction can replace the repair
CORRECT = "correct"  # the run needs a correction, or another setting of it
WEIGHTS = "weights"  # nothing is broken; weights of another level would use more of the batch

MIN_TOKENS = 256  # the fewest tokens for which shares and means are judged
FAR = 0.1  # nats of k3; from here on these are two different policies
# Limits of other distances, used if k3 is unknown.
OTHER_DISTANCES = {"probs_diff_mean": 0.01, "mult_prob_error": 1.05, "abs_log_ratio": 0.1, "kl": 0.1}
# Shares of tokens or sequences that are rejected, get weight 0, or have a weight out of its bounds.
CUTS = (
    "rollout_rs_masked_fraction",
    "rollout_is_masked_fraction",
    "rollout_is_oob_ratio",
    "rollout_is_ratio_fraction_high",
)
SYMPTOMS = ("rollout_is_eff_sample_size", "rollout_is_std", "rollout_is_mean")  # of weights that few tokens carry

_LIU = "Liu et al. 2025, When Speed Kills Stability"
_VERL = "verl, docs/algo/rollout_corr.md"
_MEASURED = "own measurement (docs/doctor.md)"
_FIRST = "verl, docs/advance/rollout_is_migration.md of October 2025"
_OF_DATA = (
    "unusable",
    "shift",
    "truncated_sampling",
    "stale_cache",
    "other_policy",
    "log_prob_mode",
    "temperature",
)


@dataclass(frozen=True)
class Rule:
    """A fault, and the test for it."""

    name: str
    title: str  # the fault in words
    needs: tuple[tuple[str, ...], ...]  # lists of facts; the test needs all facts of any one list
    holds: Callable[[Facts], bool]  # the test; comparisons with a missing fact are False
    words: str  # the finding, with facts as ``{name}``; a clause (between semicolons) with an unknown fact is left out
    advice: str  # the remedy, with names from ``WORDS`` as ``{name}``
    sources: str  # publications of the test and its thresholds
    unless: tuple[str, ...] = ()  # rules that explain the same numbers better: if one holds, this rule is silent
    kind: str = CORRECT

    def advice_in(self, program: str) -> str:
        """The remedy with the names of a program's settings."""
        return self.advice.format_map(WORDS[program])

    def can_be_looked_at(self, facts: Facts) -> bool:
        """Whether the facts suffice for the test."""
        return any(facts.has(*names) for names in self.needs)


@dataclass(frozen=True)
class Verdict:
    """A rule that holds, with its sentence and its numbers."""

    rule: Rule
    words: str
    numbers: dict[str, float]


# -- Tests that are longer than one comparison. A comparison with an unknown fact, which is NaN, is False.


def _is_enough(facts: Facts) -> bool:
    """Whether there are enough tokens for shares and means, or their number is unknown."""
    return not facts["num_tokens"] < MIN_TOKENS


def _ratio_error(facts: Facts) -> float:
    """Four standard errors of the mean ratio, and at least 0.01."""
    error = facts["ratio_std"] / math.sqrt(max(facts["num_tokens"], 1.0))
    return 0.01 if math.isnan(error) else max(0.01, 4 * error)


def _is_truncated(facts: Facts) -> bool:
    """No ratio is above 1, as if the engine normalised over a part of the vocabulary."""
    if facts["top_p"] < 1 or facts["top_k"] > 0 or facts["min_p"] > 0:
        return True
    is_below = facts["ratio_mean"] < 1 - _ratio_error(facts) and _is_enough(facts)
    is_one_sided = not facts["share_above"] > 0.2 * facts["share_below"]
    is_tight = facts["log_ratio_p99"] < 0.2 and facts["log_ratio_p01"] > -1.5 and facts["log_ratio_p25"] < 0
    return is_below and is_one_sided and is_tight


def _is_other_policy(facts: Facts) -> bool:
    """The probabilities of the two policies have little to do with each other, and are far apart."""
    is_far = facts["k3_kl"] > FAR or (not facts.has("k3_kl") and facts["probs_diff_mean"] > 0.05)
    return facts["probs_correlation"] < 0.5 and is_far and _is_enough(facts)


def _is_other_temperature(facts: Facts) -> bool:
    """One temperature explains most of the log-ratios, and the two policies like the same tokens."""
    explains = facts["temperature_unexplained"] < 0.2 and facts["probs_correlation"] > 0.9
    return explains and facts["k3_kl"] > K3 / 4 and _is_enough(facts) and not _is_of_two_kinds(facts)


def _is_raw(facts: Facts) -> bool:
    """A temperature explains the log-ratios, and the engine did not sample from the log-probs that it reports."""
    if facts["raw_log_probs"] == 1 and facts["temperature"] != 1:
        return True
    return _is_other_temperature(facts) and facts["ratio_mean"] > 1 + _ratio_error(facts)


def _is_of_two_kinds(facts: Facts) -> bool:
    """Some sequences are near, the others far, and none is in between."""
    are_apart = facts["two_kinds"] > 0.85 and facts["far_noise"] > 8 * facts["near_noise"]
    return are_apart and facts["far_noise"] > 0.15 and not _differs_by_version(facts)


def _differs_by_version(facts: Facts) -> bool:
    """Tokens of older weights are farther off than tokens of newer weights."""
    return facts["older_abs_log_ratio"] > 2 * facts["newer_abs_log_ratio"] and facts["older_abs_log_ratio"] > 0.02


def _is_stale(facts: Facts) -> bool:
    """The mismatch grows with the age of the weights."""
    is_late = facts["staleness_mean"] >= 0.5 and facts["k3_kl"] > K3
    return _differs_by_version(facts) or is_late or (facts["staleness_kl_growth"] > 2 and facts["k3_kl"] > K3 / 2)


def _has_jumped(facts: Facts) -> bool:
    """A number was beyond its limit in the last batch, in two of the last ten, or in a tenth of several batches."""
    is_often = facts["beyond_share"] >= 0.1 and facts["beyond_count"] >= 2
    return facts["beyond_last"] == 1 or facts["beyond_recent"] >= 2 or is_often


def _is_drifting(facts: Facts) -> bool:
    """k3 has grown, and training suffers; k3 alone may grow in a healthy run."""
    # The effective sample size of sequence weights falls when responses grow.
    is_smaller = facts["ess_fall"] > 0.1 and facts["of_sequences"] != 1
    suffers = facts["reward_fall"] > 3 or is_smaller or facts["grad_norm_growth"] > 3
    return facts["k3_growth"] > 10 and facts["k3_kl"] > K3 / 10 and suffers


def _has_collapsed(facts: Facts) -> bool:
    """The reward fell to nothing, and most batches have no advantage."""
    has_fallen = facts["reward_peak"] > 0 and facts["reward_now"] < 0.3 * facts["reward_peak"]
    return has_fallen and facts["silent_share"] >= 0.5


def _has_tails(facts: Facts) -> bool:
    """A few tokens carry most of k3."""
    width = facts["log_ratio_p95"] - facts["log_ratio_p05"]
    # k3 of a normal log-ratio with these quantiles, which are 3.29 deviations apart.
    usual = (width / 3.29) * (width / 3.29) / 2
    return facts["k3_kl"] > max(K3, 8 * usual) and width < 0.2


def _is_noisy(facts: Facts) -> bool:
    """The policies differ by more than rounding to bfloat16."""
    if facts.has("k3_kl"):
        return facts["k3_kl"] > K3
    return any(abs(facts[name]) > limit for name, limit in OTHER_DISTANCES.items())


def _grows(facts: Facts) -> bool:
    """Responses and χ² of sequences grow, and the weights may be of sequences."""
    are_apart = facts["chi2_seq_growth"] > 2 and facts["chi2_seq"] > 1
    return are_apart and facts["response_length_growth"] > 1.3 and facts["of_sequences"] != 0


def _are_long_products(facts: Facts) -> bool:
    """Few sequences carry the weights although tokens are near."""
    if facts.has("chi2_token"):
        is_near = facts["chi2_token"] < 0.3
    else:  # a program may write another distance alone
        is_near = any(map(facts.has, ("k3_kl", *OTHER_DISTANCES))) and not _is_noisy(facts)
    is_small = facts["rollout_is_mean"] < 0.5 and not facts["ratio_mean"] < 0.7
    are_few = is_small or facts["rollout_is_eff_sample_size"] < 0.3 or facts["rollout_is_std"] > 1
    return is_near and are_few and facts["of_sequences"] != 0


def _is_mean_off(facts: Facts) -> bool:
    """The mean weight changes the size of the gradient: to almost nothing, or by a factor of 2."""
    mean = facts["rollout_is_mean"]
    return mean < 0.1 or ((mean < 0.5 or mean > 2) and not (_are_long_products(facts) or _grows(facts)))


def _selects_by_length(facts: Facts) -> bool:
    """Long responses train less than half as often as short ones, and chance does not explain it."""
    shortest = facts["inclusion_shortest"]
    longest = facts["inclusion_longest"]
    mean = (shortest + longest) / 2
    # Variance of the difference of two rates, each of a quarter of the responses of one batch.
    variance = mean * (1 - mean) * 8 / max(facts["started"], 1.0)
    return longest < 0.5 * shortest and shortest - longest > 3 * math.sqrt(max(variance, 0.0))


def _is_moved_by_entropy(facts: Facts) -> bool:
    """The entropy rises again beside small token weights, which do not reduce the entropy bonus."""
    are_small = facts["token_weights"] == 1 and facts["rollout_is_applied_mean"] < 0.9
    return are_small and facts["entropy_bonus"] > 0 and facts["entropy_rise"] > 1.75 and facts["entropy"] > 0.3


RULES: tuple[Rule, ...] = (
    Rule(
        name="unusable",
        title="unusable log-probs",
        needs=(("bad_log_probs",), ("zero_sequences",)),
        holds=lambda facts: facts["bad_log_probs"] > 0 or facts["zero_sequences"] > 0,
        words="{bad_log_probs:.0f} log-probs are NaN, infinite or positive, and {zero_sequences:.0f} sequences have "
        "only 0 as the engine's log-probs",
        advice="ask the engine for the log-prob of every sampled token, and check the response mask for padding",
        sources="docs/rollouts.md; TRL#6166",
        kind=REPAIR,
    ),
    Rule(
        name="shift",
        title="log-probs shifted by one position",
        needs=(("shift_share", "shift_lag"),),
        holds=lambda facts: facts["shift_share"] < SHIFT_RATIO,
        words="the engine's log-prob of a token is nearer to the trainer's log-prob of its neighbour (lag "
        "{shift_lag:+.0f}): the distance is {shift_share:.0%} of the distance at the same token",
        advice="align both to the label tokens; shift whole sequences before they are cut",
        sources="megatron_rc/measures/shift.py; ms-swift#8196, verl#4250",
        kind=REPAIR,
    ),
    Rule(
        name="truncated_sampling",
        title="truncated sampling (top-p, top-k)",
        needs=(("top_p",), ("ratio_mean", "log_ratio_p99")),
        holds=_is_truncated,
        words="the mean ratio is {ratio_mean:.3f}, but full sampling gives 1: it is the trainer's total probability "
        "of the tokens that the engine kept; recorded: top_p {top_p:.3g}, top_k {top_k:.0f}",
        advice="sample with top_p 1, top_k 0 and min_p 0, or let the trainer renormalise over the tokens that the "
        "engine kept",
        sources="TRL#7269 (top_p 0.8: mean ratio 0.896); DeepSeek-AI 2025, DeepSeek-V3.2, arXiv 2512.02556, 3.1",
        unless=("shift",),
        kind=REPAIR,
    ),
    Rule(
        name="stale_cache",
        title="a stale cache, or one engine with other weights",
        needs=(("two_kinds", "far_noise"),),
        holds=_is_of_two_kinds,
        words="{far_sequences:.0%} of the sequences are {far_noise:.2f} apart, the others {near_noise:.3f} (mean "
        "over tokens of |log ρ| / (1 - p), at most 0.5 a token; p: probability of the token)",
        advice="empty the engine's prefix cache after every weight sync, and compare the weights of every replica with "
        "the trainer's weights",
        sources="SkyRL#2246 (stale prefix cache: mean difference 0.87); vLLM's reset_prefix_cache",
        unless=("shift",),
        kind=REPAIR,
    ),
    Rule(
        name="other_policy",
        title="other inputs, or weights that were never synced",
        needs=(("probs_correlation", "k3_kl"), ("probs_correlation", "probs_diff_mean")),
        holds=_is_other_policy,
        words="the probabilities of the two policies have a correlation of {probs_correlation:.2f}, and healthy ones "
        "one near 1; k3 {k3_kl:.2g} nats a token",
        advice="compare the token ids that engine and trainer score (template, padding, images, order of the rows), "
        "then the weights of both after a weight sync",
        sources=f"verl-omni#254 (other inputs: 0.13); {_MEASURED}",
        unless=("shift", "stale_cache"),
        kind=REPAIR,
    ),
    Rule(
        name="log_prob_mode",
        title="log-probs from before the temperature",
        needs=(("raw_log_probs",), ("temperature_unexplained", "ratio_mean")),
        holds=_is_raw,
        words="the mean ratio is {ratio_mean:.3f}, but log-probs of the sampling distribution give 1; the two policies "
        "differ like temperatures with a ratio of {temperature_ratio:.2f}; recorded: temperature {temperature:.3g}",
        advice="ask the engine for processed log-probs (vLLM: logprobs_mode=processed_logprobs)",
        sources="TRL#4159 (vLLM's raw_logprobs at temperature 0.6: ratio 2)",
        unless=("shift", "stale_cache", "truncated_sampling", "other_policy"),
        kind=REPAIR,
    ),
    Rule(
        name="temperature",
        title="another temperature",
        needs=(("temperature_unexplained", "probs_correlation"),),
        holds=_is_other_temperature,
        words="engine and trainer differ as if the engine's temperature were {temperature_ratio:.2f} times the "
        "trainer's; this leaves {temperature_unexplained:.0%} of the distance unexplained",
        advice="score with the temperature that the engine samples with (setting: {temperature})",
        sources=_MEASURED,
        unless=("shift", "stale_cache", "truncated_sampling", "other_policy", "log_prob_mode"),
        kind=REPAIR,
    ),
    Rule(
        name="staleness",
        title="weights that are some updates old",
        needs=(("num_versions",), ("staleness_mean", "k3_kl"), ("staleness_kl_growth",)),
        holds=_is_stale,
        words="tokens of older weights are {older_abs_log_ratio:.3f} nats off on average, tokens of newer weights "
        "{newer_abs_log_ratio:.3f}; the stalest tokens have {staleness_kl_growth:.3g} times the KL of the freshest; "
        "mean staleness {staleness_mean:.2g} steps; k3 {k3_kl:.2g}",
        advice="sync the weights more often (lower {staleness}){scale}",
        sources=f"Fu et al. 2025, AReaL, arXiv 2505.24298; {_VERL}",
        unless=("shift", "stale_cache", "truncated_sampling", "other_policy", "log_prob_mode", "temperature"),
    ),
    Rule(
        name="drift",
        title="policies that drift apart",
        needs=tuple(("k3_growth", "drift_since", sign) for sign in ("reward_fall", "ess_fall", "grad_norm_growth")),
        holds=_is_drifting,
        words="k3 is {k3_kl:.2g}, {k3_growth:.3g} times its lowest level, and above twice that since step "
        "{drift_since:.0f}; reward {reward:.3g}, at best {reward_best:.3g}; effective sample size "
        "{rollout_is_eff_sample_size:.3f}, at best {ess_best:.3f}; gradient norm {grad_norm_growth:.2g} times its "
        "lowest level; responses {response_length_growth:.2g} times as long as at the start",
        advice="find the change at that step (learning rate, staleness, weight sync, data, temperature), and continue "
        "from a checkpoint before it; bounds only slow a drift down",
        sources=f"{_LIU}; {_MEASURED}",
    ),
    Rule(
        name="collapse",
        title="a reward that fell to nothing, and steps without a signal",
        needs=(("silent_share", "reward_now", "reward_peak"),),
        holds=_has_collapsed,
        words="the mean reward of the last batches is {reward_now:.3g}, after a best of {reward_peak:.3g}; in "
        "{silent_share:.0%} of the last batches no response has an advantage, because all rewards of each prompt are "
        "equal, so nothing brings the policy back",
        advice="go back to a checkpoint before the fall, or begin again, with {signal}",
        sources=_MEASURED,
    ),
    Rule(
        name="tails",
        title="a few tokens that are far off",
        needs=(("k3_kl", "log_ratio_p05", "log_ratio_p95"),),
        holds=_has_tails,
        words="k3 is {k3_kl:.2g} although nine tokens of ten have log ρ between {log_ratio_p05:.3f} and "
        "{log_ratio_p95:.3f}: a few tokens carry it; 1st percentile {log_ratio_p01:.2f}",
        advice="set their weights to 0 (decoupled_token_icepop) or, if few responses have such a token, reject these "
        "responses (trust_region_masking); the usual causes are routing of experts, another end token, and tokens of "
        "low probability",
        sources=f"{_LIU}; NeMo-RL, docs/guides/grpo.md (one token at exp(-10)); Ma et al. 2025, Stabilizing MoE "
        "Reinforcement Learning by Aligning Training and Inference Routers, arXiv 2510.11370",
        unless=_OF_DATA,
    ),
    Rule(
        name="precision",
        title="policies that differ by more than rounding",
        needs=tuple((name,) for name in ("k3_kl", *OTHER_DISTANCES)),
        holds=_is_noisy,
        words="k3 {k3_kl:.2g}; {share_above:.0%} of the tokens are at least 2 % more probable under the trainer, "
        "{share_below:.0%} less probable; mean |log ρ| {abs_log_ratio:.2g} nats; mean difference of probabilities "
        "{probs_diff_mean:.2g}; mean exp|log ρ| {mult_prob_error:.3g}; KL {kl:.2g}",
        advice="compare the precision of engine and trainer (fp8, int8 and int4 weights or caches, bf16 output "
        "layers), their weights (the weight sync, and staleness if versions are not recorded) and their temperature "
        "(setting: {temperature}), which metrics alone do not tell from rounding",
        sources="Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, "
        "fengyao.notion.site/off-policy-rl; verl, docs/faq/faq.rst (0.01); NeMo-RL, "
        f"docs/guides/dtensor-tp-accuracy.md (1.05); slime, its CI (0.1); {_MEASURED}",
        unless=(*_OF_DATA[1:], "staleness", "tails"),
    ),
    Rule(
        name="growing_length",
        title="responses grow, and the mismatch of whole sequences with them",
        needs=(("response_length_growth", "chi2_seq_growth"),),
        holds=_grows,
        words="responses are {response_length_growth:.2g} times as long as at the start ({response_length:.0f} "
        "tokens), and χ² of sequences {chi2_seq_growth:.2g} times as large ({chi2_seq:.2g})",
        advice="use token weights, or geometric means of sequences; they do not grow with the length",
        sources=f"{_LIU}; {_VERL}",
        kind=WEIGHTS,
    ),
    Rule(
        name="gspo_with_sequence_weights",
        title="GSPO beside sequence weights",
        needs=(("gspo", "sequence_weights"),),
        holds=lambda facts: facts["gspo"] == 1 and facts["sequence_weights"] == 1,
        words="GSPO's ratio is a geometric mean over the sequence, the weights are products over it: a weight is such "
        "a mean to the power of the length",
        advice="use --rollout-is geometric, a mean as GSPO's ratio is, or token weights",
        sources="Zheng et al. 2025, Group Sequence Policy Optimization, arXiv 2507.18071",
    ),
    Rule(
        name="entropy_bonus",
        title="an entropy bonus beside small token weights",
        needs=(("entropy_bonus", "token_weights", "entropy_rise", "rollout_is_applied_mean"),),
        holds=_is_moved_by_entropy,
        words="the policy's entropy is {entropy:.2f} nats a token, {entropy_rise:.1f} times its lowest level, while "
        "the mean weight is {rollout_is_applied_mean:.2f}: the weights reduce the policy loss, but not the bonus of "
        "{entropy_bonus:g}",
        advice="set --grpo-entropy-term-weight 0, or multiply it by the mean weight",
        sources=f"{_MEASURED}; docs/study.md",
    ),
    Rule(
        name="threshold_cuts_half",
        title="a threshold that cuts half of the batch",
        needs=tuple((name,) for name in CUTS),
        holds=lambda facts: any(facts[name] >= 0.5 for name in CUTS),
        words="rejected {rollout_rs_masked_fraction:.0%}; weight 0 {rollout_is_masked_fraction:.0%}; out of bounds "
        "{rollout_is_oob_ratio:.0%}; above the upper bound {rollout_is_ratio_fraction_high:.0%}",
        advice="widen the bounds until they cut at most 5 % of the tokens, or bring the policies closer first; if "
        "these are weights of sequences, use token weights, which do not depend on the length",
        sources=f"{_MEASURED}; {_VERL}",
    ),
    Rule(
        name="long_products",
        title="sequence weights that few responses carry",
        needs=tuple((name, near) for name in SYMPTOMS for near in ("chi2_token", "k3_kl", *OTHER_DISTANCES)),
        holds=_are_long_products,
        words="effective sample size of the weights {rollout_is_eff_sample_size:.2f}; standard deviation "
        "{rollout_is_std:.2f}; mean {rollout_is_mean:.2g}; χ² of tokens only {chi2_token:.2g}; k3 only {k3_kl:.2g}",
        advice="if these are weights of sequences, use token weights, and reject sequences by their geometric mean; if "
        "they are of another level, say so with the doctor's flag --rollout-is, and they are judged as such",
        sources=f"{_VERL} (effective sample size < 0.3); {_LIU}",
        unless=(*_OF_DATA, "growing_length", "threshold_cuts_half"),
        kind=WEIGHTS,
    ),
    Rule(
        name="veto",
        title="a veto that rejects much",
        needs=(("rollout_is_veto_fraction",),),
        holds=lambda facts: facts["rollout_is_veto_fraction"] > 0.1,
        words="{rollout_is_veto_fraction:.0%} of the sequences have a token below the veto's threshold",
        advice="lower {veto}, or find out why the trainer gives these tokens almost no probability",
        sources=f"{_FIRST} (0.1)",
    ),
    Rule(
        name="length_selection",
        title="long responses that are left out more often than short ones",
        needs=(("inclusion_shortest", "inclusion_longest", "started"),),
        holds=_selects_by_length,
        words="of the longest quarter of the responses {inclusion_longest:.0%} train, of the shortest "
        "{inclusion_shortest:.0%}; of {started:.0f} started responses of a batch {bad:.0f} are bad, {replaced:.0f} "
        "replaced, {overlong:.0f} overlong and {rejected:.0f} rejected",
        advice="no weight brings them back: keep overlong responses or allow longer ones, reject by means over tokens "
        "in place of sums, and repair what makes them bad",
        sources="tinker-cookbook#822 (slow rollouts are left out)",
    ),
    Rule(
        name="jump",
        title="a distance or a share that jumped in some batches",
        needs=(("beyond_count", "beyond_share"),),
        holds=_has_jumped,
        words="{beyond_count:.0f} batches are beyond a limit, the first at step {beyond_first_step:.0f}, the last at "
        "step {beyond_last_step:.0f}; k3 up to {beyond_k3_kl:.3g}; KL up to {beyond_kl:.3g}; mean |log ρ| up to "
        "{beyond_abs_log_ratio:.3g}; mean difference of probabilities up to {beyond_probs_diff_mean:.3g}; mean exp|log "
        "ρ| up to {beyond_mult_prob_error:.3g}; vetoed sequences up to {beyond_rollout_is_veto_fraction:.0%}; "
        "rejected up to {beyond_rollout_rs_masked_fraction:.0%}; weight 0 up to "
        "{beyond_rollout_is_masked_fraction:.0%}; weights out of bounds up to {beyond_rollout_is_oob_ratio:.0%}; "
        "weights above the upper bound up to {beyond_rollout_is_ratio_fraction_high:.0%}",
        advice="find what happened at these steps (a resume, a weight sync, a restart of an engine), and compare the "
        "weights of engine and trainer",
        sources=f"slime#1695 (a jump after a resume); {_MEASURED}",
        unless=("staleness", "tails", "precision", "threshold_cuts_half", "veto"),
    ),
    Rule(
        name="wide_weights",
        title="weights that vary too much",
        needs=(("rollout_is_std",), ("rollout_is_eff_sample_size",)),
        holds=lambda facts: facts["rollout_is_std"] > 1 or facts["rollout_is_eff_sample_size"] < 0.3,
        words="standard deviation of weights {rollout_is_std:.2f}; effective sample size "
        "{rollout_is_eff_sample_size:.2f}",
        advice="lower the upper bound of the weights, or reject outliers, until the policies are closer",
        sources=f"{_FIRST} (1; 0.3)",
        unless=(*_OF_DATA, "growing_length", "long_products", "threshold_cuts_half"),
    ),
    Rule(
        name="mean_weight",
        title="a mean weight far from 1",
        needs=(("rollout_is_mean",),),
        holds=_is_mean_off,
        words="the mean weight is {rollout_is_mean:.2g}: it multiplies the loss",
        advice="use token weights, if these are products over whole responses; else check that both log-probs are of "
        "the sampled tokens, and that engine and trainer have the same weights and {temperature}",
        sources=f"{_FIRST} (0.5 to 2); NeMo-RL#2269 (0.06 at a gradient norm of 9e-5)",
        unless=(*_OF_DATA, "threshold_cuts_half"),
    ),
)
BY_NAME = {rule.name: rule for rule in RULES}


def judge(facts: Facts) -> list[Verdict]:
    """The verdicts on some facts; the first one explains the most."""
    holding = {rule.name for rule in RULES if rule.can_be_looked_at(facts) and rule.holds(facts)}
    verdicts = []
    for rule in RULES:
        if rule.name in holding and holding.isdisjoint(rule.unless):
            names = {name for needed in rule.needs for name in needed if name in facts}
            numbers = {name: facts[name] for name in sorted(names)}
            verdicts.append(Verdict(rule, sentence(rule, facts), numbers))
    return verdicts


def sentence(rule: Rule, facts: Facts) -> str:
    """The rule's sentence, without the clauses that have an unknown number."""
    clauses = []
    for clause in rule.words.split("; "):
        names = [name for _, name, _, _ in Formatter().parse(clause) if name]
        if facts.has(*names):
            clauses.append(clause)
    return "; ".join(clauses).format_map(facts)


def not_looked_at(facts: Facts) -> list[Rule]:
    """Rules that lack facts."""
    return [rule for rule in RULES if not rule.can_be_looked_at(facts)]
