"""NeMo-RL's call by its shapes (commit 7ea279a): the oracle's numbers, and errors with its names."""

import copy
import enum
import pickle
from collections import UserDict

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig
from megatron_rc.adaptors.nemo_rl import CorrectedLoss
from tests.adaptors.pages import IN_A_MICRO_BATCH, documented
from tests.support.correction_cases import CASES, clear_batch


class LossType(enum.Enum):
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class ClippedLoss:
    """ClippedPGLossFn by its formulas, with weights of its own and without."""

    input_type = "logprob"
    metric_normalizations = {"loss": "tokens", "probs_ratio": "tokens"}  # noqa: RUF012
    ratio_clip_min = ratio_clip_max = 0.2
    ratio_clip_c = 3.0
    use_importance_sampling_correction = False

    def __init__(self, loss_type=LossType.TOKEN_LEVEL, **settings):
        self.loss_type = loss_type
        vars(self).update(settings)

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        tokens = data["token_mask"][:, 1:]
        samples = data["sample_mask"]
        advantages = data["advantages"][:, 1:]
        old = data["prev_logprobs"][:, 1:]
        ratio = (next_token_logprobs - old).exp()
        bounded = ratio.clamp(1 - self.ratio_clip_min, 1 + self.ratio_clip_max)
        loss = torch.max(-advantages * ratio, -advantages * bounded)
        loss = torch.where(advantages < 0, torch.min(loss, -self.ratio_clip_c * advantages), loss)
        if self.use_importance_sampling_correction:
            loss = loss * self.weights(old - data["generation_logprobs"][:, 1:], tokens * samples.unsqueeze(1))
        if self.loss_type is LossType.TOKEN_LEVEL:
            total = (loss * tokens * samples.unsqueeze(1)).sum() / global_valid_toks
        else:
            means = (loss * tokens).sum(1) / (tokens.sum(1) + 1e-8)
            total = (means * samples).sum() / global_valid_seqs
        return total, {"loss": total.item()}

    def weights(self, log_ratio, mask):
        kind, high, low = (
            getattr(self, f"truncated_importance_sampling_{name}", None) for name in ("type", "ratio", "ratio_min")
        )
        ratio = log_ratio.exp()
        if kind == "seq-mask-tis":
            mean = ((log_ratio * mask).sum(1) / mask.sum(1)).exp()
            return ratio * ((mean >= low) & (mean <= high)).unsqueeze(1)
        if kind == "icepop":
            return ratio * ((ratio >= low) & (ratio <= high))
        return ratio if kind is None else ratio.clamp(max=high)


def data_of(batch, dtype=torch.float32, **changes):
    """A batch of NeMo-RL: a column before the first token, the last row masked as a sample."""
    generator = torch.Generator().manual_seed(0)
    filled = [
        torch.nn.functional.pad(torch.where(batch.mask, log_probs, -1.0), (1, 0))
        for log_probs in (batch.train, batch.rollout)
    ]
    advantages = torch.randn(len(batch.mask), 1, generator=generator, dtype=torch.float64)
    data = {
        "prev_logprobs": filled[0],
        "generation_logprobs": filled[1],
        "token_mask": torch.nn.functional.pad(batch.mask.to(dtype), (1, 0)),
        "sample_mask": torch.ones(len(batch.mask), dtype=dtype),
        "advantages": advantages.expand_as(filled[0]).contiguous(),
        "input_ids": torch.zeros_like(filled[0], dtype=torch.int64),
    }
    return UserDict({name: value for name, value in (data | changes).items() if value is not None})


SEQUENCES = torch.tensor(20.0, dtype=torch.float64)
TOKENS = torch.tensor(300.0, dtype=torch.float64)


def by_formula(batch, data, expected, new, loss_type):
    """The loss from the oracle's weights and mask, one sequence after the other."""
    total = 0
    for row, accepted in enumerate(torch.tensor(expected.mask)):
        count = int(batch.mask[row].sum())
        weights = torch.ones(len(accepted), dtype=torch.float64)
        if expected.weights is not None:
            weights = torch.tensor(expected.weights[row], dtype=torch.float64)
        a = data["advantages"][row, 1:]
        ratio = (new[row] - data["prev_logprobs"][row, 1:]).exp()
        loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
        loss = torch.where(a < 0, torch.minimum(loss, -3 * a), loss) * weights
        share = TOKENS if loss_type is LossType.TOKEN_LEVEL else SEQUENCES * max(count, 1)
        total = total + loss[accepted].sum() / share
    return total


def config_of(name):
    return RolloutCorrectionConfig(**CASES[name].fields | {"rejection_denominator": "original"})


def rejects_tokens(config):
    return any(criterion.of_tokens for criterion in config.criteria) or config.bad_log_probs == "reject_token"


BY_TOKEN = [(name, LossType.TOKEN_LEVEL) for name in IN_A_MICRO_BATCH]
BY_SEQUENCE = [(name, LossType.SEQUENCE_LEVEL) for name in IN_A_MICRO_BATCH if not rejects_tokens(config_of(name))]


