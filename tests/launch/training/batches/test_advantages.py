"""Advantages: estimators in every layout against the reference, rewards before them, and their flags."""

import dataclasses
import itertools
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_rc.advantages.estimators import GROUP_ESTIMATORS
from megatron_rc.advantages.group import group_advantages
from megatron_rc.launch.run_config.learning import AdvantageSection
from megatron_rc.launch.run_config.options import options_of
from megatron_rc.launch.training.batches.advantages import Advantages, Scores, summarize
from megatron_rc.launch.training.batches.micro_batches import cut_batch
from megatron_rc.launch.training.batches.reward_scaling import RewardScaler
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank, group_size
from tests.support import advantages_oracle as oracle
from tests.support.ranks import Layout
from tests.support.recorded_training import (
    SEQUENCES,
    flags,
    make_trainer,
    recorded_batch,
    run_config,
    save_initial,
    train_recorded,
)

GAMMA = 0.9
LAMBDA = 0.8
KL_COEFFICIENT = 0.3
GPG_F_NORM = 2.0
BASELINE_BOUND = 1.5
TURN_SCALE = 0.7
ESTIMATORS = (*GROUP_ESTIMATORS, "optimal-token-baseline", "reinforce-pp", "reinforce-pp-baseline", "gae", "remax")
PACKING = ["--rl-use-sequence-packing", "--rl-sequence-packing-bin-size=64"]


def test_the_flag_takes_every_estimator():
    (flag,) = (option for option in options_of(AdvantageSection) if option.field == "advantage_estimator")
    # The advantages of teachers take no rewards: tests/launch/training/test_distillation.py.
    assert sorted(flag.choices) == sorted([*ESTIMATORS, "distillation"])


# Inputs of the estimators, for the rows of the whole batch


@dataclasses.dataclass(frozen=True)
class Tables:
    """Random scores of the recorded batch; [rows, length] and label-aligned, but for ``baselines``."""

    old: torch.Tensor  # log π_old
    ref: torch.Tensor  # log π_ref
    values: torch.Tensor  # of the critic
    accepted: torch.Tensor  # bool
    weights: torch.Tensor  # of the correction, 0 at masked tokens
    squares: torch.Tensor  # Σ π_old² over the vocabulary
    baselines: torch.Tensor  # [rows], rewards of the greedy responses


def make_tables():
    """Return the tables, the same at every call."""
    generator = torch.Generator().manual_seed(7)
    batch = recorded_batch(0)
    _, mask, _ = batch.label_aligned()
    shape = batch.tokens.shape

    old = (-2.0 + 0.5 * torch.randn(shape, generator=generator)).clamp(max=-0.01)
    ref = old + 0.3 * torch.randn(shape, generator=generator)
    values = torch.randn(shape, generator=generator)

    accepted = mask & (torch.rand(shape, generator=generator) < 0.8)
    # Every fifth response has no accepted token.
    accepted[::5] = False

    baselines = torch.rand(SEQUENCES, generator=generator)
    weights = torch.where(mask, 2 * torch.rand(shape, generator=generator), 0)
    # Between two extremes: the rest of the probability is spread over many tokens, or is all on one other token.
    squares = old.exp().square() + (1 - old.exp()).square() * torch.rand(shape, generator=generator)
    return Tables(
        old=old,
        ref=ref,
        values=values,
        accepted=accepted,
        weights=weights,
        squares=squares,
        baselines=baselines,
    )


def rewards_with_zeros():
    """Return rewards of which the first three are 0, [rows]: gpg's factor has to count zeros over all replicas."""
    return torch.where(torch.arange(SEQUENCES) < 3, 0, recorded_batch(0).rewards)


def turn_rewards():
    """Return rewards of turns as in records, [rows, length]: at every fourth token, sampled or not."""
    position = torch.arange(recorded_batch(0).tokens.shape[1])
    reward_of_row = 0.1 * (1 + torch.arange(SEQUENCES).unsqueeze(1)) - 0.5
    return torch.where(position % 4 == 1, reward_of_row, 0.0)


