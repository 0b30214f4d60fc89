"""The doctor's report: text, a JSON object and an exit code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_rc.attribution.verdict import where_in_words
from megatron_rc.doctor.advice import EXP_LIMIT, Choice, Effect, candidates, choose, effect
from megatron_rc.doctor.inputs import Evidence
from megatron_rc.doctor.programs import WORDS
from megatron_rc.doctor.rules import (
    BY_NAME,
    FAR,
    OTHER_DISTANCES,
    WEIGHTS,
    Rule,
    Verdict,
    judge,
    not_looked_at,
    sentence,
)
from megatron_rc.measures.header import REWARD_SIGNS

HEALTHY = 0
WRONG = 1
UNUSABLE = 2
TOO_LITTLE = 3
NOTHING = "nothing wrong between engine and trainer"
# Upper limit of k3 in nats for each sentence.
GRADES = (
    (1e-3, "the policies are as close as rounding to bfloat16 leaves them"),
    (1e-2, "the policies differ; a correction handles it"),
    (FAR, "the policies are far apart; find the cause before relying on a correction"),
    (math.inf, "these are two different policies; repair the cause first"),
)
# Facts about the distance in the order of the report: name, label, format.
SHOWN = (
    ("kl", "KL", "{:.3g} nats a token"),
    ("k3_kl", "k3", "{:.3g} nats a token"),
    ("abs_log_ratio", "mean |log ρ|", "{:.3g}"),
    ("probs_diff_mean", "mean |Δp|", "{:.3g}"),
    ("mult_prob_error", "mean exp|log ρ|", "{:.4g}"),
    ("probs_correlation", "correlation of the probabilities", "{:.3f}"),
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
    facts = evidence.facts
    sampled = evidence.sampled
    verdicts = judge(facts)
    choice = choose(facts, verdicts, sampled)
    effects = []
    has_tokens = facts["num_tokens"] > 0
    if choice is not None and sampled is not None and sampled.old_log_probs is not None and has_tokens:
        effects = [effect(candidate, sampled) for candidate in candidates(choice)]
    return Report(evidence, verdicts, not_looked_at(facts), choice, effects)


def notes_of(report: Report) -> list[str]:
    """Sentences about omissions, and about single batches beyond a limit that are no verdict."""
    notes = list(report.evidence.notes)
    jump = BY_NAME["jump"]
    facts = report.evidence.facts
    if facts["beyond_count"] > 0 and not jump.holds(facts):
        notes.append(sentence(jump, facts))
    return notes


def in_words(report: Report) -> str:
    """The report as text."""
    parts = [
        report.evidence.what,
        *(f"note: {note}" for note in notes_of(report)),
        "",
        *_distance(report),
        *_found(report),
        *_proposed(report),
    ]
    if report.not_looked_at:
        names = ", ".join(rule.name for rule in report.not_looked_at)
        parts += ["", f"Not tested, because the input lacks the numbers: {names}."]
        if report.evidence.sampled is None:
            parts.append(f"A recorded batch has them ({WORDS[report.evidence.program]['record']}).")
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
    if len(lines) == 1:
        has_unusable = facts["num_tokens"] == 0
        reason = "no token has usable log-probs" if has_unusable else "the log-probs of the trainer are missing"
        lines.append(f"  not known: {reason}")
    return lines


def _found(report: Report) -> list[str]:
    lines = ["", "What is wrong"]
    if report.code != WRONG:
        unknown = "no fault found, but the input has no log-probs of the trainer"
        lines.append(f"  {NOTHING if report.code == HEALTHY else unknown}")
        lines += ["", "What other weights would improve"] if report.verdicts else []
    for number, verdict in enumerate(report.verdicts, start=1):
        rule = verdict.rule
        lines += [f"  {number}. {rule.title} ({rule.name})", f"     {verdict.words}"]
        lines += [f"     Do: {rule.advice_in(report.evidence.program)}.", f"     Source: {rule.sources}"]
    return lines


def _proposed(report: Report) -> list[str]:
    if report.choice is None:
        return []
    settings = report.choice.settings(report.evidence.program)
    lines = ["", "What to use", *(f"  {line}" for line in settings), f"  {report.choice.why}."]
    if report.effects:
        lines.append(f"  {'on this batch':<46}{'ESS':>7}{'mean w':>9}{'tokens rejected':>17}{'of reward -/0/+':>22}")
    for tried in report.effects:
        by_reward = tried.rejected_by_reward
        by_sign = "/".join(f"{by_reward[sign]:.0%}" if sign in by_reward else "-" for sign in REWARD_SIGNS)
        mark = "> " if tried.choice is report.choice else "  "
        name = " ".join([mark, tried.choice.preset, *map(str, tried.choice.arguments.values())])
        numbers = f"{tried.eff_sample_size:>7.3f}{tried.mean_weight:>9.3f}{tried.rejected_tokens:>17.1%}"
        lines.append(f"  {name:<46}{numbers}{by_sign:>22}")
    return lines


def as_json(report: Report) -> dict[str, Any]:
    """The report as one JSON object without unknown numbers."""
    facts = {name: value for name, value in sorted(report.evidence.facts.items()) if math.isfinite(value)}
    return {
        "input": report.evidence.what,
        "notes": notes_of(report),
        "exit_code": report.code,
        "attribution": where_in_words(report.evidence.facts),
        "verdicts": [
            {
                "name": verdict.rule.name,
                "kind": verdict.rule.kind,
                "title": verdict.rule.title,
                "words": verdict.words,
                "advice": verdict.rule.advice_in(report.evidence.program),
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
            "program": report.evidence.program,
            "settings": "\n".join(report.choice.settings(report.evidence.program)),
            "why": report.choice.why,
        },
        "effects": [
            {"preset": tried.choice.preset, "arguments": tried.choice.arguments}
            | {name: value for name, value in vars(tried).items() if name != "choice"}
            for tried in report.effects
        ],
        "facts": facts,
    }
