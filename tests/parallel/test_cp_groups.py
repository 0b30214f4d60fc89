"""CP groups of micro-batches: sizes 1, 2 and 4 in one step, in Megatron's own schedule for it, against the oracles."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_rc import (
    PlanInputs,
    PolicyLossConfig,
    RolloutCorrection,
    aggregate_loss,
    correct_rollouts,
    gae,
    group_advantages,
    masked_loss,
    outcome_rewards,
    whiten,
    wrap_finalize,
)
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from tests.correction.test_bypass import bypass
from tests.correction.test_shards import assert_as_expected, my_layout, my_part, my_places, row_lengths
from tests.support import advantages_oracle
from tests.support.correction_cases import ROWS, WIDTH, clear_batch, sizes
from tests.support.correction_comparison import assert_metrics, config_of
from tests.support.objectives_oracle import Bounds, of_response
from tests.support.on_rank import outcome, recorded
from tests.support.ranks import Layout
from tests.support.training_oracle import divides

RANKS = Layout(dp=4)
# Micro-batches as Megatron's scheduler deals them: in rounds, the rows of each one and the ranks that share them. Row 2
# has no token.
ROUNDS = (
    (((0, 5), (0, 1, 2, 3)), ((7,), (0, 1, 2, 3))),
    (((1, 6), (0, 1)), ((8, 10), (2, 3))),
    (((3,), (0,)), ((11,), (0,)), ((4,), (1,)), ((9,), (2,)), ((2,), (3,))),
)
DEALT = [micro_batch for dealt in ROUNDS for micro_batch in dealt]
# Ranks 1 and 3 have micro-batches of one group, which their neighbours have beside another.
UNEVEN = (
    *(((0, 5), (0, 1)), ((7, 2), (0, 1)), ((1, 6), (2, 3)), ((8, 10), (2, 3)), ((9,), (2, 3))),
    *(((3,), (0,)), ((11,), (2,)), ((4,), (0,))),
)


def own_groups():
    """(the correction's groups, the CP group of micro-batches on so many ranks), as Megatron makes them."""
    from megatron.core import parallel_state

    dp_cp = ParallelGroups.from_megatron().dp_cp
    pairs = parallel_state.create_hybrid_dp_cp_groups(dist.get_rank(), [0, 1, 2, 3], None)
    return ParallelGroups(dp_cp=dp_cp), {1: None, 2: pairs[2], 4: dp_cp}


def form_of(number):
    """Micro-batches are padded and packed by turns."""
    return ("padded", "packed")[number % 2]


def my_micro_batches(batch, by_size, dealt=DEALT):
    """{its number in the step: (rows, layout, tensors, sides)} of this rank, in an order that a plan may be given.

    Odd ranks have the small groups first, the others the large ones.
    """
    micro_batches = {}
    small_groups_first = dist.get_rank() % 2 == 1
    by_group_size = sorted(enumerate(dealt), key=lambda entry: len(entry[1][1]), reverse=not small_groups_first)
    for number, (rows, members) in by_group_size:
        if dist.get_rank() in members:
            part = batch.rows(torch.tensor(rows))
            size = len(members)
            form = form_of(number)
            layout = my_layout(row_lengths(part, form), form, {"cp_group": by_size[size], "cp_size": size})
            micro_batches[number] = (torch.tensor(rows), *my_part(part, form, layout))
    return micro_batches


def columns_of(mine):
    """(rows, layouts, [tensors of each kind], sides): lists with one entry a micro-batch."""
    rows, layouts, tensors, sides = zip(*mine.values(), strict=True)
    sides = {key: [of_micro_batch[key] for of_micro_batch in sides] for key in sides[0]}
    return rows, list(layouts), [list(column) for column in zip(*tensors, strict=True)], sides


def correct_dealt(batches, dealt=DEALT):
    """(the results as ``correct_shards`` of test_shards gives them, the collectives)."""
    groups, by_size = own_groups()
    results = {}
    seen = {}
    for name, batch in batches.items():
        rows, layouts, tensors, sides = columns_of(my_micro_batches(batch, by_size, dealt))
        with recorded() as seen[name]:
            result = correct_rollouts(*tensors, config_of(name), layouts, groups, **sides, **sizes(batch))
        result.check()
        weights = None if result.weights is None else torch.cat([weights.flatten() for weights in result.weights])
        mask = torch.cat([mask.flatten() for mask in result.mask])
        places = (torch.cat(indices) for indices in zip(*map(my_places, rows, layouts), strict=True))
        numbers = (result.denominators, result.skip, result.sequence_lengths, result.metrics())
        results[name] = (torch.cat(rows), tuple(places), weights, mask, numbers)
    return results, seen


# Each way in which numbers of whole sequences, prompts or turns are made, without those that differ in bounds alone.
NAMES = [
    *("token", "token accepted scope", "maxima and veto", "groups", "sequence by staleness", "min prefix"),
    *("turns by id", "bad sequences"),
]


def test_a_mix_of_sizes_matches_the_oracle(ranks):
    clear = {name: clear_batch(name) for name in NAMES}
    batches = {name: batch for name, (batch, _) in clear.items()}
    results, seen = zip(*ranks.run(correct_dealt, RANKS, batches), strict=True)
    assert_as_expected(results, clear)
    # One sum over each CP group, by its ranks: (0, 1), (0, 1, 2, 3), (2, 3); then those of the whole batch.
    for rank, calls in enumerate(seen):
        of_cp = [("SUM", 2), ("SUM", 4)] if rank < 2 else [("SUM", 4), ("SUM", 2)]
        assert [call[:2] for call in calls["token"]] == [*of_cp, ("SUM", 4), ("MAX", 4)]


def test_a_rank_with_one_group_beside_ranks_with_more_matches_the_oracle(ranks):
    clear = {name: clear_batch(name) for name in ("token", "maxima and veto", "turns by id", "groups")}
    batches = {name: batch for name, (batch, _) in clear.items()}
    results, seen = zip(*ranks.run(correct_dealt, RANKS, batches, UNEVEN), strict=True)
    assert_as_expected(results, clear)
    for calls in seen:
        assert [call[:2] for call in calls["token"]] == [("SUM", 2), ("SUM", 4), ("MAX", 4)]
        assert [call[:2] for call in calls["maxima and veto"]][:2] == [("SUM", 2), ("MAX", 2)]


# (case, mode, objective, aggregation, Megatron's calculate_per_token_loss)
STEPS = [
    ("token clamp", "decoupled", "ppo_clip", "token-mean", True),
    ("sequence", "decoupled", "gspo", "seq-mean-token-mean", False),
    ("turns", "decoupled", "cppo", "token-mean", False),
    ("sequence", "bypass", "reinforce", "seq-mean-token-mean", False),
    ("turns", "bypass", "reinforce", "seq-mean-token-sum", True),
    ("sequence", "one pass", "gspo", "token-mean", False),
]
DIVISOR = 3  # Megatron's num_microbatches, another number than any rank has


def drawn(name, mode):
    """(log π_θ, log π_old or the policy in its place, an advantage for each row)."""
    batch, _ = clear_batch(name)
    generator = torch.Generator().manual_seed(5)
    noise = 0.3 * torch.randn(ROWS, WIDTH, generator=generator).double() * (mode == "decoupled")
    theta = torch.where(batch.mask, batch.train + noise, -1.0).clamp(max=-1e-3)
    behind = batch.rollout if mode == "bypass" else batch.train
    return theta, behind, torch.randn(ROWS, generator=generator).double()


def arguments_of(step):
    """The arguments of ``train_dealt``, made in this process: a clear batch takes a search."""
    theta, _, worths = drawn(*step[:2])
    return step, clear_batch(step[0])[0], theta, worths


def by_loops(step):
    """(gradient of the loss, its metrics), from the oracles."""
    name, mode, algorithm, aggregation, _ = step
    batch, expected = clear_batch(name)
    theta, behind, worths = drawn(name, mode)
    theta = theta.requires_grad_()
    total = torch.zeros(()).double()
    seen = {"low": 0, "high": 0, "": 0}
    for row in range(ROWS):
        tokens = batch.mask[row].nonzero().flatten().tolist()
        of_row = [theta[row, t] for t in tokens], behind[row, tokens].tolist(), [worths[row].item()] * len(tokens)
        for t, (loss, kind) in zip(tokens, of_response(Bounds(algorithm), *of_row), strict=True):
            seen[kind] += 1
            share = expected.sequence_lengths[row] if aggregation == "seq-mean-token-mean" else 1
            total = total + (expected.weights[row][t] * loss / share if expected.mask[row][t] else 0.0)
    tokens, sequences = torch.tensor(expected.denominators).sum(0).tolist()[2:]
    loss = total / divides(aggregation, tokens, sequences, 1.0)
    number = sum(seen.values())
    loss.backward()
    metrics = {"loss/total": loss.item()}
    metrics |= {f"policy/clip_fraction_{side}": seen[side] / number for side in ("low", "high")}
    metrics["policy/approx_kl"] = (behind - theta.detach())[batch.mask].mean().item()
    return theta.grad, metrics


class Model(torch.nn.Module):
    """One number a token, log π_θ; a chunk of a model as Megatron's schedule and the correction use it."""

    def __init__(self, theta, config):
        from megatron.core.enums import ModelType

        super().__init__()
        self.theta = torch.nn.Parameter(theta)
        self.config = config
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, _):
        """Nothing comes from another stage."""

    def scale_gradients(self, factor):
        self.theta.grad *= factor


