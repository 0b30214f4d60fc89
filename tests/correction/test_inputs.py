"""What the correction is given: what is refused at once, what is reported by check(), and what it asks of the host."""

import contextlib
import dataclasses
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
from tests.support.correction_comparison import config_of, numbers

INTS = torch.zeros(12, dtype=torch.int64)
OF_TOKENS = (torch.arange(12 * 16) == 3 * 16).view(12, 16).long()
NAMES = ("train_log_probs", "rollout_log_probs", "response_mask")
KINDS = dict(zip(NAMES, (torch.float32, torch.float32, torch.bool), strict=True))


def arguments(name="token"):
    batch = make_batch(CASES[name], 0, filler=0.0)
    return dict(zip(NAMES, (batch.train, batch.rollout, batch.mask), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_log_probs": torch.zeros(12, 15)}, r"rollout_log_probs .*\(12, 15\)"),
        ({"response_mask": torch.ones(12, 16, dtype=torch.int64)}, "response_mask .*int64"),
        ({"rollout_log_probs": torch.zeros(12, 16, dtype=torch.bfloat16)}, "rollout_log_probs .*bfloat16"),
        ({"train_log_probs": torch.zeros(12, 16, dtype=torch.float16)}, "train_log_probs .*float16"),
        ({"train_log_probs": torch.zeros(12, 16, dtype=torch.int64)}, "train_log_probs .*int64"),
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
        ({"layout": SequenceLayout.padded(12, 8)}, r"\(12, 16\).*layout.*\(12, 8\)"),
        ({"layout": SequenceLayout.padded(12, 16, cp_size=2)}, r"groups\.cp"),
        ({name: torch.zeros(5, dtype=kind) for name, kind in KINDS.items()}, r"\(5,\)"),
        ({name: [] for name in NAMES}, "response_mask"),
    ],
)
def test_wrong_shapes_and_dtypes_are_errors_at_once(change, message):
    with pytest.raises(ValueError, match=message):
        correct_rollouts(**(arguments() | change), config=config_of("token"))


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        ({"rollout_is": "token"}, "from_dict"),
        ("decoupled_token_is", "decoupled_token_is"),
        ("my_run.yaml", "from_yaml"),
    ],
)
def test_what_is_no_config_is_an_error_that_says_what_to_pass(config, remedy):
    with pytest.raises(ValueError, match=f"config .*RolloutCorrectionConfig.*{remedy}"):
        correct_rollouts(**arguments(), config=config)
    with pytest.raises(ValueError, match=f"config .*RolloutCorrectionConfig.*{remedy}"):
        RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig())


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
        ({"policy_versions": OF_TOKENS, "current_version": 0}, "policy_versions: 1 values"),
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


_KINDS = {"nan": "NaN", "inf": "infinite", "-inf": "infinite", "0.0002": "positive"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2e-4])
@pytest.mark.parametrize("policy", ["train_log_probs", "rollout_log_probs"])
def test_the_lowest_bad_token_is_named(policy, value):
    given = arguments()
    for row, column in ((1, 5), (1, 9), (9, 0)):
        given["response_mask"][row, column] = True
        given[policy][row, column] = value
    ids = torch.arange(12).flip(0)
    result = correct_rollouts(**given, config=config_of("token"), sequence_ids=ids)
    name = "training" if policy[0] == "t" else "rollout"
    message = rf"{name} log-prob of sample 2, position 0 is {_KINDS[str(value)]} .*3.*bad_log_probs=reject_token"
    with pytest.raises(ValueError, match=message):
        result.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_log_probs_in_the_loss_are_compared_in_float32(dtype):
    """A model's log π_θ may be narrow; the result is the one of the same numbers in float32."""
    config = RolloutCorrectionConfig(rollout_is="sequence", bypass_mode=True, loss_type="reinforce")
    given = arguments()
    theta = given["train_log_probs"].nan_to_num(0.0).to(dtype)
    rollout, mask = given["rollout_log_probs"].float(), given["response_mask"]
    weights = []
    for log_probs in (theta, theta.float()):
        correction = RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig())
        correction.plan(PlanInputs(None, rollout, mask))
        weights.append(correction.in_loss(log_probs, rollout, mask).weights)
    assert weights[0].dtype == torch.float32
    assert torch.equal(weights[0], weights[1])


def test_what_a_masked_sequence_says_is_no_error():
    """Dummies that fill a batch carry anything."""
    given = arguments()
    given["response_mask"][4] = False
    sides = {"rewards": torch.zeros(12), "policy_versions": INTS.clone(), "sequence_ids": torch.arange(12)}
    sides["rewards"][4], sides["policy_versions"][4], sides["sequence_ids"][4] = math.nan, 99, -7
    correct_rollouts(**given, config=config_of("token"), **sides, current_version=1).check()