def early_rewards():
    """Return the scaled rewards of earlier turns, [rows, length], float64, label-aligned."""
    at_tokens = torch.where(recorded_batch(0).response_mask, turn_rewards().double(), 0)
    # A label stands one position before its token.
    return TURN_SCALE * at_tokens.roll(-1, dims=1)


# The reference


def bounded_ratios(old):
    """Return the ratio π_old/π_rollout of each whole response, at most the bound, [rows], float64."""
    _, mask, rollout = recorded_batch(0).label_aligned()
    log_ratios = torch.where(mask, old.double() - rollout.double(), 0).sum(1)
    return log_ratios.exp().clamp(max=BASELINE_BOUND)


def baseline_weights(special, tables):
    """Return the weight of each response in the baseline of its prompt, [rows]; all 1 without weights."""
    if special == "ratio":
        return bounded_ratios(tables.old)
    if special == "correction":
        _, mask, _ = recorded_batch(0).label_aligned()
        return tables.weights.double().sum(1) / mask.sum(1)
    return torch.ones(SEQUENCES)


def kl_in_rewards(kl, tables):
    """Return the coefficient times the KL penalty of each token, [rows, length], float64; zeros for ``none``."""
    _, mask, _ = recorded_batch(0).label_aligned()
    difference = torch.where(mask, tables.old.double() - tables.ref.double(), 0)
    if kl == "none":
        return torch.zeros_like(difference)
    penalty = {
        "k1": difference,
        "k2": difference.square() / 2,
        "k3": torch.exp(-difference) - 1 + difference,
        "abs": difference.abs(),
    }[kl]
    return KL_COEFFICIENT * torch.where(mask, penalty, 0)


def reference(estimator, kl, scope, special="group"):
    """Return the advantage of each token by the oracle, [rows, length], label-aligned.

    Args:
        estimator: one of ``ESTIMATORS``.
        kl: estimator of the KL penalty in the rewards, or ``none``.
        scope: ``all``, or ``accepted``: responses without an accepted token are in no baseline.
        special: ``ratio`` or ``correction``: weights of responses in baselines. ``turns``: rewards of earlier turns.
            ``group``: neither.
    """
    batch = recorded_batch(0)
    tables = make_tables()
    _, mask, _ = batch.label_aligned()
    rewards = rewards_with_zeros().double()
    prompt_ids = batch.group_ids.tolist()
    penalty = kl_in_rewards(kl, tables)

    if scope == "accepted":
        in_baseline = tables.accepted.any(1).tolist()
        counted = (mask & tables.accepted).tolist()
    else:
        in_baseline = [True] * SEQUENCES
        counted = mask.tolist()

    if estimator in (*GROUP_ESTIMATORS, "reinforce-pp-baseline"):
        per_response = oracle.group(
            "grpo-no-std" if estimator == "reinforce-pp-baseline" else estimator,
            (rewards - penalty.sum(1)).tolist(),
            prompt_ids,
            in_baseline,
            batch.response_mask.sum(1).tolist(),
            GPG_F_NORM,
            baseline_weights(special, tables).tolist(),
        )
        per_token = torch.tensor(per_response).double().unsqueeze(1).expand(mask.shape)
        if estimator == "reinforce-pp-baseline":
            return torch.tensor(oracle.whiten(per_token.tolist(), counted))
        return per_token

    # Estimators per token: a reward at the end of the response, less the KL of each token.
    if special == "turns":
        rewards = rewards - early_rewards().sum(1)
        penalty = penalty - early_rewards()
    at_the_end = oracle.at_the_end(rewards.tolist(), mask.tolist())
    token_rewards = torch.tensor(at_the_end, dtype=torch.float64) - penalty

    if estimator == "optimal-token-baseline":
        advantages = oracle.token_baseline(
            token_rewards.tolist(),
            tables.old.double().tolist(),
            tables.squares.double().tolist(),
            mask.tolist(),
            prompt_ids,
            tables.weights.double().tolist(),
            in_baseline,
        )
        return torch.tensor(advantages, dtype=torch.float64)

    # The others are GAE; values of 0 stand for no critic.
    values = tables.values if estimator == "gae" else torch.zeros_like(tables.values)
    gamma, lam = {"gae": (GAMMA, LAMBDA), "remax": (1.0, 1.0), "reinforce-pp": (GAMMA, 1.0)}[estimator]
    advantages, _ = oracle.gae(token_rewards.tolist(), values.double().tolist(), mask.tolist(), gamma, lam)
    advantages = torch.tensor(advantages)
    if estimator == "remax":
        return advantages - tables.baselines.double().unsqueeze(1)
    return torch.tensor(oracle.whiten(advantages.tolist(), counted))


