"""The comparison with a host's own functions: with Megatron-Core itself, and with stand-ins for hosts on no index.

``make test-adaptors`` runs it with verl.
"""

import importlib
import re
import sys
import types

import pytest
import torch

from megatron_rc.adaptors.check import megatron_lm, nemo_rl, slime
from megatron_rc.adaptors.check.__main__ import HOSTS, UNUSABLE, main
from megatron_rc.adaptors.check.comparison import Batch, Comparison, report
from tests.adaptors.pages import blocks
from tests.adaptors.test_nemo_rl import ClippedLoss
from tests.support.paths import ROOT
from tests.support.ranks import server_context

pytestmark = pytest.mark.processes


def module(monkeypatch, name, **members):
    """Make a module importable, with its packages."""
    for end in range(1, len(name.split(".")) + 1):
        part = ".".join(name.split(".")[:end])
        if part not in sys.modules:
            monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    vars(sys.modules[name]).update(members)


def by_formula(weights):
    """A function of slime that multiplies the loss by weights of the ratio and the two bounds."""

    def correct(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **others):
        ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
        return pg_loss * weights(ratio, args.tis_clip_low, args.tis_clip), loss_masks, {}

    return correct


def with_slime(monkeypatch):
    icepop = by_formula(lambda ratio, low, high: torch.where((ratio < low) | (ratio > high), 0, ratio))
    module(monkeypatch, slime.NEEDS, vanilla_tis_function=by_formula(torch.clamp), icepop_function=icepop)
    sys.modules["slime.backends.megatron_utils"].loss = sys.modules[slime.NEEDS]


def with_nemo_rl(monkeypatch, loss=ClippedLoss):
    module(monkeypatch, nemo_rl.NEEDS, ClippedPGLossConfig=dict, ClippedPGLossFn=lambda config: loss(**config))
    module(monkeypatch, "nemo_rl.distributed.batched_data_dict", BatchedDataDict=dict)


def grpo_loss(**arguments):
    """Megatron-LM's loss, by its formula."""
    of = types.SimpleNamespace(**arguments)
    ratio = (of.current_logprobs - of.old_logprobs).exp()
    gain = of.advantages.unsqueeze(1)
    weights = (of.old_logprobs - of.inference_logprobs).exp().clamp(max=of.is_truncation_coef)
    clipped = ratio.clamp(1 - of.clamp_eps_lower, 1 + of.clamp_eps_upper)
    return -weights * torch.minimum(ratio * gain, clipped * gain), None


def with_grpo(monkeypatch):
    importlib.import_module(megatron_lm.NEEDS)
    module(monkeypatch, megatron_lm.GRPO, calculate_grpo_loss=grpo_loss)
    monkeypatch.setattr(megatron_lm, "has_grpo", lambda: True)


RESULTS = ("loss", "gradient")
STAND_INS = {"slime": with_slime, "nemo_rl": with_nemo_rl, "megatron_lm": with_grpo}


@pytest.fixture
def loaded():
    """The ranks' server of these tests, of which the comparison forks its ranks: it has loaded Megatron for others."""
    server_context()


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("host", STAND_INS)
def test_hosts_that_compute_the_same_are_equal(monkeypatch, capsys, host):
    STAND_INS[host](monkeypatch)
    assert main([host]) == 0
    *lines, verdict = capsys.readouterr().out.splitlines()
    assert all(line.startswith("equal ") for line in lines)
    assert verdict == f"{host} and megatron_rc agree in all {len(lines)} results"
    layouts = {"slime": "2 context ranks", "nemo_rl": "2 data ranks", "megatron_lm": "2 tensor-parallel ranks"}
    assert any(layouts[host] in line for line in lines)
    assert any("whole" in line or "1 tensor-parallel rank," in line for line in lines)


def test_a_host_that_differs_is_named_with_the_size(monkeypatch, capsys):
    """An IcePop that keeps ratios below its lower bound."""

    class OneSided(ClippedLoss):
        def __init__(self, **config):
            below = {"truncated_importance_sampling_ratio_min": 0.0}
            masks = config.get("truncated_importance_sampling_type") == "icepop"
            super().__init__(**config | below if masks else config)

    with_nemo_rl(monkeypatch, OneSided)
    assert main(["nemo_rl"]) == 1
    lines = capsys.readouterr().out.splitlines()
    different = [line.split(":") for line in lines if line.startswith("DIFFERS")]
    results = [f"IcePop, {result}, {layout}" for layout in ("whole batch", "2 data ranks") for result in RESULTS]
    assert [name.split("  ")[1] for name, _ in different] == results
    assert all(float(re.findall(r"by up to ([\d.e+-]+),", size)[0]) > 1e-3 for _, size in different)
    assert lines[-1] == "4 of 16 results of nemo_rl differ"


