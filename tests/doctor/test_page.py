"""docs/doctor.md: its tables are those of the code, and its commands run."""

import re
import shlex

import pytest

from megatron_rc.doctor.__main__ import main
from megatron_rc.doctor.facts import Facts
from megatron_rc.doctor.programs import NAMES_OF
from megatron_rc.doctor.report import GRADES, HEALTHY, TOO_LITTLE, UNUSABLE, WRONG, in_words
from megatron_rc.doctor.rules import BY_NAME, RULES
from megatron_rc.measures.shift import MIN_PAIRS
from tests.doctor.test_inputs import metrics_of, write_lines
from tests.doctor.test_report import report_of
from tests.settings.test_documents import quoted, rows
from tests.support.paths import ROOT
from tests.support.tables import table

PAGE = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")


RULES_ON_PAGE = rows("docs/doctor.md", "rule | what is wrong | kind | it holds if | sources")


def test_the_tables_are_those_of_the_code():
    listed = [[name.strip("`"), *others] for name, *others, _, _ in RULES_ON_PAGE]
    assert listed == [[rule.name, rule.title, rule.kind] for rule in RULES]
    assert [cells[-1] for cells in RULES_ON_PAGE] == [rule.sources for rule in RULES]
    assert f"over at least {MIN_PAIRS} pairs" in RULES_ON_PAGE[1][3]
    for limit, grade in GRADES[:-1]:
        assert f"| {limit:g} | {grade} |" in PAGE
    codes = dict(re.findall(r"^\| (\d) \| (.*) \|$", PAGE, flags=re.MULTILINE))
    assert set(codes) == {str(code) for code in (HEALTHY, WRONG, UNUSABLE, TOO_LITTLE)}
    # A rule stands below those that explain the same numbers better.
    order = list(BY_NAME)
    for rule in RULES:
        assert all(order.index(name) < order.index(rule.name) for name in rule.unless)


def test_names_of_metrics_are_those_of_the_code():
    listed = {}
    head = "program | metrics (the name here) | log-probs and mask of a record"
    for program, cell, _ in rows("docs/doctor.md", head):
        names_of_fact = re.findall(r"([^;]+) \(`(\w+)`\)", cell)
        listed[program.lower()] = {name: fact for names, fact in names_of_fact for name in quoted(names)}
    assert listed == {program: dict(names) for program, names in NAMES_OF.items() if program != "megatron_rc"}


