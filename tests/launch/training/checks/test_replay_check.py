"""Replayed experts of other tokens end the run before its first step, on every rank alike; right ones do not.

The records are made by the float64 reference: tokens, forced experts, and the log-probs that follow from both.
"""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_rc.launch.errors import RunError
from megatron_rc.launch.rollouts.broadcast import ReplicaBroadcast
from megatron_rc.launch.training.checks.replay_check import K3Sums
from megatron_rc.records.rollout import save_rollouts
from tests.support import training_cases, training_oracle
from tests.support.made_rollouts import made_batch
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer
from tests.support.training_runs import LIVE, agreed, rows, said_by_training

EXPERTS = 8
TOP_K = 2
SEQUENCES = 96
LENGTH = 16
PROMPT = 3
TOKENS = SEQUENCES * (LENGTH - PROMPT)
DENSE = 0  # the layer without experts
LAYERS = [layer for layer in range(training_oracle.LAYERS) if layer != DENSE]
MODEL = [f"--num-experts={EXPERTS}", "--moe-ffn-hidden-size=24", "--moe-layer-freq=[0,1,1,1]"]
RUN = f"""--moe-enable-routing-replay --grpo-prompts-per-step={SEQUENCES // 4} --global-batch-size={SEQUENCES}
--micro-batch-size={SEQUENCES} --grpo-iterations=1 --train-iters=1 --lr=1e-5 --run-name=run --finetune""".split()


@pytest.fixture(scope="module")
def weights():
    dense = training_oracle.make_weights(1)
    mixed = training_oracle.make_weights(1, experts=EXPERTS)
    of_dense_layer = f"decoder.layers.{DENSE}."
    chosen = {name: weight for name, weight in mixed.items() if not name.startswith(of_dense_layer)}
    return chosen | {name: weight for name, weight in dense.items() if name.startswith(of_dense_layer)}


def sampled_by(weights, tokens, random_share):
    """(experts [n, s, layers, top_k] of all layers, log-probs [n, s] at tokens) of an engine with these weights.

    A share of the experts is drawn at random, as if another kernel had rounded so; the routers choose the others.
    """
    exact = {name: weight.double() for name, weight in weights.items()}
    generator = torch.Generator().manual_seed(5)
    shape = (*tokens.shape, training_oracle.LAYERS)
    drawn = torch.rand(*shape, EXPERTS, generator=generator).topk(TOP_K, dim=-1).indices
    is_drawn = torch.rand(shape, generator=generator) < random_share
    routes = torch.where(is_drawn.unsqueeze(-1), drawn, -1)
    logits = training_oracle.routers_of(exact, tokens, routes)
    for layer, router in zip(LAYERS, logits, strict=True):
        live = router.topk(TOP_K, dim=-1).indices.view(*tokens.shape, TOP_K)
        routes[:, :, layer] = torch.where(is_drawn[:, :, layer, None], routes[:, :, layer], live)
    log_probs = training_oracle.score(exact, tokens, routes)[0].roll(1, dims=1)
    return routes, log_probs.float()


def records_of(weights, random_share=0.3):
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, training_oracle.VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) >= PROMPT).expand(tokens.shape).clone()
    routes, log_probs = sampled_by(weights, tokens, random_share)
    batch = made_batch(tokens, mask, log_probs, torch.rand(SEQUENCES, generator=generator))
    return replace(batch, routed_experts=routes.short())


@pytest.fixture(scope="module")
def right(weights):
    return records_of(weights)


def save_weights(words, weights):
    trainer = make_trainer(words)
    training_cases.load(trainer.chunks, weights)
    trainer.save()


@pytest.fixture(scope="module")
def checkpoint(ranks, tmp_path_factory, weights):
    """A checkpoint of the reference's weights, which every layout loads."""
    folder = tmp_path_factory.mktemp("weights")
    ranks.run(save_weights, Layout(), flags(folder, *MODEL, f"--save={folder}/save"), weights)
    return folder / "save"


def words_of(folder, checkpoint, batches, layout=None, *more):
    """The flags of a run on these rollout batches, after they are written."""
    records = folder / "records"
    records.mkdir()
    for step, batch in enumerate(batches):
        save_rollouts(batch, records / f"step-{step:07d}-replica-0000.safetensors")
    sources = [f"--load-rollouts={records}", f"--load={checkpoint}", "--rollout-rs-threshold=1e-9_1e9,1e9"]
    return flags(folder, *MODEL, *RUN, "--grpo-kl-beta=0", *sources, *more, *(layout or Layout()).flags())


def shifted(routes, tokens):
    return routes.roll(tokens, dims=1)


