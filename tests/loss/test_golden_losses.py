"""Other projects' losses and their gradients through our objectives, aggregations and correction inside the loss.

Each of the 73 cases is compared, or left out and counted by its reason:

- GPG, DRO: objectives that we do not have; GPG's loss is ``reinforce``.
- GMPO with weights of tokens: verl takes their geometric mean over the response, here each token has its own.
- NeMo-RL's KL inside the loss: the gradient is not that of the value.
- ``-norm`` of 2025-11: not divided by the number of sequences.
- GSPO of slime and NeMo-RL where A varies inside a sequence: their gradient is another there.

verl's GSPO, GMPO and SAPO aggregate as ``seq-mean-token-mean`` whatever they are told. ``grad_detached``, where there
is one, is the gradient with the weights as constants.
"""

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
import yaml
from torch import Tensor

from megatron_rc import PlanInputs, RolloutCorrection, RolloutCorrectionConfig, correct_rollouts
from megatron_rc.loss.aggregation import aggregate_loss, denominator, loss_sum
from megatron_rc.loss.metrics import MAXIMA, SUMS, derive_loss_metrics
from megatron_rc.loss.policy import PolicyLossConfig, kl_penalty, policy_loss
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from tests.correction import test_golden
from tests.golden.load import cases
from tests.support import one_step

RTOL = 1e-6
ATOL = 1e-8
# Number of cases compared by algorithm and project, and left out by reason.
_COMPARED = """
ppo_clip: {verl: 17, NeMo-RL: 5, slime: 3}
reinforce: {verl: 6, NeMo-RL: 1}
gspo: {verl: 4, NeMo-RL: 1}
cispo: {verl: 3, NeMo-RL: 1, slime: 1}
dppo_tv: {verl: 2}
dppo_kl: {verl: 2}
sapo: {verl: 2}
gmpo: {verl: 2}
bypass_ppo_clip: {verl: 3}
bypass_reinforce: {verl: 5}
rollout_corrected_pg: {verl: 3}
aggregation: {verl: 3}
kl_penalty: {verl: 3}
"""
COMPARED = {(name, by): number for name, some in yaml.safe_load(_COMPARED).items() for by, number in some.items()}
LEFT_OUT = {
    "GMPO with weights of tokens": 1,
    "GPG": 1,
    "DRO": 1,
    "NeMo-RL's KL inside the loss": 1,
    "-norm without the number of sequences": 1,
    "GSPO through the mean, with A per token": 1,
}
# Number of metrics likewise.
METRICS_COMPARED = {"of_loss": 113, "of_correction": 318}
METRICS_LEFT_OUT = {
    "NeMo-RL's own": 77,
    "slime's own": 3,
    "slime's mean of means": 4,
    "over the accepted tokens": 6,
    "GMPO's: tokens outside either bound, by the sign of A": 4,
}
GENERATION = {"2025-11": "gen2", "2026-08": "gen3"}
OBJECTIVES = {"gpg": "GPG", "dro": "DRO"}
# The fields of each project that hold low, high and c, and their defaults.
CLIPS = {
    "verl": ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", 3.0),
    "NeMo-RL": ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c", None),
    "slime": ("eps_clip", "eps_clip_high", "eps_clip_c", None),
}


def why_left_out(case):
    """Why a case is not compared, or None."""
    algorithm = case["algorithm"]
    project = case["source"]["project"]
    if algorithm in OBJECTIVES:
        return OBJECTIVES[algorithm]
    if algorithm == "gmpo" and "rollout_is_weights" in case["arrays"]:
        return "GMPO with weights of tokens"
    if algorithm == "ppo_clip+kl":
        return "NeMo-RL's KL inside the loss"
    if algorithm == "gspo" and project != "verl" and case["tags"]["advantages"] == "token":
        return "GSPO through the mean, with A per token"
    if case["source"]["release"] == "2025-11" and case["loss_agg_mode"] == "seq-mean-token-sum-norm":
        return "-norm without the number of sequences"
    return None


