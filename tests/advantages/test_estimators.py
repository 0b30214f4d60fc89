"""Advantages on shards: against golden numbers of verl, and a float64 reference, over layouts."""

import functools
import itertools
import math
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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

RTOL = 1e-6
ATOL = 1e-8
GOLDEN = {case["id"]: case for case in cases("advantages")}
# How the tokens of one data-parallel rank lie on its context-parallel ones.
CUTS = [("padded", "zigzag"), ("padded", "contiguous"), ("packed", "zigzag"), ("packed", "contiguous")]
LAYOUTS = [Layout(cp=4), Layout(cp=2, dp=2)]


def arrays_of(case):
    """Return the tensors of a golden case, with our name for the rewards."""
    arrays = {name: torch.from_numpy(array) for name, array in case["arrays"].items()}
    arrays["rewards"] = arrays.pop("token_level_rewards")
    return arrays


def estimate(case, arrays, *, layout=None, groups=None, num_groups=None):
    """Return (advantages, returns or None) of a golden case, or of this rank's shard of it, in the mask's shape."""
    mask = arrays["response_mask"]
    rewards = arrays["rewards"]
    estimator = case["estimator"]
    config = case["config"]
    placement = {"layout": layout, "groups": groups}

    if estimator == "gae":
        estimated = gae(rewards, arrays["values"], mask, gamma=config["gamma"], lam=config["lam"], **placement)
        # verl's function whitens the advantages itself.
        return whiten(estimated.advantages, mask, **placement), estimated.returns
    if estimator == "reinforce_plus_plus":
        estimated = reinforce_plus_plus(rewards, mask, gamma=config["gamma"], **placement)
        return estimated.advantages, estimated.returns
    if estimator == "remax":
        estimated = remax(rewards, arrays["reward_baselines"], mask, **placement)
        return estimated.advantages, estimated.returns

    # The other estimators give each whole response one advantage.
    layout = layout or SequenceLayout.padded(*mask.shape)
    response_rewards = all_sum(layout.sum_sequences(rewards), groups)
    lengths = all_sum(layout.sum_sequences(mask.double()), groups)
    per_response = group_advantages(
        response_rewards,
        arrays["index"],
        estimator=group_estimator(estimator, config),
        lengths=lengths,
        num_groups=num_groups,
        groups=groups,
        f_norm=config.get("f_norm", 1.0),
    )
    per_token = torch.where(mask, layout.expand(per_response), 0)
    if estimator.endswith("baseline"):
        per_token = whiten(per_token, mask, **placement)
    return per_token, None


def group_estimator(estimator, config):
    """Return our name of the estimator that verl computes; ValueError if there is none."""
    name = {"reinforce_plus_plus_baseline": "grpo-no-std"}.get(estimator, estimator.replace("_", "-"))
    if not config.get("norm_adv_by_std_in_grpo", True):
        name += "-no-std"
    if name not in GROUP_ESTIMATORS:
        raise ValueError(f"{estimator} with {config} has no estimator here: {name} is unknown")
    return name


def all_sum(values, groups):
    """Return the sum of the values over the CP ranks."""
    if groups is not None and group_size(groups.cp) > 1:
        dist.all_reduce(values, group=groups.cp)
    return values


def assert_golden(case, advantages, returns, mask):
    arrays = arrays_of(case)
    for name, values in (("advantages", advantages), ("returns", returns)):
        if values is not None and name in arrays:
            torch.testing.assert_close(
                values[mask], arrays[name][mask], rtol=RTOL, atol=ATOL, msg=f"{case['id']} {name}"
            )


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    arrays = arrays_of(GOLDEN[name])
    advantages, returns = estimate(GOLDEN[name], arrays)
    assert_golden(GOLDEN[name], advantages, returns, arrays["response_mask"])


def test_golden_cases_that_are_compared():
    assert Counter(case["estimator"] for case in GOLDEN.values()) == {
        "gae": 5,
        "grpo": 5,
        "rloo": 3,
        "rloo_vectorized": 1,
        "opo": 3,
        "grpo_passk": 2,
        "gpg": 2,
        "remax": 3,
        "reinforce_plus_plus": 3,
        "reinforce_plus_plus_baseline": 3,
    }


