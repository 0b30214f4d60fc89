"""Inputs of the correction: errors that are raised at once, and errors that check() reports."""

import contextlib
import math

import pytest
import torch

from megatron_rc import (
    PlanInputs,
    PolicyLossConfig,
    RolloutCorrection,
    RolloutCorrectionConfig,
    correct_rollouts,
)
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from tests.support.correction_cases import CASES, make_batch
from tests.support.correction_comparison import config_of, numbers, use_blocks

INTS = torch.zeros(12, dtype=torch.int64)
# A version for each token: 1 at the only trained token of row 3, 0 elsewhere.
TOKEN_VERSIONS = (torch.arange(12 * 16) == 3 * 16).view(12, 16).long()
NAMES = ("train_log_probs", "rollout_log_probs", "response_mask")
DTYPES = dict(zip(NAMES, (torch.float32, torch.float32, torch.bool), strict=True))


def arguments(name="token"):
    """Log-probs and mask of a case's batch, by the names of the arguments."""
    batch = make_batch(CASES[name], 0, filler=0.0)
    return dict(zip(NAMES, (batch.train, batch.rollout, batch.mask), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_log_probs": torch.zeros(12, 15)}, r"rollout_log_probs .*\(12, 15\)"),
        ({"response_mask": torch.ones(12, 16, dtype=torch.int64)}, "response_mask .*int64"),
        ({"rollout_log_probs": torch.zeros(12, 16, dtype=torch.bfloat16)}, "rollout_log_probs .*bfloat16"),
        ({"train_log_probs": None}, "train_log_probs"),
        ({"train_log_probs": [torch.zeros(12, 16)]}, "train_log_probs"),
        ({"mini_batch_ids": INTS[:7]}, r"mini_batch_ids .*\(7,\)"),
        ({"sequence_ids": torch.zeros(12)}, "sequence_ids .*float32"),
        ({"advantages": torch.zeros(11)}, r"advantages .*\(11,\)"),
        ({"num_mini_batches": 2}, "num_mini_batches=2 .*mini_batch_ids"),
        ({"num_groups": 0, "group_ids": INTS}, "num_groups=0"),
        ({"group_ids": INTS}, "group_ids .*num_groups"),
        ({"policy_versions": INTS}, "policy_versions .*current_version"),
        ({"max_staleness": 2}, "max_staleness=2"),
        ({"turn_ids": INTS}, "turn_ids"),
        ({"turn_ids": torch.zeros(12, 16)}, "turn_ids .*float32"),
        ({"layout": SequenceLayout.padded(12, 8)}, r"\(12, 16\).*layout.*\(12, 8\)"),
        ({"layout": SequenceLayout.padded(12, 16, cp_size=2)}, r"groups\.cp"),
        ({name: torch.zeros(5, dtype=dtype) for name, dtype in DTYPES.items()}, r"\(5,\)"),
        ({name: [] for name in NAMES}, "response_mask"),
    ],
)
def test_wrong_shapes_and_dtypes_are_errors_at_once(change, message):
    with pytest.raises(ValueError, match=message):
        correct_rollouts(**(arguments() | change), config=config_of("token"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("groups", "group_any|group_mean_k1.*group_ids="), ("sequence icepop", "opsm .*advantages")],
)
def test_criteria_name_the_input_that_they_lack(name, message):
    with pytest.raises(ValueError, match=message):
        correct_rollouts(**arguments(name), config=config_of(name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mini_batch_ids": INTS + 2, "num_mini_batches": 2}, "mini_batch_ids: 11 values"),
        ({"group_ids": torch.arange(12), "num_groups": 11}, r"group_ids: 1 values .* lie in \[0, num_groups"),
        ({"sequence_ids": torch.arange(12) + 2**21 - 11}, "sequence_ids: 1 values"),
        ({"policy_versions": torch.arange(12), "current_version": 9}, "policy_versions: 2 values .* at most"),
        ({"policy_versions": TOKEN_VERSIONS, "current_version": 0}, "policy_versions: 1 values"),
        ({"rewards": torch.full((12,), math.nan)}, "rewards: 11 values .* finite"),
        ({"advantages": torch.full((12, 16), math.nan)}, "advantages: [0-9]+ values .* finite"),
    ],
)
def test_values_out_of_range_are_reported_by_check(change, message):
    """Only one rank may see them, so that nothing is raised before the reductions."""
    result = correct_rollouts(**(arguments() | change), config=config_of("token"))
    result.metrics()
    with pytest.raises(ValueError, match=message):
        result.check()