def dense_layer_at_the_end(routes):
    moved = torch.empty_like(routes)
    moved[:, :, :-1] = routes[:, :, 1:]
    moved[:, :, -1] = torch.arange(TOP_K).short()
    return moved


WRONG = {
    "shifted by one token": lambda routes: shifted(routes, 1),
    "layers reversed": lambda routes: routes[:, :, [DENSE, *LAYERS[::-1]]],
    "of another sample": lambda routes: routes.roll(1, dims=0),
    "dense layer at the wrong end": dense_layer_at_the_end,
    "constant": lambda routes: torch.arange(TOP_K).short().expand_as(routes).contiguous(),
}


def verdicts(words, batches):
    """The error of one trainer with each of these rollout batches, None if it goes on."""
    trainer = make_trainer(words)
    replica = ReplicaBroadcast(trainer.config, trainer.groups)
    errors = []
    for batch in batches:
        try:
            trainer.prepare(replica.batch(batch))
            errors.append(None)
        except RunError as error:
            errors.append(str(error))
    return errors


def test_experts_of_other_tokens_are_refused(ranks, tmp_path, checkpoint, right):
    wrong = [replace(right, routed_experts=exchanged(right.routed_experts)) for exchanged in WRONG.values()]
    words = words_of(tmp_path, checkpoint, [right])
    ((of_right, *of_wrong),) = ranks.run(verdicts, Layout(), words, [right, *wrong])
    assert of_right is None
    for table, error in zip(WRONG, of_wrong, strict=True):
        assert error is not None, table
        assert error.startswith("the experts that are replayed are not those of the rollout batch after step 0:"), table
        assert f"over {TOKENS:,} tokens" in error, table
        assert "--moe-enable-routing-replay" in error, table


def test_a_few_hopeless_tokens_do_not_hide_the_others(ranks, tmp_path, checkpoint, right):
    """Their k3 is e^20 with and without replay: by itself it is the mean and the standard error of both."""
    log_probs = right.rollout_log_probs.clone()
    log_probs[[3, 50, 90], 7] = -40.0
    wrong = replace(right, rollout_log_probs=log_probs, routed_experts=shifted(right.routed_experts, 1))
    ((error, _),) = ranks.run(said_by_training, Layout(), words_of(tmp_path, checkpoint, [wrong]))
    assert "not those of the rollout batch after step 0" in error
    assert "no token counts for more than 10 nats" in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "a step was made"


LAYOUTS = [
    (
        Layout(pp=2),
        ["--bypass-mode", "--loss-type=reinforce", "--rl-use-sequence-packing", "--rl-sequence-packing-bin-size=256"],
    ),
    (Layout(cp=2, dp=2, ep=2), ["--moe-token-dispatcher-type=alltoall", f"--micro-batch-size={SEQUENCES // 2}"]),
]


@pytest.mark.parametrize(("layout", "more"), LAYOUTS, ids=str)
def test_every_rank_of_every_layout_comes_to_the_same_verdict(ranks, tmp_path, checkpoint, right, layout, more):
    """The second batch is shifted; after the first one, which is right, a line has both numbers."""
    wrong = replace(right, routed_experts=shifted(right.routed_experts, 1))
    arguments = words_of(tmp_path, checkpoint, [right, wrong], layout, *more, "--train-iters=2")
    everywhere = ranks.run(said_by_training, layout, arguments)
    error = agreed([error for error, _ in everywhere])
    assert error.startswith("RunError: the experts that are replayed are not those of the rollout batch")
    assert "after step 1:" in error
    (row,) = rows(tmp_path)
    assert row["routing/k3"] < 1e-8
    assert row["routing/k3_without"] > 0.05
    lines = [line for line in everywhere[0][1].splitlines() if "routing replay:" in line]
    assert len(lines) == 1
    assert (
        f"{row['routing/k3']:.3g} nats a token with the replayed experts, {row['routing/k3_without']:.3g} with"
        in lines[0]
    )
    assert not [message for _, message in everywhere[1:] if "routing replay:" in message], "other ranks repeat it"


def test_right_experts_of_other_weights_go_on(ranks, tmp_path, checkpoint, weights):
    """An engine with older weights, whose log-probs replay brings only a little closer."""
    batch = records_of(training_oracle.moved(weights, 3, 0.2), random_share=0)
    ((error, _),) = ranks.run(said_by_training, Layout(), words_of(tmp_path, checkpoint, [batch]))
    assert error is None
    (row,) = rows(tmp_path)
    assert 1e-5 < row["routing/k3"] < 1.1 * row["routing/k3_without"]


