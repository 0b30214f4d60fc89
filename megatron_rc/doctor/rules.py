"""The table of rules. A rule explains numbers that would make rules below it hold too."""

from __future__ import annotations

from string import Formatter

from megatron_rc.doctor import signs
from megatron_rc.doctor.facts import Facts
from megatron_rc.doctor.rule import REPAIR, WEIGHTS, Rule, Verdict
from megatron_rc.measures.shift import SHIFT_RATIO

LIU = "Liu et al. 2025, When Speed Kills Stability"
VERL = "verl, docs/algo/rollout_corr.md"
OWN = "own measurement (docs/doctor.md)"
FIRST = "verl, docs/advance/rollout_is_migration.md of October 2025"
_BROKEN = ("unusable", "shift", "truncated_sampling", "stale_cache", "log_prob_mode", "temperature")

RULES: tuple[Rule, ...] = (
    Rule(
        "unusable",
        "unusable log-probs",
        (("bad_log_probs",), ("zero_sequences",)),
        lambda facts: facts["bad_log_probs"] > 0 or facts["zero_sequences"] > 0,
        "{bad_log_probs:.0f} log-probs are NaN, infinite or positive, and {zero_sequences:.0f} sequences have only 0 "
        "as the engine's log-probs",
        "ask the engine for the log-prob of every sampled token, and check the response mask for padding",
        "docs/rollouts.md; TRL#6166",
        kind=REPAIR,
    ),
    Rule(
        "shift",
        "log-probs shifted by one position",
        (("shift_share", "shift_lag"),),
        lambda facts: facts["shift_share"] < SHIFT_RATIO,
        "the engine's log-prob of a token is nearer to the trainer's log-prob of its neighbour (lag {shift_lag:+.0f}): "
        "the distance is {shift_share:.0%} of the distance at the same token",
        "align both to the label tokens; shift whole sequences before they are cut",
        "megatron_rc/measures/shift.py; ms-swift#8196, verl#4250",
        kind=REPAIR,
    ),
    Rule(
        "truncated_sampling",
        "truncated sampling (top-p, top-k)",
        (("top_p",), ("ratio_mean", "log_ratio_p99")),
        signs.is_truncated,
        "the mean ratio is {ratio_mean:.3f}, but full sampling gives 1: so much probability does the trainer "
        "give to the tokens that the engine kept; recorded: top_p {top_p:.3g}, top_k {top_k:.0f}",
        "sample with top_p 1, top_k 0 and min_p 0, or let the trainer renormalise over the tokens that the engine kept",
        "TRL#7269 (top_p 0.8: mean ratio 0.896); DeepSeek-AI 2025, DeepSeek-V3.2, arXiv 2512.02556, 3.1",
        ("shift",),
        kind=REPAIR,
    ),
    Rule(
        "stale_cache",
        "a stale cache, or one engine with other weights",
        (("two_kinds", "far_noise"),),
        signs.is_of_two_kinds,
        "{far_sequences:.0%} of the sequences are {far_noise:.2f} apart, the others {near_noise:.3f} (|log ρ| / (1 - "
        "p), p: probability of the token)",
        "empty the engine's prefix cache after every weight sync, and compare the weights of every replica with the "
        "trainer's weights",
        "SkyRL#2246 (stale prefix cache: mean difference 0.87); vLLM's reset_prefix_cache",
        ("shift",),
        kind=REPAIR,
    ),
    Rule(
        "log_prob_mode",
        "log-probs from before the temperature",
        (("raw_log_probs",), ("temperature_unexplained", "ratio_mean")),
        signs.is_raw,
        "the mean ratio is {ratio_mean:.3f}, but log-probs of the sampling distribution give 1; the two "
        "policies differ like temperatures with a ratio of {temperature_ratio:.2f}; recorded: temperature "
        "{temperature:.3g}",
        "ask the engine for processed log-probs (vLLM: logprobs_mode=processed_logprobs)",
        "TRL#4159 (vLLM's raw_logprobs at temperature 0.6: ratio 2)",
        ("shift", "stale_cache", "truncated_sampling"),
        kind=REPAIR,
    ),
    Rule(
        "temperature",
        "another temperature",
        (("temperature_unexplained",),),
        signs.is_other_temperature,
        "engine and trainer differ as if the engine's temperature were {temperature_ratio:.2f} times the trainer's; "
        "this leaves {temperature_unexplained:.0%} of the distance unexplained",
        "score with the temperature that the engine samples with (setting: {temperature})",
        OWN,
        ("shift", "stale_cache", "truncated_sampling", "log_prob_mode"),
        kind=REPAIR,
    ),
    Rule(
        "staleness",
        "weights that are some updates old",
        (("num_versions",), ("staleness_mean", "k3_kl"), ("staleness_kl_growth",)),
        signs.is_stale,
        "tokens of older weights are {older_abs_log_ratio:.3f} nats off on average, tokens of newer weights "
        "{newer_abs_log_ratio:.3f}; the stalest tokens have {staleness_kl_growth:.3g} times the KL of the freshest; "
        "mean staleness {staleness_mean:.2g} steps; k3 {k3_kl:.2g}",
        "sync the weights more often (lower {staleness}){scale}",
        f"Fu et al. 2025, AReaL, arXiv 2505.24298; {VERL}",
        ("shift", "stale_cache", "truncated_sampling", "log_prob_mode", "temperature"),
    ),
    Rule(
        "drift",
        "policies that drift apart",
        tuple(("k3_growth", "drift_since", sign) for sign in ("reward_fall", "ess_fall", "grad_norm_growth")),
        signs.is_drifting,
        "k3 is {k3_kl:.2g}, {k3_growth:.3g} times its lowest level, and above twice that since step {drift_since:.0f}; "
        "reward {reward:.3g}, at best {reward_best:.3g}; effective sample size {rollout_is_eff_sample_size:.3f}, at "
        "best {ess_best:.3f}; gradient norm {grad_norm_growth:.2g} times its lowest level; responses "
        "{response_length_growth:.2g} times as long as at the start",
        "find the change at that step (learning rate, staleness, weight sync, data, temperature), and continue from a "
        "checkpoint before it; bounds only slow a drift down",
        f"{LIU}; {OWN}",
    ),
    Rule(
        "collapse",
        "a reward that fell to nothing, and steps without a signal",
        (("silent_share", "reward_now", "reward_peak"),),
        lambda facts: (
            facts["reward_peak"] > 0
            and facts["reward_now"] < 0.3 * facts["reward_peak"]
            and facts["silent_share"] >= 0.5
        ),
        "the mean reward of the last steps is {reward_now:.3g}, after a best of {reward_peak:.3g}; in "
        "{silent_share:.0%} of the last steps no response has an advantage, because all rewards of each prompt are "
        "equal, so nothing brings the policy back",
        "go back to a checkpoint before the fall, or begin again, with {signal}",
        OWN,
    ),
    Rule(
        "tails",
        "a few tokens that are far off",
        (("k3_kl", "log_ratio_p05", "log_ratio_p95"),),
        signs.has_tails,
        "k3 is {k3_kl:.2g} although nine tokens of ten have log ρ between {log_ratio_p05:.3f} and {log_ratio_p95:.3f}: "
        "a few tokens carry it; 1st percentile {log_ratio_p01:.2f}",
        "reject their sequences (trust_region_masking) or set their weights to 0 (decoupled_token_icepop); the usual "
        "causes are routing of experts and tokens of low probability",
        f"{LIU}; NeMo-RL, docs/guides/grpo.md (one token at exp(-10)); Ma et al. 2025, Stabilizing MoE Reinforcement "
        "Learning by Aligning Training and Inference Routers, arXiv 2510.11370",
        _BROKEN,
    ),
    Rule(
        "precision",
        "policies that differ by more than rounding",
        tuple((name,) for name in ("k3_kl", *signs.OTHER_DISTANCES)),
        signs.is_noisy,
        "k3 {k3_kl:.2g}; {share_above:.0%} of the tokens are at least 2 % more probable under the trainer, "
        "{share_below:.0%} less probable; mean |log ρ| {abs_log_ratio:.2g} nats; mean difference of probabilities "
        "{probs_diff_mean:.2g}",
        "compare the precision of engine and trainer (fp8, int8 and int4 weights or caches, bf16 output layers), their "
        "weights (the weight sync, and staleness if versions are not recorded) and their temperature (setting: "
        "{temperature}), which metrics alone do not tell from rounding",
        "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, "
        "fengyao.notion.site/off-policy-rl; verl, docs/faq/faq.rst (0.01); NeMo-RL, "
        f"docs/guides/dtensor-tp-accuracy.md (1.05); {OWN}",
        ("shift", "truncated_sampling", "stale_cache", "log_prob_mode", "temperature", "staleness", "tails"),
    ),
    Rule(
        "growing_length",
        "responses grow, and the mismatch of whole sequences with them",
        (("response_length_growth", "chi2_seq_growth"),),
        signs.grows,
        "responses are {response_length_growth:.2g} times as long as at the start ({response_length:.0f} tokens), and "
        "χ² of sequences {chi2_seq_growth:.2g} times as large ({chi2_seq:.2g})",
        "use token weights, or geometric means of sequences; they do not grow with the length",
        f"{LIU}; {VERL}",
        kind=WEIGHTS,
    ),
    Rule(
        "long_products",
        "sequence weights that few responses carry",
        tuple((name, near) for name in signs.SYMPTOMS for near in ("chi2_token", "k3_kl")),
        signs.are_long_products,
        "effective sample size of the weights {rollout_is_eff_sample_size:.2f}; standard deviation "
        "{rollout_is_std:.2f}; mean {rollout_is_mean:.2f}; χ² of tokens only {chi2_token:.2g}; k3 only {k3_kl:.2g}",
        "use token weights, and reject sequences by their geometric mean",
        f"{VERL} (effective sample size < 0.3); {LIU}",
        (*_BROKEN, "growing_length"),
        kind=WEIGHTS,
    ),
    Rule(
        "gspo_with_sequence_weights",
        "GSPO beside sequence weights",
        (("gspo", "sequence_weights"),),
        lambda facts: facts["gspo"] == 1 and facts["sequence_weights"] == 1,
        "GSPO's ratio is a geometric mean over the sequence, the weights are products over it: a weight is such a mean "
        "to the power of the length",
        "use --rollout-is geometric, a mean as GSPO's ratio is, or token weights",
        "Zheng et al. 2025, Group Sequence Policy Optimization, arXiv 2507.18071",
    ),
    Rule(
        "entropy_bonus",
        "an entropy bonus beside small token weights",
        (("entropy_bonus", "token_weights", "entropy_rise", "rollout_is_applied_mean"),),
        signs.is_moved_by_entropy,
        "the policy's entropy is {entropy:.2f} nats a token, {entropy_rise:.1f} times its lowest level, while the mean "
        "weight is {rollout_is_applied_mean:.2f}: the weights reduce the policy loss, but not the bonus of "
        "{entropy_bonus:g}",
        "set --grpo-entropy-term-weight 0, or multiply it by the mean weight",
        f"{OWN}; docs/study.md",
    ),
    Rule(
        "threshold_cuts_half",
        "a threshold that cuts half of the batch",
        tuple((name,) for name in signs.CUTS),
        lambda facts: any(facts[name] >= 0.5 for name in signs.CUTS),
        "rejected {rollout_rs_masked_fraction:.0%}; weight 0 {rollout_is_masked_fraction:.0%}; out of bounds "
        "{rollout_is_oob_ratio:.0%}; above the upper bound {rollout_is_ratio_fraction_high:.0%}",
        "widen the bounds until they cut at most 5 % of the tokens, or bring the policies closer first",
        f"{OWN}; {VERL}",
    ),
    Rule(
        "veto",
        "a veto that rejects much",
        (("rollout_is_veto_fraction",),),
        lambda facts: facts["rollout_is_veto_fraction"] > 0.1,
        "{rollout_is_veto_fraction:.0%} of the sequences have a token below the veto's threshold",
        "lower {veto}, or find out why the trainer gives these tokens almost no probability",
        f"{FIRST} (0.1)",
    ),
    Rule(
        "wide_weights",
        "weights that vary too much",
        (("rollout_is_std",), ("rollout_is_eff_sample_size",)),
        lambda facts: facts["rollout_is_std"] > 1 or facts["rollout_is_eff_sample_size"] < 0.3,
        "standard deviation of weights {rollout_is_std:.2f}; effective sample size {rollout_is_eff_sample_size:.2f}",
        "lower the upper bound of the weights, or reject outliers, until the policies are closer",
        f"{FIRST} (1; 0.3)",
        (*_BROKEN, "growing_length", "long_products", "threshold_cuts_half"),
    ),
    Rule(
        "mean_weight",
        "a mean weight far from 1",
        (("rollout_is_mean",),),
        lambda facts: facts["rollout_is_mean"] < 0.5 or facts["rollout_is_mean"] > 2,
        "the mean weight is {rollout_is_mean:.2f}: it multiplies the loss",
        "check that both log-probs are of the sampled tokens, and that engine and trainer have the same weights and "
        "{temperature}; a mean that stays far from 1 is divided out by normalisation over the batch",
        f"{FIRST} (0.5 to 2)",
        (*_BROKEN, "growing_length", "long_products", "threshold_cuts_half"),
    ),
)
BY_NAME = {rule.name: rule for rule in RULES}


def judge(facts: Facts) -> list[Verdict]:
    """The verdicts on some facts; the first one explains the most."""
    found = {rule.name for rule in RULES if rule.can_be_looked_at(facts) and rule.holds(facts)}
    verdicts = []
    for rule in RULES:
        if rule.name in found and found.isdisjoint(rule.unless):
            names = {name for needed in rule.needs for name in needed if name in facts}
            numbers = {name: facts[name] for name in sorted(names)}
            verdicts.append(Verdict(rule, _in_words(rule, facts), numbers))
    return verdicts


def _in_words(rule: Rule, facts: Facts) -> str:
    """The rule's sentence, without the clauses (between semicolons) that have an unknown number."""
    clauses = rule.words.split("; ")
    names = ([name for _, name, _, _ in Formatter().parse(clause) if name] for clause in clauses)
    return "; ".join(one for one, of in zip(clauses, names, strict=True) if facts.has(*of)).format_map(facts)


def not_looked_at(facts: Facts) -> list[Rule]:
    """Rules that lack facts."""
    return [rule for rule in RULES if not rule.can_be_looked_at(facts)]