# The arguments of ``reference``.
CASES = [
    *((estimator, kl, "all") for estimator, kl in zip(ESTIMATORS, itertools.cycle(["none", "k1"]))),
    *((estimator, kl, "accepted") for estimator, kl in zip(ESTIMATORS[:-1], itertools.cycle(["k3", "none"]))),
    ("grpo", "k2", "all"),
    ("reinforce-pp", "k2", "all"),
    ("gae", "k3", "all"),
    ("remax", "none", "all"),
    *((estimator, "none", "all", "ratio") for estimator in (*GROUP_ESTIMATORS, "reinforce-pp-baseline")),
    ("rloo", "k1", "accepted", "ratio"),
    ("grpo", "none", "all", "correction"),
    ("rloo", "none", "accepted", "correction"),
    ("reinforce-pp-baseline", "none", "all", "correction"),
    ("reinforce-pp", "abs", "all"),
    ("gae", "k1", "all", "turns"),
    ("reinforce-pp", "none", "all", "turns"),
    ("remax", "none", "all", "turns"),
    ("optimal-token-baseline", "none", "all", "turns"),
]


def rows_of_replica(groups):
    """Return the slice of the whole batch's rows that this data-parallel rank has."""
    share = SEQUENCES // group_size(groups.dp)
    first = share * group_rank(groups.dp)
    return slice(first, first + share)


def case_settings(base, estimator, kl, scope, special):
    """Return the settings ``base`` with the estimator, KL, scope and baseline of a case."""
    settings = {
        "advantage_estimator": estimator,
        "gamma": GAMMA,
        "gae_lambda": LAMBDA,
        "gpg_f_norm": GPG_F_NORM,
        "advantage_scope": scope,
        "advantage_baseline_bound": BASELINE_BOUND,
    }
    if kl != "none":
        settings["kl_in_reward"] = KL_COEFFICIENT
        settings["kl_in_reward_estimator"] = kl
    if special in ("ratio", "correction"):
        settings["advantage_baseline"] = "weighted"
        settings["advantage_baseline_weights"] = special
    return dataclasses.replace(base, **settings)