# The word of the message for a bad log-prob.
BAD_WORDS = {"nan": "NaN", "inf": "infinite", "-inf": "infinite", "0.0002": "positive"}


@pytest.mark.parametrize(
    ("policy", "value"),
    [
        ("train_log_probs", math.nan),
        ("train_log_probs", math.inf),
        ("rollout_log_probs", -math.inf),
        ("rollout_log_probs", 2e-4),
    ],
)
@pytest.mark.parametrize("is_cut", [False, True], ids=["one block", "a block for each row"])
def test_the_lowest_bad_token_is_named(monkeypatch, policy, value, is_cut):
    if is_cut:
        use_blocks(monkeypatch, 16)
    tensors = arguments()
    for row, column in ((1, 5), (1, 9), (9, 0)):
        tensors["response_mask"][row, column] = True
        tensors[policy][row, column] = value
    # Row 9 has the lowest id of the rows with bad tokens, 2.
    sequence_ids = torch.arange(12).flip(0)
    result = correct_rollouts(**tensors, config=config_of("token"), sequence_ids=sequence_ids)

    name = "training" if policy == "train_log_probs" else "rollout"
    message = rf"{name} log-prob of sample 2, position 0 is {BAD_WORDS[str(value)]} .*3.*bad_log_probs=reject_token"
    with pytest.raises(ValueError, match=message):
        result.check()


def test_narrow_log_probs_in_the_loss_are_compared_in_float32():
    """A model's log π_θ may be narrow; the result is the one of the same numbers in float32."""
    config = RolloutCorrectionConfig(rollout_is="sequence", bypass_mode=True, loss_type="reinforce")
    tensors = arguments()
    theta = tensors["train_log_probs"].nan_to_num(0.0).bfloat16()
    rollout = tensors["rollout_log_probs"].float()
    mask = tensors["response_mask"]
    weights = []
    for log_probs in (theta, theta.float()):
        correction = RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig())
        correction.plan(PlanInputs(None, rollout, mask))
        weights.append(correction.in_loss(log_probs, rollout, mask).weights)
    assert weights[0].dtype == torch.float32
    assert torch.equal(weights[0], weights[1])


def test_what_a_masked_sequence_says_is_no_error():
    """Dummy sequences that fill a batch may have any rewards, versions and ids."""
    tensors = arguments()
    tensors["response_mask"][4] = False
    rewards = torch.zeros(12)
    rewards[4] = math.nan
    policy_versions = INTS.clone()
    policy_versions[4] = 99
    sequence_ids = torch.arange(12)
    sequence_ids[4] = -7
    result = correct_rollouts(
        **tensors,
        config=config_of("token"),
        rewards=rewards,
        policy_versions=policy_versions,
        sequence_ids=sequence_ids,
        current_version=1,
    )
    result.check()


def with_zeros(length, num_sequences):
    """Arguments whose first sequences have ``length`` trained tokens each, all with a rollout log-prob of 0."""
    tensors = arguments()
    for row in range(num_sequences):
        tensors["response_mask"][row] = False
        tensors["response_mask"][row, :length] = True
        tensors["rollout_log_probs"][row] = 0.0
        tensors["rollout_log_probs"][row, length:] = -1.0
        tensors["train_log_probs"][row] = -0.5
    return tensors


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_rollout_log_probs_that_are_all_zero_are_refused(value):
    """An engine returned none, or the field was never filled. Each sequence is judged by itself."""
    tensors = with_zeros(length=9, num_sequences=2)
    tensors["rollout_log_probs"][0, :9] = value
    result = correct_rollouts(**tensors, config=config_of("token"))
    result.metrics()
    with pytest.raises(ValueError, match=r"rollout_log_probs.* 2 .*allow_zero_log_probs=True"):
        result.check()
    correct_rollouts(**tensors, config=config_of("token"), allow_zero_log_probs=True).check()