EVERY = list(cases("policy_loss"))
CASES = {case["id"]: case for case in EVERY if why_left_out(case) is None}
CORRECTED = [name for name, case in CASES.items() if case["algorithm"].startswith(("bypass", "rollout_corrected"))]


def test_every_case_is_compared_or_counted():
    assert len(EVERY) == 73
    assert Counter((case["algorithm"], case["source"]["project"]) for case in CASES.values()) == COMPARED
    reasons = Counter(why_left_out(case) for case in EVERY)
    assert reasons.pop(None) == len(CASES) == 67
    assert reasons == LEFT_OUT


@dataclass
class Outcome:
    """What our code says of a case: the loss, d loss / d log_prob, metrics."""

    loss: float
    gradient: Tensor
    metrics: dict[str, float]


def tensors(case):
    return {name: torch.from_numpy(value) for name, value in case["arrays"].items()}


def algorithm_of(case):
    if case["algorithm"] == "rollout_corrected_pg":
        return "reinforce"
    return case["algorithm"].removeprefix("bypass_")


def clips(case):
    """The settings of policy_loss that bound a case's objective."""
    config = case["config"]
    low, high, dual, default = CLIPS[case["source"]["project"]]
    both = config.get("clip_ratio", 0.2)
    clipping = {
        name: both if config.get(theirs) is None else config[theirs]
        for name, theirs in (("clip_low", low), ("clip_high", high))
    }
    if algorithm_of(case) == "sapo":
        clipping |= {name: config[name] for name in ("tau_pos", "tau_neg")}
    takes_dual_clip = algorithm_of(case) in ("ppo_clip", "dppo_tv", "dppo_kl")
    return clipping | {"dual_clip": config.get(dual, default) if takes_dual_clip else None}


def aggregation(case):
    """(mode, loss_scale_factor) of a case."""
    of_sequences = case["algorithm"] in ("gspo", "gmpo", "sapo") and case["source"]["project"] == "verl"
    mode = "seq-mean-token-mean" if of_sequences else case["loss_agg_mode"]
    batch_info = case["config"].get("global_batch_info", {})
    width = batch_info.get("loss_scale_factor", case["shape"][1])
    return mode, {"token-sum": 1.0, "seq-mean-token-sum-norm": float(width)}.get(mode)


def correction_of(case):
    """The correction that a case makes itself, read from its own settings; None where it is handed the weights."""
    algorithm = case["algorithm"]
    config = case["config"]
    project = case["source"]["project"]
    if algorithm == "rollout_corrected_pg":
        fields = config | {"bypass_mode": True, "loss_type": "reinforce"}
        return RolloutCorrectionConfig.from_dict(fields, dialect="verl-2025-11")
    if algorithm.startswith("bypass_"):
        fields = {"rollout_is": None, "bypass_mode": True} | config["rollout_correction"]
        # verl's engines hand its loss the counts of the whole batch, made before it rejects. These cases call the
        # loss alone, without such counts: then it divides by what it accepts.
        assert "global_batch_info" not in config
        return replace(RolloutCorrectionConfig.from_dict(fields, dialect="verl"), rejection_denominator="accepted")
    if project == "NeMo-RL":
        return RolloutCorrectionConfig.from_dict({"loss_fn": config}, dialect="nemo-rl")
    if project == "slime":
        fields = {name: config[name] for name in ("tis_clip", "tis_clip_low") if "tis" in config}
        return RolloutCorrectionConfig.from_dict({"use_tis": "tis" in config} | fields, dialect="slime")
    return None