def local_advantages(folder, packed, references):
    """Return the largest difference from the reference on this rank by case, and a summary of each case."""
    groups = ParallelGroups.from_megatron()
    rows = rows_of_replica(groups)
    batch = recorded_batch(0, group_rank(groups.dp), group_size(groups.dp))
    batch_with_turns = dataclasses.replace(batch, turn_rewards=turn_rewards()[rows])
    rewards = rewards_with_zeros()[rows]
    tables = make_tables()

    options = [f"--context-parallel-size={group_size(groups.cp)}"]
    if packed:
        options = [*PACKING, *options]
    base = run_config(flags(folder, *options), group_size(groups.dp_cp), engine=False)
    cut_plain = cut_batch(batch, base, groups)
    cut_with_turns = cut_batch(batch_with_turns, base, groups)

    differences = {}
    summaries = []
    for case in CASES:
        estimator, kl, scope = case[:3]
        special = case[3] if len(case) == 4 else "group"
        config = dataclasses.replace(base, advantages=case_settings(base.advantages, estimator, kl, scope, special))

        cut = cut_with_turns if special == "turns" else cut_plain
        accepted = _cut(cut, tables.accepted[rows])
        scores = Scores(
            batch=batch,
            rewards=rewards,
            turn_scale=TURN_SCALE,
            cut=cut,
            old=_cut(cut, tables.old[rows]),
            squares=_cut(cut, tables.squares[rows]),
            ref=_cut(cut, tables.ref[rows]),
            values=_cut(cut, tables.values[rows]),
            baselines=tables.baselines[rows],
        )
        estimated = Advantages(config, groups).of(
            scores,
            accepted=accepted if scope == "accepted" else None,
            weights=_cut(cut, tables.weights[rows]),
        )

        advantages = estimated.advantages
        if advantages.shape != cut.local.layout.shape:
            # One advantage of each response.
            advantages = cut.local.layout.expand(advantages)
        expected = _cut(cut, references[case][rows])
        counted = cut.local.response_mask
        if scope == "accepted":
            counted = counted & accepted
        # A rank may have no token that counts.
        differences[case] = float((advantages - expected)[counted].abs().max()) if counted.any() else 0.0

        (nonzero_share,), metrics = summarize(scores, estimated, 1, groups)
        summaries.append((kl, round(nonzero_share, 9), sorted(metrics)))
    return differences, summaries


def _cut(cut, values):
    """Return the values of this rank's tokens from those of the replica's rows, by row and position; padding: 0."""
    row = cut.local.layout.expand(cut.rows)
    zero = torch.zeros((), dtype=values.dtype)
    return torch.where(row >= 0, values[row.clamp(min=0), cut.local.positions], zero)


def shares_of_decided(references):
    """Return for each case the share of responses with an advantage at any token that counts."""
    _, mask, _ = recorded_batch(0).label_aligned()
    counted = {"all": mask, "accepted": mask & make_tables().accepted}
    shares = []
    for case in CASES:
        _, _, scope, *_ = case
        nonzero = (references[case].abs() > 1e-9) & counted[scope]
        shares.append(round(float(nonzero.any(1).double().mean()), 9))
    return shares


def test_every_estimator_is_the_reference(ranks, tmp_path):
    references = {case: reference(*case) for case in CASES}
    shares = shares_of_decided(references)
    assert min(shares) < max(shares)

    for packed in (False, True):
        results = ranks.run(local_advantages, Layout(cp=2, dp=2), tmp_path, packed, references)
        _, first_summaries = results[0]
        for differences, summaries in results:
            assert {case: value for case, value in differences.items() if value > 2e-6} == {}
            assert summaries == first_summaries
            assert [share for _, share, _ in summaries] == shares
            assert all(bool(metrics) == (kl != "none") for kl, _, metrics in summaries)


# An estimator of a user's module

USERS_ESTIMATOR = "python:examples.custom_estimator:MAXRL"


def users_estimator_on_a_rank(folder, packed):
    """Compare this rank's advantages with (x - mean) / mean.

    Returns the estimator's name, the largest difference, and the largest advantage of the reference.
    """
    groups = ParallelGroups.from_megatron()
    rows = rows_of_replica(groups)
    options = [
        f"--advantage-estimator={USERS_ESTIMATOR}",
        "--advantage-baseline=weighted",
        f"--advantage-baseline-bound={BASELINE_BOUND}",
        "--advantage-scope=accepted",
        f"--context-parallel-size={group_size(groups.cp)}",
    ]
    if packed:
        options += PACKING

    # The flag registers the estimator in this table; later tests need the table without it.
    with mock.patch.dict(GROUP_ESTIMATORS):
        config = run_config(flags(folder, *options), group_size(groups.dp_cp), engine=False)
        batch = recorded_batch(0, group_rank(groups.dp), group_size(groups.dp))
        cut = cut_batch(batch, config, groups)
        tables = make_tables()
        old = _cut(cut, tables.old[rows])
        accepted = _cut(cut, tables.accepted[rows])
        scores = Scores(batch=batch, rewards=rewards_with_zeros()[rows], cut=cut, old=old)
        estimated = Advantages(config, groups).of(scores, accepted=accepted)

    expected = users_reference()[rows][cut.rows.clamp(min=0)]
    difference = torch.where(cut.rows >= 0, estimated.advantages.double() - expected, 0)
    return config.advantages.advantage_estimator, float(difference.abs().max()), float(expected.abs().max())


