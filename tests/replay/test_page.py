"""The page: its data are the numbers of the report and of the batch, and it needs nothing from elsewhere."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
import torch

from megatron_rc.records.rollout import save_rollouts
from megatron_rc.replay import page
from megatron_rc.replay.__main__ import main
from tests.replay.batches import scored_batch


class Reader(HTMLParser):
    """The JSON of the page, and every address that it names."""

    def __init__(self, text):
        super().__init__()
        self.inside, self.data, self.addresses, self.tags = False, "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.inside = ("id", "data") in attributes
        self.addresses += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, text):
        if self.inside:
            self.data += text


def written(tmp_path, capsys, batch, *words):
    file = tmp_path / "a<b>.safetensors"
    save_rollouts(batch, file)
    words = [str(file), "--preset=decoupled_token_is", "--preset=decoupled_seq_is_rs", *words]
    assert main([*words, f"--html={tmp_path}/page.html", "--json"]) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    return Reader(text), json.loads(capsys.readouterr().out), text


def test_the_page_holds_the_report_and_needs_no_network(tmp_path, capsys):
    found, report, text = written(tmp_path, capsys, scored_batch())
    data = json.loads(found.data)
    assert data["report"] == report
    assert found.addresses == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "@import" not in text
    assert "fetch(" not in text
    # A name cannot end the data.
    assert "<b" in report["batches"][0]
    assert found.tags.count("b") == 0


def test_points_are_tokens_and_sequences_of_the_batch(tmp_path, capsys):
    batch = scored_batch()
    data = json.loads(written(tmp_path, capsys, batch)[0].data)
    tokens, mask = data["tokens"], batch.response_mask
    assert len(tokens["log_ratio"]) == int(mask.sum())
    places = {}
    first = mask.int().argmax(dim=1)
    for row, column in mask.nonzero().tolist():
        places[row, column - int(first[row])] = row, column
    for index, (row, position) in enumerate(zip(tokens["sequence"], tokens["position"], strict=True)):
        at = places.pop((int(row), int(position)))
        assert tokens["token"][index] == batch.tokens[at]
        assert tokens["log_prob"][index] == pytest.approx(float(batch.rollout_log_probs[at]), rel=1e-4)
        ratio = float(batch.old_log_probs[at] - batch.rollout_log_probs[at])
        assert tokens["log_ratio"][index] == pytest.approx(ratio, rel=1e-3, abs=1e-6)
        assert tokens["weights"][0][index] == pytest.approx(min(math.exp(ratio), 2.0), rel=1e-3)
    assert not places
    sequences = data["sequences"]
    assert sequences["sample_id"] == batch.sample_ids.tolist()
    assert sequences["length"] == mask.sum(dim=1).tolist()
    sums = torch.where(mask, batch.old_log_probs - batch.rollout_log_probs, 0).double().sum(dim=1)
    assert sequences["log_ratio"] == pytest.approx(sums.tolist(), rel=1e-4, abs=1e-6)
    rejected = data["report"]["corrections"][1]["total"]["rejected_sequences"]
    assert sequences["accepted"][1].count(0) == rejected > 0
    assert {
        weight
        for weight, row in zip(tokens["weights"][1], tokens["sequence"], strict=True)
        if not sequences["accepted"][1][int(row)]
    } == {-1.0}


def test_very_many_are_sampled_alike_every_time(tmp_path, capsys, monkeypatch):
    for name, value in (("POINTS", 50), ("BAND_TOKENS", 100), ("MAX_SEQUENCES", 6)):
        monkeypatch.setattr(page, name, value)
    batch = scored_batch(rows=40, length=60)
    first, again = (json.loads(written(tmp_path, capsys, batch)[0].data) for _ in range(2))
    assert first == again
    assert len(first["tokens"]["log_ratio"]) == 50
    assert 60 < first["bands"]["tokens"] <= 100
    assert len(first["sequences"]["row"]) <= 6


def test_bands_are_quantiles():
    across, values = torch.arange(2000) / 100.0, torch.arange(2000).double()
    found = page._bands(across.double(), values)
    assert len(found) == page.BAND_BINS
    low, middle, high = found[0][1:]
    held = values[: 2000 // page.BAND_BINS]
    assert (low, middle, high) == pytest.approx(
        torch.quantile(held, torch.tensor([0.05, 0.5, 0.95]).double()).tolist(), abs=1
    )
    assert page._bands(torch.zeros(5), torch.zeros(5)) == []