@pytest.mark.parametrize(("share", "steps", "is_said"), [(1.0, 2, True), (0.04, 1, False)])
def test_unknown_experts_are_one_line(ranks, tmp_path, checkpoint, right, share, steps, is_said):
    is_unknown = torch.rand(SEQUENCES, LENGTH, generator=torch.Generator().manual_seed(1)) < share
    batch = replace(right, routed_experts=torch.where(is_unknown[..., None, None], -1, right.routed_experts))
    arguments = words_of(tmp_path, checkpoint, [batch] * steps, None, f"--train-iters={steps}")
    ((error, message),) = ranks.run(said_by_training, Layout(), arguments)
    assert error is None
    for row in rows(tmp_path):
        assert row["routing/unknown"] == pytest.approx(share, abs=0.02)
    unknown = [line for line in message.splitlines() if "routing/unknown" in line]
    assert len(unknown) == is_said
    if is_said:
        assert f"{rows(tmp_path)[0]['routing/unknown']:.1%}" in unknown[0]


def live_run(words, shift):
    """A run whose engine reports its experts at other tokens."""
    from megatron_rc.launch.engines.router_record import RouterRecord

    right = RouterRecord.of_responses

    def of_responses(record, prompts, responses):
        return [table.roll(shift, dims=0) for table in right(record, prompts, responses)]

    with mock.patch.object(RouterRecord, "of_responses", of_responses):
        return said_by_training(words)


@pytest.mark.parametrize("shift", [0, 1])
def test_the_first_batch_of_a_live_engine_is_judged(ranks, tmp_path, shift):
    arguments = [*MODEL[:2], "--qk-layernorm", "--kv-channels=16", "--untie-embeddings-and-output-weights", *LIVE, *RUN]
    arguments += ["--grpo-prompts-per-step=64", "--global-batch-size=256", "--train-iters=2", "--init-method-std=0.3"]
    arguments += ["--micro-batch-size=128"]
    arguments += ["--rollout-rs-threshold=1e-9_1e9,1e9", "--rollout-check-tolerance=5", "--no-finetune"]
    arguments += ["--rollout-dtype=fp8-e4m3"]
    ((error, message),) = ranks.run(live_run, Layout(), flags(tmp_path, *arguments), shift)
    if shift:
        assert "not those of the rollout batch after step 0" in error
        return
    assert error is None
    assert message.count("routing replay:") == 1
    first, second = rows(tmp_path)
    assert first["routing/k3"] < first["routing/k3_without"]
    assert "routing/k3" not in second, "later batches cost no pass"


def distances_of(with_replay, without_replay):
    differences = with_replay - without_replay
    return K3Sums(
        tokens=float(len(differences)),
        with_replay=float(with_replay.sum()),
        without_replay=float(without_replay.sum()),
        squared_differences=float(differences.square().sum()),
    )


@pytest.mark.parametrize(
    ("tokens", "increase", "noise", "is_worse"),
    [
        (1024, 0.2, 0.0, True),
        (1023, 0.2, 0.0, False),
        (4096, 0.11, 0.0, True),
        (4096, 0.09, 0.0, False),
        (4096, -0.5, 0.0, False),
        (4096, 0.2, 3.0, True),
        (4096, 0.2, 6.0, False),
    ],
)
def test_a_tenth_three_standard_errors_and_1024_tokens(tokens, increase, noise, is_worse):
    generator = torch.Generator().manual_seed(0)
    without_replay = torch.rand(tokens, generator=generator, dtype=torch.float64)
    without_replay /= without_replay.mean()
    of_token = torch.randn(tokens, generator=generator, dtype=torch.float64)
    of_token = (of_token - of_token.mean()) / of_token.std()
    differences = increase + noise * of_token
    standard_error = float(differences.std()) / math.sqrt(tokens)
    assert is_worse == (tokens >= 1024 and increase > 0.1 and increase > 3 * standard_error)
    assert distances_of(without_replay + differences, without_replay).is_worse_with_replay == is_worse


def test_small_batches_are_added_up_until_they_give_a_verdict(ranks, tmp_path, checkpoint, right):
    """624 tokens are too few; the fault shows when the second batch has come."""
    half = SEQUENCES // 2
    wrong = replace(right, routed_experts=shifted(right.routed_experts, 1))
    batches = [replace(wrong.rows(slice(0, half)), sample_ids=torch.arange(half)) for _ in range(2)]
    more = [f"--grpo-prompts-per-step={half // 4}", f"--global-batch-size={half}", "--train-iters=2"]
    more += [f"--micro-batch-size={half}"]
    ((error, message),) = ranks.run(said_by_training, Layout(), words_of(tmp_path, checkpoint, batches, None, *more))
    assert f"over {TOKENS // 2:,} tokens, too few" in message
    assert "not those of the rollout batch after step 1" in error
    assert f"over {TOKENS:,} tokens" in error
    assert len(rows(tmp_path)) == 1