def users_reference():
    """Return (x - mean) / mean of each response, [rows], float64; 0 for a response alone with its prompt.

    The mean is over the prompt's responses with an accepted token, by their bounded ratios.
    """
    batch = recorded_batch(0)
    tables = make_tables()
    rewards = rewards_with_zeros()
    ratios = bounded_ratios(tables.old)
    in_baseline = tables.accepted.any(1)

    advantages = torch.zeros(SEQUENCES, dtype=torch.float64)
    for row in in_baseline.nonzero().flatten().tolist():
        siblings = in_baseline & (batch.group_ids == batch.group_ids[row])
        mean = (ratios * rewards)[siblings].sum() / ratios[siblings].sum()
        if mean != 0 and siblings.sum() > 1:
            advantages[row] = (rewards[row] - mean) / mean
    return advantages


@pytest.mark.parametrize(("layout", "packed"), [(Layout(cp=2, dp=2), True), (Layout(dp=4), False)], ids=str)
def test_an_estimator_of_a_users_module_is_its_formula(ranks, tmp_path, layout, packed):
    for name, difference, largest in ranks.run(users_estimator_on_a_rank, layout, tmp_path, packed):
        assert name == "maxrl"
        assert difference < 2e-6
        assert largest > 0.05


# Log-probs that are missing or unusable


def test_the_engine_stands_for_the_old_policy_where_nothing_scored_it(tmp_path):
    """Bypass mode; a token without a log-prob of the engine has no KL."""
    options = ["--advantage-estimator=reinforce-pp", "--kl-in-reward=0.3", "--kl-in-reward-estimator=k3"]
    config = run_config(flags(tmp_path, *options), engine=False)
    single = ParallelGroups()

    batch = recorded_batch(0)
    row, column = batch.response_mask.nonzero()[3]
    batch.rollout_log_probs[row, column] = torch.nan
    cut = cut_batch(batch, config, single)
    ref = cut.local.rollout_log_probs.nan_to_num(-1.0) + 0.2
    scores = Scores(batch=batch, rewards=batch.rewards, cut=cut, ref=ref)
    estimated = Advantages(config, single).of(scores)
    assert estimated.advantages.isfinite().all()

    # log π_old - log π_ref is -0.2 at every token that has a log-prob.
    usable = cut.local.response_mask & cut.local.rollout_log_probs.isfinite()
    expected_kl = torch.where(usable, torch.tensor(0.2).exp() - 1 - 0.2, 0)
    torch.testing.assert_close(estimated.kl.float(), expected_kl, atol=1e-6, rtol=1e-4)
    assert int(usable.sum()) == int(batch.response_mask.sum()) - 1

    with_engine_as_old = dataclasses.replace(scores, old=cut.local.rollout_log_probs)
    assert torch.equal(Advantages(config, single).of(with_engine_as_old).advantages, estimated.advantages)


def test_an_unusable_log_prob_spoils_no_token_baseline(tmp_path):
    """With ``--bad-log-probs reject_token`` the token has no energy, and its siblings keep their advantages."""
    options = ["--advantage-estimator=optimal-token-baseline", "--bad-log-probs=reject_token"]
    config = run_config(flags(tmp_path, *options), engine=False)
    batch = recorded_batch(0)
    cut = cut_batch(batch, config, ParallelGroups())
    tables = make_tables()
    token = tuple(cut.local.response_mask.nonzero()[2])

    def advantages_with(log_prob, sum_of_squares):
        """Advantages of all tokens if one token has these scores."""
        old = _cut(cut, tables.old)
        old[token] = log_prob
        squares = _cut(cut, tables.squares)
        squares[token] = sum_of_squares
        scores = Scores(batch=batch, rewards=batch.rewards, cut=cut, old=old, squares=squares)
        return Advantages(config, ParallelGroups()).of(scores).advantages

    unusable = advantages_with(log_prob=torch.nan, sum_of_squares=torch.nan)
    # A token with probability 1 has the energy 1 - 2 · 1 + 1 = 0.
    without_energy = advantages_with(log_prob=0.0, sum_of_squares=1.0)
    assert unusable.isfinite().all()
    assert torch.equal(unusable, without_energy)