def rounded_up(length, unit):
    """Return the smallest multiple of the unit that is at least the length."""
    return -(-length // unit) * unit


class Shard:
    """This rank's part of a batch of whole rows: every dp-th row, cut over the CP ranks.

    Attributes:
        rows: the rows of this data-parallel rank.
        lengths: the padded length of each of them, over all CP ranks.
        layout: how this rank's tokens lie in them.
    """

    def __init__(self, arrays, form, split, groups):
        mask = arrays["response_mask"]
        cp_rank = group_rank(groups.cp)
        cp_size = group_size(groups.cp)
        self.rows = torch.arange(group_rank(groups.dp), len(mask), group_size(groups.dp))

        # A zigzag gives each CP rank two chunks of a sequence.
        unit = 2 * cp_size
        if form == "packed":
            # Packed sequences differ in length, and so in the padding that is cut off.
            ends = [int(mask[row].nonzero().max()) + 1 if mask[row].any() else 0 for row in self.rows]
            self.lengths = [rounded_up(end, unit) for end in ends]
            bounds = list(itertools.accumulate([0, *(length // cp_size for length in self.lengths)]))
            self.layout = SequenceLayout.packed(bounds, cp_rank=cp_rank, cp_size=cp_size, split=split)
        else:
            padded_length = rounded_up(mask.shape[1], unit)
            self.lengths = [padded_length] * len(self.rows)
            self.layout = SequenceLayout.padded(
                len(self.rows), padded_length // cp_size, cp_rank=cp_rank, cp_size=cp_size, split=split
            )

    def cut(self, full, filler=0):
        """Cut this rank's tokens out of a tensor of the whole batch, [b, s]; padding gets the filler."""
        width = max([full.shape[1], *self.lengths])
        padded = full.new_full((len(full), width), filler)
        padded[:, : full.shape[1]] = full
        rows = [padded[row, :length] for row, length in zip(self.rows, self.lengths, strict=True)]
        # The empty tensor is for a rank without rows.
        tokens = torch.cat([*rows, full.new_empty(0)])
        if len(self.layout.shape) == 2:
            tokens = tokens.view(len(rows), -1)
        return self.layout.cut(tokens)

    def take(self, arrays):
        """Return this rank's part of each tensor; padding is False in a mask, NaN in other tensors of tokens."""
        local = {}
        for name, value in arrays.items():
            if value.dim() == 2:
                local[name] = self.cut(value, filler=0 if value.dtype == torch.bool else float("nan"))
            else:
                local[name] = value[self.rows]
        return local


@functools.cache
def batch(seed=0, rows=12, length=29):
    """Random rows with holes, one empty and one full; values at tokens that do not count are NaN."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length, (rows, 1), generator=generator)
    mask = (torch.rand(rows, length, generator=generator) < 0.8) & (torch.arange(length) < lengths)
    mask[3] = False
    mask[5] = True

    random_tokens = functools.partial(torch.randn, rows, length, generator=generator, dtype=torch.float64)
    tokens = {"rewards": random_tokens(), "values": 3 * random_tokens()}
    arrays = {name: torch.where(mask, value, torch.nan) for name, value in tokens.items()}
    arrays["response_mask"] = mask
    arrays["outcome"] = torch.randn(rows, generator=generator, dtype=torch.float64)
    arrays["index"] = torch.arange(rows) // 3
    return arrays


@functools.cache
def oracle_results(gamma, lam):
    """Return the oracle's results for batch(), by the names of library_results()."""
    arrays = batch()
    mask = arrays["response_mask"].tolist()
    rewards = arrays["rewards"].nan_to_num().tolist()
    values = arrays["values"].nan_to_num().tolist()
    advantages, returns = oracle.gae(rewards, values, mask, gamma, lam)
    results = {
        "advantages": advantages,
        "returns": returns,
        "white": oracle.whiten(advantages, mask),
        "outcome": oracle.at_the_end(arrays["outcome"].tolist(), mask),
    }
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in results.items()}


def library_results(local, gamma, lam, **placement):
    """Return the library's results for batch(), or for this rank's shard of it."""
    mask = local["response_mask"]
    estimated = gae(local["rewards"], local["values"], mask, gamma=gamma, lam=lam, **placement)
    return {
        "advantages": estimated.advantages,
        "returns": estimated.returns,
        "white": whiten(estimated.advantages, mask, **placement),
        "outcome": outcome_rewards(local["outcome"], mask, **placement),
    }


FACTORS = [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0), (0.0, 0.5)]


@pytest.mark.parametrize(("gamma", "lam"), FACTORS)
def test_reference(gamma, lam):
    for name, values in library_results(batch(), gamma, lam).items():
        torch.testing.assert_close(values, oracle_results(gamma, lam)[name], rtol=1e-12, atol=1e-12, msg=name)


def reference_on_ranks():
    """Return the largest difference from the oracle on this rank."""
    groups = ParallelGroups.from_megatron()
    largest_difference = 0.0
    for (form, split), (gamma, lam) in itertools.product(CUTS, FACTORS[1:3]):
        shard = Shard(batch(), form, split, groups)
        results = library_results(shard.take(batch()), gamma, lam, layout=shard.layout, groups=groups)
        for name, expected in oracle_results(gamma, lam).items():
            differences = (results[name] - shard.cut(expected)).abs()
            if differences.numel():
                largest_difference = max(largest_difference, float(differences.amax()))
    return largest_difference


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_reference_on_shards(ranks, layout):
    assert max(ranks.run(reference_on_ranks, layout)) < 1e-12


def collectives_on_ranks(length):
    """Return the collectives of each function on this rank, as (kind, number of ranks, number of elements)."""
    groups = ParallelGroups.from_megatron()
    shard = Shard(batch(length=length), "padded", "zigzag", groups)
    local = shard.take(batch(length=length))
    mask = local["response_mask"]
    placement = {"layout": shard.layout, "groups": groups}
    group_call = functools.partial(group_advantages, local["outcome"], local["index"])
    calls = {
        "gae": lambda: gae(local["rewards"], local["values"], mask, **placement),
        "whiten": lambda: whiten(local["rewards"], mask, **placement),
        "outcome": lambda: outcome_rewards(local["outcome"], mask, **placement),
        "group": lambda: group_call(num_groups=4, groups=groups),
        "local group": group_call,
        "passk": lambda: group_call(estimator="grpo-passk", num_groups=4, groups=groups),
        "gpg": lambda: group_call(estimator="gpg", groups=groups),
    }

    collectives = {}
    for name, call in calls.items():
        with recorded() as collectives[name]:
            call()
    return collectives


def test_collectives_do_not_grow_with_the_tokens(ranks):
    layout = Layout(cp=2, dp=2)
    of_short_rows = ranks.run(collectives_on_ranks, layout, 29)
    of_long_rows = ranks.run(collectives_on_ranks, layout, 300)
    assert of_short_rows == of_long_rows

    sequences = 6  # 12 rows on two data-parallel ranks
    chunks = 4  # two for each CP rank
    for collectives in of_short_rows:
        assert collectives["gae"] == [("SUM", 2, sequences * chunks * 2)]
        assert collectives["whiten"] == [("SUM", 4, 2), ("SUM", 4, 1)]
        assert collectives["outcome"] == [("MAX", 2, sequences)]
        # 4 prompts, and a place for ids that are out of range.
        assert collectives["group"] == [("SUM", 4, 5 * 5), ("SUM", 4, 5)]
        assert collectives["local group"] == []
        assert collectives["passk"] == [*collectives["group"], ("MAX", 4, 5), ("SUM", 4, 5), ("MAX", 4, 5)]
        assert collectives["gpg"] == [("SUM", 4, 2)]


@functools.cache
def responses(seed):
    """20 responses to 8 prompts, with importance weights of e⁻⁶ to e⁶: arguments of group_advantages()."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(20, generator=generator)
    group_ids = torch.randint(0, 8, (20,), generator=generator)
    rewards[::4] = torch.round(rewards[::4])  # some are 0, and some alike
    return {
        "rewards": rewards,
        "group_ids": group_ids,
        "kept": torch.rand(20, generator=generator) < 0.6,
        "lengths": torch.randint(0, 9, (20,), generator=generator),
        "weights": (3 * torch.randn(20, generator=generator)).clamp(-6, 6).exp(),
    }


def oracle_group(estimator, fields):
    """Return the oracle's advantages for the arguments of group_advantages()."""
    values = {name: value.tolist() for name, value in fields.items()}
    advantages = oracle.group(
        estimator,
        rewards=values["rewards"],
        ids=values["group_ids"],
        kept=values["kept"],
        lengths=values["lengths"],
        f_norm=3.0,
        weights=values.get("weights"),
    )
    return torch.tensor(advantages, dtype=torch.float64)


@pytest.mark.parametrize("without", [(), ("kept", "weights")], ids=str)
@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_groups_of_kept_responses(estimator, without):
    fields = {name: value for name, value in responses(1).items() if name not in without}
    all_kept = torch.ones(20, dtype=torch.bool)
    expected = oracle_group(estimator, {"kept": all_kept, **fields})
    for num_groups in (None, 9):
        advantages = group_advantages(**fields, estimator=estimator, f_norm=3.0, num_groups=num_groups)
        torch.testing.assert_close(advantages, expected, rtol=1e-9, atol=1e-9)


def weighted_on_ranks():
    """Return (rank, {estimator: advantages of this rank's responses}); each prompt has responses on all ranks."""
    groups = ParallelGroups.from_megatron()
    dp_rank = group_rank(groups.dp)
    fields = {name: value[dp_rank :: group_size(groups.dp)] for name, value in responses(1).items()}
    return dp_rank, {
        estimator: group_advantages(**fields, estimator=estimator, f_norm=3.0, num_groups=8, groups=groups)
        for estimator in GROUP_ESTIMATORS
    }


def test_weights_of_responses_on_several_ranks(ranks):
    for dp_rank, advantages in ranks.run(weighted_on_ranks, Layout(cp=2, dp=2)):
        for estimator, advantages_of_rank in advantages.items():
            expected = oracle_group(estimator, responses(1))[dp_rank::2]
            torch.testing.assert_close(advantages_of_rank, expected, rtol=1e-9, atol=1e-9, msg=estimator)


@pytest.mark.parametrize("reward", [0.1, 1e9])
def test_equal_rewards_give_exactly_no_advantage_however_they_count(reward):
    rewards = torch.full((800,), reward, dtype=torch.float64)
    group_ids = torch.arange(100).repeat_interleave(8)
    weights = torch.rand(800, generator=torch.Generator().manual_seed(0)) + 0.01
    for estimator in set(GROUP_ESTIMATORS):
        advantages = group_advantages(rewards, group_ids, estimator=estimator, lengths=100 * weights, weights=weights)
        assert not advantages.any(), estimator

    # Responses of five or six tokens. The sixth may be the only one of its prompt, whose baseline is 0.
    mask = torch.arange(6) < torch.randint(5, 7, (800, 1), generator=torch.Generator().manual_seed(1))
    sum_pi_squared = weights.unsqueeze(1).expand(mask.shape).double()
    advantages = optimal_token_baseline(
        rewards=outcome_rewards(rewards, mask),
        log_probs=(sum_pi_squared / 2).log(),
        sum_pi_squared=sum_pi_squared,
        response_mask=mask,
        group_ids=group_ids,
    ).advantages
    assert not advantages[:, :5].any()


@pytest.mark.parametrize("wrong", [-1.0, torch.nan])
def test_a_wrong_weight_is_seen(wrong):
    """A wrong weight makes advantages of its own prompt NaN; that of a response that is not kept does nothing."""
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 2.0])
    group_ids = torch.tensor([0, 0, 1, 1, 1])
    weights = torch.tensor([wrong, 1.0, 1.0, 1.0, wrong])
    kept = torch.tensor([True, True, True, True, False])
    for estimator in GROUP_ESTIMATORS:
        advantages = group_advantages(
            rewards, group_ids, estimator=estimator, lengths=torch.ones(5), weights=weights, kept=kept
        )
        assert advantages[0].isnan()
        assert advantages[2:].isfinite().all()


def test_long_sequences_lose_no_digits():
    """A sequence of 32k tokens: the maps of a chunk are joined in 15 rounds."""
    length = 2**15
    rewards = torch.zeros(1, length, dtype=torch.float64)
    rewards[0, -1] = 1.0
    values = torch.zeros(1, length, dtype=torch.float64)
    mask = torch.ones(1, length, dtype=torch.bool)
    returns = gae(rewards, values, mask, gamma=0.9999, lam=1.0).returns
    expected = 0.9999 ** torch.arange(length - 1, -1, -1, dtype=torch.float64)
    torch.testing.assert_close(returns[0], expected, rtol=1e-11, atol=0)


def test_a_batch_without_tokens_is_zero():
    mask = torch.zeros(2, 4, dtype=torch.bool)
    tokens = torch.full((2, 4), torch.nan)
    assert not gae(tokens, tokens, mask).advantages.any()
    assert not whiten(tokens, mask).any()
    assert not outcome_rewards(torch.ones(2), mask).any()

    no_sequences = SequenceLayout.packed([0])
    no_tokens = torch.zeros(0)
    assert gae(no_tokens, no_tokens, no_tokens.bool(), layout=no_sequences).returns.shape == (0,)


def refusal_on_ranks(first_rank_ids):
    """Return the error, or the advantages, if the first data-parallel rank has these ids and the other valid ones."""
    groups = ParallelGroups.from_megatron()
    group_ids = torch.tensor([0, 1, 1] if group_rank(groups.dp) else first_rank_ids)
    return outcome(lambda: group_advantages(torch.ones(3), group_ids, num_groups=2, groups=groups).tolist())


def test_ids_beyond_the_prompts_are_one_error_on_all_ranks(ranks):
    layout = Layout(cp=2, dp=2)
    (message,) = set(ranks.run(refusal_on_ranks, layout, [-1, 1, 2]))
    assert message.startswith("group_ids of 2 responses")
    assert "num_groups=2" in message
    assert ranks.run(refusal_on_ranks, layout, [1, 1, 0]) == [[0.0] * 3] * 4


NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


@dataclass(frozen=True)
class SplitResponses:
    """Responses of one to four rows each, whose rows come in any order.

    Attributes:
        rewards: [n], of each response.
        group_ids: [n], its prompt.
        weights: [n], its importance weight.
        kept: [n] bool, whether it has a kept row.
        lengths: [n], tokens of its kept rows.
        response: [rows] int64, the response that each row belongs to.
        kept_rows: [rows] bool, whether each row is kept.
        row_lengths: [rows], tokens of each row.
    """

    rewards: Tensor
    group_ids: Tensor
    weights: Tensor
    kept: Tensor
    lengths: Tensor
    response: Tensor
    kept_rows: Tensor
    row_lengths: Tensor


def split_responses(seed=0, prompts=6, per_prompt=5):
    """Random responses of several rows. The last prompt has a single response; some whole responses are not kept."""
    generator = torch.Generator().manual_seed(seed)
    num_responses = prompts * per_prompt - (per_prompt - 1)
    rewards = torch.randint(0, 4, (num_responses,), generator=generator).double() / 2 - 0.5
    weights = torch.rand(num_responses, generator=generator, dtype=torch.float64) + 0.1

    rows_per_response = torch.randint(1, 5, (num_responses,), generator=generator)
    response = torch.arange(num_responses).repeat_interleave(rows_per_response)
    response = response[torch.randperm(len(response), generator=generator)]
    kept_rows = torch.rand(len(response), generator=generator) > 0.25
    row_lengths = torch.randint(1, 30, (len(response),), generator=generator)

    kept = []
    lengths = []
    for index in range(num_responses):
        kept_rows_of_response = (response == index) & kept_rows
        kept.append(bool(kept_rows_of_response.any()))
        lengths.append(int(row_lengths[kept_rows_of_response].sum()))
    return SplitResponses(
        rewards=rewards,
        group_ids=torch.arange(num_responses) // per_prompt,
        weights=weights,
        kept=torch.tensor(kept),
        lengths=torch.tensor(lengths),
        response=response,
        kept_rows=kept_rows,
        row_lengths=row_lengths,
    )


def rollout_advantages(estimator, num_groups=None, groups=None):
    """Return (advantages of this rank's rows, the oracle's); all rows of a response are on one data-parallel rank."""
    split = split_responses()
    of_responses = oracle.group(
        estimator,
        rewards=split.rewards.tolist(),
        ids=split.group_ids.tolist(),
        kept=split.kept.tolist(),
        lengths=split.lengths.tolist(),
        f_norm=2.0,
        weights=split.weights.tolist(),
    )
    of_rows = torch.tensor(of_responses, dtype=torch.float64)[split.response]
    expected = torch.where(split.kept_rows, of_rows, 0)

    if groups:
        on_this_rank = split.response % group_size(groups.dp) == group_rank(groups.dp)
    else:
        on_this_rank = torch.ones_like(split.kept_rows)
    local_response = split.response[on_this_rank]
    advantages = group_advantages(
        split.rewards[local_response],
        split.group_ids[local_response],
        estimator=estimator,
        lengths=split.row_lengths[on_this_rank],
        weights=split.weights[local_response],
        kept=split.kept_rows[on_this_rank],
        # Responses to different prompts may have the same number.
        rollout_ids=local_response % 7,
        f_norm=2.0,
        num_groups=num_groups,
        groups=groups,
    )
    return advantages, expected[on_this_rank]


def test_a_rollout_of_several_rows_counts_once_without_a_number_of_groups():
    advantages, expected = rollout_advantages("grpo")
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)


