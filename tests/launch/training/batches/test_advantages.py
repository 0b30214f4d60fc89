"""The advantages of a run: every estimator on every cut against the reference, rewards before them, and their flags."""

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

GAMMA, LAMBDA, COEFFICIENT, F_NORM, BOUND, SCALE = 0.9, 0.8, 0.3, 2.0, 1.5, 0.7
ESTIMATORS = (*GROUP_ESTIMATORS, "optimal-token-baseline", "reinforce-pp", "reinforce-pp-baseline", "gae", "remax")


def test_the_flag_takes_every_estimator():
    (flag,) = (option for option in options_of(AdvantageSection) if option.field == "advantage_estimator")
    assert sorted(flag.choices) == sorted(ESTIMATORS)


def tables():
    """Whole rows, label-aligned: log π_old, log π_ref, values, accepted tokens, weights, Σπ²; and greedy rewards."""
    generator = torch.Generator().manual_seed(7)
    batch = recorded_batch(0)
    shape = batch.tokens.shape
    old = (-2.0 + 0.5 * torch.randn(shape, generator=generator)).clamp(max=-0.01)
    ref = old + 0.3 * torch.randn(shape, generator=generator)
    values = torch.randn(shape, generator=generator)
    accepted = batch.label_aligned()[1] & (torch.rand(shape, generator=generator) < 0.8)
    accepted[::5] = False
    baselines = torch.rand(SEQUENCES, generator=generator)
    weights = torch.where(batch.label_aligned()[1], 2 * torch.rand(shape, generator=generator), 0)
    squares = old.exp().square() + (1 - old.exp()).square() * torch.rand(shape, generator=generator)
    return old, ref, values, accepted, weights, squares, baselines


def given_rewards():
    """Some are 0, and not as many on each replica: a factor of gpg counts those of the whole batch."""
    return torch.where(torch.arange(SEQUENCES) < 3, 0, recorded_batch(0).rewards)


def turn_rewards():
    """[rows, length] as records have them: at every fourth token, whatever was sampled there."""
    place = torch.arange(recorded_batch(0).tokens.shape[1])
    return torch.where(place % 4 == 1, 0.1 * (1 + torch.arange(SEQUENCES).unsqueeze(1)) - 0.5, 0.0)


def early_rewards():
    """[rows, length] float64, label-aligned: the scaled rewards of earlier turns; a label stands before its token."""
    sampled = torch.where(recorded_batch(0).response_mask, turn_rewards().double(), 0)
    return SCALE * sampled.roll(-1, dims=1)


def reference(estimator, kl, scope, special="group"):
    """[rows, length] float64."""
    batch, (old, ref, values, accepted, weights, squares, baselines) = recorded_batch(0), tables()
    _, mask, rollout = batch.label_aligned()
    ratios = torch.where(mask, old.double() - rollout.double(), 0).sum(1).exp().clamp(max=BOUND)
    means = weights.double().sum(1) / mask.sum(1)
    of_responses = {"ratio": ratios, "correction": means}
    of_responses = of_responses.get(special, torch.ones(SEQUENCES)).tolist()
    difference = torch.where(mask, old.double() - ref.double(), 0)
    penalty = {
        "k1": difference,
        "k2": difference.square() / 2,
        "k3": torch.exp(-difference) - 1 + difference,
        "abs": difference.abs(),
    }.get(kl)
    off = torch.zeros_like(difference) if penalty is None else COEFFICIENT * torch.where(mask, penalty, 0)
    rewards, ids = given_rewards().double(), batch.group_ids.tolist()
    kept = accepted.any(1) if scope == "accepted" else torch.ones(SEQUENCES, dtype=torch.bool)
    counted = (mask & accepted if scope == "accepted" else mask).tolist()
    if estimator in (*GROUP_ESTIMATORS, "reinforce-pp-baseline"):
        name = "grpo-no-std" if estimator == "reinforce-pp-baseline" else estimator
        lengths = batch.response_mask.sum(1).tolist()
        taken_off = (rewards - off.sum(1)).tolist()
        each = torch.tensor(oracle.group(name, taken_off, ids, kept.tolist(), lengths, F_NORM, of_responses))
        whole = each.double().unsqueeze(1).expand(mask.shape)
        return torch.tensor(oracle.whiten(whole.tolist(), counted)) if estimator.endswith("baseline") else whole
    if special == "turns":
        rewards, off = rewards - early_rewards().sum(1), off - early_rewards()
    tokens = torch.tensor(oracle.at_the_end(rewards.tolist(), mask.tolist()), dtype=torch.float64) - off
    if estimator == "optimal-token-baseline":
        scores = (old.double().tolist(), squares.double().tolist(), mask.tolist())
        found = oracle.token_baseline(tokens.tolist(), *scores, ids, weights.double().tolist(), kept.tolist())
        return torch.tensor(found, dtype=torch.float64)
    critic = values if estimator == "gae" else torch.zeros_like(values)
    gamma, lam = {"gae": (GAMMA, LAMBDA), "remax": (1.0, 1.0), "reinforce-pp": (GAMMA, 1.0)}[estimator]
    found = torch.tensor(oracle.gae(tokens.tolist(), critic.double().tolist(), mask.tolist(), gamma, lam)[0])
    if estimator == "remax":
        return found - baselines.double().unsqueeze(1)
    return torch.tensor(oracle.whiten(found.tolist(), counted))


