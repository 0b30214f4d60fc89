"""The trainer on one device, in groups of one rank: gradients of every parameter against float64, and whole steps."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from megatron_rc.launch.engines.weight_sums import sum_of
from tests.gpu.packages import require
from tests.gpu.training import job, joined, steps, words_for
from tests.launch.training import test_matrix as matrix
from tests.launch.training.models import test_hybrid
from tests.support import training_cases
from tests.support.errors import largest_error
from tests.support.made_rollouts import on_device
from tests.support.ranks import Layout
from tests.support.recorded_training import GPT2, flags, make_trainer, recorded_batch
from tests.support.training_cases import Case

CASES = {
    "decoupled": Case(Layout(), "decoupled"),
    "decoupled packed": Case(Layout(), "decoupled", packed=True, size=4),
    "decoupled GSPO per-token loss": Case(Layout(), "decoupled", variant=1, per_token_loss=True, size=4),
    "bypass PPO packed": Case(Layout(), "bypass ppo_clip", packed=True),
    "bypass REINFORCE": Case(Layout(), "bypass reinforce", size=2),
    "bypass GSPO": Case(Layout(), "bypass gspo"),
}
BF16 = ("--bf16", "--use-distributed-optimizer")


@pytest.fixture(scope="module", autouse=True)
def groups(request, tmp_path_factory):
    device = request.config.getoption("--device")
    with joined(words_for(device, flags(tmp_path_factory.mktemp("groups")))):
        yield


@pytest.fixture
def words(device, tmp_path):
    """Flags of a run here: those of a case, or of the tiny run with some more."""

    def words(*more, case=None, model=None):
        base = case.words(tmp_path) if case else flags(tmp_path, **({"model": model} if model else {}))
        return words_for(device.type, [*base, "--transformer-impl=local", *more])

    return words


def distance_of(everywhere, case):
    """The relative distance of the gradient from the reference's, in the mini-batch where it is largest."""
    expected = training_cases.expected(case.objective)
    errors = []
    for index, want in enumerate(expected.gradients):
        got = matrix.whole_gradients(everywhere, index)
        assert got.keys() == want.keys()
        apart = sum(float((got[name] - want[name]).square().sum()) for name in want)
        errors.append((apart / sum(float(gradient.square().sum()) for gradient in want.values())) ** 0.5)
    return largest_error(errors)


def run(case, arguments):
    old, new = training_cases.weights()
    return training_cases.run_case(arguments, training_cases.make_data(), old, new)


@pytest.mark.parametrize("name", CASES)
def test_gradients(words, figures, name):
    """In float32, to 1e-4 of each parameter's own."""
    case = CASES[name]
    outcome = run(case, words(case=case))
    figures(gradient_error=distance_of([outcome], case))
    matrix.assert_case([outcome], case)