def finalize(group, model, num_tokens, **_):
    """The mean over the ranks, or with a number of tokens the sum divided by theirs, as Megatron's DDP."""
    gradient = model[0].theta.grad
    dist.all_reduce(gradient, group=group)
    if num_tokens is not None:
        dist.all_reduce(num_tokens, group=group)
    gradient /= dist.get_world_size(group) if num_tokens is None else num_tokens


def train_dealt(step, batch, theta, worths):
    """(gradient, metrics of the loss, of the correction, counts) of a step in Megatron's hybrid CP schedule."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
    from megatron.core.transformer import TransformerConfig

    name, mode, algorithm, aggregation, per_token = step
    groups, by_size = own_groups()
    sides = {key: value for key, value in batch.sides.items() if key not in ("mini_batch_ids", "rewards")}
    mine = my_micro_batches(dataclasses.replace(batch, sides=sides | {"advantages": worths}), by_size)
    _, layouts, (train, *tensors), sides = columns_of(mine)
    counts = sizes(batch) | {"num_mini_batches": 1}
    config = bypass(name) if mode == "bypass" else config_of(name)
    loss = PolicyLossConfig(algorithm, aggregation=aggregation)
    correction = RolloutCorrection(config, groups, loss=loss, one_pass=mode == "one pass")
    inputs = PlanInputs(None if correction.corrects_in_loss else train, *tensors, layouts, **sides)
    megatron = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, calculate_per_token_loss=per_token)
    megatron.hybrid_context_parallel = True
    megatron.finalize_model_grads_func = wrap_finalize(correction, partial(finalize, groups.dp_cp))
    plan = correction.plan(inputs, **counts)
    plan.check()
    made = dict(zip(mine, plan.micro_batches(inputs), strict=True))
    scale = plan.loss_scale(
        num_microbatches=DIVISOR,
        local_microbatches=len(mine),
        calculate_per_token_loss=per_token,
        total_tokens=sum(
            sum(row_lengths(batch.rows(torch.tensor(rows)), form_of(number))) for number, (rows, _) in enumerate(DEALT)
        ),
    )

    def forward(iterator, model):
        number = next(iterator)["number"]
        rows, layout, *_ = mine[number]
        log_probs = model.theta[my_places(rows, layout)].view(layout.shape)
        return log_probs, lambda output: masked_loss(correction, made[number], output, None, scale)

    model = Model(theta, megatron)
    numbers = iter(range(len(DEALT)))
    rounds = [[(next(numbers), members) for _, members in dealt] for dealt in ROUNDS]
    dealt = [
        [[number for number, members in micro_batches if rank in members] for rank in range(4)]
        for micro_batches in rounds
    ]
    forward_backward_no_pipelining(
        forward_step_func=forward,
        data_iterator=iter([([{"number": number} for number in range(len(DEALT))], dealt)]),
        model=[model],
        num_microbatches=DIVISOR,
        seq_length=WIDTH,
        micro_batch_size=1,
        forward_only=False,
    )
    if correction.corrects_in_loss:
        correction.step.check()
    result = correction.step if correction.corrects_in_loss else plan
    return model.theta.grad, correction.loss_metrics(), result.metrics(), result.denominators.sum(0).tolist()


def train_all(steps):
    return [train_dealt(*step) for step in steps]


def test_steps_of_a_mix_of_sizes_match_the_oracles(ranks):
    """Weights, masks and denominators are in the gradient."""
    expected_steps = [by_loops(step) for step in STEPS]
    for rank in ranks.run(train_all, RANKS, [arguments_of(step) for step in STEPS]):
        for step, (gradient, metrics), (got_gradient, of_loss, of_correction, counts) in zip(
            STEPS, expected_steps, rank, strict=True
        ):
            expected = clear_batch(step[0])[1]
            assert (got_gradient - gradient).norm() < 1e-9 * gradient.norm(), step
            assert {name: of_loss[name] for name in metrics} == pytest.approx(metrics, rel=1e-9, abs=1e-12)
            assert counts == torch.tensor(expected.denominators).sum(0).tolist()
            if step[1] == "decoupled":
                assert_metrics(of_correction, expected, 1e-9)
            for name, value in expected.metrics.items():
                assert of_correction[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-9, abs=1e-9), name


def wrong_uses():
    """{fragment: the message of the error that should have it} on this rank."""
    groups, by_size = own_groups()
    pair = by_size[2]
    four = by_size[4]
    rank = dist.get_rank()

    def correct(layout, groups=groups):
        tokens = torch.full(layout.shape, -1.0)
        correct_rollouts(tokens, tokens, tokens < 0, config_of("token"), layout, groups)

    def advantages(number, layout):
        ids = torch.zeros(number, dtype=torch.int64)
        group_advantages(torch.ones(number), ids, num_groups=1, groups=groups, layout=layout)

    padded = SequenceLayout.padded
    other_rank = 1 + (rank == 1)
    uses = {
        f"cp_rank={other_rank}": lambda: padded(2, 4, cp_rank=other_rank, cp_group=four),
        "cp_size=2": lambda: SequenceLayout.packed([0, 4], cp_size=2, cp_group=four),
        "cp_group is a list": lambda: padded(2, 4, cp_group=[0, 1]),
        "groups.dp_cp": lambda: correct(padded(2, 4, cp_group=four), ParallelGroups(dp_cp=pair)),
        f"rank {rank % 2} of 2": lambda: correct(padded(2, 4, cp_rank=rank % 2, cp_size=2)),
        "layout has 2 sequences": lambda: advantages(3, padded(2, 4)),
    }
    return {fragment: outcome(use) for fragment, use in uses.items()}


def test_wrong_groups_are_refused(ranks):
    for messages in ranks.run(wrong_uses, RANKS):
        for fragment, message in messages.items():
            assert fragment in message


def bad_data(batch):
    """The error of the batch."""
    groups, by_size = own_groups()
    _, layouts, tensors, _ = columns_of(my_micro_batches(batch, by_size))
    return outcome(correct_rollouts(*tensors, config_of("token"), layouts, groups).check)


def test_bad_data_are_the_same_error_on_all_ranks(ranks):
    """Ranks 2 and 3 hold a half of row 8 each. Without ids it is the sample's place in a rank's lists."""
    batch, _ = clear_batch("token")
    position = int(batch.mask[8].nonzero()[0])
    rollout = batch.rollout.clone()
    rollout[8, position] = torch.nan
    (message,) = set(ranks.run(bad_data, RANKS, dataclasses.replace(batch, rollout=rollout)))
    assert f"sample 3 of data-parallel rank 2 (no sequence_ids given), position {position} is NaN" in message


def advantages_dealt(batch, rewards, values):
    """{function: [(rows, positions or None, its result)]} of this rank; the loss is that of ``ONE_EACH``."""
    groups, by_size = own_groups()
    mine = my_micro_batches(batch, by_size)
    rows, layouts, *_ = columns_of(mine)
    rows = torch.cat(rows)
    results = {"rewards": [], "gae": []}
    for estimator in advantages_oracle.GROUP_ESTIMATORS:
        told = {"lengths": batch.mask[rows].sum(1), "num_groups": 5, "groups": groups, "layout": layouts}
        advantages = group_advantages(rewards[rows], batch.sides["group_ids"][rows], estimator=estimator, **told)
        results[estimator] = [(rows, None, advantages)]
    places_of_all = (my_places(rows, layout) for rows, layout, *_ in mine.values())
    tokens = [torch.cat(indices) for indices in zip(*places_of_all, strict=True)]
    row = values[tuple(tokens)].unsqueeze(0), batch.mask[tuple(tokens)].unsqueeze(0)
    results["whiten"] = [(*tokens, whiten(*row, groups=groups)[0])]
    for number in sorted(mine):
        rows, layout, (*_, mask), _ = mine[number]
        places = my_places(rows, layout)
        options = {"layout": layout, "groups": groups}
        value = values[places].view(layout.shape)
        scores = outcome_rewards(rewards[rows], mask, **options)
        results["rewards"].append((*places, scores.flatten()))
        estimated = gae(scores, value, mask, gamma=0.9, lam=0.8, **options).advantages
        results["gae"].append((*places, estimated.flatten()))
        if number in ONE_EACH:
            per_token = value.requires_grad_()
            loss = aggregate_loss(per_token, mask, "seq-mean-token-mean", **options)
            loss.backward()
            results["gradient"] = [(*places, per_token.grad.flatten())]
            results["loss"] = float(loss)
    return results


ONE_EACH = (2, 7, 8)  # micro-batches of which every rank has one: a pair's, and two of one rank


def test_advantages_and_losses_of_a_mix_of_sizes_match_the_oracle(ranks):
    batch, _ = clear_batch("groups")
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(ROWS, WIDTH, generator=generator).double()
    rewards = torch.randn(ROWS, generator=generator).double()
    mask = batch.mask.tolist()
    ids = batch.sides["group_ids"].tolist()
    ended = advantages_oracle.at_the_end(rewards.tolist(), mask)
    some = torch.tensor(sorted(row for number in ONE_EACH for row in DEALT[number][0]))
    shares = torch.zeros(ROWS, WIDTH).double()
    counts = batch.mask[some].sum(1, keepdim=True)
    shares[some] = batch.mask[some] / counts.double().clamp(min=1) / (counts > 0).sum()
    expected = {"rewards": ended, "gae": advantages_oracle.gae(ended, values.tolist(), mask, 0.9, 0.8)[0]}
    for estimator in advantages_oracle.GROUP_ESTIMATORS:
        lengths = batch.mask.sum(1).tolist()
        expected[estimator] = advantages_oracle.group(estimator, rewards.tolist(), ids, [True] * ROWS, lengths)
    expected |= {"whiten": advantages_oracle.whiten(values.tolist(), mask), "gradient": shares}
    for rank in ranks.run(advantages_dealt, RANKS, batch, rewards, values):
        assert rank.pop("loss") == pytest.approx(float((shares * values).sum()), rel=1e-12)
        for name, pieces in rank.items():
            for rows, positions, got in pieces:
                whole = torch.as_tensor(expected[name], dtype=torch.float64)
                want = whole[rows] if positions is None else whole[rows, positions]
                torch.testing.assert_close(got.double(), want, rtol=1e-9, atol=1e-12, msg=name)