def test_what_megatron_lm_lacks_here_is_left_out_by_name(monkeypatch):
    monkeypatch.setattr(megatron_lm, "has_grpo", lambda: False)
    text, code = report("megatron_lm", [Comparison("a", 0.0, 0.0, 1)], megatron_lm.left_out())
    assert code == 0
    assert "left out the GRPO loss: megatron.rl.rl_utils is not installed" in text
    assert "agree in all" not in text


def test_a_comparison_without_a_correction_is_no_success(monkeypatch, capsys):
    """Without megatron.rl only log-probs are compared, of Megatron-LM's correction nothing."""
    monkeypatch.setattr(megatron_lm, "has_grpo", lambda: False)
    monkeypatch.setattr(megatron_lm, "comparisons", lambda seed: iter([Comparison("log-probs", 0.0, 0.0, 1)]))
    assert main(["megatron_lm"]) == UNUSABLE
    assert "--allow-left-out" in capsys.readouterr().err
    assert main(["megatron_lm", "--allow-left-out"]) == 0


def test_comparisons_before_a_failure_are_printed(monkeypatch, capsys):
    def failing(seed):
        yield Comparison("log-probs", 0.0, 0.0, 1)
        raise AttributeError("icepop_function")

    monkeypatch.setattr(megatron_lm, "comparisons", failing)
    assert main(["megatron_lm"]) == UNUSABLE
    printed = capsys.readouterr()
    assert "equal    log-probs" in printed.out
    assert "icepop_function" in printed.err


@pytest.mark.parametrize("host", ["verl", "slime", "nemo_rl"])
def test_a_host_that_is_not_there_cannot_be_compared(monkeypatch, capsys, host):
    monkeypatch.setitem(sys.modules, host, None)
    assert main([host]) == UNUSABLE
    assert f"run this in an environment in which {host}." in capsys.readouterr().err


def test_a_host_that_fails_cannot_be_compared(monkeypatch, capsys):
    class Other(ClippedLoss):
        def __call__(self, logprobs, data):
            raise AssertionError

    with_nemo_rl(monkeypatch, Other)
    assert main(["nemo_rl"]) == UNUSABLE
    assert "nemo_rl could not be called: TypeError" in capsys.readouterr().err


def test_a_comparison_needs_a_batch(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["verl", "--seeds", "0"])
    assert ended.value.code == UNUSABLE
    assert "--seeds 0" in capsys.readouterr().err


def test_differences_are_relative_and_nan_is_one():
    ones = torch.ones(2)
    inf = torch.tensor([torch.inf, 1.0])
    assert Comparison.of("a", ones * 100, ones * 101).difference == pytest.approx(1 / 101)
    assert Comparison.of("a", ones / 100, ones / 50).difference == pytest.approx(0.01)
    assert Comparison.of("a", torch.tensor([torch.nan, 1.0]), ones).difference == torch.inf
    assert Comparison.of("a", inf, ones).difference == torch.inf
    assert Comparison.of("a", inf, inf.clone()).difference == 0
    with pytest.raises(ValueError, match="a: ours has shape"):
        Comparison.of("a", ones, torch.ones(3))
    text, code = report("verl", [Comparison("a", 0.5, 0.1, 3), Comparison("b", 0.0, 0.0, 4)])
    assert code == 1
    assert text.splitlines() == [
        "DIFFERS  a: by up to 0.5, allowed is 0.1",
        "equal    b, 4 numbers",
        "1 of 2 results of verl differ",
    ]


def test_batches_are_ragged_and_repeat():
    batch = Batch.random(3)
    again = Batch.random(3)
    assert all(map(torch.equal, vars(batch).values(), vars(again).values()))
    assert len(set(batch.mask.sum(1).tolist())) > 3


def test_the_page_shows_the_job_and_every_host():
    (job,) = blocks("Equality in your CI", "text")
    assert "python -m megatron_rc.adaptors.check verl" in job
    page = (ROOT / "docs" / "adaptors.md").read_text(encoding="utf-8")
    assert all(f"| `{host}` |" in page for host in HOSTS)