def rollouts_on_ranks():
    """Return (advantages of this rank's rows, the oracle's) for each estimator."""
    groups = ParallelGroups.from_megatron()
    return [rollout_advantages(estimator, num_groups=6, groups=groups) for estimator in GROUP_ESTIMATORS]


def test_rollouts_of_several_rows_on_ranks(ranks):
    for of_rank in ranks.run(rollouts_on_ranks, Layout(cp=2, dp=2)):
        for advantages, expected in of_rank:
            torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("differing", ["reward", "weight"])
def test_rows_of_a_rollout_have_one_reward_and_one_weight(differing):
    rewards = torch.zeros(4)
    weights = torch.ones(4)
    group_ids = torch.zeros(4, dtype=torch.int64)
    rollout_ids = torch.tensor([1, 2, 2, 2])
    if differing == "reward":
        rewards[2] = 0.5
    else:
        weights[2] = 0.5
    with pytest.raises(ValueError, match="rollout_ids: 1 rows have another reward or weight"):
        group_advantages(rewards, group_ids, weights=weights, rollout_ids=rollout_ids)

    # A row that is not kept may differ.
    kept = torch.tensor([True, True, False, True])
    group_advantages(rewards, group_ids, weights=weights, rollout_ids=rollout_ids, kept=kept)

    with pytest.raises(ValueError, match=r"rollout_ids is torch.int64 \(3,\): expected torch.int64 \(4,\)"):
        group_advantages(rewards, group_ids, rollout_ids=rollout_ids[:3])