@pytest.mark.parametrize(("name", "loss_type"), BY_TOKEN + BY_SEQUENCE)
def test_the_loss_is_the_oracles(name, loss_type):
    config = config_of(name)
    batch, expected = clear_batch(name)
    data = data_of(batch, torch.int64 if loss_type is LossType.TOKEN_LEVEL else torch.float32)
    before = {key: value.clone() for key, value in data.items()}
    noise = 0.4 * torch.randn(batch.train.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    base = torch.where(data["prev_logprobs"].isfinite(), data["prev_logprobs"], -1.0)[:, 1:]
    new = (base + noise).requires_grad_()
    loss, metrics = CorrectedLoss(ClippedLoss(loss_type), config)(
        next_token_logprobs=new, data=data, global_valid_seqs=SEQUENCES, global_valid_toks=TOKENS
    )
    expected_loss = by_formula(batch, data, expected, new, loss_type)
    # NeMo-RL adds 1e-8 to the length of a sequence.
    torch.testing.assert_close(loss, expected_loss, rtol=1e-7, atol=1e-10)
    (gradient,) = torch.autograd.grad(loss, new, retain_graph=True)
    (expected_gradient,) = torch.autograd.grad(expected_loss, new)
    accepted = torch.tensor(expected.mask)
    torch.testing.assert_close(gradient[accepted], expected_gradient[accepted], rtol=1e-7, atol=1e-10)
    assert not gradient[~accepted].any()
    assert all(torch.equal(value.nan_to_num(), before[key].nan_to_num()) for key, value in data.items())
    share = int(batch.mask.sum()) / float(TOKENS)
    for key in () if CASES[name].bad else ("kl", "k3_kl", "rollout_rs_masked_fraction"):
        assert metrics[f"rollout_corr/{key}"] == pytest.approx(expected.metrics[key] * share, rel=1e-6, abs=1e-12)


TOKEN = RolloutCorrectionConfig.decoupled_token_is()
K1 = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}


def test_what_nemo_rl_reads_is_that_of_its_loss():
    loss = CorrectedLoss(ClippedLoss(reference_policy_kl_penalty=0.1), TOKEN)
    for copied in (loss, pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        assert copied.loss_type is LossType.TOKEN_LEVEL
        assert copied.input_type == "logprob"
        assert copied.reference_policy_kl_penalty == 0.1
        assert copied.metric_normalizations["rollout_corr/kl"] == "tokens"
        assert not hasattr(copied, "use_fused_linear_logprobs")


def test_on_policy_the_current_policy_is_the_old_one():
    batch, _ = clear_batch("nothing")
    data = data_of(batch)
    seen = {}

    class Loss(ClippedLoss):
        def __call__(self, **arguments):
            seen.update(arguments["data"])
            return arguments["next_token_logprobs"].sum(), {}

    loss = CorrectedLoss(Loss(force_on_policy_ratio=True), TOKEN)
    new = data["prev_logprobs"][:, 1:].clone()
    del data["prev_logprobs"]
    loss(new, data, SEQUENCES, TOKENS)
    ratio = (new - data["generation_logprobs"][:, 1:]).exp().clamp(max=2.0)
    torch.testing.assert_close(
        (seen["advantages"] / data["advantages"])[:, 1:][batch.mask], ratio[batch.mask], rtol=1e-9, atol=0
    )


@pytest.mark.parametrize(
    ("made", "fields", "message"),
    [
        (object(), {}, "loss_fn is a object without loss_type: pass NeMo-RL's ClippedPGLossFn"),
        (ClippedLoss(use_importance_sampling_correction=True), {}, "use_importance_sampling_correction=True"),
        (ClippedLoss(), {"bypass_mode": True}, "bypass_mode=True: NeMo-RL"),
        (ClippedLoss(), {"rollout_is": "token", "rollout_is_batch_normalize": True}, "rollout_is_batch_normalize=True"),
        (ClippedLoss(), K1, "set rejection_denominator='original'"),
        (
            ClippedLoss(LossType.SEQUENCE_LEVEL),
            K1 | {"rejection_denominator": "original"},
            "token_k1 .*token_level_loss=False",
        ),
    ],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)
def test_losses_that_cannot_be(made, fields, message):
    with pytest.raises(ValueError, match=message):
        CorrectedLoss(made, RolloutCorrectionConfig(**fields))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation_logprobs": None}, "generation_logprobs is missing in the data"),
        ({"token_mask": torch.ones(12, 16)}, r"token_mask has shape \(12, 16\): expected \(12, 17\)"),
    ],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)
def test_data_that_cannot_be(changes, message):
    batch, _ = clear_batch("nothing")
    with pytest.raises(ValueError, match=message):
        CorrectedLoss(ClippedLoss(), TOKEN)(torch.zeros(12, 16), data_of(batch, **changes), SEQUENCES, TOKENS)


def test_the_page_wraps_a_loss():
    wrapped = documented("NeMo-RL", loss_fn=ClippedLoss())["loss_fn"]
    assert wrapped.config.rollout_rs == "seq_mean_k1"
    assert wrapped.loss_type is LossType.TOKEN_LEVEL