CASES = [
    *((estimator, kl, "all") for estimator, kl in zip(ESTIMATORS, itertools.cycle(["none", "k1"]))),
    *((estimator, kl, "accepted") for estimator, kl in zip(ESTIMATORS[:-1], itertools.cycle(["k3", "none"]))),
    *((("grpo", "k2", "all"), ("reinforce-pp", "k2", "all"), ("gae", "k3", "all"), ("remax", "none", "all"))),
    *((estimator, "none", "all", "ratio") for estimator in (*GROUP_ESTIMATORS, "reinforce-pp-baseline")),
    *((("rloo", "k1", "accepted", "ratio"), ("grpo", "none", "all", "correction"))),
    *((("rloo", "none", "accepted", "correction"), ("reinforce-pp-baseline", "none", "all", "correction"))),
    ("reinforce-pp", "abs", "all"),
    *((("gae", "k1", "all", "turns"), ("reinforce-pp", "none", "all", "turns"))),
    *((("remax", "none", "all", "turns"), ("optimal-token-baseline", "none", "all", "turns"))),
]


def local_advantages(folder, packed):
    """The largest difference from the reference on this rank, by case; and the summaries."""
    groups, worst, summaries = ParallelGroups.from_megatron(), {}, []
    batch = recorded_batch(0, group_rank(groups.dp), group_size(groups.dp))
    rows = slice(*(SEQUENCES // group_size(groups.dp) * (group_rank(groups.dp) + end) for end in (0, 1)))
    more = ["--rl-use-sequence-packing", "--rl-sequence-packing-bin-size=64"] * packed
    more += [f"--context-parallel-size={group_size(groups.cp)}"]
    world = group_size(groups.dp_cp)
    base = run_config(flags(folder, *more), world, engine=False)
    plain, by_turn = (
        cut_batch(one, base, groups) for one in (batch, dataclasses.replace(batch, turn_rewards=turn_rewards()[rows]))
    )
    for case in CASES:
        estimator, kl, scope, *special = case
        cut = by_turn if special == ["turns"] else plain
        wanted = {"advantage_estimator": estimator, "gamma": GAMMA, "gae_lambda": LAMBDA, "gpg_f_norm": F_NORM}
        wanted |= {"advantage_scope": scope, "advantage_baseline_bound": BOUND}
        if kl != "none":
            wanted |= {"kl_in_reward": COEFFICIENT, "kl_in_reward_estimator": kl}
        if special and special != ["turns"]:
            wanted |= {"advantage_baseline": "weighted", "advantage_baseline_weights": special[0]}
        config = dataclasses.replace(base, advantages=dataclasses.replace(base.advantages, **wanted))
        taken = [_cut(cut, value[rows]) for value in (*tables()[:6], reference(*case))]
        old, ref, values, accepted, weights, squares, want = taken
        more_scores = {"old": old, "squares": squares, "ref": ref, "values": values, "baselines": tables()[6][rows]}
        scores = Scores(batch=batch, rewards=given_rewards()[rows], turn_scale=SCALE, cut=cut, **more_scores)
        estimated = Advantages(config, groups).of(scores, accepted if scope == "accepted" else None, weights)
        got = estimated.advantages
        got = got if got.shape == cut.local.layout.shape else cut.local.layout.expand(got)
        here = cut.local.response_mask & (accepted if scope == "accepted" else True)
        worst[case] = float((got - want)[here].abs().max()) if here.any() else 0.0
        (nonzero,), metrics = summarize(scores, estimated, 1, groups)
        summaries.append((kl, round(nonzero, 9), sorted(metrics)))
    return worst, summaries


def _cut(cut, whole):
    """Rows of this replica to its local tokens, by row and position."""
    layout = cut.local.layout
    row = layout.expand(cut.rows)
    return torch.where(row >= 0, whole[row.clamp(min=0), cut.local.positions], torch.zeros((), dtype=whole.dtype))


def shares_of_decided():
    """For each case the share of responses with an advantage at any token that counts."""
    mask, accepted = recorded_batch(0).label_aligned()[1], tables()[3]
    counted = {"all": mask, "accepted": mask & accepted}
    return [
        round(float(((reference(*case).abs() > 1e-9) & counted[case[2]]).any(1).double().mean()), 9) for case in CASES
    ]


@pytest.mark.parametrize("layout", [Layout(cp=2, dp=2), Layout(dp=4)], ids=str)
def test_every_estimator_is_the_reference(ranks, tmp_path, layout):
    shares = shares_of_decided()
    assert min(shares) < max(shares)
    for packed in (False, True):
        found = ranks.run(local_advantages, layout, tmp_path, packed)
        for worst, summaries in found:
            assert {case: value for case, value in worst.items() if value > 2e-6} == {}
            assert summaries == found[0][1]
            assert [share for *_, share, _ in summaries] == shares
            assert all(bool(metrics) == (kl != "none") for kl, _, metrics in summaries)


OWN = "python:examples.custom_estimator:MAXRL"


def own_estimator_on_a_rank(folder, packed):
    """The estimator's name, and the largest difference of this rank's advantages from (x - mean) / mean."""
    groups = ParallelGroups.from_megatron()
    share = SEQUENCES // group_size(groups.dp)
    rows = slice(share * group_rank(groups.dp), share * (group_rank(groups.dp) + 1))
    words = [f"--advantage-estimator={OWN}", "--advantage-baseline=weighted", f"--advantage-baseline-bound={BOUND}"]
    words += ["--advantage-scope=accepted", f"--context-parallel-size={group_size(groups.cp)}"]
    if packed:
        words += ["--rl-use-sequence-packing", "--rl-sequence-packing-bin-size=64"]

    with mock.patch.dict(GROUP_ESTIMATORS):
        config = run_config(flags(folder, *words), group_size(groups.dp_cp), engine=False)
        batch = recorded_batch(0, group_rank(groups.dp), group_size(groups.dp))
        cut = cut_batch(batch, config, groups)
        old, accepted = (_cut(cut, tables()[index][rows]) for index in (0, 3))
        scores = Scores(batch=batch, rewards=given_rewards()[rows], cut=cut, old=old)
        estimated = Advantages(config, groups).of(scores, accepted)

    wanted = own_reference()[rows][cut.rows.clamp(min=0)]
    difference = torch.where(cut.rows >= 0, estimated.advantages.double() - wanted, 0)
    return config.advantages.advantage_estimator, float(difference.abs().max()), float(wanted.abs().max())


def own_reference():
    """(x - mean) / mean of each response, [rows] float64, over the kept responses by their bounded ratios."""
    batch, (old, _, _, accepted, *_) = recorded_batch(0), tables()
    _, mask, rollout = batch.label_aligned()
    ratios = torch.where(mask, old.double() - rollout.double(), 0).sum(1).exp().clamp(max=BOUND)
    kept = accepted.any(1)
    wanted = torch.zeros(SEQUENCES, dtype=torch.float64)
    for row in kept.nonzero().flatten().tolist():
        siblings = kept & (batch.group_ids == batch.group_ids[row])
        mean = (ratios * given_rewards())[siblings].sum() / ratios[siblings].sum()
        if mean != 0 and siblings.sum() > 1:
            wanted[row] = (given_rewards()[row] - mean) / mean
    return wanted


@pytest.mark.parametrize("layout", [Layout(cp=2, dp=2), Layout(dp=4)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_an_estimator_of_a_users_module_is_its_formula(ranks, tmp_path, layout, packed):
    for name, difference, largest in ranks.run(own_estimator_on_a_rank, layout, tmp_path, packed):
        assert name == "maxrl"
        assert difference < 2e-6
        assert largest > 0.05


def test_the_engine_stands_for_the_old_policy_where_nothing_scored_it(tmp_path):
    """In bypass mode; a log-prob of the engine's that is none has no KL."""
    words = ["--advantage-estimator=reinforce-pp", "--kl-in-reward=0.3", "--kl-in-reward-estimator=k3"]
    config, alone = run_config(flags(tmp_path, *words), engine=False), ParallelGroups()
    batch = recorded_batch(0)
    place = batch.response_mask.nonzero()[3]
    batch.rollout_log_probs[place[0], place[1]] = torch.nan
    cut = cut_batch(batch, config, alone)
    ref = cut.local.rollout_log_probs.nan_to_num(-1.0) + 0.2
    scores = Scores(batch=batch, rewards=batch.rewards, cut=cut, ref=ref)
    estimated = Advantages(config, alone).of(scores)
    assert estimated.advantages.isfinite().all()
    wanted = cut.local.response_mask & cut.local.rollout_log_probs.isfinite()
    expected = torch.where(wanted, torch.tensor(0.2).exp() - 1 - 0.2, 0)
    torch.testing.assert_close(estimated.kl.float(), expected, atol=1e-6, rtol=1e-4)
    assert int(wanted.sum()) == int(batch.response_mask.sum()) - 1
    given = Advantages(config, alone).of(dataclasses.replace(scores, old=cut.local.rollout_log_probs))
    assert torch.equal(given.advantages, estimated.advantages)


def test_an_unusable_log_prob_spoils_no_token_baseline(tmp_path):
    """With ``--bad-log-probs reject_token`` the token has no energy, and its siblings keep their advantages."""
    words = ["--advantage-estimator=optimal-token-baseline", "--bad-log-probs=reject_token"]
    config, batch = run_config(flags(tmp_path, *words), engine=False), recorded_batch(0)
    cut = cut_batch(batch, config, ParallelGroups())
    old, squares = (_cut(cut, tables()[index]) for index in (0, 5))
    place = tuple(cut.local.response_mask.nonzero()[2])
    spoilt, known = old.clone(), squares.clone()
    spoilt[place], known[place] = torch.nan, torch.nan
    certain, whole = old.clone(), squares.clone()
    certain[place], whole[place] = 0.0, 1.0
    found, wanted = (
        Advantages(config, ParallelGroups()).of(
            Scores(batch=batch, rewards=batch.rewards, cut=cut, old=scored, squares=sums)
        )
        for scored, sums in ((spoilt, known), (certain, whole))
    )
    assert found.advantages.isfinite().all()
    assert torch.equal(found.advantages, wanted.advantages)


@pytest.mark.parametrize("kind", ["none", "ratio", "correction"])
def test_rows_of_one_rollout_are_one_response_of_their_prompt(tmp_path, kind):
    """Rows 0 and 1, 4 and 5, ... are rollouts of two rows: their weights, lengths and KL are those of both rows."""
    words = ["--advantage-estimator=rloo", "--kl-in-reward=0.3", "--kl-in-reward-estimator=k1"]
    if kind != "none":
        words += ["--advantage-baseline=weighted", f"--advantage-baseline-weights={kind}"]
        words += [f"--advantage-baseline-bound={BOUND}"] if kind == "ratio" else []
    config, alone = run_config(flags(tmp_path, *words), engine=False), ParallelGroups()
    rows = torch.arange(SEQUENCES)
    rollout = torch.where(rows % 4 < 2, rows // 4 * 4, rows)
    batch = dataclasses.replace(recorded_batch(0), rollout_ids=rollout)
    rewards = batch.rewards[rollout]
    cut = cut_batch(batch, config, alone)
    _, mask, engine = batch.label_aligned()
    old, ref, _, _, weights, *_ = tables()
    scores = Scores(batch=batch, rewards=rewards, cut=cut, old=_cut(cut, old), ref=_cut(cut, ref))
    found = Advantages(config, alone).of(scores, weights=_cut(cut, weights)).advantages

    def of_rollouts(values):
        """The sum of each response's tokens, in the order of the responses."""
        sums = torch.zeros(SEQUENCES, dtype=torch.float64)
        sums.index_add_(0, rollout, torch.where(mask, values.double(), 0).sum(1))
        return sums[rollout.unique()]

    penalised = rewards.double()[rollout.unique()] - 0.3 * of_rollouts(old - ref)
    counted = {
        "none": torch.ones(len(penalised)),
        "ratio": of_rollouts(old - engine).exp().clamp(max=BOUND),
        "correction": of_rollouts(weights) / of_rollouts(torch.ones_like(weights)),
    }[kind]
    ids = batch.group_ids[rollout.unique()].tolist()
    kept = [True] * len(ids)
    want = torch.tensor(oracle.group("rloo", penalised.tolist(), ids, kept, kept, weights=counted.tolist()))
    expanded = want[torch.searchsorted(rollout.unique(), rollout)]
    torch.testing.assert_close(found.double(), expanded[cut.rows].double(), rtol=1e-5, atol=1e-6)


def test_ratios_of_long_responses_are_told_apart_in_the_baseline(tmp_path):
    """Log ratios of about -8 a token: all are far below e⁻²⁰, and one response of a prompt has most of the weight."""
    words = ["--advantage-estimator=grpo-no-std", "--advantage-baseline=weighted"]
    config, alone = run_config(flags(tmp_path, *words), engine=False), ParallelGroups()
    batch = recorded_batch(0)
    cut = cut_batch(batch, config, alone)
    old = cut.local.rollout_log_probs.nan_to_num(-1.0) - 8 + 0.3 * torch.randn(cut.local.layout.shape)
    log_ratio = torch.where(cut.local.response_mask, old.double() - cut.local.rollout_log_probs.double(), 0).sum(1)
    assert float(log_ratio.max()) < -20
    found = Advantages(config, alone).of(Scores(batch=batch, rewards=batch.rewards, cut=cut, old=old)).advantages
    ids = batch.group_ids[cut.rows]
    rewards = batch.rewards.double()[cut.rows]
    largest = torch.stack([log_ratio[ids == one].max() for one in ids])
    weights = (log_ratio - largest).exp().tolist()
    kept = [True] * len(ids)
    want = oracle.group("grpo-no-std", rewards.tolist(), ids.tolist(), kept, kept, weights=weights)
    assert found.tolist() == pytest.approx(want, rel=1e-5, abs=1e-6)


TRAINED = {
    "tokens": """--advantage-estimator=reinforce-pp --gamma=0.9 --advantage-scope=accepted --kl-in-reward=0.2
    --kl-in-reward-estimator=k3 --reward-scaling=mean-std --reward-clip=1.2""",
    "optimal": "--advantage-estimator=optimal-token-baseline",
    "weights": """--advantage-estimator=grpo --advantage-baseline=weighted --advantage-baseline-weights=correction
    --advantage-scope=accepted""",
}


@pytest.mark.parametrize("name", TRAINED)
def test_the_trainer_takes_the_same_steps_in_every_layout(ranks, tmp_path, name):
    """Advantages of tokens, a KL in the reward, accepted responses, weighted baselines: two steps a batch."""
    more = [*TRAINED[name].split(), "--optimizer=sgd", "--lr=0.5", "--grpo-kl-beta=0"]
    start = [*flags(tmp_path), f"--save={tmp_path}/start"]
    ranks.run(save_initial, Layout(), start)
    load = [f"--load={tmp_path}/start", "--finetune"]
    (single,) = ranks.run(train_recorded, Layout(), flags(tmp_path, *more, *load), 2)
    layout = Layout(pp=2, cp=2)
    got = ranks.run(train_recorded, layout, flags(tmp_path, *more, *load, *layout.flags()), 2)
    for rank in got:
        for step, want in zip(rank, single, strict=True):
            assert step["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
            assert step["loss/total"] == pytest.approx(want["loss/total"], abs=1e-5)
    assert single[0]["grad_norm"] > 0
    if name != "tokens":
        plain = [word for word in more if not word.startswith("--advantage-")]
        (counted_alike,) = ranks.run(train_recorded, Layout(), flags(tmp_path, *plain, *load), 2)
        assert abs(counted_alike[0]["grad_norm"] / single[0]["grad_norm"] - 1) > 1e-3


def test_reward_statistics_go_on_after_a_checkpoint(ranks, tmp_path):
    found = ranks.run(saved_and_loaded, Layout(dp=2), tmp_path)
    for before, after in found:
        assert before == after
        assert before[0] == 2 * SEQUENCES


def saved_and_loaded(folder):
    more = ["--advantage-estimator=grpo-no-std", "--reward-scaling=std", "--grpo-kl-beta=0"]
    trainer = make_trainer(flags(folder, *more, f"--save={folder}/ck"))
    for index in range(2):
        trainer.prepare(recorded_batch(index, group_rank(trainer.groups.dp), 2))
    trainer.save()
    again = make_trainer(flags(folder, *more, f"--load={folder}/ck"))
    return [scaler.state()["reward_statistics"] for scaler in (trainer.rewards, again.rewards)]


def test_greedy_rewards_are_scaled_and_clipped_as_those_they_are_taken_off(ranks, tmp_path):
    """A response with the reward of the greedy one has no advantage, whatever is done to rewards."""
    (advantages,) = ranks.run(advantages_over_their_own_rewards, Layout(), tmp_path)
    assert not advantages.any()


def advantages_over_their_own_rewards(folder):
    more = ["--advantage-estimator=remax", "--reward-scaling=mean-std", "--reward-clip=1.2", "--grpo-kl-beta=0"]
    trainer, batch = make_trainer(flags(folder, *more)), recorded_batch(0)
    return trainer.prepare(batch, batch.rewards).estimated.advantages


def scaler_of(kind, clip=None):
    return RewardScaler(SimpleNamespace(reward_scaling=kind, reward_clip=clip), None)


@pytest.mark.parametrize("kind", ["none", "std", "mean-std"])
def test_rewards_are_scaled_by_the_run_so_far_and_clipped(kind):
    generator = torch.Generator().manual_seed(3)
    batches = [1e4 + 3 * torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(4)]
    scaler, seen = scaler_of(kind), []
    for batch in batches:
        kept = torch.arange(20) != 5
        got = scaler(batch, kept)
        seen.append(batch[kept])
        run = torch.cat(seen)
        mean, std = (run.mean() if kind == "mean-std" else 0.0), (1.0 if kind == "none" else run.std())
        torch.testing.assert_close(got, (batch - mean) / std, rtol=1e-9, atol=1e-9)
    assert bool(scaler.metrics()) == bool(scaler.state()) == (kind != "none")
    again = scaler_of(kind)
    again.load(json.loads(json.dumps(scaler.state())))
    assert torch.equal(again(batches[0], kept), scaler(batches[0], kept))
    clipped = scaler_of("none", 2.0)
    assert clipped(torch.tensor([-5.0, 1.0, 3.0]), torch.ones(3, dtype=torch.bool)).tolist() == [-2, 1, 2]


@pytest.mark.parametrize("kind", ["std", "mean-std"])
def test_equal_rewards_are_not_divided_by_zero_and_have_no_advantage(kind):
    """Not even one of a rounding, which would count among the responses that have one."""
    scaler = scaler_of(kind)
    if kind == "std":
        assert scaler(torch.ones(3), torch.ones(3, dtype=torch.bool)).tolist() == [1, 1, 1]
    different = torch.rand(40, generator=torch.Generator().manual_seed(0)).repeat_interleave(3)
    scaled = scaler_of(kind)(different, torch.ones(120, dtype=torch.bool))
    assert not group_advantages(scaled, torch.arange(120) // 3, estimator="rloo").any()


def test_scaling_that_changes_advantages_is_taken(tmp_path):
    """Responses without a group have no deviation that would undo it."""
    alone = ["--grpo-group-size=1", "--grpo-prompts-per-step=16", "--reward-scaling=std"]
    assert run_config(flags(tmp_path, *alone)).advantages.reward_scaling == "std"
