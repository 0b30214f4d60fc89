"""One picture of a run: reward, KL and the spread of the weights over its steps."""

from __future__ import annotations

import json
from pathlib import Path

_WEIGHT = "rollout_corr/rollout_is_"


def draw_run(metrics: Path, picture: Path) -> None:
    """Draw ``metrics.jsonl`` into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    figure, (reward, kl, weight) = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")

    def curve(axis: object, name: str, **style: object) -> None:
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axis.plot(*zip(*points, strict=True), **style)  # type: ignore[attr-defined]

    curve(reward, "reward/mean", color="tab:green")
    reward.set(title="mean reward", xlabel="step", ylim=(0, 1.02))
    curve(kl, "rollout_corr/kl", label="KL(rollout ‖ trainer)", color="tab:blue", linewidth=1)
    curve(kl, "rollout_corr/k3_kl", label="k3 estimate", color="tab:orange", linewidth=1)
    kl.set(title="rollout against trainer, nats a token", xlabel="step")
    spread = [row for row in rows if f"{_WEIGHT}raw_min" in row]
    steps = [row["step"] for row in spread]
    for low, high, alpha, label in (("raw_min", "raw_max", 0.2, "smallest to largest"),):
        lows, highs = ([row[_WEIGHT + name] for row in spread] for name in (low, high))
        weight.fill_between(steps, lows, highs, alpha=alpha, color="tab:purple", label=label)
    means = [row[f"{_WEIGHT}raw_mean"] for row in spread]
    stds = [row[f"{_WEIGHT}raw_std"] for row in spread]
    low = [mean - std for mean, std in zip(means, stds, strict=True)]
    high = [mean + std for mean, std in zip(means, stds, strict=True)]
    weight.fill_between(steps, low, high, alpha=0.4, color="tab:purple", label="mean ± std")
    weight.plot(steps, means, color="tab:purple", linewidth=1)
    weight.set(title="importance weight ρ before truncation", xlabel="step")
    for axis in (reward, kl, weight):
        axis.grid(alpha=0.3)
    for axis in (kl, weight):
        axis.legend(fontsize=8)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)