@pytest.mark.parametrize(("position", "value"), [((0, 8), -1e-30), ((0, 0), 1e-9)])
def test_eight_zeros_and_zeros_among_others_are_honest(position, value):
    config = config_of("token")
    eight_zeros = with_zeros(length=8, num_sequences=5)
    correct_rollouts(**eight_zeros, config=config).check()

    # A log-prob that rounding has moved above 0 is no error either.
    rounded = torch.full((12, 16), 9e-5)
    correct_rollouts(**arguments() | {"train_log_probs": rounded}, config=config).check()

    nine_tokens = with_zeros(length=9, num_sequences=1)
    nine_tokens["rollout_log_probs"][position] = value
    correct_rollouts(**nine_tokens, config=config).check()


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (torch.zeros(12, 16, dtype=torch.bfloat16), "rollout_log_probs .*bfloat16"),
        (None, "rollout_log_probs"),
    ],
)
def test_bypass_refuses_rollout_log_probs_in_the_plan(rollout, message):
    """The schedule would be too late for the error: other pipeline stages would wait."""
    config = RolloutCorrectionConfig(rollout_is="token", bypass_mode=True, loss_type="reinforce")
    correction = RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig())
    mask = arguments()["response_mask"]
    with pytest.raises(ValueError, match=message):
        correction.plan(PlanInputs(None, rollout, mask))


@pytest.mark.parametrize("policy", ["reject_token", "reject_sequence"])
def test_bad_tokens_are_counted_where_they_are_rejected(policy):
    tensors = arguments()
    tensors["rollout_log_probs"][1, :2] = math.nan
    tensors["response_mask"][1, :2] = True
    result = correct_rollouts(**tensors, config=RolloutCorrectionConfig(rollout_is="token", bad_log_probs=policy))
    result.check()
    assert result.metrics()["rollout_corr/bad_log_probs"] == 2
    assert not result.mask[1, :2].any()
    assert bool(result.mask[1].any()) == (policy == "reject_token")


def test_views_and_mixed_dtypes_are_read_as_they_are():
    tensors = arguments()
    config = config_of("token")
    leaf = tensors["train_log_probs"].clone().requires_grad_()
    expected = correct_rollouts(**tensors | {"train_log_probs": leaf}, config=config)
    assert not expected.weights.requires_grad

    # Columns of wider tensors.
    columns = {name: torch.cat([tensor, tensor[:, :3]], dim=1)[:, :16] for name, tensor in tensors.items()}
    # Megatron's tensors are [s, b]: their transposes are [b, s], and not contiguous.
    transposed = {name: tensor.T.contiguous().T for name, tensor in tensors.items()}
    transposed_log_probs = {name: transposed[name] for name in ("train_log_probs", "rollout_log_probs")}
    transposed_mask = {"response_mask": transposed["response_mask"]}
    for views in (columns, transposed, tensors | transposed_log_probs, tensors | transposed_mask):
        result = correct_rollouts(**views, config=config)
        assert torch.equal(result.weights, expected.weights)
        assert torch.equal(result.mask, expected.mask)
        assert torch.equal(numbers(result), numbers(expected))

    mixed = tensors | {"rollout_log_probs": tensors["rollout_log_probs"].float()}
    assert correct_rollouts(**mixed, config=config).weights.dtype == torch.float64


@pytest.mark.parametrize("bypass", [False, True])
def test_a_trainer_refuses_zero_log_probs_too(bypass):
    log_probs = torch.full((1, 9), -1.0)
    zeros = torch.zeros(1, 9)
    mask = torch.ones(1, 9, dtype=torch.bool)
    mode = {"bypass_mode": True, "loss_type": "reinforce"} if bypass else {}
    config = RolloutCorrectionConfig(rollout_is="token", **mode)
    for allowed in (False, True):
        correction = RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig(), allow_zero_log_probs=allowed)
        result = correction.plan(PlanInputs(None if bypass else log_probs, zeros, mask))
        if bypass:
            correction.in_loss(log_probs, zeros, mask)
            correction.finish_step()
            result = correction.step
        with contextlib.nullcontext() if allowed else pytest.raises(ValueError, match="allow_zero_log_probs=True"):
            result.check()
