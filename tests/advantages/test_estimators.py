"""Advantages on shards: against golden numbers of verl, and a float64 reference, over layouts."""

import functools
import itertools
import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from megatron_rc import (
    RolloutCorrectionConfig,
    correct_rollouts,
    gae,
    group_advantages,
    optimal_token_baseline,
    outcome_rewards,
    reinforce_plus_plus,
    remax,
    whiten,
)
from megatron_rc.advantages.group import GROUP_ESTIMATORS
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from megatron_rc.parallel.groups import group_rank, group_size
from tests.golden.load import cases
from tests.support import advantages_oracle as oracle
from tests.support.on_rank import outcome, recorded
from tests.support.ranks import Layout

RTOL, ATOL = 1e-6, 1e-8
GOLDEN = {case["id"]: case for case in cases("advantages")}
# How the tokens of one data-parallel rank lie on its context-parallel ones.
CUTS = [("padded", "zigzag"), ("padded", "contiguous"), ("packed", "zigzag"), ("packed", "contiguous")]
LAYOUTS = [Layout(cp=4), Layout(cp=2, dp=2), Layout(dp=4)]


def arrays_of(case):
    arrays = {name: torch.from_numpy(array) for name, array in case["arrays"].items()}
    arrays["rewards"] = arrays.pop("token_level_rewards")
    return arrays


def estimate(case, arrays, layout=None, groups=None, num_groups=None):
    """(advantages, returns or None) of a golden case, or of a shard of it, like the mask."""
    mask, rewards, where = arrays["response_mask"], arrays["rewards"], {"layout": layout, "groups": groups}
    estimator, config = case["estimator"], case["config"]
    if estimator == "gae":
        found = gae(rewards, arrays["values"], mask, gamma=config["gamma"], lam=config["lam"], **where)
        return whiten(found.advantages, mask, **where), found.returns
    if estimator == "reinforce_plus_plus":
        found = reinforce_plus_plus(rewards, mask, gamma=config["gamma"], **where)
        return found.advantages, found.returns
    if estimator == "remax":
        found = remax(rewards, arrays["reward_baselines"], mask, **where)
        return found.advantages, found.returns
    layout = layout or SequenceLayout.padded(*mask.shape)
    scores = all_sum(layout.sum_sequences(rewards), groups)
    name = group_estimator(estimator, config)
    lengths = all_sum(layout.sum_sequences(mask.double()), groups)
    where_groups = {"num_groups": num_groups, "groups": groups, "f_norm": config.get("f_norm", 1.0)}
    each = group_advantages(scores, arrays["index"], estimator=name, lengths=lengths, **where_groups)
    per_token = torch.where(mask, layout.expand(each), 0)
    return (whiten(per_token, mask, **where) if estimator.endswith("baseline") else per_token), None


def group_estimator(estimator, config):
    """Our name of what verl computes; an error where there is none."""
    name = {"reinforce_plus_plus_baseline": "grpo-no-std"}.get(estimator, estimator.replace("_", "-"))
    if not config.get("norm_adv_by_std_in_grpo", True):
        name += "-no-std"
    if name not in GROUP_ESTIMATORS:
        raise ValueError(f"{estimator} with {config} has no estimator here: {name} is unknown")
    return name


def all_sum(values, groups):
    if groups is not None and group_size(groups.cp) > 1:
        dist.all_reduce(values, group=groups.cp)
    return values


def assert_golden(case, advantages, returns, mask):
    arrays = arrays_of(case)
    for name, got in (("advantages", advantages), ("returns", returns)):
        if got is not None and name in arrays:
            torch.testing.assert_close(got[mask], arrays[name][mask], rtol=RTOL, atol=ATOL, msg=f"{case['id']} {name}")


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    arrays = arrays_of(GOLDEN[name])
    assert_golden(GOLDEN[name], *estimate(GOLDEN[name], arrays), arrays["response_mask"])


def test_golden_cases_that_are_compared():
    assert Counter(case["estimator"] for case in GOLDEN.values()) == {
        **{"gae": 5, "grpo": 5, "rloo": 3, "rloo_vectorized": 1, "opo": 3, "grpo_passk": 2, "gpg": 2, "remax": 3},
        **{"reinforce_plus_plus": 3, "reinforce_plus_plus_baseline": 3},
    }


