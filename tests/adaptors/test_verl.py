"""verl's calls by their shapes (0.9.1): the oracle's numbers, and errors with its names. test-adaptors has verl."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig
from megatron_rc.adaptors.verl import VerlCorrection
from tests.support import correction_oracle as oracle
from tests.support.correction_cases import CASES, clear_batch
from tests.support.correction_comparison import assert_metrics
from tests.support.objectives_oracle import Bounds, of_response
from tests.support.training_oracle import divides

# Of what verl's batch can carry: it has no versions, turns or advantages.
NAMES = ["token clamp", "geometric and veto measured", "groups", "bad sequences"]
RNG = torch.Generator().manual_seed(0)


class Config(SimpleNamespace):
    """The interface of verl's ActorConfig."""

    def get(self, name, default=None):
        return getattr(self, name, default)


def actor(info=None, **fields):
    settings = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.3, "global_batch_info": info or {}}
    return Config(**settings | fields)


def proto(batch, **changes):
    """The parts of a DataProto that are read; its mask has integers, as verl's."""
    tensors = {"old_log_probs": batch.train, "rollout_log_probs": batch.rollout, "response_mask": batch.mask.long()}
    tensors = {name: value for name, value in (tensors | changes).items() if value is not None}
    uid = [f"prompt {index}" for index in batch.sides.get("group_ids", torch.zeros(0)).tolist()]
    return SimpleNamespace(batch=tensors, non_tensor_batch={"uid": uid} if uid else {})


@pytest.mark.parametrize("name", NAMES)
def test_the_driver_gets_the_oracles_batch(name):
    batch, expected = clear_batch(name)
    config = RolloutCorrectionConfig(**CASES[name].fields)
    data = proto(batch)
    got, metrics = VerlCorrection(config).add_to_batch(data, {"rollout_is": None})
    assert got is data
    assert got.batch["response_mask"].dtype == torch.int64
    assert got.batch["response_mask"].bool().tolist() == expected.mask
    assert ("rollout_is_weights" in got.batch) == (expected.weights is not None)
    if expected.weights is not None:
        want = torch.tensor(expected.weights, dtype=torch.float64)
        torch.testing.assert_close(got.batch["rollout_is_weights"], want, rtol=1e-9, atol=1e-12)
    assert metrics["rollout_corr/kl"] == pytest.approx(expected.metrics["kl"], rel=1e-9)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == expected.metrics["rollout_rs_masked_fraction"]


def per_token(log_prob, old, advantages, algorithm, weights):
    """[b, r] by the formula, element by element."""
    bounds = Bounds(algorithm, low=0.2, high=0.3, dual=3.0)
    rows = zip(log_prob, old.tolist(), advantages.tolist(), strict=True)
    losses = [[loss for loss, _ in of_response(bounds, list(new), *row)] for new, *row in rows]
    return torch.stack([torch.stack(row) for row in losses]) * weights


def divided(loss, mask, mode, info):
    """verl's sums and denominators, by loops over sequences."""
    rows = [loss[row][mask[row]] for row in range(len(mask))]
    total = sum(row.sum() / (max(len(row), 1) if mode == "seq-mean-token-mean" else 1) for row in rows)
    tokens = info.get("batch_num_tokens") or sum(map(len, rows))
    sequences = info.get("global_batch_size") or sum(len(row) > 0 for row in rows)
    scale = 1 if mode == "token-sum" else info.get("loss_scale_factor") or mask.shape[1]
    return total / divides(mode, tokens, sequences, scale) * (info.get("dp_size") or 1)


def step(seed=0, shape=(6, 8)):
    """(old, new, advantages, mask): ragged responses with holes, one of them empty, and spread log-probs."""
    generator = torch.Generator().manual_seed(seed)
    old = -1 - 2 * torch.rand(shape, generator=generator, dtype=torch.float64)
    new = old + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-1.9, 1.9)
    advantages = 2 * torch.randn(shape[0], 1, generator=generator, dtype=torch.float64).expand(shape)
    mask = torch.arange(shape[1]) < torch.tensor([8, 3, 0, 5, 1, 7]).unsqueeze(1)
    return old, new.requires_grad_(), advantages, mask & (torch.rand(shape, generator=generator) > 0.2)