# Words of the page around a threshold #, the number that it bounds, and other numbers that the rule needs.
THRESHOLDS = """
truncated_sampling | percentile > #, | log_ratio_p01 | ratio_mean: 0.9, log_ratio_p25: -1, log_ratio_p99: 0
truncated_sampling | 99th < #) | log_ratio_p99 | ratio_mean: 0.9, log_ratio_p25: -1, log_ratio_p01: -1
stale_cache | at least # times | far_noise | two_kinds: 1, near_noise: 1
staleness | k3 > # at a mean | k3_kl | staleness_mean: 1
staleness | at least # steps | staleness_mean | k3_kl: 1
drift | grown to # times | k3_growth | k3_kl: 1, reward_fall: 9
drift | above #, | k3_kl | k3_growth: 99, reward_fall: 9
drift | the reward is # standard | reward_fall | k3_kl: 1, k3_growth: 99
drift | size # below | ess_fall | k3_kl: 1, k3_growth: 99
drift | norm # times | grad_norm_growth | k3_kl: 1, k3_growth: 99
collapse | below # times | reward_now | reward_peak: 1, silent_share: 1
tails | k3 > #; | k3_kl | log_ratio_p05: 0, log_ratio_p95: 0
tails | less than # apart | log_ratio_p95 | log_ratio_p05: 0, k3_kl: 1
precision | k3 > # and | k3_kl | -
precision | probabilities above #, | probs_diff_mean | -
precision | error above #, | mult_prob_error | -
precision | KL above # | kl | -
precision | KL above # | abs_log_ratio | -
growing_length | length grows #-fold | response_length_growth | chi2_seq_growth: 9, chi2_seq: 9
growing_length | sequences #-fold | chi2_seq_growth | response_length_growth: 9, chi2_seq: 9
growing_length | more than #; | chi2_seq | response_length_growth: 9, chi2_seq_growth: 9
long_products | size < #, | rollout_is_eff_sample_size | chi2_token: 0
long_products | deviation > # | rollout_is_std | chi2_token: 0
long_products | weight < #, | rollout_is_mean | chi2_token: 0
long_products | tokens is < # (or | chi2_token | rollout_is_std: 9
long_products | at most #, or | k3_kl | rollout_is_std: 9
long_products | ratio is above #: | ratio_mean | rollout_is_mean: 0, chi2_token: 0
entropy_bonus | below #, | rollout_is_applied_mean | token_weights: 1, entropy_bonus: 1, entropy_rise: 9, entropy: 9
entropy_bonus | above # nats | entropy | token_weights: 1, entropy_bonus: 1, entropy_rise: 9, rollout_is_applied_mean: 0
entropy_bonus | and # times | entropy_rise | token_weights: 1, entropy_bonus: 1, entropy: 9, rollout_is_applied_mean: 0
veto | more than # % | rollout_is_veto_fraction | -
length_selection | below # times | inclusion_longest | inclusion_shortest: 1, started: 99999
wide_weights | weights > #, | rollout_is_std | -
wide_weights | size < # | rollout_is_eff_sample_size | -
mean_weight | below #; | rollout_is_mean | chi2_token: 0
mean_weight | below # or | rollout_is_mean | of_sequences: 0
mean_weight | above # | rollout_is_mean | -
other_policy | correlation below # | probs_correlation | k3_kl: 1
other_policy | k3 > # ( | k3_kl | probs_correlation: 0
temperature | less than # of | temperature_unexplained | probs_correlation: 1, k3_kl: 1
temperature | correlation above # | probs_correlation | temperature_unexplained: 0, k3_kl: 1
"""


@table("name phrase fact {others}", THRESHOLDS)
def test_the_thresholds_are_those_of_the_code(name, phrase, fact, others):
    """The rule holds on one side of the page's number, the side that the words say, and not on the other."""
    (cell,) = (cells[3] for cells in RULES_ON_PAGE if cells[0] == f"`{name}`")
    (number,) = re.findall(re.escape(phrase).replace(r"\#", r"(-?[\d.]*\d)"), cell)
    limit = float(number) / (100 if "%" in phrase else 1)
    less, more = (BY_NAME[name].holds(Facts(others | {fact: limit + side * 1e-6})) for side in (-1, 1))
    is_upper = re.search("<|less|below #|at most", phrase) is not None
    assert (less, more) == (is_upper, not is_upper)


def test_the_example_is_what_is_said():
    """Its numbers aside, whose last digit may differ from machine to machine. A line … stands for other lines."""
    example = re.search(r"^## What it says\n\n```text\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)[1]
    lines = [line for line in example.splitlines() if line.strip() not in ("", "…")]
    assert len(lines) > 12
    message = map(without_numbers, in_words(report_of("temperature 0.7")).splitlines())
    # Each line is looked for after the line before it.
    assert all(without_numbers(line) in message for line in lines)


def without_numbers(line):
    return re.sub(r"[-\d. ]+", "", line)


@pytest.mark.parametrize("document", ["docs/doctor.md", "README.md"])
def test_the_commands_run_as_they_are_written(tmp_path, monkeypatch, capsys, document):
    text = (ROOT / document).read_text(encoding="utf-8")
    commands = re.findall(r"(?:^|`)python -m megatron_rc\.doctor ([^`\n]*?)(?:`| +#.*|$)", text, flags=re.MULTILINE)
    assert commands
    monkeypatch.chdir(tmp_path)
    for arguments in map(shlex.split, commands):
        (path,) = (tmp_path / word for word in arguments if not word.startswith("-"))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv":
            path.write_text("Step,run - rollout_corr/k3_kl\n1,0.0001\n")
        else:
            path = path if path.suffix else path / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_lines(path, [{"step": 1, **metrics_of(None)}])
        assert main(arguments) == 0, arguments
    assert "nothing wrong" in capsys.readouterr().out