def zeros(lengths, count):
    """Arguments with ``count`` sequences of these trained tokens each, whose rollout log-probs are all 0."""
    given = arguments()
    for row in range(count):
        given["response_mask"][row], given["rollout_log_probs"][row] = False, 0.0
        given["response_mask"][row, :lengths], given["rollout_log_probs"][row, lengths:] = True, -1.0
        given["train_log_probs"][row] = -0.5
    return given


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_rollout_log_probs_that_are_all_zero_are_refused(value):
    """An engine that returned none, or a field that was never filled; decided for each sequence."""
    given = zeros(9, 2)
    given["rollout_log_probs"][0, :9] = value
    result = correct_rollouts(**given, config=config_of("token"))
    result.metrics()
    with pytest.raises(ValueError, match=r"rollout_log_probs.* 2 .*allow_zero_log_probs=True"):
        result.check()
    correct_rollouts(**given, config=config_of("token"), allow_zero_log_probs=True).check()


@pytest.mark.parametrize(("place", "value"), [((0, 8), -1e-30), ((0, 0), 1e-9)])
def test_eight_zeros_and_zeros_among_others_are_honest(place, value):
    correct_rollouts(**zeros(8, 5), config=config_of("token")).check()
    rounded = torch.full((12, 16), 9e-5)  # nor is a rounding above 0 an error
    correct_rollouts(**arguments() | {"train_log_probs": rounded}, config=config_of("token")).check()
    given = zeros(9, 1)
    given["rollout_log_probs"][place] = value
    correct_rollouts(**given, config=config_of("token")).check()


@pytest.mark.parametrize("bypass", [False, True])
def test_a_trainer_refuses_zero_log_probs_too(bypass):
    given = zeros(9, 3)
    mode = {"bypass_mode": True, "loss_type": "reinforce"} if bypass else {}
    config = RolloutCorrectionConfig(rollout_is="token", **mode)
    for allowed in (False, True):
        correction = RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig(), allow_zero_log_probs=allowed)
        inputs = PlanInputs(**given)
        result = correction.plan(dataclasses.replace(inputs, train_log_probs=None) if bypass else inputs)
        if bypass:
            correction.in_loss(*given.values())
            correction.finish_step()
            result = correction.step
        with contextlib.nullcontext() if allowed else pytest.raises(ValueError, match="allow_zero_log_probs=True"):
            result.check()


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (torch.zeros(12, 16, dtype=torch.bfloat16), "rollout_log_probs .*bfloat16"),
        (torch.zeros(12, 16, dtype=torch.int64), "rollout_log_probs .*int64"),
        (None, "rollout_log_probs"),
    ],
)
def test_bypass_refuses_rollout_log_probs_in_the_plan(rollout, message, listed):
    """In the schedule, where other pipeline stages would wait, it is too late."""
    config = RolloutCorrectionConfig(rollout_is="token", bypass_mode=True, loss_type="reinforce")
    correction = RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig())
    mask = arguments()["response_mask"]
    if listed:
        rollout, mask = None if rollout is None else [rollout], [mask]
    with pytest.raises(ValueError, match=message):
        correction.plan(PlanInputs(None, rollout, mask))


@pytest.mark.parametrize("policy", ["reject_token", "reject_sequence"])
def test_bad_tokens_are_counted_where_they_are_rejected(policy):
    given = arguments()
    given["rollout_log_probs"][1, :2], given["response_mask"][1, :2] = math.nan, True
    result = correct_rollouts(**given, config=RolloutCorrectionConfig(rollout_is="token", bad_log_probs=policy))
    result.check()
    assert result.metrics()["rollout_corr/bad_log_probs"] == 2
    assert not result.mask[1, :2].any()
    assert bool(result.mask[1].any()) == (policy == "reject_token")


def test_views_and_mixed_dtypes_are_read_as_they_are():
    given = arguments()
    config = config_of("token")
    leaf = given["train_log_probs"].clone().requires_grad_()
    want = correct_rollouts(**given | {"train_log_probs": leaf}, config=config)
    assert not want.weights.requires_grad
    wide = {name: torch.cat([value, value[:, :3]], dim=1)[:, :16] for name, value in given.items()}
    # Megatron's tensors are [s, b]: their transposes are [b, s], and not contiguous.
    turned = {name: value.T.contiguous().T for name, value in given.items()}
    some = {name: turned[name] for name in NAMES[:2]}
    for views in (wide, turned, given | some, given | {"response_mask": turned["response_mask"]}):
        got = correct_rollouts(**views, config=config)
        assert torch.equal(got.weights, want.weights)
        assert torch.equal(got.mask, want.mask)
        assert torch.equal(numbers(got), numbers(want))
    mixed = given | {"rollout_log_probs": given["rollout_log_probs"].float()}
    assert correct_rollouts(**mixed, config=config).weights.dtype == torch.float64


@pytest.mark.parametrize(
    "turn_ids",
    [torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64)],
    ids=["one a sequence", "floats", "other length"],
)
def test_turn_ids_are_one_a_token(turn_ids):
    values = torch.full((2, 3), -1.0)
    with pytest.raises(ValueError, match="turn_ids"):
        correct_rollouts(values, values, values < 0, RolloutCorrectionConfig(rollout_is="turn"), turn_ids=turn_ids)