def assert_loss(loss, expected, log_prob):
    """Assert that a loss is the expected one, and has its gradient."""
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    (gradient,), (expected_gradient,) = (
        torch.autograd.grad(value, log_prob, retain_graph=True) for value in (loss, expected)
    )
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-15)


GLOBAL = {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 12, "loss_scale_factor": 7}
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", [GLOBAL], ids=["global"])
def test_the_loss_of_the_decoupled_mode(mode, info):
    old, new, advantages, mask = step()
    weights = 0.5 + torch.rand(mask.shape, generator=RNG, dtype=torch.float64)
    correction = VerlCorrection(RolloutCorrectionConfig.decoupled_token_is())
    filled = torch.where(mask, old, torch.nan)
    loss, metrics = correction.policy_loss(filled, new, advantages, mask.int(), mode, actor(info), weights)
    assert_loss(loss, divided(per_token(new, old, advantages, "ppo_clip", weights), mask, mode, info), new)
    assert metrics["actor/pg_clipfrac"] > 0.1
    assert metrics["actor/pg_clipfrac_lower"] >= 0


REJECTING = {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.5_1.8,0.2"}
CRITERIA = (("token_k1", -0.6931471805599453, 0.5877866649021191), ("seq_mean_k3", -float("inf"), 0.2))


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("info", [{}, GLOBAL], ids=["alone", "global"])
def test_the_loss_of_bypass_mode(loss_type, info):
    rollout, new, advantages, mask = step(3)
    fields = {"rollout_is": "sequence", "rollout_is_threshold": 1.5, **REJECTING}
    config = RolloutCorrectionConfig(bypass_mode=True, loss_type=loss_type, **fields)
    loss, metrics = VerlCorrection(config).policy_loss(rollout, new, advantages, mask.float(), config=actor(info))
    settings = oracle.Settings(level="sequence", upper=1.5, criteria=CRITERIA)
    corrected = oracle.correct(*(value.tolist() for value in (new.detach(), rollout, mask)), settings)
    accepted = torch.tensor(corrected.mask)
    weights = torch.tensor(corrected.weights, dtype=torch.float64)
    assert 0 < int(accepted.sum()) < int(mask.sum())
    weights = weights if loss_type == "reinforce" else torch.ones_like(weights)
    assert_loss(
        loss, divided(per_token(new, rollout, advantages, loss_type, weights), accepted, "token-mean", info), new
    )
    assert_metrics({name: value for name, value in metrics.items() if not name.startswith("actor/")}, corrected, 1e-9)


def test_settings_are_verls_own():
    settings = {"_target_": "x", "rollout_is": "token", "rollout_is_threshold": 1.1, "bypass_mode": False}
    batch, _ = clear_batch("nothing")
    got, _ = VerlCorrection().add_to_batch(proto(batch), settings)
    assert float(got.batch["rollout_is_weights"].max()) == pytest.approx(1.1)
    settings = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": None}
    settings |= {"rollout_rs": "token_k2", "rollout_rs_threshold": 1e6}  # rejects nothing
    rollout, new, advantages, mask = step()
    config = actor(policy_loss=Config(rollout_correction=settings))
    loss, _ = VerlCorrection().policy_loss(rollout, new, advantages, mask, config=config)
    expected = -(advantages * new)[mask].mean()
    torch.testing.assert_close(loss, expected)


def test_bad_log_probs_reach_no_gradient():
    rollout, new, advantages, mask = step()
    row, column = mask.nonzero()[0].tolist()
    rollout = rollout.clone()
    rollout[row, column] = torch.nan
    fields = {"bad_log_probs": "reject_token", "bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}
    loss, _ = VerlCorrection(RolloutCorrectionConfig(**fields)).policy_loss(
        rollout, new, advantages, mask, config=actor()
    )
    (gradient,) = torch.autograd.grad(loss, new)
    assert gradient.isfinite().all()
    assert gradient[row, column] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"proximal_interpolation": True}, "proximal_interpolation=True: .* versions"),
        ({"rejection_denominator": "original"}, "rejection_denominator='original': verl"),
        ({"rollout_rs": "opsm", "rollout_rs_threshold": 0.1}, "rollout_rs='opsm': verl .* advantages"),
        (
            {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize=True: .* global",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_settings_that_verl_cannot_carry_out(fields, message):
    with pytest.raises(ValueError, match=message):
        VerlCorrection(RolloutCorrectionConfig(**fields))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_log_probs": None}, "rollout_log_probs is missing in the batch: set actor_rollout_ref.rollout.calc"),
        ({"rollout_log_probs": torch.full((12, 16), torch.nan)}, "is NaN"),
        ({"old_log_probs": torch.zeros(12, 16).numpy()}, r"old_log_probs is ndarray: expected a tensor of shape \(12"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_batches_that_cannot_be(changes, message):
    batch, _ = clear_batch("nothing")
    with pytest.raises(ValueError, match=message):
        VerlCorrection(RolloutCorrectionConfig.decoupled_token_is()).add_to_batch(proto(batch, **changes))


def test_a_nested_mask_is_refused():
    batch, _ = clear_batch("nothing")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"response_mask is a nested tensor: expected it padded to shape \[rows, tok"):
        VerlCorrection(RolloutCorrectionConfig.decoupled_token_is()).add_to_batch(proto(batch, response_mask=nested))


def test_prompts_are_needed_where_a_criterion_looks_at_them():
    batch, _ = clear_batch("nothing")
    config = RolloutCorrectionConfig(rollout_is=None, rollout_rs="group_mean_k1", rollout_rs_threshold="0.9_1.1")
    with pytest.raises(ValueError, match="uid of the batch has 0 entries: expected 12"):
        VerlCorrection(config).add_to_batch(proto(batch))


def test_a_lower_bound_below_0_clips_nothing():
    """verl's examples of CISPO have clip_ratio_low=10."""
    old = torch.tensor([[-1.0, -3.0]])
    new = torch.tensor([[-4.0, -1.0]])
    ones = torch.ones(1, 2)
    correction = VerlCorrection(RolloutCorrectionConfig.decoupled_token_is(), algorithm="cispo")
    loss, _ = correction.policy_loss(old, new, ones, ones, config=actor(clip_ratio_low=10, clip_ratio_high=0.2))
    assert loss.item() == pytest.approx((4 * math.exp(-3) + 1.2) / 2)


def test_calls_that_cannot_be():
    rollout, new, advantages, mask = step()
    decoupled = VerlCorrection(RolloutCorrectionConfig.decoupled_token_is())
    bypass = VerlCorrection(RolloutCorrectionConfig(bypass_mode=True))
    batch, _ = clear_batch("nothing")
    with pytest.raises(ValueError, match="register policy_loss as 'bypass_mode'"):
        bypass.add_to_batch(proto(batch))
    with pytest.raises(ValueError, match=r"old_log_prob is NoneType: expected a tensor of shape \(6, 8\)"):
        decoupled.policy_loss(None, new, advantages, mask, config=actor())
    for wrong, value in {"clip_ratio": None, "clip_ratio_high": "0.2", "clip_ratio_c": 0.5}.items():
        with pytest.raises(ValueError, match=f"{wrong}={value!r} of the actor's configuration must be"):
            decoupled.policy_loss(rollout, new, advantages, mask, config=actor(**{wrong: value}))
    with pytest.raises(ValueError, match="loss_agg_mode='mean' is unknown"):
        decoupled.policy_loss(rollout, new, advantages, mask, "mean", actor())
    with pytest.raises(ValueError, match="batch_num_tokens is missing in global_batch_info"):
        decoupled.policy_loss(rollout, new, advantages, mask, "token-mean", actor({"dp_size": 2}))
    with pytest.raises(ValueError, match=r"algorithm.rollout_correction is None: expected verl's settings"):
        VerlCorrection().add_to_batch(proto(batch))
    with pytest.raises(ValueError, match="algorithm='grpo' is unknown"):
        VerlCorrection(algorithm="grpo")