# Baselines of responses


@pytest.mark.parametrize("kind", ["none", "ratio", "correction"])
def test_rows_of_one_rollout_are_one_response_of_their_prompt(tmp_path, kind):
    """Rows 0 and 1, 4 and 5, ... are rollouts of two rows: their weights, lengths and KL are those of both rows."""
    options = ["--advantage-estimator=rloo", "--kl-in-reward=0.3", "--kl-in-reward-estimator=k1"]
    if kind != "none":
        options += ["--advantage-baseline=weighted", f"--advantage-baseline-weights={kind}"]
    if kind == "ratio":
        options.append(f"--advantage-baseline-bound={BASELINE_BOUND}")
    config = run_config(flags(tmp_path, *options), engine=False)
    single = ParallelGroups()

    # The id of a rollout is its first row.
    rows = torch.arange(SEQUENCES)
    rollout_ids = torch.where(rows % 4 < 2, rows // 4 * 4, rows)
    first_rows = rollout_ids.unique()
    batch = dataclasses.replace(recorded_batch(0), rollout_ids=rollout_ids)
    rewards = batch.rewards[rollout_ids]
    cut = cut_batch(batch, config, single)
    _, mask, engine = batch.label_aligned()
    tables = make_tables()
    scores = Scores(
        batch=batch,
        rewards=rewards,
        cut=cut,
        old=_cut(cut, tables.old),
        ref=_cut(cut, tables.ref),
    )
    estimated = Advantages(config, single).of(scores, weights=_cut(cut, tables.weights))

    def sums_of_rollouts(values):
        """The sum over each rollout's tokens, in the order of ``first_rows``."""
        sums = torch.zeros(SEQUENCES, dtype=torch.float64)
        sums.index_add_(0, rollout_ids, torch.where(mask, values.double(), 0).sum(1))
        return sums[first_rows]

    penalised = rewards.double()[first_rows] - 0.3 * sums_of_rollouts(tables.old - tables.ref)
    if kind == "ratio":
        weights = sums_of_rollouts(tables.old - engine).exp().clamp(max=BASELINE_BOUND)
    elif kind == "correction":
        lengths = sums_of_rollouts(torch.ones_like(tables.weights))
        weights = sums_of_rollouts(tables.weights) / lengths
    else:
        weights = torch.ones(len(first_rows))

    expected = advantages_of_equal_lengths("rloo", penalised, batch.group_ids[first_rows], weights)
    expected_of_rows = torch.tensor(expected)[torch.searchsorted(first_rows, rollout_ids)]
    torch.testing.assert_close(
        estimated.advantages.double(),
        expected_of_rows[cut.rows].double(),
        rtol=1e-5,
        atol=1e-6,
    )


def advantages_of_equal_lengths(estimator, rewards, prompt_ids, weights):
    """Return the oracle's advantages of responses of one length, all of them in the baselines of their prompts."""
    in_baseline = [True] * len(rewards)
    lengths = [1] * len(rewards)
    return oracle.group(
        estimator, rewards.tolist(), prompt_ids.tolist(), in_baseline, lengths, weights=weights.tolist()
    )


def test_ratios_of_long_responses_are_told_apart_in_the_baseline(tmp_path):
    """Log ratios of about -8 a token: all are far below e⁻²⁰, and one response of a prompt has most of the weight."""
    options = ["--advantage-estimator=grpo-no-std", "--advantage-baseline=weighted"]
    config = run_config(flags(tmp_path, *options), engine=False)
    single = ParallelGroups()
    batch = recorded_batch(0)
    cut = cut_batch(batch, config, single)
    rollout = cut.local.rollout_log_probs
    old = rollout.nan_to_num(-1.0) - 8 + 0.3 * torch.randn(cut.local.layout.shape)
    log_ratio = torch.where(cut.local.response_mask, old.double() - rollout.double(), 0).sum(1)
    assert float(log_ratio.max()) < -20

    scores = Scores(batch=batch, rewards=batch.rewards, cut=cut, old=old)
    estimated = Advantages(config, single).of(scores)

    # Weights are relative to the largest of each prompt.
    prompt_ids = batch.group_ids[cut.rows]
    largest = torch.stack([log_ratio[prompt_ids == prompt_id].max() for prompt_id in prompt_ids])
    expected = advantages_of_equal_lengths(
        "grpo-no-std",
        batch.rewards.double()[cut.rows],
        prompt_ids,
        weights=(log_ratio - largest).exp(),
    )
    assert estimated.advantages.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


# Training

TRAINED = {
    "tokens": """--advantage-estimator=reinforce-pp --gamma=0.9 --advantage-scope=accepted --kl-in-reward=0.2
    --kl-in-reward-estimator=k3 --reward-scaling=mean-std --reward-clip=1.2""",
    "optimal": "--advantage-estimator=optimal-token-baseline",
    "weights": """--advantage-estimator=grpo --advantage-baseline=weighted --advantage-baseline-weights=correction
    --advantage-scope=accepted""",
}


@pytest.fixture(scope="module")
def started(ranks, tmp_path_factory):
    """Flags that begin at one checkpoint, and the steps on one batch without flags of the advantages."""
    folder = tmp_path_factory.mktemp("started")
    small = ["--num-layers=2", "--micro-batch-size=8"]
    ranks.run(save_initial, Layout(), flags(folder, *small, f"--save={folder}/start"))
    options = [*small, "--optimizer=sgd", "--lr=0.5", "--grpo-kl-beta=0", f"--load={folder}/start", "--finetune"]
    (default_steps,) = ranks.run(train_recorded, Layout(), flags(folder, *options), 1)
    return options, default_steps


@pytest.mark.parametrize("name", TRAINED)
def test_the_trainer_takes_the_same_steps_in_every_layout(ranks, started, tmp_path, name):
    """Advantages of tokens, a KL in the reward, accepted responses, weighted baselines: two steps a batch."""
    options, default_steps = started
    arguments = flags(tmp_path, *TRAINED[name].split(), *options)
    # Rewards are scaled by those of all batches so far.
    num_batches = 2 if "--reward-scaling" in TRAINED[name] else 1
    (single_steps,) = ranks.run(train_recorded, Layout(), arguments, num_batches)

    layout = Layout(pp=2, cp=2)
    steps_of_ranks = ranks.run(train_recorded, layout, [*arguments, *layout.flags()], num_batches)
    for steps in steps_of_ranks:
        for step, single_step in zip(steps, single_steps, strict=True):
            assert step["grad_norm"] == pytest.approx(single_step["grad_norm"], rel=1e-4)
            assert step["loss/total"] == pytest.approx(single_step["loss/total"], abs=1e-5)
    assert single_steps[0]["grad_norm"] > 0

    # The flags of the advantages change the steps.
    if name != "tokens":
        assert abs(default_steps[0]["grad_norm"] / single_steps[0]["grad_norm"] - 1) > 1e-3


def test_reward_statistics_go_on_after_a_checkpoint(ranks, tmp_path):
    for saved, loaded in ranks.run(saved_and_loaded, Layout(dp=2), tmp_path):
        assert saved == loaded
        count, *_ = saved
        assert count == 2 * SEQUENCES


def saved_and_loaded(folder):
    """Return the statistics of the rewards of two batches in a trainer, and in one that loads its checkpoint."""
    options = ["--advantage-estimator=grpo-no-std", "--reward-scaling=std", "--grpo-kl-beta=0"]
    trainer = make_trainer(flags(folder, *options, f"--save={folder}/ck"))
    for index in range(2):
        trainer.prepare(recorded_batch(index, group_rank(trainer.groups.dp), 2))
    trainer.save()
    resumed = make_trainer(flags(folder, *options, f"--load={folder}/ck"))
    return [scaler.state()["reward_statistics"] for scaler in (trainer.rewards, resumed.rewards)]


# Rewards before the estimator


def test_greedy_rewards_are_scaled_and_clipped_as_those_they_are_taken_off(ranks, tmp_path):
    """A response with the reward of the greedy one has no advantage, whatever is done to rewards."""
    (advantages,) = ranks.run(advantages_over_their_own_rewards, Layout(), tmp_path)
    assert not advantages.any()


def advantages_over_their_own_rewards(folder):
    """Return remax's advantages if every response has the reward of the greedy one."""
    options = ["--advantage-estimator=remax", "--reward-scaling=mean-std", "--reward-clip=1.2", "--grpo-kl-beta=0"]
    trainer = make_trainer(flags(folder, *options))
    batch = recorded_batch(0)
    return trainer.prepare(batch, batch.rewards).estimated.advantages


def scaler_of(kind, clip=None):
    """Return a scaler of one process, with statistics of no rewards yet."""
    return RewardScaler(SimpleNamespace(reward_scaling=kind, reward_clip=clip), None)


@pytest.mark.parametrize("kind", ["none", "std", "mean-std"])
def test_rewards_are_scaled_by_the_run_so_far_and_clipped(kind):
    generator = torch.Generator().manual_seed(3)
    batches = [1e4 + 3 * torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(4)]
    # One response of each batch does not count in the statistics.
    counted = torch.arange(20) != 5

    scaler = scaler_of(kind)
    counted_rewards = []
    for batch in batches:
        scaled = scaler(batch, counted)
        counted_rewards.append(batch[counted])
        run_so_far = torch.cat(counted_rewards)
        mean = run_so_far.mean() if kind == "mean-std" else 0.0
        std = 1.0 if kind == "none" else run_so_far.std()
        torch.testing.assert_close(scaled, (batch - mean) / std, rtol=1e-9, atol=1e-9)
    assert bool(scaler.metrics()) == bool(scaler.state()) == (kind != "none")

    # A checkpoint keeps the state as JSON.
    restored = scaler_of(kind)
    restored.load(json.loads(json.dumps(scaler.state())))
    assert torch.equal(restored(batches[0], counted), scaler(batches[0], counted))

    clipping = scaler_of("none", clip=2.0)
    assert clipping(torch.tensor([-5.0, 1.0, 3.0]), torch.ones(3, dtype=torch.bool)).tolist() == [-2, 1, 2]


@pytest.mark.parametrize("kind", ["std", "mean-std"])
def test_equal_rewards_are_not_divided_by_zero_and_have_no_advantage(kind):
    """Not even an advantage of a rounding, which would count among the responses that have an advantage."""
    if kind == "std":
        scaler = scaler_of(kind)
        assert scaler(torch.ones(3), torch.ones(3, dtype=torch.bool)).tolist() == [1, 1, 1]

    # Forty prompts, each with three responses of one reward.
    rewards = torch.rand(40, generator=torch.Generator().manual_seed(0)).repeat_interleave(3)
    scaled = scaler_of(kind)(rewards, torch.ones(120, dtype=torch.bool))
    assert not group_advantages(scaled, torch.arange(120) // 3, estimator="rloo").any()


def test_scaling_that_changes_advantages_is_taken(tmp_path):
    """Responses without a group have no deviation that would undo it."""
    options = ["--grpo-group-size=1", "--grpo-prompts-per-step=16", "--reward-scaling=std"]
    assert run_config(flags(tmp_path, *options)).advantages.reward_scaling == "std"
