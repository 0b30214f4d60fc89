"""Fields that go unchanged into Megatron's configs train, with forward-only and training passes that agree."""

import pytest

from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, recorded_batch, save_initial

SELECTIVE = "--recompute-granularity=selective --recompute-modules"
EXPERTS = "--num-experts=4 --moe-ffn-hidden-size=16 --moe-token-dispatcher-type=alltoall"
CASES = {
    "dense": "--no-rope-freq=2 --rotary-interleaved --qk-l2-norm --deterministic-mode --decoupled-lr=1e-3 "
    f"--no-decoupled-weight-decay --weight-decay=0.1 --activation-func-clamp-value=1 {SELECTIVE} core_attn mlp",
    "fused": "--bias-activation-fusion --bias-dropout-fusion --cross-entropy-loss-fusion --bf16 --grad-reduce-in-bf16",
    "experts": f"{EXPERTS} --moe-router-dtype=fp64 --moe-router-score-function=sigmoid --moe-router-num-groups=2 "
    "--moe-router-group-topk=1 --moe-router-topk-scaling-factor=2",
    "shared": f"{EXPERTS} --moe-shared-expert-intermediate-size=8 --moe-shared-expert-gate {SELECTIVE} moe",
}


def steps(words):
    trainer = make_trainer(words)
    rank, size = (trainer.groups.dp.rank() if trainer.groups.dp else 0), trainer.config.data_parallel_size
    prepared = trainer.prepare(recorded_batch(0, rank, size))
    return [trainer.update(prepared, 0) for _ in range(2)]


def steps_and_layers(words):
    return steps(words), len(make_trainer(words).chunks[0].decoder.layers)


@pytest.mark.parametrize("case", CASES)
def test_both_passes_agree(ranks, tmp_path, case):
    first, second = ranks.run(steps, Layout(), flags(tmp_path, *CASES[case].split()))[0]
    assert first["policy/noise_floor"] == 0
    assert second["policy/abs_log_ratio"] > 0
    assert first["grad_norm"] > 0


@pytest.mark.parametrize(
    ("layout", "ends", "layers"),
    [
        pytest.param(Layout(pp=2), "--decoder-first-pipeline-num-layers=1", [1, 3], marks=pytest.mark.long),
        (Layout(pp=4), "--decoder-first-pipeline-num-layers=2 --decoder-last-pipeline-num-layers=2", [2, 1, 1, 2]),
    ],
    ids=["first", "both"],
)
def test_uneven_stages_take_the_same_steps(ranks, tmp_path, layout, ends, layers):
    words = flags(tmp_path, f"--num-layers={sum(layers)}", "--optimizer=sgd")
    ranks.run(save_initial, Layout(), [*words, f"--save={tmp_path}/start"])
    words += [f"--load={tmp_path}/start", "--finetune"]
    expected = ranks.run(steps, Layout(), words)[0]
    for (got, own), number in zip(
        ranks.run(steps_and_layers, layout, [*words, *layout.flags(), *ends.split()]), layers, strict=True
    ):
        assert own == number
        for step, want in zip(got, expected, strict=True):
            assert step["loss/total"] == pytest.approx(want["loss/total"], rel=1e-4)
            assert step["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)


def test_experts_split_in_another_way_take_the_same_steps(ranks, tmp_path):
    """Each rank has two whole experts where the other matrices are split."""
    words = flags(tmp_path, *EXPERTS.split(), "--optimizer=sgd")
    ranks.run(save_initial, Layout(), [*words, f"--save={tmp_path}/start"])
    words += [f"--load={tmp_path}/start", "--finetune"]
    expected = ranks.run(steps, Layout(), words)[0]
    layout = Layout(tp=2, sp=True, ep=2, etp=1)
    for got in ranks.run(steps, layout, [*words, *layout.flags()]):
        for step, want in zip(got, expected, strict=True):
            assert step["loss/total"] == pytest.approx(want["loss/total"], rel=1e-4)
            assert step["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
