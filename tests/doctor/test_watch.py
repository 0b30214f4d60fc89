"""The doctor inside a run: one line when a verdict changes."""

from megatron_rc.doctor.series import MOST_STEPS, OVER_THE_RUN, WINDOW
from megatron_rc.doctor.watch import Watch
from tests.doctor.test_inputs import metrics_of

SETTINGS = {"policy-loss": "ppo_clip", "rollout-is": "token", "rollout-is-apply": "true"}


def lines(watch, rows):
    return {step: sentence for step, row in enumerate(rows, start=1) if (sentence := watch.step(step, row)) is not None}


def test_one_line_when_the_verdict_changes():
    good = metrics_of(None)
    bad = metrics_of("int4")
    sentences = lines(Watch(5, SETTINGS, "rollout_corr/"), [good] * 10 + [bad] * 20 + [good] * 20)
    assert (min(sentences), max(sentences)) == (15, 40), "the median of ten steps, every five"
    assert sentences[15].startswith("doctor after step 15: policies that differ by more than rounding (precision): ")
    assert "k3 0." in sentences[15]
    assert sentences[40] == "doctor after step 40: nothing wrong between engine and trainer (before: precision)"
    assert all("\n" not in sentence for sentence in sentences.values())


def test_a_line_needs_a_verdict():
    assert lines(Watch(1, SETTINGS, "rollout_corr/"), [metrics_of(None)] * 3) == {}
    skipped = [{"lr": 0.1}, {"lr": 0.1, "grad_norm": float("nan")}, {"rollout_corr/kl": float("nan")}]
    assert lines(Watch(2, SETTINGS, "rollout_corr/"), skipped) == {}
    settings = SETTINGS | {"policy-loss": "gspo", "rollout-is": "sequence"}
    assert "GSPO" in lines(Watch(1, settings, "rollout_corr/"), [metrics_of(None)])[1]
    for prefix in ("mismatch/", "mine/"):
        sentences = lines(Watch(1, SETTINGS, prefix), [metrics_of("int4", metric_prefix=prefix)])
        assert "precision" in sentences[1], prefix


def test_growth_is_seen_over_more_steps_than_are_kept():
    healthy = metrics_of(None)
    rows = [
        healthy | {"rollout/response_length": 100.0 + step, "rollout_corr/chi2_seq": 0.5 * 1.02**step}
        for step in range(100)
    ]
    watch = Watch(50, SETTINGS | {"rollout-is": "sequence"}, "rollout_corr/")
    assert "growing_length" in lines(watch, rows)[100]
    assert len(watch.history.last) < len(rows) or len(rows) <= WINDOW * MOST_STEPS
    assert set(OVER_THE_RUN) <= set(watch.history.columns)
