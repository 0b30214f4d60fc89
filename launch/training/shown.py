"""Which of a run's many numbers the terminal shows."""

from __future__ import annotations

BAR = {
    "reward": "reward/mean",
    "kl": "rollout_corr/kl",
    "ess": "rollout_corr/rollout_is_eff_sample_size",
    "rejected": "rollout_corr/rollout_rs_masked_fraction",
    "tok/s": "perf/tokens_per_second",
}
TABLE = (
    "reward/mean",
    "eval/exact_match",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/rollout_is_raw_max",
    "rollout_corr/rollout_rs_masked_fraction",
    "policy/entropy",
    "grad_norm",
    "perf/tokens_per_second",
)
AVERAGED = 10
_USUAL = "rollout_corr/"


def usual_names(row: dict[str, float], prefix: str) -> dict[str, float]:
    """The metrics of a row, those of the correction under their usual names whatever ``--metric-prefix`` says.

    The prefix of the oldest dashboards has a name that says it twice: ``mismatch/mismatch_kl``.
    """
    if prefix == _USUAL:
        return row
    return {
        _USUAL + name.removeprefix(prefix).removeprefix("mismatch_") if name.startswith(prefix) else name: value
        for name, value in row.items()
    }


def bar_words(metrics: dict[str, float]) -> str:
    """The few that stand beside the bar."""
    return "  ".join(f"{short} {metrics[name]:.3g}" for short, name in BAR.items() if name in metrics)


def table(summary: dict[str, tuple[float, list[float]]]) -> str:
    """First values, and means of the last ones; of an evaluation the last one alone."""
    lines = [f"{'metric':<44}{'first step':>12}{f'last {AVERAGED} steps':>15}"]
    for name in TABLE:
        if name in summary:
            first, values = summary[name]
            last = values[-1:] if name.startswith("eval/") else values
            lines.append(f"{name:<44}{first:>12.4g}{sum(last) / len(last):>15.4g}")
    return "\n".join(lines)