class Shard:
    """This rank's part of a batch of whole rows: every dp-th row, cut over the CP ranks."""

    def __init__(self, arrays, form, split, groups):
        mask = arrays["response_mask"]
        rank, size = group_rank(groups.cp), group_size(groups.cp)
        self.rows = torch.arange(group_rank(groups.dp), len(mask), group_size(groups.dp))
        # Packed sequences differ in length, and so in what is cut off.
        ends = [int(mask[row].nonzero().max()) + 1 if mask[row].any() else 0 for row in self.rows]
        unit = 2 * size
        lengths = [-(-end // unit) * unit for end in ends] if form == "packed" else [-(-mask.shape[1] // unit) * unit]
        self.lengths = lengths if form == "packed" else lengths * len(self.rows)
        if form == "packed":
            bounds = list(itertools.accumulate([0, *(length // size for length in self.lengths)]))
            self.layout = SequenceLayout.packed(bounds, cp_rank=rank, cp_size=size, split=split)
        else:
            self.layout = SequenceLayout.padded(
                len(self.rows), lengths[0] // size, cp_rank=rank, cp_size=size, split=split
            )

    def cut(self, full, filler=0):
        """[b, s] to this shard; what is padded gets the filler."""
        width = max([full.shape[1], *self.lengths])
        wide = full.new_full((len(full), width), filler)
        wide[:, : full.shape[1]] = full
        rows = [wide[row, :length] for row, length in zip(self.rows, self.lengths, strict=True)]
        whole = torch.cat([*rows, full.new_empty(0)])
        return self.layout.cut(whole.view(len(rows), -1) if len(self.layout.shape) == 2 else whole)

    def take(self, arrays):
        return {
            name: self.cut(value, 0 if value.dtype == torch.bool else float("nan"))
            if value.dim() == 2
            else value[self.rows]
            for name, value in arrays.items()
        }


def golden_on_ranks():
    """The golden cases on the shards of this rank; everything that is not counted is NaN."""
    groups = ParallelGroups.from_megatron()
    # The reference is compared on all cuts.
    for case, (form, split) in itertools.product(GOLDEN.values(), CUTS[1:3]):
        arrays = arrays_of(case)
        mask, number = arrays["response_mask"], int(arrays["index"].max()) + 1 if "index" in arrays else None
        arrays["rewards"] = torch.where(mask, arrays["rewards"], 0)
        shard = Shard(arrays, form, split, groups)
        local = shard.take(arrays)
        local["rewards"] = torch.where(local["response_mask"], local["rewards"], 0)
        advantages, returns = estimate(case, local, shard.layout, groups, number)
        here = local["response_mask"]
        for name, got in (("advantages", advantages), ("returns", returns)):
            if got is not None and name in local:
                torch.testing.assert_close(got[here], local[name][here], rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_golden_on_shards(ranks, layout):
    ranks.run(golden_on_ranks, layout)


@functools.cache
def batch(seed=0, rows=12, length=29):
    """Random rows with holes, one empty and one full; what does not count is NaN."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length, (rows, 1), generator=generator)
    mask = (torch.rand(rows, length, generator=generator) < 0.8) & (torch.arange(length) < lengths)
    mask[3], mask[5] = False, True
    random = functools.partial(torch.randn, rows, length, generator=generator, dtype=torch.float64)
    arrays = {"rewards": random(), "values": 3 * random()}
    arrays = {name: torch.where(mask, value, torch.nan) for name, value in arrays.items()}
    outcome = torch.randn(rows, generator=generator, dtype=torch.float64)
    return arrays | {"response_mask": mask, "outcome": outcome, "index": torch.arange(rows) // 3}


def lists(*tensors):
    return [tensor.nan_to_num().tolist() for tensor in tensors]


@functools.cache
def expected(gamma, lam):
    arrays = batch()
    mask = arrays["response_mask"].tolist()
    advantages, returns = oracle.gae(*lists(arrays["rewards"], arrays["values"]), mask, gamma, lam)
    found = {"advantages": advantages, "returns": returns, "white": oracle.whiten(advantages, mask)}
    found["outcome"] = oracle.at_the_end(arrays["outcome"].tolist(), mask)
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


def estimated(local, gamma, lam, **where):
    mask = local["response_mask"]
    found = gae(local["rewards"], local["values"], mask, gamma=gamma, lam=lam, **where)
    return {
        "advantages": found.advantages,
        "returns": found.returns,
        "white": whiten(found.advantages, mask, **where),
        "outcome": outcome_rewards(local["outcome"], mask, **where),
    }


FACTORS = [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0), (0.0, 0.5), (1.0, 0.95)]


@pytest.mark.parametrize(("gamma", "lam"), FACTORS)
def test_reference(gamma, lam):
    for name, got in estimated(batch(), gamma, lam).items():
        torch.testing.assert_close(got, expected(gamma, lam)[name], rtol=1e-12, atol=1e-12, msg=name)


def reference_on_ranks():
    """The largest difference on this rank."""
    groups, worst = ParallelGroups.from_megatron(), 0.0
    for (form, split), factors in itertools.product(CUTS, FACTORS[1:3]):
        shard = Shard(batch(), form, split, groups)
        found = estimated(shard.take(batch()), *factors, layout=shard.layout, groups=groups)
        for name, value in expected(*factors).items():
            difference = (found[name] - shard.cut(value)).abs()
            worst = max(worst, float(difference.amax()) if difference.numel() else 0.0)
    return worst


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_reference_on_shards(ranks, layout):
    assert max(ranks.run(reference_on_ranks, layout)) < 1e-12


def collectives_on_ranks(length):
    """(kind, group's size, elements) of every collective of each function."""
    groups = ParallelGroups.from_megatron()
    shard = Shard(batch(length=length), "padded", "zigzag", groups)
    local, where = shard.take(batch(length=length)), {"layout": shard.layout, "groups": groups}
    mask, found = local["response_mask"], {}
    of_group = functools.partial(group_advantages, local["outcome"], local["index"])
    for name, run in {
        "gae": lambda: gae(local["rewards"], local["values"], mask, **where),
        "whiten": lambda: whiten(local["rewards"], mask, **where),
        "outcome": lambda: outcome_rewards(local["outcome"], mask, **where),
        "group": lambda: of_group(num_groups=4, groups=groups),
        "local group": of_group,
        "passk": lambda: of_group(estimator="grpo-passk", num_groups=4, groups=groups),
        "gpg": lambda: of_group(estimator="gpg", groups=groups),
    }.items():
        with recorded() as found[name]:
            run()
    return found


def test_collectives_do_not_grow_with_the_tokens(ranks):
    short, long = ([ranks.run(collectives_on_ranks, Layout(cp=2, dp=2), length)] for length in (29, 300))
    assert short == long
    sequences, chunks = 6, 4
    for found in short[0]:
        assert found["gae"] == [("SUM", 2, sequences * chunks * 2)]
        assert found["whiten"] == [("SUM", 4, 2), ("SUM", 4, 1)]
        assert found["outcome"] == [("MAX", 2, sequences)]
        assert found["group"] == [("SUM", 4, 5 * 5), ("SUM", 4, 5)]
        assert found["local group"] == []
        assert found["passk"] == [*found["group"], ("MAX", 4, 5), ("SUM", 4, 5), ("MAX", 4, 5)]
        assert found["gpg"] == [("SUM", 4, 2)]


@functools.cache
def responses(seed):
    """20 responses to 8 prompts, with importance weights of e⁻⁶ to e⁶."""
    generator = torch.Generator().manual_seed(seed)
    rewards, ids = torch.randn(20, generator=generator), torch.randint(0, 8, (20,), generator=generator)
    rewards[::4] = torch.round(rewards[::4])  # some are 0, and some alike
    kept = torch.rand(20, generator=generator) < 0.6
    lengths = torch.randint(0, 9, (20,), generator=generator)
    weights = (3 * torch.randn(20, generator=generator)).clamp(-6, 6).exp()
    return {"rewards": rewards, "group_ids": ids, "kept": kept, "lengths": lengths, "weights": weights}


def wanted_of(estimator, fields):
    values = {name: value.tolist() for name, value in fields.items()}
    order = ("rewards", "group_ids", "kept", "lengths")
    found = oracle.group(estimator, *(values[name] for name in order), 3.0, values.get("weights"))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("without", [(), ("weights",), ("kept", "weights")], ids=str)
@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("seed", range(4))
def test_groups_of_kept_responses(estimator, seed, without):
    fields = {name: value for name, value in responses(seed).items() if name not in without}
    want = wanted_of(estimator, {"kept": torch.ones(20, dtype=torch.bool), **fields})
    for number in (None, 9):
        got = group_advantages(**fields, estimator=estimator, f_norm=3.0, num_groups=number)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def weighted_on_ranks(estimator):
    """The advantages of every data-parallel rank's own responses, with all prompts on all ranks."""
    groups = ParallelGroups.from_megatron()
    rank, size = group_rank(groups.dp), group_size(groups.dp)
    fields = {name: value[rank::size] for name, value in responses(1).items()}
    return rank, group_advantages(**fields, estimator=estimator, f_norm=3.0, num_groups=8, groups=groups)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_weights_of_responses_on_several_ranks(ranks, estimator):
    want = wanted_of(estimator, responses(1))
    for rank, got in ranks.run(weighted_on_ranks, Layout(cp=2, dp=2), estimator):
        torch.testing.assert_close(got, want[rank::2], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reward", [0.1, 1.0, -7.7, 1e9])
def test_equal_rewards_give_exactly_no_advantage_however_they_count(reward):
    rewards, prompts = torch.full((800,), reward, dtype=torch.float64), torch.arange(100).repeat_interleave(8)
    weights = torch.rand(800, generator=torch.Generator().manual_seed(0)) + 0.01
    for estimator in set(GROUP_ESTIMATORS):
        found = group_advantages(rewards, prompts, estimator=estimator, lengths=100 * weights, weights=weights)
        assert not found.any(), estimator
    mask = torch.arange(6) < torch.randint(5, 7, (800, 1), generator=torch.Generator().manual_seed(1))
    tokens, shares = outcome_rewards(rewards, mask), weights.unsqueeze(1).expand(mask.shape).double()
    found = optimal_token_baseline(tokens, (shares / 2).log(), shares, mask, prompts).advantages
    assert not found[:, :5].any()


@pytest.mark.parametrize("wrong", [-1.0, torch.nan])
def test_a_wrong_weight_is_seen(wrong):
    """Of the first prompt alone; a response that is not kept needs none."""
    rewards, ids = torch.tensor([1.0, 0.0, 1.0, 0.0, 2.0]), torch.tensor([0, 0, 1, 1, 1])
    weights, kept = torch.tensor([wrong, 1.0, 1.0, 1.0, wrong]), torch.tensor([True, True, True, True, False])
    for estimator in GROUP_ESTIMATORS:
        lengths = torch.ones(5)
        got = group_advantages(rewards, ids, estimator=estimator, lengths=lengths, weights=weights, kept=kept)
        assert got[0].isnan()
        assert got[2:].isfinite().all()


def test_long_sequences_lose_no_digits():
    """32k tokens: the maps of a chunk are joined in 15 rounds."""
    rewards, mask = torch.zeros(1, 2**15), torch.ones(1, 2**15, dtype=torch.bool)
    rewards[0, -1] = 1.0
    found = gae(rewards.double(), torch.zeros(1, 2**15, dtype=torch.float64), mask, gamma=0.9999, lam=1.0)
    want = 0.9999 ** torch.arange(2**15 - 1, -1, -1, dtype=torch.float64)
    torch.testing.assert_close(found.returns[0], want, rtol=1e-11, atol=0)


def test_a_batch_without_tokens_is_zero():
    mask, tokens = torch.zeros(2, 4, dtype=torch.bool), torch.full((2, 4), torch.nan)
    assert not gae(tokens, tokens, mask).advantages.any()
    assert not whiten(tokens, mask).any()
    assert not outcome_rewards(torch.ones(2), mask).any()
    empty = SequenceLayout.packed([0])
    none = torch.zeros(0)
    assert gae(none, none, none.bool(), layout=empty).returns.shape == (0,)


def refusal_on_ranks(wrong):
    """What is raised where the first data-parallel rank has these ids and the other has those of two prompts."""
    groups = ParallelGroups.from_megatron()
    ids = torch.tensor([0, 1, 1] if group_rank(groups.dp) else wrong)
    return outcome(lambda: group_advantages(torch.ones(3), ids, num_groups=2, groups=groups).tolist())


def test_ids_beyond_the_prompts_are_one_error_on_all_ranks(ranks):
    layout = Layout(cp=2, dp=2)
    (message,) = set(ranks.run(refusal_on_ranks, layout, [-1, 1, 2]))
    assert message.startswith("2 of group_ids")
    assert "num_groups=2" in message
    assert ranks.run(refusal_on_ranks, layout, [1, 1, 0]) == [[0.0] * 3] * 4


def half_named_on_ranks():
    """What is raised where a prompt's responses lie on both ranks and the call says half of it."""
    groups = ParallelGroups.from_megatron()
    rewards = torch.tensor([float(group_rank(groups.dp)), 1.0])
    wheres = ({"groups": groups}, {"num_groups": 1})
    return [outcome(group_advantages, rewards, torch.zeros(2).long(), **where) for where in wheres]


def test_baselines_of_one_rank_are_not_taken_for_those_of_the_batch(ranks):
    for without_number, without_groups in ranks.run(half_named_on_ranks, Layout(dp=2)):
        assert re.match(r"groups .* without num_groups", without_number)
        assert re.match(r"num_groups=1 without groups", without_groups)


NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


def responses_in_rows(seed=0, prompts=6, per_prompt=5):
    """Responses of one to four rows each, in any order: (oracle's arguments, which response each row is of, kept rows).

    One prompt has a single response; some rows, and some whole responses, are not kept.
    """
    generator = torch.Generator().manual_seed(seed)
    responses = prompts * per_prompt - (per_prompt - 1)
    ids = (torch.arange(responses) // per_prompt).tolist()
    rewards = torch.randint(0, 4, (responses,), generator=generator).double() / 2 - 0.5
    weights = torch.rand(responses, generator=generator, dtype=torch.float64) + 0.1
    rows_each = torch.randint(1, 5, (responses,), generator=generator)
    response = torch.arange(responses).repeat_interleave(rows_each)
    response = response[torch.randperm(len(response), generator=generator)]
    kept_rows = torch.rand(len(response), generator=generator) > 0.25
    kept = [bool(kept_rows[response == index].any()) for index in range(responses)]
    row_lengths = torch.randint(1, 30, (len(response),), generator=generator)
    lengths = [int(row_lengths[(response == index) & kept_rows].sum()) for index in range(responses)]
    return (rewards, ids, kept, lengths, weights), response, kept_rows, row_lengths


def rollout_advantages(estimator, is_weighted, num_groups=None, groups=None):
    """(advantages of this rank's rows, the oracle's): each response lies whole on one data-parallel rank."""
    (rewards, ids, kept, lengths, weights), response, kept_rows, row_lengths = responses_in_rows()
    given = (rewards.tolist(), ids, kept, lengths, 2.0, weights.tolist() if is_weighted else None)
    want = torch.tensor(oracle.group(estimator, *given), dtype=torch.float64)[response]
    here = response % group_size(groups.dp) == group_rank(groups.dp) if groups else response >= 0
    found = group_advantages(
        rewards[response][here],
        torch.tensor(ids)[response][here],
        estimator=estimator,
        lengths=row_lengths[here],
        weights=weights[response][here] if is_weighted else None,
        kept=kept_rows[here],
        # Numbers that come again for other prompts.
        rollout_ids=(response % 7)[here],
        f_norm=2.0,
        num_groups=num_groups,
        groups=groups,
    )
    return found, torch.where(kept_rows, want, 0)[here]


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_rollout_of_several_rows_counts_once(estimator, is_weighted):
    found, want = rollout_advantages(estimator, is_weighted)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def rollouts_on_ranks():
    groups = ParallelGroups.from_megatron()
    return [rollout_advantages(estimator, True, num_groups=6, groups=groups) for estimator in GROUP_ESTIMATORS]


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(cp=2, dp=2)], ids=str)
def test_rollouts_of_several_rows_on_ranks(ranks, layout):
    for of_rank in ranks.run(rollouts_on_ranks, layout):
        for found, want in of_rank:
            torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("what", ["reward", "weight"])
def test_rows_of_a_rollout_have_one_reward_and_one_weight(what):
    rewards, weights, ids = torch.zeros(4), torch.ones(4), torch.zeros(4, dtype=torch.int64)
    (rewards if what == "reward" else weights)[2] = 0.5
    rollout_ids = torch.tensor([1, 2, 2, 2])
    with pytest.raises(ValueError, match="rollout_ids: 1 rows have another reward or weight"):
        group_advantages(rewards, ids, weights=weights, rollout_ids=rollout_ids)
    kept = torch.tensor([True, True, False, True])
    group_advantages(rewards, ids, weights=weights, rollout_ids=rollout_ids, kept=kept)
    with pytest.raises(ValueError, match=r"rollout_ids is torch.int64 \(3,\): expected torch.int64 \(4,\)"):
        group_advantages(rewards, ids, rollout_ids=rollout_ids[:3])


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_reward_that_is_not_finite_shows_in_its_prompt_alone(estimator, bad):
    rewards, ids = torch.tensor([1.0, bad, 4.0, 0.0, 3.0, bad]), torch.tensor([0, 0, 0, 1, 1, 2])
    found = group_advantages(rewards, ids, estimator=estimator, lengths=torch.arange(1, 7))
    alone_is_0 = estimator in ("rloo-vectorized", "grpo-passk", "grpo-passk-no-std")
    assert (~found.isfinite()).tolist() == [True, True, True, False, False, not alone_is_0]
    dropped = group_advantages(rewards, ids, estimator=estimator, lengths=ids, kept=rewards.isfinite())
    assert dropped.isfinite().all()


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize(("gamma", "lam"), FACTORS)
def test_a_token_that_is_not_finite_shows_up_to_it(gamma, lam, bad):
    """And in the correction's check. The second sequence has none."""
    mask, zeros = torch.ones(2, 5, dtype=torch.bool), torch.zeros(2, 5)
    mask[0, 1] = False
    spoilt = zeros.clone()
    spoilt[0, 2] = bad
    until = [[True, False, True, False, False], [False] * 5]
    for arguments in ((spoilt, zeros), (zeros, spoilt)):
        found = gae(*arguments, mask, gamma=gamma, lam=lam)
        for values in (found.advantages, found.returns):
            assert (~values.isfinite()).tolist() == until
        assert whiten(found.advantages, mask).isnan().all()
        log_probs = torch.full((2, 5), -1.0)
        for advantages in (found.advantages, whiten(found.advantages, mask)):
            result = correct_rollouts(log_probs, log_probs, mask, RolloutCorrectionConfig(), advantages=advantages)
            with pytest.raises(ValueError, match=r"^advantages: \d values of the batch .* must be finite"):
                result.check()
    assert reinforce_plus_plus(spoilt, mask, gamma=gamma).advantages.isnan().all()
    baselined = remax(zeros, torch.tensor([bad, 1.0]), mask).advantages
    assert torch.equal(~baselined.isfinite(), mask & torch.tensor([[True], [False]]))
    ends = outcome_rewards(torch.tensor([bad, 1.0]), mask)
    assert (~ends.isfinite()).nonzero().tolist() == [[0, 4]]


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_a_return_that_is_not_finite_shows_in_the_optimal_token_baseline(bad):
    """Also where no other response has a token, so that the baseline is 0. Other prompts are left alone."""
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    rewards = torch.tensor([[0.0, bad], [1.0, 0.0], [0.0, 2.0]])
    log_probs, squares = torch.full((3, 2), -1.0), torch.full((3, 2), 0.5)
    found = optimal_token_baseline(rewards, log_probs, squares, mask, torch.tensor([0, 0, 1])).advantages
    assert (~found.isfinite()).tolist() == [[True, True], [True, False], [False, False]]
    assert found[2].tolist() == [2.0, 2.0]


TOKENS, MASK = torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool)
HALF = SequenceLayout.padded(2, 4, cp_rank=1, cp_size=2)
IDS, ONES = torch.zeros(2, dtype=torch.int64), torch.ones(2)


def group(rewards=ONES, ids=IDS, **more):
    return group_advantages(rewards, ids, **more)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gae(TOKENS, TOKENS[:1], MASK), r"values .*\(1, 4\)"),
        (lambda: gae(TOKENS, TOKENS, TOKENS), r"response_mask .*float32"),
        (lambda: gae(TOKENS, TOKENS, MASK, gamma=1.5), r"gamma=1\.5"),
        (lambda: group(ids=torch.zeros(3).long()), r"group_ids .*\(3,\)"),
        (lambda: group(kept=ONES), r"kept .*float32"),
        (lambda: group(estimator="opo"), r"estimator='opo' .*lengths"),
        (lambda: group(estimator="opo", lengths=torch.ones(3)), r"lengths .*\(3,\)"),
        (lambda: group(estimator="best"), r"estimator='best' .*grpo"),
        (lambda: group(f_norm=0.0), r"f_norm=0\.0"),
        (lambda: group(groups=ParallelGroups()), "groups .*num_groups"),
        (lambda: whiten(TOKENS, MASK, layout=HALF), r"groups\.cp"),
        (lambda: remax(TOKENS, torch.zeros(3), MASK), "baselines"),
        (lambda: outcome_rewards(torch.zeros(2, 4), MASK), "rewards"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@functools.cache
def scored(seed=0):
    """Random rows with log-probs, Σπ² and weights of their tokens; the prompts of rows 0, 4, 8 and so on are one."""
    arrays = {name: batch(seed)[name] for name in ("rewards", "response_mask")}
    mask, generator = arrays["response_mask"], torch.Generator().manual_seed(seed)
    random = functools.partial(torch.rand, mask.shape, generator=generator, dtype=torch.float64)
    probability = random()
    fields = {"log_probs": probability.log(), "weights": 2 * random()}
    # Between the least possible value, with one other token, and the largest.
    fields["sum_pi_squared"] = probability.square() + (1 - probability).square() * random()
    arrays |= {name: torch.where(mask, value, torch.nan) for name, value in fields.items()}
    return arrays | {"group_ids": torch.arange(len(mask)) % 4, "kept": torch.arange(len(mask)) != 4}


def wanted_tokens(fields):
    order = ("rewards", "log_probs", "sum_pi_squared", "response_mask", "group_ids", "weights", "kept")
    values = [fields[name].nan_to_num().tolist() if name in fields else None for name in order]
    return torch.tensor(oracle.token_baseline(*values), dtype=torch.float64)


@pytest.mark.parametrize("without", [(), ("weights",), ("weights", "kept")], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_optimal_token_baseline(seed, without):
    fields = {name: value for name, value in scored(seed).items() if name not in without}
    found = optimal_token_baseline(**fields)
    torch.testing.assert_close(found.advantages, wanted_tokens(fields), rtol=1e-12, atol=1e-12)
    mask = fields["response_mask"]
    assert torch.equal(found.returns, gae(fields["rewards"], torch.zeros_like(fields["rewards"]), mask).returns)


def token_baselines_on_ranks():
    """The largest difference on this rank."""
    groups, worst = ParallelGroups.from_megatron(), 0.0
    for form, split in CUTS:
        shard = Shard(scored(), form, split, groups)
        local = shard.take(scored())
        found = optimal_token_baseline(**local, layout=shard.layout, groups=groups).advantages
        worst = max(worst, float((found - shard.cut(wanted_tokens(scored()))).abs().max()))
    return worst


@pytest.mark.parametrize("layout", [Layout(cp=4), Layout(cp=2, dp=2)], ids=str)
def test_optimal_token_baseline_on_shards(ranks, layout):
    assert max(ranks.run(token_baselines_on_ranks, layout)) < 1e-12
