"""One picture of a run: reward, KL and the spread of the weights over its steps."""

from __future__ import annotations

from pathlib import Path

from megatron_rc.launch.training.metrics_file import read_rows

_WEIGHT = "rollout_corr/rollout_is_"


def draw_run(metrics: Path, picture: Path) -> None:
    """Draw ``metrics.jsonl`` into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = list(read_rows(metrics))
    figure, (reward, kl, weight) = pyplot.subplots(1, 3, figsize=(13, 3.6))
    figure.subplots_adjust(left=0.04, right=0.99, top=0.9, bottom=0.14, wspace=0.15)

    def curve(axis: object, name: str, **style: object) -> None:
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axis.plot(*zip(*points, strict=True), **style)  # type: ignore[attr-defined]

    curve(reward, "reward/mean", color="tab:green")
    curve(reward, "eval/exact_match", color="tab:red", marker="o", label="right answers, held out")
    reward.set(title="mean reward", xlabel="step", ylim=(0, 1.02))
    curve(kl, "rollout_corr/kl", label="KL(rollout ‖ trainer)", color="tab:blue", linewidth=1)
    curve(kl, "rollout_corr/k3_kl", label="k3 estimate", color="tab:orange", linewidth=1)
    kl.set(title="rollout against trainer, nats a token", xlabel="step")
    spread = [row for row in rows if f"{_WEIGHT}raw_min" in row]
    steps = [row["step"] for row in spread]
    least, most, mean, std = ([row[f"{_WEIGHT}raw_{name}"] for row in spread] for name in ("min", "max", "mean", "std"))
    below = [centre - width for centre, width in zip(mean, std, strict=True)]
    above = [centre + width for centre, width in zip(mean, std, strict=True)]
    weight.fill_between(steps, least, most, alpha=0.2, color="tab:purple", label="smallest to largest")
    weight.fill_between(steps, below, above, alpha=0.4, color="tab:purple", label="mean ± std")
    weight.plot(steps, mean, color="tab:purple", linewidth=1)
    weight.set(title="importance weight ρ before truncation", xlabel="step")
    for axis in (reward, kl, weight):
        axis.grid(alpha=0.3)
    for axis in (reward, kl, weight):
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=8)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)