@pytest.mark.parametrize("bad", NOT_FINITE[:2])
@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_reward_that_is_not_finite_shows_in_its_prompt_alone(estimator, bad):
    rewards = torch.tensor([1.0, bad, 4.0, 0.0, 3.0, bad])
    group_ids = torch.tensor([0, 0, 0, 1, 1, 2])
    advantages = group_advantages(rewards, group_ids, estimator=estimator, lengths=torch.arange(1, 7))
    # These give the only response to a prompt the advantage 0, whatever its reward.
    only_response_gets_0 = estimator in ("rloo-vectorized", "grpo-passk", "grpo-passk-no-std")
    assert (~advantages.isfinite()).tolist() == [True, True, True, False, False, not only_response_gets_0]

    without_bad_rewards = group_advantages(
        rewards, group_ids, estimator=estimator, lengths=group_ids, kept=rewards.isfinite()
    )
    assert without_bad_rewards.isfinite().all()


@pytest.mark.parametrize(
    ("gamma", "lam", "bad"), [(1.0, 1.0, torch.nan), (0.9, 0.8, torch.inf), (0.0, 0.5, -torch.inf)]
)
def test_a_token_that_is_not_finite_shows_up_to_it(gamma, lam, bad):
    """A bad reward or value spoils its sequence up to its token, and the correction's check() reports it."""
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 1] = False
    zeros = torch.zeros(2, 5)
    spoilt = zeros.clone()
    spoilt[0, 2] = bad
    # The second sequence has no bad token.
    expected_not_finite = [[True, False, True, False, False], [False] * 5]
    log_probs = torch.full((2, 5), -1.0)
    config = RolloutCorrectionConfig()

    for rewards, values in ((spoilt, zeros), (zeros, spoilt)):
        estimated = gae(rewards, values, mask, gamma=gamma, lam=lam)
        assert (~estimated.advantages.isfinite()).tolist() == expected_not_finite
        assert (~estimated.returns.isfinite()).tolist() == expected_not_finite
        whitened = whiten(estimated.advantages, mask)
        assert whitened.isnan().all()
        for advantages in (estimated.advantages, whitened):
            result = correct_rollouts(log_probs, log_probs, mask, config, advantages=advantages)
            with pytest.raises(ValueError, match=r"^advantages: \d values of the batch .* must be finite"):
                result.check()

    assert reinforce_plus_plus(spoilt, mask, gamma=gamma).advantages.isnan().all()

    # A bad reward of the whole first sequence.
    sequence_rewards = torch.tensor([bad, 1.0])
    in_first_sequence = torch.tensor([[True], [False]])
    with_baseline = remax(zeros, sequence_rewards, mask).advantages
    assert torch.equal(~with_baseline.isfinite(), mask & in_first_sequence)
    token_rewards = outcome_rewards(sequence_rewards, mask)
    assert (~token_rewards.isfinite()).nonzero().tolist() == [[0, 4]]


