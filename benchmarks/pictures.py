"""The pictures of docs/sharding.md: the tokens of each rank, and the messages between ranks.

``python -m benchmarks.pictures`` draws docs/sharding_tokens.png and docs/sharding_groups.png, with the positions of
``SequenceLayout``. One process on a CPU, a few seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_rc.parallel import SequenceLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CP = 2
COLORS = ("tab:blue", "tab:orange")
# the trained labels of the padded response
FIRST = 5
LAST = 14
PACKED = (8, 12)  # lengths of the packed sequences, padding included
TRAINED = ((3, 7), (2, 11))


def tokens() -> Figure:
    """The whole sequences and the parts of two CP ranks, padded and packed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    layouts = [SequenceLayout.padded(1, 16 // CP, cp_rank=rank, cp_size=CP) for rank in range(CP)]
    _band(upper, layouts, [FIRST <= t < LAST for t in range(16)], [0] * 16)
    upper.set_title("padded: one response of 16 positions, [1, 16] → [1, 8] on each rank", fontsize=9, loc="left")
    bounds = [0, PACKED[0] // CP, sum(PACKED) // CP]
    layouts = [SequenceLayout.packed(bounds, cp_rank=rank, cp_size=CP) for rank in range(CP)]
    trained = [lo <= t < hi for length, (lo, hi) in zip(PACKED, TRAINED, strict=True) for t in range(length)]
    sequence = [index for index, length in enumerate(PACKED) for _ in range(length)]
    _band(lower, layouts, trained, sequence)
    lower.set_title("packed: two responses of 8 and 12 positions, [20] → [10] on each rank", fontsize=9, loc="left")
    return figure


def _band(axes: Axes, layouts: list[SequenceLayout], trained: list[bool], sequence: list[int]) -> None:
    """A row of cells for the whole and one for each rank; a cell is a token in its owner's colour, dark if trained."""
    whole = torch.arange(len(trained)).view(1, -1) if len(layouts[0].shape) == 2 else torch.arange(len(trained))
    shards = [layout.cut(whole).flatten().tolist() for layout in layouts]
    owner = {token: rank for rank, shard in enumerate(shards) for token in shard}
    starts = [sequence.index(index) for index in sequence]
    for row, (label, held) in enumerate([("whole", sorted(owner)), *((f"CP {r}", s) for r, s in enumerate(shards))]):
        axes.text(-0.4, -row + 0.5, label, ha="right", va="center", fontsize=9)
        for column, token in enumerate(held):
            strong = trained[token]
            shade = 0.75 if strong else 0.2
            _cell(axes, column, -row, COLORS[owner[token]], shade, str(token - starts[token]), strong)
            if column and sequence[held[column - 1]] != sequence[token]:
                axes.plot([column, column], [-row, -row + 0.9], color="black", linewidth=2.5)
    note = "each rank sums its dark cells; SUM over cp:\na few numbers a response, never a token"
    axes.text(len(shards[0]) + 0.4, -1 + 0.45 - 0.5, note, fontsize=8, va="center")
    axes.set(xlim=(-2.2, 20.2), ylim=(-CP - 0.2, 1.2))
    axes.axis("off")


def _cell(axes: Axes, x: float, y: float, color: str, shade: float, text: str, bold: bool) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), 0.95, 0.9, facecolor=color, alpha=shade, edgecolor="none"))
    axes.text(x + 0.47, y + 0.45, text, ha="center", va="center", fontsize=8, weight="bold" if bold else "normal")


def groups() -> Figure:
    """TP 2 × CP 2 × PP 2 × DP 2: the ranks of both stages, and the correction's messages in each group."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.3), layout="constrained")
    axes = figure.subplots()
    for stage, left in enumerate((0.0, 7.0)):
        axes.text(left + 2.2, 8.35, f"PP {stage}: {('first', 'last')[stage]} stage", ha="center", fontsize=10)
        for row in range(4):
            for tp in range(2):
                dp, cp = divmod(row, 2)
                _rank(axes, left + 2.3 * tp, 6.3 - 2 * row, f"DP {dp}  CP {cp}\nTP {tp}", stage)
    _arrow(axes, (9.0, 7.55), (9.3, 7.55), "tab:green")
    axes.text(9.15, 7.85, "tp", color="tab:green", ha="center", fontsize=9)
    for top in (6.3, 2.3):
        _arrow(axes, (7.3, top), (7.3, top - 0.6), "tab:red")
        axes.text(7.15, top - 0.3, "cp", color="tab:red", ha="right", va="center", fontsize=9)
    _arrow(axes, (11.75, 7.7), (11.75, 0.5), "tab:purple")
    axes.text(11.95, 4.1, "dp_cp", color="tab:purple", va="center", fontsize=9)
    _arrow(axes, (6.9, 1.0), (4.45, 1.0), "black", style="->")
    axes.text(5.7, 1.2, "pp", ha="center", fontsize=9)
    lines = (
        ("tab:green", "tp: MAX and SUM, a few numbers a token: log-probs from logits (as any cross entropy)"),
        ("tab:red", "cp: SUM, a few numbers a response: its log-probs under both policies, its tokens"),
        ("tab:purple", "dp_cp: SUM and MAX, about 32 kB: w̄, denominators, metrics, errors"),
        ("black", "pp: broadcast of these, about 32 kB: every stage skips, raises or goes on alike"),
    )
    for index, (color, words) in enumerate(lines):
        axes.text(-0.1, -0.75 - 0.75 * index, words, color=color, fontsize=8.5, va="center")
    axes.set(xlim=(-0.3, 13.2), ylim=(-3.5, 8.8))
    axes.axis("off")
    return figure


def _rank(axes: Axes, x: float, y: float, text: str, stage: int) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), 2.0, 1.4, facecolor=("0.92", "tab:cyan")[stage], alpha=(1, 0.35)[stage]))
    axes.text(x + 1.0, y + 0.7, text, ha="center", va="center", fontsize=8)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, style: str = "<->") -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": style, "color": color, "linewidth": 1.6})


def main(folder: Path) -> None:
    """Draw both pictures."""
    tokens().savefig(folder / "sharding_tokens.png", dpi=110)
    groups().savefig(folder / "sharding_groups.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
