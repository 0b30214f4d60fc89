"""Policy losses, KL penalties, advantages and schedule factors, against other projects' numbers and by hand."""

import math

import pytest
import torch

from megatron_rc.launch.advantages import group_advantages
from megatron_rc.losses import PolicyLossConfig, kl_penalty, policy_loss
from megatron_rc.schedule import LossScale, schedule_return
from tests.golden.load import cases

PPO = [
    case
    for case in cases("policy_loss", algorithm="ppo_clip")
    if case["source"]["project"] == "verl"
    and case.get("loss_agg_mode") == "token-mean"
    and not case["config"].get("global_batch_info")
]
KL = [
    case
    for case in cases("policy_loss", algorithm="kl_penalty")
    if case["config"].get("kl_penalty") in ("k1", "k2", "k3")
]
GRPO = [
    case
    for case in cases("advantages")
    if case["estimator"] == "grpo" and case["config"].get("norm_adv_by_std_in_grpo", True)
]


def tensors(case):
    return {name: torch.from_numpy(value) for name, value in case["arrays"].items()}


def test_enough_golden_cases_are_read():
    assert len(PPO) >= 3
    assert len(GRPO) >= 2


@pytest.mark.parametrize("case", PPO, ids=lambda case: case["id"])
def test_ppo_clip_golden(case):
    arrays, config = tensors(case), case["config"]
    mask = arrays["response_mask"]
    log_probs = arrays["log_prob"].clone().requires_grad_()
    loss = policy_loss(
        log_probs,
        arrays["old_log_prob"],
        arrays["advantages"],
        mask,
        clip_low=config.get("clip_ratio_low", config.get("clip_ratio", 0.2)),
        clip_high=config.get("clip_ratio_high", config.get("clip_ratio", 0.2)),
        dual_clip=config.get("clip_ratio_c", 3.0),
        weights=arrays.get("rollout_is_weights"),
    )
    value = loss.per_token.sum() / mask.sum()
    value.backward()
    assert value.item() == pytest.approx(case["loss"], rel=1e-6, abs=1e-8)
    torch.testing.assert_close(log_probs.grad, torch.where(mask, arrays["grad_log_prob"], 0), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("case", GRPO, ids=lambda case: case["id"])
def test_group_advantages_golden(case):
    arrays = tensors(case)
    mask = arrays["response_mask"]
    got = group_advantages(arrays["token_level_rewards"].sum(1), arrays["index"])
    want = arrays["advantages"]
    torch.testing.assert_close(torch.where(mask, got.unsqueeze(1), 0), torch.where(mask, want, 0), rtol=1e-6, atol=1e-8)


def test_equal_rewards_give_no_advantage():
    got = group_advantages(torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5]), torch.tensor([4, 4, 9, 9, 2]))
    assert got[:2].tolist() == [0, 0]
    assert got[2] == -got[3]
    assert float(got[4]) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.7), ("k2", 0.245), ("k3", math.exp(-0.7) - 1 + 0.7)])
def test_kl_penalty_by_hand(estimator, value):
    got = kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.7]), estimator)
    assert got.item() == pytest.approx(value, rel=1e-6)


def test_an_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="estimator='k4' is unknown"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "dual_clip", "value", "gradient"),
    [
        (0.0, 1.0, None, -1.0, -1.0),
        (math.log(1.5), 1.0, None, -1.2, 0.0),  # clipped above
        (math.log(0.5), 1.0, None, -0.5, -0.5),
        (math.log(0.5), -1.0, None, 0.8, 0.0),  # clipped below
        (math.log(1.5), -1.0, None, 1.5, 1.5),
        (math.log(5.0), -1.0, 3.0, 3.0, 0.0),  # dual clip
        (25.0, -1.0, None, math.exp(20), 0.0),  # the ratio's argument is clamped
    ],
)
def test_ppo_clip_by_hand(log_ratio, advantage, dual_clip, value, gradient):
    log_probs = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    loss = policy_loss(
        log_probs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1, dtype=torch.bool), dual_clip=dual_clip
    )
    loss.per_token.sum().backward()
    assert loss.per_token.item() == pytest.approx(value)
    assert log_probs.grad.item() == pytest.approx(gradient)


def test_masked_positions_change_no_bit():
    mask = torch.tensor([[True, False]])
    log_probs = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    loss = policy_loss(log_probs, torch.tensor([[-1.5, -math.inf]]), torch.tensor([[1.0, math.nan]]), mask)
    loss.per_token.sum().backward()
    assert loss.per_token[0, 1] == 0
    assert log_probs.grad.tolist()[0][1] == 0
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_low": 1.0}, "clip_low=1.0"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"dual_clip": 1.0}, "dual_clip=1.0"),
        ({"kl_coef": -1.0}, "kl_coef=-1.0"),
        ({"entropy_coef": math.inf}, "entropy_coef=inf"),
    ],
)
def test_objectives_that_cannot_work_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        PolicyLossConfig(**fields)


@pytest.mark.parametrize("name", ["old_log_probs", "response_mask", "weights", "advantages"])
def test_shapes_that_do_not_fit_are_named(name):
    arguments = {
        "log_probs": torch.zeros(2, 3),
        "old_log_probs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "response_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=name):
        policy_loss(**(arguments | {name: torch.zeros(3, 3).bool() if name == "response_mask" else torch.zeros(3, 3)}))


@pytest.mark.parametrize("per_token", [False, True])
def test_schedule_factors_cancel_megatrons(per_token):
    """What Megatron does with the three values (its division, DDP's mean or sum, the scaling) must leave Σℓ/G."""
    scale = LossScale(
        denominator=7.0,
        num_microbatches=3,
        dp_cp_size=4,
        calculate_per_token_loss=per_token,
        local_tokens=10,
        total_tokens=120,
    )
    sums = torch.arange(12.0).view(4, 3)
    gradients = torch.zeros(4)
    counts = 0
    for rank in range(4):
        for micro_batch in range(3):
            loss, count, log = schedule_return(sums[rank, micro_batch].clone(), {"x": sums[0, 0]}, scale)
            assert (count.dtype, count.dim()) == (torch.int32, 0)
            assert log["x"].data_ptr() != sums.data_ptr()
            counts += int(count)
            gradients[rank] += loss if per_token else loss / count / 3
    total = gradients.sum() / counts if per_token else gradients.mean()
    assert float(total) == pytest.approx(float(sums.sum()) / 7)