# Arguments for two sequences of four tokens.
TOKENS = torch.zeros(2, 4)
MASK = torch.ones(2, 4, dtype=torch.bool)
SECOND_OF_TWO_RANKS = SequenceLayout.padded(2, 4, cp_rank=1, cp_size=2)
GROUP_IDS = torch.zeros(2, dtype=torch.int64)
ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gae(TOKENS, TOKENS[:1], MASK), r"values .*\(1, 4\)"),
        (lambda: gae(TOKENS, TOKENS, TOKENS), r"response_mask .*float32"),
        (lambda: gae(TOKENS, TOKENS, MASK, gamma=1.5), r"gamma=1\.5"),
        (lambda: group_advantages(ONES, torch.zeros(3).long()), r"group_ids .*\(3,\)"),
        (lambda: group_advantages(ONES, GROUP_IDS, estimator="opo"), r"estimator='opo' .*lengths"),
        (lambda: group_advantages(ONES, GROUP_IDS, estimator="opo", lengths=torch.ones(3)), r"lengths .*\(3,\)"),
        (lambda: group_advantages(ONES, GROUP_IDS, estimator="best"), r"estimator='best' .*grpo"),
        (lambda: group_advantages(ONES, GROUP_IDS, f_norm=0.0), r"f_norm=0\.0"),
        (lambda: whiten(TOKENS, MASK, layout=SECOND_OF_TWO_RANKS), r"groups\.cp"),
        (lambda: remax(TOKENS, torch.zeros(3), MASK), "baselines"),
        (lambda: outcome_rewards(torch.zeros(2, 4), MASK), "rewards"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@functools.cache
def scored(seed=0):
    """Random arguments of optimal_token_baseline(): 12 rows of 4 prompts, of which row 4 is not kept."""
    rewards = batch(seed)["rewards"]
    mask = batch(seed)["response_mask"]
    generator = torch.Generator().manual_seed(seed)
    random_tokens = functools.partial(torch.rand, mask.shape, generator=generator, dtype=torch.float64)

    probability = random_tokens()
    weights = 2 * random_tokens()
    # Between the least possible value, with one other token, and the largest.
    sum_pi_squared = probability.square() + (1 - probability).square() * random_tokens()
    rows = torch.arange(len(mask))
    return {
        "rewards": rewards,
        "response_mask": mask,
        "log_probs": torch.where(mask, probability.log(), torch.nan),
        "weights": torch.where(mask, weights, torch.nan),
        "sum_pi_squared": torch.where(mask, sum_pi_squared, torch.nan),
        "group_ids": rows % 4,
        "kept": rows != 4,
    }


def oracle_token_baseline(fields):
    """Return the oracle's advantages for the arguments of optimal_token_baseline()."""
    values = {name: value.nan_to_num().tolist() for name, value in fields.items()}
    advantages = oracle.token_baseline(
        rewards=values["rewards"],
        log_probs=values["log_probs"],
        squares=values["sum_pi_squared"],
        mask=values["response_mask"],
        ids=values["group_ids"],
        weights=values.get("weights"),
        kept=values.get("kept"),
    )
    return torch.tensor(advantages, dtype=torch.float64)


@pytest.mark.parametrize("without", [(), ("weights", "kept")], ids=str)
def test_optimal_token_baseline(without):
    fields = {name: value for name, value in scored().items() if name not in without}
    estimated = optimal_token_baseline(**fields)
    torch.testing.assert_close(estimated.advantages, oracle_token_baseline(fields), rtol=1e-12, atol=1e-12)

    rewards = fields["rewards"]
    rewards_to_come = gae(rewards, torch.zeros_like(rewards), fields["response_mask"]).returns
    assert torch.equal(estimated.returns, rewards_to_come)


def token_baselines_on_ranks():
    """Return the largest difference from the oracle on this rank."""
    groups = ParallelGroups.from_megatron()
    largest_difference = 0.0
    for form, split in CUTS:
        shard = Shard(scored(), form, split, groups)
        local = shard.take(scored())
        advantages = optimal_token_baseline(**local, layout=shard.layout, groups=groups).advantages
        differences = (advantages - shard.cut(oracle_token_baseline(scored()))).abs()
        largest_difference = max(largest_difference, float(differences.max()))
    return largest_difference


def test_optimal_token_baseline_on_shards(ranks):
    assert max(ranks.run(token_baselines_on_ranks, Layout(cp=2, dp=2))) < 1e-12


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_return_that_is_not_finite_shows_in_the_optimal_token_baseline(bad):
    """Even if no other response has a token there, so that the baseline is 0. Other prompts are left alone."""
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    rewards = torch.tensor([[0.0, bad], [1.0, 0.0], [0.0, 2.0]])
    log_probs = torch.full((3, 2), -1.0)
    sum_pi_squared = torch.full((3, 2), 0.5)
    estimated = optimal_token_baseline(rewards, log_probs, sum_pi_squared, mask, torch.tensor([0, 0, 1]))
    assert (~estimated.advantages.isfinite()).tolist() == [[True, True], [True, False], [False, False]]
    assert estimated.advantages[2].tolist() == [2.0, 2.0]


def error_of_prompts_without_groups():
    try:
        group_advantages(torch.ones(2), torch.zeros(2, dtype=torch.int64), num_groups=1)
    except ValueError as error:
        return str(error)
    return ""


def test_baselines_of_one_rank_are_not_taken_for_those_of_the_batch(ranks):
    for message in ranks.run(error_of_prompts_without_groups, Layout(dp=2)):
        assert "num_groups=1 without groups" in message
