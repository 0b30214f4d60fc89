"""Mamba layers of ``--model hybrid``: Megatron-Core's own, with kernels that stand in for those of a GPU.

The stand-ins compute the formulas of the kernels' packages on a CPU (``tests/support/mamba_kernels``); parameters,
their cuts, collectives, checkpoints and gradients are Megatron-Core's.
"""

import importlib
import sys
from unittest import mock

import pytest

from megatron_rc.launch.dry_run.findings import examine
from tests.support.hybrid import HYBRID, needs_hybrid
from tests.support.paths import ROOT
from tests.support.ranks import Layout
from tests.support.recorded_training import (
    LLAMA,
    flags,
    make_trainer,
    run_config,
    save_initial,
    share,
    train_recorded,
)
from tests.support.refusals import refused

KERNELS = str(ROOT / "tests" / "support" / "mamba_kernels")
SIZES = ["--mamba-num-heads=8", "--mamba-head-dim=8", "--mamba-num-groups=4", "--mamba-state-dim=6"]
PATTERN = "--hybrid-layer-pattern=M-*-M-M-"
MAMBA = [*LLAMA, HYBRID, PATTERN, *SIZES]
# Experts, more groups than context-parallel ranks, attention in one layer of the last stage.
MIXTURE = ["--num-experts=4", "--moe-ffn-hidden-size=24", "--moe-layer-freq=[0,1,0,1]"]
MIXTURE += ["--hybrid-layer-pattern=M-ME*-ME"]


def with_kernels(function, *arguments):
    """Call the function on a rank of the pool, with the stand-ins in the place of the kernels."""
    from megatron.core.ssm import mamba_mixer

    with mock.patch.object(sys, "path", [KERNELS, *sys.path]):
        importlib.reload(mamba_mixer)
        return function(*arguments)


def mamba_parameters(words):
    """The local shape and the gradient of each parameter of Mamba after a step, by its name."""
    trainer = make_trainer(words)
    trainer.update(trainer.prepare(share(trainer, 0)), 0)
    found = {}
    for name, parameter in trainer.model[0].named_parameters():
        if ".mixer." in name:
            found[name.partition("decoder.")[2]] = (tuple(parameter.shape), bool(parameter.main_grad.abs().sum() > 0))
    return found


@pytest.fixture(scope="module", params=[[], MIXTURE], ids=["dense", "experts"])
def start(request, ranks, tmp_path_factory):
    """(flags that load one checkpoint, the steps of one process)."""
    folder = tmp_path_factory.mktemp("mamba")
    ranks.run(with_kernels, Layout(), save_initial, flags(folder, *request.param, f"--save={folder}", model=MAMBA))
    words = [*request.param, f"--load={folder}", "--finetune", "--micro-batch-size=8", "--optimizer=sgd", "--lr=0.1"]
    words = flags(folder, *words, model=MAMBA)
    return words, ranks.run(with_kernels, Layout(), train_recorded, words, 2)[0]


LAYOUTS = [Layout(tp=2, sp=True), Layout(cp=2), Layout(tp=2, cp=2, sp=True), Layout(pp=2, vpp=True), Layout(dp=2)]


@needs_hybrid
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_takes_the_same_steps(start, ranks, layout):
    """The later steps have the gradients of the earlier ones in them, which are far above the tolerance."""
    words, expected = start
    assert abs(expected[1]["loss/total"] - expected[0]["loss/total"]) > 1e-3
    for steps in ranks.run(with_kernels, layout, train_recorded, [*words, *layout.flags()], 2):
        for step, want in zip(steps, expected, strict=True):
            for name in ("loss/total", "grad_norm", "rollout_corr/kl", "policy/entropy"):
                assert step[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name


@needs_hybrid
def test_a_rank_has_its_heads_and_all_parameters_learn(ranks, tmp_path):
    layout = Layout(tp=2, sp=True)
    for found in ranks.run(with_kernels, layout, mamba_parameters, flags(tmp_path, *layout.flags(), model=MAMBA)):
        assert {name.split(".")[1] for name in found} == {"0", "4", "6"}
        assert found["layers.0.mixer.A_log"] == ((4,), True)
        # Gate and input of 4 heads of 8, twice 2 groups of 6, and a step for each head.
        assert found["layers.4.mixer.in_proj.weight"] == ((2 * 32 + 2 * 12 + 4, 32), True)
        assert all(learns for _, learns in found.values()), found


@needs_hybrid
def test_a_bfloat16_run_has_a_frozen_reference(ranks, tmp_path):
    words = flags(tmp_path, "--bf16", "--grpo-kl-beta=0.05", model=MAMBA)
    ((first, later),) = ranks.run(with_kernels, Layout(), train_recorded, words, 1)
    assert first["policy/reference_kl"] == 0 < later["policy/reference_kl"]


WRONG = """
--hybrid-layer-pattern=M-*- :: --hybrid-layer-pattern M-*- | 4 layers | ----
--hybrid-layer-pattern=M-M-M-ME :: --hybrid-layer-pattern M-M-M-ME | ---- | --moe-layer-freq
--hybrid-layer-pattern=M-G-*-*- :: --hybrid-layer-pattern M-G-*-*- | M or *
--hybrid-layer-pattern=*-*-*-*- :: --mamba- | --hybrid-layer-pattern with M
--rl-use-sequence-packing :: --hybrid-layer-pattern M-*-M-M- | --rl-use-sequence-packing
--mamba-num-groups=3 :: --mamba-num-heads 8 | --mamba-num-groups 3
--mamba-num-heads=6 --mamba-num-groups=3 --tensor-model-parallel-size=2 :: --mamba-num-groups 3
--save-hf=hf :: --hybrid-layer-pattern M-*-M-M- | no Hugging Face architecture
"""


@needs_hybrid
@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_flags_that_mamba_layers_cannot_take(tmp_path, monkeypatch, line):
    monkeypatch.syspath_prepend(KERNELS)
    words, _, named = line.partition(" :: ")
    with refused(named):
        run_config(flags(tmp_path, *words.split(), model=MAMBA), 2, engine=False)


@needs_hybrid
def test_a_dry_run_cannot_run_the_kernels(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(KERNELS)
    with refused("--hybrid-layer-pattern | dry run"):
        examine(run_config(flags(tmp_path, model=MAMBA), engine=False), [], 1, None)


@needs_hybrid
def test_without_the_kernels_mamba_layers_are_refused(tmp_path):
    with refused("--hybrid-layer-pattern | mamba_ssm and causal_conv1d | pip install"):
        run_config(flags(tmp_path, model=MAMBA), engine=False)


def test_a_pattern_is_of_a_hybrid_model(tmp_path):
    with refused("--hybrid-layer-pattern *-*-*-*- | --model hybrid"):
        run_config(flags(tmp_path, "--hybrid-layer-pattern=*-*-*-*-"), engine=False)