FUSED = ("--fused-linear-log-probs",)
RECOMPUTED = ("--recompute-granularity=full", "--recompute-method=uniform")
APEX = "fused_weight_gradient_mlp_cuda"
TE = "transformer_engine.pytorch"
TE_LAYERS = ("--transformer-impl=transformer_engine",)
# Other ways to the same gradients: (package, case, flags, distance). bfloat16 has float32 gradients and the distributed
# optimizer; not in decoupled mode, whose two policies differ by little more than it rounds, so that others are clipped.
NEAR = {
    "fused output layer": ("", "decoupled", FUSED, 1e-4),
    "recomputed": ("", "decoupled", (*RECOMPUTED, "--recompute-num-layers=1"), 1e-4),
    "bfloat16": ("", "bypass REINFORCE", BF16, 0.2),
    "bfloat16 fused": ("", "bypass REINFORCE", (*BF16, *FUSED), 0.2),
    "bfloat16 packed": ("", "bypass PPO packed", BF16, 0.2),
    "bfloat16 packed fused": ("", "bypass PPO packed", (*BF16, *FUSED), 0.2),
    # apex's kernel adds a weight's gradient to main_grad itself.
    "apex": (APEX, "bypass REINFORCE", (), 1e-4),
    "apex fused": (APEX, "bypass REINFORCE", FUSED, 1e-4),
    "apex bfloat16": (APEX, "bypass REINFORCE", BF16, 0.2),
    # Its layers may use TF32 in float32; its attention takes no packed float32.
    "Transformer Engine": (TE, "bypass REINFORCE", TE_LAYERS, 1e-2),
    "Transformer Engine bfloat16": (TE, "bypass REINFORCE", (*TE_LAYERS, *BF16), 0.2),
    "Transformer Engine packed": (TE, "bypass PPO packed", (*TE_LAYERS, *BF16), 0.2),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_gradients(words, figures, name):
    package, case, more, most = NEAR[name]
    if package:
        require(package)
    distance = distance_of([run(CASES[case], words(*more, case=CASES[case]))], CASES[case])
    figures(gradient_error=distance)
    assert distance <= most


ROTARY = {
    "packed": None,
    "packed, latent attention with YaRN": [
        *test_hybrid.LATENT,
        *test_hybrid.EXPERTS,
        "--rope-type=yarn",
        "--rotary-scaling-factor=2",
    ],
}


@pytest.mark.parametrize("name", ROTARY)
def test_fused_rotary_embeddings(words, figures, name):
    """Transformer Engine's rotary kernel gives packed tokens the gradients that PyTorch's operations give."""
    require(TE)
    more = [*TE_LAYERS, *BF16, "--rl-use-sequence-packing", "--rl-sequence-packing-bin-size=64"]
    losses = [
        steps(words(*more, *fusion_flags, model=ROTARY[name]), [0])[0]
        for fusion_flags in ((), ("--apply-rope-fusion",))
    ]
    apart = abs(losses[1]["grad_norm"] - losses[0]["grad_norm"]) / losses[0]["grad_norm"]
    figures(grad_norm_error=apart, loss_error=abs(losses[1]["loss/total"] - losses[0]["loss/total"]))
    assert apart <= 1e-2


@pytest.mark.parametrize(
    ("more", "model"),
    [
        ((), None),
        (BF16, None),
        ((*BF16, "--rl-use-sequence-packing", "--fused-linear-log-probs"), None),
        ((*BF16, "--grpo-kl-beta=0.1", "--grpo-entropy-term-weight=0.01"), None),
        (("--num-experts=4", "--moe-ffn-hidden-size=32"), None),
        (BF16, GPT2),
    ],
    ids=["plain", "bfloat16", "packed and fused", "penalties", "experts", "LayerNorm and biases"],
)
def test_steps(words, on_gpu, figures, more, model):
    """Whole optimizer steps: the weights move, and all metrics are finite."""
    if on_gpu and "--num-experts=4" in more:
        require("transformer_engine.pytorch")  # the launcher refuses experts without it
    metrics_of_steps = steps(words(*more, model=model), [0, 1, 2])
    assert all(math.isfinite(value) for metrics in metrics_of_steps for value in metrics.values())
    assert all(metrics["grad_norm"] > 0 for metrics in metrics_of_steps)
    assert not any(metrics["skipped_steps"] for metrics in metrics_of_steps)
    figures(loss=metrics_of_steps[-1]["loss/total"], grad_norm=metrics_of_steps[-1]["grad_norm"])


@pytest.mark.timeout(170)
@pytest.mark.parametrize("more", [(), BF16], ids=["float32", "bfloat16"])
def test_checkpoints_between_devices(words, device, figures, tmp_path, more):
    """Two steps here, one on the CPU, one here again, each from the last checkpoint: as without any.

    No token is rejected, and weights change little, so that rounding decides about nothing.
    """
    folder = tmp_path / "checkpoints"
    more = (*more, "--lr=1e-4", "--rollout-rs-threshold=1e-6_1e6,1e6")
    arguments = (*more, f"--save={folder}", f"--load={folder}")
    steps(words(*arguments), [0, 1])
    without = steps(words(*more), [0, 1, 2, 3])
    path = tmp_path / "there.json"
    job(("-m", "tests.gpu.training", "steps", str(path), "[2]", *words_for("cpu", words(*arguments))), 80)
    there = json.loads(path.read_text(encoding="utf-8"))
    metrics_here = steps(words(*arguments), [3])
    apart = [
        abs(got["grad_norm"] - want["grad_norm"]) / want["grad_norm"]
        for got, want in zip([*there, *metrics_here], without[2:], strict=True)
    ]
    figures(grad_norm_error_cpu=apart[0], grad_norm_error_back=apart[1])
    assert largest_error(apart) <= (0.05 if "--bf16" in more else 1e-3)


def test_grouped_experts(words, figures, tmp_path):
    """Grouped products take the weights of single experts, give them back, and score alike."""
    from megatron_rc.launch.training.batches.micro_batches import cut_batch
    from megatron_rc.launch.weights.converter import export_model, load_model

    require("transformer_engine.pytorch")
    more = [*BF16, "--transformer-impl=transformer_engine", "--num-experts=4", "--moe-ffn-hidden-size=32"]
    alone, grouped = (make_trainer(words(*more, *kernel_flags)) for kernel_flags in ((), ("--moe-grouped-gemm",)))
    weights = dict(export_model(alone.chunks, alone.config, alone.groups))
    save_file({name: tensor.cpu() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    load_model(grouped.chunks, grouped.config, grouped.groups, tmp_path)
    again = dict(export_model(grouped.chunks, grouped.config, grouped.groups))
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    batch = on_device(recorded_batch(0), alone.device)
    scores_alone, scores_grouped = (
        trainer.score(cut_batch(batch, trainer.config, trainer.groups)) for trainer in (alone, grouped)
    )
    difference = float((scores_alone - scores_grouped).abs().max())
    figures(largest_difference=difference)
    assert difference < 0.1


def test_sum_of_weights(device, on_gpu):
    """A bucket's checksum is the same on both sides of a transfer, whichever of them has a GPU."""
    bucket = torch.randint(0, 256, (40_000_003 if on_gpu else 400_003,), dtype=torch.uint8)
    assert sum_of(bucket.to(device)) == sum_of(bucket)
