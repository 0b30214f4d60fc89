"""TP, CP, PP and DP over nccl, one rank a GPU: weights, metrics and gradients against float64, as on the CPU."""

import pytest
import torch

from tests.gpu.check_training import distance_of
from tests.gpu.training import job, words_for
from tests.launch.training import test_matrix as matrix
from tests.support.ranks import Layout
from tests.support.training_cases import Case

CASES = [
    Case(Layout(tp=2, sp=True), "decoupled", packed=True, size=4),
    Case(Layout(cp=2), "decoupled", variant=1),
    Case(Layout(pp=2), "bypass reinforce", size=4),
    Case(Layout(dp=2), "bypass ppo_clip", per_token_loss=True, size=2),
    Case(Layout(pp=2, vpp=True), "decoupled", size=4),
    Case(Layout(tp=2, cp=2), "bypass gspo", packed=True, size=1),
    Case(Layout(tp=2, pp=2, cp=2), "decoupled", size=4),
]


@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    "case", [pytest.param(one, id=str(one), marks=pytest.mark.gpus(one.layout.world)) for one in CASES]
)
def test_layout(device, figures, tmp_path, case):
    arguments = words_for(device.type, [*case.words(tmp_path), "--transformer-impl=local"])
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.layout.world}"]
    command += ["--module", "tests.gpu.training", "rank", str(tmp_path), *arguments]
    job(command, 100)
    ranks = range(case.layout.world)
    everywhere = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in ranks]
    figures(gradient_error=distance_of(everywhere, case))
    matrix.assert_case(everywhere, case)