def decoupled(case, **changes):
    """A case whose policy loss, penalty or aggregation is one call of ours each."""
    arrays = tensors(case)
    metrics = {}
    mask = arrays["response_mask"]
    log_probs = arrays["log_prob"].requires_grad_()
    accepted = mask
    if case["algorithm"] == "aggregation":
        per_token = log_probs
    elif case["algorithm"] == "kl_penalty":
        per_token = kl_penalty(log_probs, arrays["ref_log_prob"], case["config"]["kl_penalty"])
    else:
        old = arrays.get("old_log_prob", arrays.get("rollout_log_prob"))
        weights = arrays.get("rollout_is_weights")
        if config := correction_of(case):
            assert config.rejection_denominator == "original" or not config.rejects
            result = correct_rollouts(old, arrays["rollout_log_prob"], mask, config)
            weights = result.weights
            accepted = result.mask
        settings = {"algorithm": algorithm_of(case), "weights": weights} | clips(case) | changes
        policy = policy_loss(log_probs, old, arrays["advantages"], mask, **settings)
        sums = policy.statistics.sums.tolist()
        maxima = policy.statistics.maxima.tolist()
        metrics = derive_loss_metrics(dict(zip(SUMS, sums, strict=True)), dict(zip(MAXIMA, maxima, strict=True)))
        per_token = policy.per_token
    loss = aggregated(case, per_token, accepted, mask)
    loss.backward()
    return Outcome(loss.item(), log_probs.grad, metrics)


def aggregated(case, per_token, accepted, mask):
    mode, factor = aggregation(case)
    batch_info = case["config"].get("global_batch_info")
    if batch_info is None:
        return aggregate_loss(per_token, accepted, mode, denominator_mask=mask, loss_scale_factor=factor)
    counts = (batch_info.get(name, math.nan) for name in ("batch_num_tokens", "global_batch_size"))
    tokens, sequences = (torch.tensor(count, dtype=torch.float64) for count in counts)
    total = loss_sum(per_token, accepted, mode, mask.sum(1).double(), SequenceLayout.padded(*mask.shape))
    return total / denominator(mode, factor, tokens, sequences) * batch_info["dp_size"]


def corrects_in_loss(case, config, **changes):
    """(correction in bypass mode, its plan's inputs)."""
    arrays, (mode, factor) = tensors(case), aggregation(case)
    objective = PolicyLossConfig(aggregation=mode, loss_scale_factor=factor, **(clips(case) | changes))
    inputs = PlanInputs(None, arrays["rollout_log_prob"], arrays["response_mask"], advantages=arrays["advantages"])
    return RolloutCorrection(config, ParallelGroups(), loss=objective), inputs


def bypassed(case, **changes):
    """A step of one micro-batch through the schedule's loss: its own factors are 1, D₀/G comes from finish_step."""
    arrays = tensors(case)
    config = correction_of(case)
    more = {name: changes.pop(name) for name in config.to_dict() if name in changes}
    config = RolloutCorrectionConfig(**(config.to_dict() | more))
    correction, inputs = corrects_in_loss(case, config, **changes)
    log_probs = arrays["log_prob"].requires_grad_()
    loss, count = one_step.made(correction, inputs, log_probs)
    assert count == 1
    factor = correction.step.factor
    return Outcome(float(loss * factor), log_probs.grad * factor, correction.loss_metrics() | correction.step.metrics())


@functools.cache
def outcome(name):
    case = CASES[name]
    return bypassed(case) if name in CORRECTED else decoupled(case)


def assert_loss_and_gradient(case, got):
    arrays = tensors(case)
    assert got.loss == pytest.approx(case["loss"], rel=RTOL, abs=ATOL)
    want = arrays.get("grad_detached", arrays["grad_log_prob"])
    torch.testing.assert_close(got.gradient, want, rtol=RTOL, atol=ATOL)
    assert not got.gradient[~arrays["response_mask"]].any()


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient(name):
    assert outcome(name).gradient.any()
    assert_loss_and_gradient(CASES[name], outcome(name))


def disagrees(case, got):
    try:
        assert_loss_and_gradient(case, got)
    except AssertionError:
        return True
    return False


UNTEMPERED = {"tau_pos": None, "tau_neg": None}  # other objectives than sapo take no temperatures


