"""The doctor's report: text, a JSON object and an exit code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_rc.attribution.verdict import where_in_words
from megatron_rc.doctor.advice import EXP_LIMIT, Choice, Effect, candidates, choose, effect
from megatron_rc.doctor.inputs import Evidence
from megatron_rc.doctor.other_words import WORDS
from megatron_rc.doctor.ranges import RANGES
from megatron_rc.doctor.rule import WEIGHTS, Rule, Verdict
from megatron_rc.doctor.rules import judge, not_looked_at
from megatron_rc.doctor.signs import OTHER_DISTANCES
from megatron_rc.measures.measure import REWARD_SIGNS

HEALTHY, WRONG, UNUSABLE, TOO_LITTLE = 0, 1, 2, 3
# Upper limit of k3 in nats for each sentence.
GRADES = (
    (1e-3, "the policies are as close as rounding to bfloat16 leaves them"),
    (1e-2, "the policies differ; a correction handles it"),
    (1e-1, "the policies are far apart; find the cause before relying on a correction"),
    (math.inf, "these are two different policies; repair the cause first"),
)
# Facts about the distance in the order of the report: name, label, format.
SHOWN = (
    ("kl", "KL", "{:.3g} nats a token"),
    ("k3_kl", "k3", "{:.3g} nats a token"),
    ("abs_log_ratio", "mean |log ρ|", "{:.3g}"),
    ("probs_diff_mean", "mean |Δp|", "{:.3g}"),
    ("mult_prob_error", "mean exp|log ρ|", "{:.4g}"),
    ("ratio_mean", "mean ρ", "{:.4g}"),
    ("ppl_ratio", "perplexity, trainer / engine", "{:.4g}"),
    ("chi2_token", "χ² of tokens", "{:.3g}"),
    ("chi2_seq", "χ² of sequences", "{:.3g}"),
    ("rollout_is_eff_sample_size", "effective sample size, as logged", "{:.3f}"),
    ("token_eff_sample_size", "effective sample size, token weights", "{:.3f}"),
    ("sequence_eff_sample_size", "effective sample size, sequence weights", "{:.3f}"),
)
_QUANTILES = ("01", "05", "50", "95", "99")


@dataclass(frozen=True)
class Report:
    """Verdicts, proposal and effects for one input."""

    evidence: Evidence
    verdicts: list[Verdict]
    not_looked_at: list[Rule]
    choice: Choice | None
    effects: list[Effect]

    @property
    def code(self) -> int:
        """The exit code."""
        if any(verdict.rule.kind != WEIGHTS for verdict in self.verdicts):
            return WRONG
        return HEALTHY if any(map(self.evidence.facts.has, ("k3_kl", *OTHER_DISTANCES))) else TOO_LITTLE


def examine(evidence: Evidence) -> Report:
    """Judge the input; if it is a batch with log-probs of both policies, try corrections on it."""
    facts, sampled = evidence.facts, evidence.sampled
    verdicts = judge(facts)
    choice = choose(facts, verdicts, sampled)
    can_try = sampled is not None and sampled.old_log_probs is not None and choice is not None
    effects = [effect(one, sampled) for one in candidates(choice)] if can_try and sampled and choice else []
    return Report(evidence, verdicts, not_looked_at(facts), choice, effects)


def in_words(report: Report) -> str:
    """The report as text."""
    parts = [
        report.evidence.what,
        *(f"note: {note}" for note in report.evidence.notes),
        "",
        *_distance(report),
        *_found(report),
        *_proposed(report),
    ]
    complaints = _complaints(report)
    if complaints:
        parts += ["", "Outside of published ranges (docs/doctor.md says where ours differ)"]
        parts += [f"  {one}" for one in complaints]
    if report.not_looked_at:
        names = ", ".join(rule.name for rule in report.not_looked_at)
        parts += ["", f"Not tested, because the input lacks the numbers: {names}."]
        if report.evidence.sampled is None:
            parts.append(f"A recorded batch has them ({WORDS[report.evidence.dialect]['record']}).")
    return "\n".join(parts)


def _distance(report: Report) -> list[str]:
    facts = report.evidence.facts
    lines = ["How far apart"]
    if facts.has("k3_kl"):
        lines.append(f"  {next(words for limit, words in GRADES if facts['k3_kl'] <= limit)}")
    lines += [f"  {label:<40}{form.format(facts[name])}" for name, label, form in SHOWN if name in facts]
    if facts.has(*(f"log_ratio_p{quantile}" for quantile in _QUANTILES)):
        logs = (max(-EXP_LIMIT, min(EXP_LIMIT, facts[f"log_ratio_p{quantile}"])) for quantile in _QUANTILES)
        ratios = "  ".join(f"{math.exp(log):.3g}" for log in logs)
        lines.append(f"  {'ρ at 1, 5, 50, 95, 99 %':<40}{ratios}")
    where = where_in_words(facts)
    if where is not None:
        lines.append(f"  {where}")
    return lines if len(lines) > 1 else [*lines, "  not known: the log-probs of the trainer are missing"]


def _found(report: Report) -> list[str]:
    lines = ["", "What is wrong"]
    if report.code != WRONG:
        unknown = "no fault found, but the input has no log-probs of the trainer"
        lines.append(f"  {'nothing wrong' if report.code == HEALTHY else unknown}")
        lines += ["", "What other weights would improve"] if report.verdicts else []
    for number, verdict in enumerate(report.verdicts, start=1):
        rule = verdict.rule
        lines += [f"  {number}. {rule.title} ({rule.name})", f"     {verdict.words}"]
        lines += [f"     Do: {rule.advice_in(report.evidence.dialect)}.", f"     Source: {rule.sources}"]
    return lines


def _proposed(report: Report) -> list[str]:
    if report.choice is None:
        return []
    settings = report.choice.settings(report.evidence.dialect)
    lines = ["", "What to use", *(f"  {line}" for line in settings), f"  {report.choice.why}."]
    if report.effects:
        lines.append(f"  {'on this batch':<46}{'ESS':>7}{'mean w':>9}{'tokens rejected':>17}{'of reward -/0/+':>22}")
    for one in report.effects:
        by_sign = "/".join(
            f"{one.rejected_by_reward[sign]:.0%}" if sign in one.rejected_by_reward else "-" for sign in REWARD_SIGNS
        )
        values = map(str, one.choice.arguments.values())
        name = " ".join(["> " if one.choice is report.choice else "  ", one.choice.preset, *values])
        lines.append(
            f"  {name:<46}{one.eff_sample_size:>7.3f}{one.mean_weight:>9.3f}{one.rejected_tokens:>17.1%}{by_sign:>22}"
        )
    return lines


def _complaints(report: Report) -> list[str]:
    return [complaint for one in RANGES if (complaint := one.complaint(report.evidence.facts))]


def as_json(report: Report) -> dict[str, Any]:
    """The report as one JSON object without unknown numbers."""
    facts = {name: value for name, value in sorted(report.evidence.facts.items()) if math.isfinite(value)}
    return {
        "input": report.evidence.what,
        "notes": list(report.evidence.notes),
        "exit_code": report.code,
        "attribution": where_in_words(report.evidence.facts),
        "verdicts": [
            {
                "name": verdict.rule.name,
                "kind": verdict.rule.kind,
                "title": verdict.rule.title,
                "words": verdict.words,
                "advice": verdict.rule.advice_in(report.evidence.dialect),
                "sources": verdict.rule.sources,
                "numbers": {name: value for name, value in verdict.numbers.items() if math.isfinite(value)},
            }
            for verdict in report.verdicts
        ],
        "not_looked_at": [rule.name for rule in report.not_looked_at],
        "proposal": None
        if report.choice is None
        else {
            "preset": report.choice.preset,
            "arguments": report.choice.arguments,
            "flags": report.choice.flags(),
            "dialect": report.evidence.dialect,
            "settings": "\n".join(report.choice.settings(report.evidence.dialect)),
            "why": report.choice.why,
        },
        "effects": [
            {"preset": one.choice.preset, "arguments": one.choice.arguments}
            | {name: value for name, value in vars(one).items() if name != "choice"}
            for one in report.effects
        ],
        "outside_of_published_ranges": _complaints(report),
        "facts": facts,
    }
