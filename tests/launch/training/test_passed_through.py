"""Fields that go unchanged into Megatron's configs train, with forward-only and training passes that agree."""

import pytest

from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, save_initial, share

SELECTIVE = "--recompute-granularity=selective --recompute-modules"
# Two micro-batches, and no pass of a reference policy.
FEW_PASSES = ["--micro-batch-size=8", "--grpo-kl-beta=0"]
EXPERTS = "--num-experts=4 --moe-ffn-hidden-size=16 --moe-token-dispatcher-type=alltoall"
CASES = {
    "dense": "--no-rope-freq=2 --rotary-interleaved --qk-l2-norm --deterministic-mode --decoupled-lr=1e-3 "
    f"--no-decoupled-weight-decay --weight-decay=0.1 --activation-func-clamp-value=1 {SELECTIVE} core_attn mlp",
    "fused": "--bias-activation-fusion --bias-dropout-fusion --cross-entropy-loss-fusion --bf16 --grad-reduce-in-bf16",
    "experts": f"{EXPERTS} --moe-router-dtype=fp64 --moe-router-score-function=sigmoid --moe-router-num-groups=2 "
    "--moe-router-group-topk=1 --moe-router-topk-scaling-factor=2",
    "shared": f"{EXPERTS} --moe-shared-expert-intermediate-size=8 --moe-shared-expert-gate {SELECTIVE} moe",
}


def steps_and_layers(words):
    """(metrics of two steps, number of layers of each chunk of this rank)."""
    trainer = make_trainer(words)
    prepared = trainer.prepare(share(trainer, 0))
    steps = [trainer.update(prepared, 0).metrics for _ in range(2)]
    return steps, [len(chunk.decoder.layers) for chunk in trainer.chunks]


def steps_as_on_one_process(ranks, folder, layout, *model, more=()):
    """What each rank of the layout finds, from the same weights as one process, whose steps it takes."""
    arguments = flags(folder, "--optimizer=sgd", *FEW_PASSES, *model)
    ranks.run(save_initial, Layout(), [*arguments, f"--save={folder}/start"])
    arguments += [f"--load={folder}/start", "--finetune"]
    expected, _ = ranks.run(steps_and_layers, Layout(), arguments)[0]
    results = ranks.run(steps_and_layers, layout, [*arguments, *layout.flags(), *more])
    for got, _ in results:
        for step, want in zip(got, expected, strict=True):
            assert step["loss/total"] == pytest.approx(want["loss/total"], rel=1e-4)
            assert step["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    return results


@pytest.mark.parametrize("case", CASES)
def test_both_passes_agree(ranks, tmp_path, case):
    words = flags(tmp_path, *FEW_PASSES, *CASES[case].split())
    first, second = ranks.run(steps_and_layers, Layout(), words)[0][0]
    assert first["policy/noise_floor"] == 0
    assert second["policy/abs_log_ratio"] > 0
    assert first["grad_norm"] > 0


@pytest.mark.parametrize(
    ("layout", "ends", "layers"),
    [
        pytest.param(Layout(pp=2), "--decoder-first-pipeline-num-layers=1", [[1], [3]], marks=pytest.mark.long),
        (
            Layout(pp=4),
            "--decoder-first-pipeline-num-layers=2 --decoder-last-pipeline-num-layers=2",
            [[2], [1], [1], [2]],
        ),
        (Layout(pp=2, vpp=True, stages="E|tt|ttt|L"), "", [[0, 3], [2, 0]]),
    ],
    ids=["first", "both", "layout"],
)
def test_uneven_stages_take_the_same_steps(ranks, tmp_path, layout, ends, layers):
    results = steps_as_on_one_process(
        ranks, tmp_path, layout, f"--num-layers={sum(map(sum, layers))}", more=ends.split()
    )
    assert [numbers for _, numbers in results] == layers


ADAM = ["--optimizer=adam", "--lr=1e-3", "--adam-eps=1e-2"]


@pytest.mark.parametrize(
    ("layout", "adam", "more"),
    [
        (Layout(tp=2, sp=True, ep=2, etp=1), [], []),
        (Layout(dp=2, ep=2), ADAM, ["--use-distributed-optimizer"]),
    ],
    ids=["whole-experts", "distributed"],
)
def test_experts_split_in_another_way_take_the_same_steps(ranks, tmp_path, layout, adam, more):
    """The gradient norm too, of which each rank holds another part."""
    steps_as_on_one_process(ranks, tmp_path, layout, *EXPERTS.split(), *adam, more=more)