@pytest.mark.parametrize(
    ("run", "wrong", "seen"),
    [
        (decoupled, {"clip_low": 0.15}, 37),
        (decoupled, {"clip_high": 0.15}, 38),
        (decoupled, {"dual_clip": None}, 6),
        (decoupled, {"weights": None}, 20),
        (decoupled, {"algorithm": "ppo_clip", **UNTEMPERED}, 25),
        (decoupled, {"algorithm": "gspo", **UNTEMPERED}, 45),
        (decoupled, {"algorithm": "dppo_tv", **UNTEMPERED}, 48),
        (decoupled, {"algorithm": "dppo_kl", **UNTEMPERED}, 48),
        (bypassed, {"clip_high": 0.15}, 3),
        (bypassed, {"rejection_denominator": "original"}, 4),
        (bypassed, {"rollout_is_batch_normalize": False}, 3),
    ],
)
def test_one_wrong_setting_is_seen(run, wrong, seen):
    """By that many cases: else the comparisons would not depend on it."""
    tried = [case for name, case in CASES.items() if (name in CORRECTED) == (run is bypassed)]
    assert sum(disagrees(case, run(case, **wrong)) for case in tried) == seen


@pytest.mark.parametrize("name", CORRECTED)
def test_correction_inside_the_loss(name):
    case = CASES[name]
    arrays = tensors(case)
    config = correction_of(case)
    inputs = [arrays[key] for key in ("log_prob", "rollout_log_prob", "response_mask")]
    correction, given = corrects_in_loss(case, config)
    correction.plan(given)
    weights, mask, _ = correction.in_loss(*inputs)
    assert torch.equal(mask, arrays["effective_mask"])
    # Batch normalisation is a factor of the whole step, and PPO gets no weights: all at once, the weights are theirs.
    assert (weights is not None) == ("weights" in arrays and algorithm_of(case) == "reinforce")
    weights = correct_rollouts(*inputs, config).measured_weights
    assert (weights is not None) == ("weights" in arrays)
    if weights is not None:
        torch.testing.assert_close(weights, arrays["weights"], rtol=RTOL, atol=ATOL)
    assert outcome(name).metrics["loss/total"] == pytest.approx(outcome(name).loss, rel=1e-12)


def of_loss(case, name, metrics):
    """(why a metric of the loss is not compared or None, our value)."""
    project = case["source"]["project"]
    mask = case["arrays"]["response_mask"]
    if project == "NeMo-RL" or name.startswith("tis"):
        return f"{project}'s own", None
    if case["algorithm"] == "gmpo" and name.startswith("pg_clipfrac"):
        return "GMPO's: tokens outside either bound, by the sign of A", None
    if project == "slime" and not mask.all():
        return "slime's mean of means", None
    if not (case["arrays"].get("effective_mask", mask) == mask).all():
        return "over the accepted tokens", None
    if name == "pg_clipfrac":
        return None, metrics["policy/clip_fraction_low"] + metrics["policy/clip_fraction_high"]
    return None, metrics[{"ppo_kl": "policy/approx_kl", "pg_clipfrac_lower": "policy/dual_clip_fraction"}[name]]


def of_correction(case, name, metrics):
    """(why a metric of the correction inside the loss is not compared or None, our value); see test_golden."""
    arrays = tensors(case)
    config = correction_of(case)
    inputs = [arrays[key] for key in ("log_prob", "rollout_log_prob", "response_mask")]
    case = case | {"generation": GENERATION[case["source"]["release"]]}
    reason = test_golden.left_out(case, name, (inputs[0] - inputs[1])[inputs[2]])

    def metrics_of(changed_config):
        return metrics if changed_config == config else correct_rollouts(*inputs, changed_config).metrics()

    return reason, None if reason else test_golden.ours(case, config, metrics_of, name)


def test_metrics():
    compared = Counter()
    reasons = Counter()
    wrong = []
    for name, case in CASES.items():
        for key, want in case["metrics"].items():
            kind = of_correction if key.startswith("rollout_corr/") else of_loss
            reason, got = kind(case, key.split("/")[-1], outcome(name).metrics)
            if reason is not None:
                reasons[reason] += 1
                continue
            compared[kind.__name__] += 1
            if not math.isclose(got, want, rel_tol=RTOL, abs_tol=ATOL):
                wrong.append((name, key, got, want))
    assert not wrong, f"{len(wrong)} differ: {wrong[:6]}"
    assert compared == METRICS_COMPARED
    assert reasons == METRICS_LEFT_OUT
