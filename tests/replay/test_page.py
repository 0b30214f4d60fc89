"""The page and the picture: their charts are the numbers of the outcomes and of the batch."""

import re

import pytest
import torch
from matplotlib.figure import Figure

from megatron_rc.records.rollout import save_rollouts
from megatron_rc.replay import page
from megatron_rc.replay.__main__ import main
from megatron_rc.replay.candidates import named
from megatron_rc.replay.outcome import edges, outcome
from megatron_rc.replay.reading import read_batches
from megatron_rc.replay.tokens import recorded
from tests.drawing.test_page import Reader
from tests.replay.batches import scored_batch

PRESETS = ["decoupled_seq_is_rs", "disabled"]


@pytest.fixture
def replayed(tmp_path):
    """Data and outcomes of two presets, and the batch."""
    return made(tmp_path, scored_batch(rows=40, length=60))


def made(folder, batch):
    save_rollouts(batch, folder / "a.safetensors")
    data = recorded(read_batches([str(folder / "a.safetensors")], None))
    return data, [outcome(data, name, config) for name, config in named(PRESETS).items()], batch


def axes_of(chart):
    axes = Figure().subplots()
    chart.draw(axes)
    return axes


def test_the_page_holds_the_report_and_needs_no_network(tmp_path, capsys):
    batch_file = tmp_path / "a.safetensors"
    save_rollouts(scored_batch(), batch_file)
    files = [f"--html={tmp_path}/page.html", f"--picture={tmp_path}/page.png"]
    assert main([str(batch_file), *(f"--preset={name}" for name in PRESETS), *files]) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    reader = Reader(text)
    assert capsys.readouterr().out in "".join(reader.texts)
    assert reader.addresses == []
    assert "script" not in reader.tags
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    assert reader.tags.count("svg") == 3 + len(PRESETS)
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_weights_are_the_histograms_of_the_outcomes(replayed):
    data, outcomes, _ = replayed
    weights, *_ = page.charts_of(data, outcomes)
    axes = axes_of(weights)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_legend_handles_labels()[1] == PRESETS
    for steps, result in zip(axes.patches, outcomes, strict=True):
        values, steps_edges, _ = steps.get_data()
        shares = [count / int(data.lengths.sum()) for count in result.weights.histogram]
        assert values.tolist() == shares
        assert steps_edges.tolist() == edges()


def test_points_are_the_tokens_of_the_batch(replayed):
    data, outcomes, batch = replayed
    _, over_position, over_probability, *_ = page.charts_of(data, outcomes)
    mask = batch.response_mask
    ratios = (batch.old_log_probs.double() - batch.rollout_log_probs.double())[mask]
    first = mask.int().argmax(dim=1, keepdim=True)
    positions = (torch.arange(mask.shape[1]) - first)[mask] + 1
    for chart, across in (
        (over_position, positions.double()),
        (over_probability, batch.rollout_log_probs.double()[mask].exp()),
    ):
        points = axes_of(chart).lines[0].get_xydata()
        assert len(points) == int(mask.sum()) < page.NUM_POINTS
        expected = torch.stack([across, ratios], dim=1)
        torch.testing.assert_close(torch.tensor(sorted(points.tolist())), torch.tensor(sorted(expected.tolist())))


def test_hollow_sequences_are_those_without_an_accepted_token(replayed):
    data, outcomes, batch = replayed
    rejecting, disabled = page.charts_of(data, outcomes)[3:]
    mask = batch.response_mask
    sums = torch.where(mask, batch.old_log_probs.double() - batch.rollout_log_probs.double(), 0).sum(dim=1)
    lengths = mask.sum(dim=1)
    accepted, rejected, _ = axes_of(rejecting).lines
    assert len(rejected.get_xdata()) == outcomes[0].total.rejected_sequences > 0
    expected = sorted(zip(lengths.tolist(), sums.tolist(), strict=True))
    points = [*accepted.get_xydata().tolist(), *rejected.get_xydata().tolist()]
    torch.testing.assert_close(torch.tensor(sorted(points)), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert len(axes_of(disabled).lines[1].get_xdata()) == 0


def test_very_many_are_sampled_alike_every_time(tmp_path, monkeypatch):
    for name, value in (("NUM_POINTS", 50), ("BAND_TOKENS", 100), ("MOST_SEQUENCES", 6), ("MOST_CORRECTIONS", 1)):
        monkeypatch.setattr(page, name, value)
    data, outcomes, _ = made(tmp_path, scored_batch(rows=40, length=60))
    first = page.charts_of(data, outcomes)
    assert len(first) == 4
    assert len(axes_of(first[1]).lines[0].get_xdata()) == 50
    assert sum(len(line.get_xdata()) for line in axes_of(first[3]).lines[:2]) <= 6
    again = page.charts_of(data, outcomes)
    for chart, repeated_chart in zip(first, again, strict=True):
        for line, other_line in zip(axes_of(chart).lines, axes_of(repeated_chart).lines, strict=True):
            assert line.get_xydata().tolist() == other_line.get_xydata().tolist()


def test_bands_are_quantiles():
    across = torch.arange(2000) / 100.0
    values = torch.arange(2000).double()
    middle, low, median, high = page.quantile_bands(across.double(), values)
    assert len(middle) == page.BAND_BINS
    in_first_bin = values[: 2000 // page.BAND_BINS]
    expected = torch.quantile(in_first_bin, torch.tensor([0.05, 0.5, 0.95]).double()).tolist()
    assert (low[0], median[0], high[0]) == pytest.approx(expected, abs=1)
    assert page.quantile_bands(torch.zeros(5), torch.zeros(5)) == ([], [], [], [])
