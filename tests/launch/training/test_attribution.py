"""The parts of a mismatch are the same numbers in every layout, and the reference's; the pass leaves no trace.

The reference is autograd in float64 on the plain model of ``training_oracle.py``, at the midpoint of both sets of
weights. The engine's log-probs have noise of their own, as kernels would make it, so that the coefficients are not the
differences that the weights make.
"""

import contextlib
import dataclasses
import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_rc.attribution import Attribution, attribute, megatron, megatron_shards
from megatron_rc.attribution.names import model_order
from megatron_rc.parallel.groups import group_rank, group_size
from tests.launch.training.test_one_pass import in_float64
from tests.support import training_cases, training_oracle
from tests.support.ranks import Layout
from tests.support.recorded_training import GPT2, LLAMA, make_trainer
from tests.support.recorded_training import flags as flags_of_run
from tests.support.training_cases import LENGTH, PER_MINI_BATCH, SEQUENCES

IN_FLOAT64 = 1e-9
IN_FLOAT32 = 1e-5
# Megatron's angles of rotary embeddings are float32 whatever the model's dtype is.
TO_REFERENCE = 2e-6
EXPERTS = (
    "--num-experts=4",
    f"--moe-ffn-hidden-size={training_oracle.EXPERT_INNER}",
    "--moe-token-dispatcher-type=alltoall",
    # Router losses, which have no part in log-probs.
    "--moe-aux-loss-coeff=0.5",
    "--moe-z-loss-coeff=0.02",
)
BATCH = (f"--grpo-prompts-per-step={SEQUENCES // 4}", f"--global-batch-size={PER_MINI_BATCH}")
DISTRIBUTED = ("--use-distributed-optimizer",)
OVERLAPPED = (*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size=2000")
RECOMPUTED = ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1")
OTHER_LLAMA = (*LLAMA, "--qk-layernorm", "--add-qkv-bias", "--untie-embeddings-and-output-weights")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run whose batch is attributed."""

    layout: Layout
    packed: bool = False
    per_token_loss: bool = False
    has_experts: bool = False
    flags: tuple[str, ...] = ()
    is_exact: bool = True  # the model computes in float64
    model: tuple[str, ...] = tuple(LLAMA)
    is_reduced: bool = False  # Megatron reduces the gradients as in an optimizer step

    def words(self, folder):
        arguments = training_cases.cut_words(self.case, *BATCH, *self.flags)
        return flags_of_run(folder, *arguments, *(EXPERTS if self.has_experts else ()), model=self.model)

    @property
    def case(self):
        return training_cases.Case(
            self.layout, "decoupled", packed=self.packed, per_token_loss=self.per_token_loss, size=8
        )

    @property
    def tolerance(self):
        return IN_FLOAT64 if self.is_exact else IN_FLOAT32

    def __str__(self):
        names = [str(self.layout), *(flag.removeprefix("--") for flag in self.flags[:2])]
        for field in ("packed", "per_token_loss", "has_experts", "is_reduced"):
            if getattr(self, field):
                names.append(field)
        return "-".join([*names, "float64" if self.is_exact else "float32"])


SINGLE = Run(Layout())
RUNS = [
    SINGLE,
    Run(Layout(tp=2), packed=True),
    Run(Layout(tp=2, sp=True), packed=True, per_token_loss=True, flags=RECOMPUTED),
    Run(Layout(pp=2, vpp=True), packed=True, per_token_loss=True),
    Run(Layout(cp=2)),
    Run(Layout(dp=2), flags=OVERLAPPED, is_exact=False),
    Run(Layout(tp=2, dp=2), flags=DISTRIBUTED, is_exact=False, packed=True),
    Run(Layout(tp=2, dp=2, ep=2, sp=True), has_experts=True, packed=True),
]
REDUCED = [
    Run(Layout(tp=2, pp=2, sp=True), is_reduced=True),
    Run(Layout(dp=2, ep=2), has_experts=True, is_reduced=True),
    Run(Layout(pp=2, dp=2, ep=2), flags=DISTRIBUTED, is_exact=False, has_experts=True, is_reduced=True),
]


# Functions of the library that are replaced, with the value that they return then.
WRONG = {
    "copies of norms counted on every TP rank": (RUNS[1], "_is_first_of_tensor_copies", True),
    "partial gradients of norms counted on one": (RUNS[2], "_is_partial_over_tensor_ranks", False),
    "reduced gradients counted on every replica": (REDUCED[1], "_whole_on_first_replica", None),
}


@functools.cache
def both_weights(has_experts):
    """The trainer's weights and the engine's."""
    trainer = training_oracle.make_weights(1, experts=4 if has_experts else 0)
    return trainer, training_oracle.moved(trainer, 7, 0.004 if has_experts else 0.02)


@functools.cache
def make_data():
    """Ragged responses with holes, one rank's share without any."""
    generator = torch.Generator().manual_seed(5)
    shape = (SEQUENCES, LENGTH)
    ids = torch.arange(SEQUENCES)
    ends = torch.randint(3, LENGTH, (SEQUENCES, 1), generator=generator)
    mask = (torch.arange(LENGTH) < ends) & (torch.rand(shape, generator=generator) > 0.15)
    mask[SEQUENCES * 3 // 4 :] = False
    rollout = -2.5 + 0.4 * torch.randn(shape, generator=generator)
    return training_oracle.Data(
        tokens=torch.randint(0, training_oracle.VOCABULARY, shape, generator=generator),
        mask=mask,
        rollout=rollout.clamp(max=-0.01).float().double(),
        rewards=torch.rand(SEQUENCES, generator=generator),
        group_ids=ids // 4,
        mini_batch_ids=ids // PER_MINI_BATCH,
    )


@functools.cache
def expected(has_experts):
    """The parts by name, Σ D², and Σ D Δ, float64."""
    data = make_data()
    trainer, engine = ({name: weight.double() for name, weight in each.items()} for each in both_weights(has_experts))
    train = training_oracle.score(trainer, data.tokens)[0]
    differences = torch.where(data.mask, train - data.rollout, 0.0)

    middle = {name: ((trainer[name] + engine[name]) / 2).requires_grad_() for name in trainer}
    total = (differences * training_oracle.score(middle, data.tokens)[0]).sum()
    gradients = torch.autograd.grad(total, list(middle.values()))
    parts = {
        name: float((gradient * (trainer[name] - engine[name])).sum())
        for name, gradient in zip(middle, gradients, strict=True)
    }
    of_weights = differences * (train - training_oracle.score(engine, data.tokens)[0])
    return parts, float(differences.square().sum()), float(of_weights.sum())


# On the ranks


def cut_plainly(name, whole, dimension, size):
    """TP shards of a model whose MLP has no gate."""
    return list(whole.chunk(size, dimension))


def engine_shards(trainer, engine):
    """The engine's weights as this rank's shards."""
    tp = trainer.groups.tp
    shards = {}
    for local_name, parameter in training_cases.named(trainer.chunks):
        # The last stage's copy of tied embeddings.
        name = local_name if local_name in engine else "embedding.word_embeddings.weight"
        whole = engine[name]
        if getattr(parameter, "tensor_model_parallel", False):
            whole = training_cases.cut_weight(name, whole, parameter.partition_dim, group_size(tp))[group_rank(tp)]
        shards[name] = whole
    return shards


def loaded_trainer(run, folder, data, weights):
    """The trainer with these weights, its tokens, and its log-probs."""
    from megatron_rc.launch.training.batches.micro_batches import cut_batch

    trainer = make_trainer(run.words(folder))
    groups = trainer.groups
    training_cases.load(trainer.chunks, weights)
    batch, _ = training_cases.batch_of(data, group_rank(groups.dp), group_size(groups.dp))
    cut = cut_batch(batch, trainer.config, groups)
    return trainer, batch, cut, trainer.score(cut)


@dataclasses.dataclass
class Attributed:
    """What one rank brings back.

    Attributes:
        result: the attribution.
        is_restored: the weights have their bits back.
        gradients: largest gradient that is left.
        wrong: attributions with each fault of the run in ``WRONG``.
    """

    result: Attribution
    is_restored: bool
    gradients: float
    wrong: dict[str, Attribution]


def attributed(run, folder, data, weights, engine):
    """Attribute a batch on this rank."""
    with in_float64() if run.is_exact else contextlib.nullcontext():
        trainer, _, cut, train = loaded_trainer(run, folder, data, weights)
        before = [parameter.detach().clone() for chunk in trainer.chunks for parameter in chunk.parameters()]
        shards = engine_shards(trainer, engine)
        attribute_once = attributed_in_own_loop if run.is_reduced else attributed_by_launcher
        result = attribute_once(trainer, cut, train, shards)
        after = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
        is_restored = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        gradients = max(float(parameter.main_grad.abs().max()) for parameter in after)

        wrong = {}
        for fault, (run_of_fault, name, value) in WRONG.items():
            if run_of_fault == run:
                with mock.patch.object(megatron, name, return_value=value):
                    wrong[fault] = attribute_once(trainer, cut, train, shards)
        return Attributed(result, is_restored, gradients, wrong)


def attributed_by_launcher(trainer, cut, train, shards):
    """The attribution that a run makes."""
    from megatron_rc.launch.training.attribution import attribute_batch

    return attribute_batch(trainer.model, trainer.passes, cut, train, shards, check=True)


def attributed_in_own_loop(trainer, cut, train, shards):
    """The attribution with gradients that Megatron's own ``finalize_model_grads`` has reduced."""
    from megatron.core.distributed import finalize_model_grads

    from megatron_rc.launch.training.models.passes import Scoring

    config = trainer.model[0].config
    groups = trainer.groups
    local = cut.local
    cuts = [one for mini_batch in cut.cuts for one in mini_batch]
    factor = len(cuts) * group_size(groups.dp_cp)  # Megatron's schedule and DDP make means
    config.finalize_model_grads_func = finalize_model_grads
    config.moe_aux_loss_coeff = 0.0
    config.moe_z_loss_coeff = None

    def loss(_, piece, output):
        return factor * (piece.advantages * output[0]).sum(), torch.ones((), dtype=torch.int32), {}

    def backward(coefficients):
        trainer.clear_gradients()
        weighted = cut if coefficients is None else cut.with_advantages(coefficients)
        trainer.passes.run(trainer.model, weighted, cuts, loss, scoring=Scoring())

    def differences_to(other):
        return torch.where(local.response_mask, train - other, 0.0)

    def differences_of_weights():
        scored = trainer.passes.score(trainer.model, cut)
        return None if scored is None else differences_to(scored.log_probs)

    return attribute(
        megatron_shards(trainer.model, reduced=True),
        shards,
        backward,
        differences_to(local.rollout_log_probs) if groups.is_last_stage else None,
        differences_of_weights=differences_of_weights,
        group=dist.group.WORLD,
        counts_tokens=group_rank(groups.tp) == 0,
    )


# The tests


@pytest.fixture(scope="module")
def attributions(ranks, tmp_path_factory):
    """What every rank of a run brings back; each run is made once."""
    folder = tmp_path_factory.mktemp("attribution")

    def on_ranks(run):
        return ranks.run(attributed, run.layout, run, folder, make_data(), *both_weights(run.has_experts))

    return functools.cache(on_ranks)


def assert_parts(result, parts, measured, of_weights, tolerance):
    """The parts differ by less than ``tolerance`` of Σ|c_p|."""
    size = sum(abs(part) for part in parts.values())
    assert list(result.parts) == sorted(parts, key=model_order)
    worst = max(parts, key=lambda name: abs(result.parts[name] - parts[name]))
    assert result.parts[worst] == pytest.approx(parts[worst], rel=0, abs=tolerance * size), worst
    assert result.measured == pytest.approx(measured, rel=tolerance)
    assert result.of_weights == pytest.approx(of_weights, rel=0, abs=tolerance * size)


@pytest.mark.parametrize("run", [*RUNS, *REDUCED], ids=str)
def test_parts_are_the_references_in_every_layout(attributions, run):
    alone = attributions(dataclasses.replace(SINGLE, has_experts=run.has_experts))[0].result
    for of_rank in attributions(run):
        assert of_rank.is_restored
        assert of_rank.gradients == 0
        assert_parts(of_rank.result, *expected(run.has_experts), max(run.tolerance, TO_REFERENCE))
        assert_parts(of_rank.result, alone.parts, alone.measured, alone.of_weights, run.tolerance)


def test_the_case_is_not_vacuous():
    """Parts of both signs, none of them lost in the sum, and a rest that is not in the weights."""
    for has_experts in (False, True):
        parts, measured, of_weights = expected(has_experts)
        size = sum(abs(part) for part in parts.values())
        assert min(abs(part) for part in parts.values()) > 1e-6 * size
        assert min(parts.values()) < 0 < max(parts.values())
        assert measured > 2 * abs(of_weights)
        # Routers choose other experts on the way, which no gradient knows.
        assert (sum(parts.values()) == pytest.approx(of_weights, abs=0.01 * size)) != has_experts


@pytest.mark.parametrize("fault", WRONG)
def test_counting_twice_or_not_at_all_is_seen(attributions, fault):
    run = WRONG[fault][0]
    with pytest.raises(AssertionError):
        assert_parts(attributions(run)[0].wrong[fault], *expected(run.has_experts), 1e-3)


# Models that the reference has not


def attributed_without_gate(*args):
    with mock.patch.object(training_cases, "cut_weight", cut_plainly):
        return attributed(*args)


def shapes_of_weights(run, folder):
    trainer = make_trainer(run.words(folder))
    return {name: parameter.shape for name, parameter in training_cases.named(trainer.chunks)}


def attributed_with(model):
    """The function that attributes a batch of a model, whose MLP may have no gate."""
    return attributed if "--swiglu" in model else attributed_without_gate


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory):
    """Data and weights of a model, and their attribution on one rank; each is made once."""
    folder = tmp_path_factory.mktemp("alone")

    def on_one_rank(model):
        run = Run(SINGLE.layout, model=model)
        (shapes,) = ranks.run(shapes_of_weights, run.layout, run, folder)
        generator = torch.Generator().manual_seed(3)
        weights = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        inputs = make_data(), weights, training_oracle.moved(weights, 4, 0.02)
        (single,) = ranks.run(attributed_with(model), run.layout, run, folder, *inputs)
        return inputs, single.result

    return functools.cache(on_one_rank)


@pytest.mark.parametrize(
    ("model", "layout"),
    [(OTHER_LLAMA, Layout(tp=2, pp=2)), (tuple(GPT2), Layout(tp=2, sp=True))],
    ids=["qk-norms-untied-tp2-pp2", "biases-tp2-sp"],
)
def test_biases_norms_of_heads_and_an_untied_head(ranks, tmp_path, alone, model, layout):
    inputs, single = alone(model)
    for of_rank in ranks.run(attributed_with(model), layout, Run(layout, model=model), tmp_path, *inputs):
        assert_parts(of_rank.result, single.parts, single.measured, single.of_weights, IN_FLOAT64)
        assert min(abs(part) for part in of_rank.result.parts.values()) > 0


# What the pass leaves behind


def gradients_before_and_after(run, folder, data, weights, engine):
    """Gradients and metrics of a training pass, without an attribution before it and with one."""
    from megatron_rc.launch.training.attribution import attribute_batch

    trainer, batch, cut, train = loaded_trainer(run, folder, data, weights)
    passes = []
    for is_second in (False, True):
        if is_second:
            shards = engine_shards(trainer, engine)
            attribute_batch(trainer.model, trainer.passes, cut, train, shards, nodes=2)
        metrics = trainer.accumulate(trainer.prepare(batch), 0)
        gradients = [p.main_grad.clone() for chunk in trainer.chunks for p in chunk.parameters()]
        passes.append((gradients, metrics))
        trainer.clear_gradients()
    return passes


def test_the_next_step_is_as_without_it(ranks, tmp_path):
    """``test_attribution_runs.py`` has the distributed optimizer with overlapped reductions."""
    accepting = ("--rollout-rs-threshold=0.001_1000,100", "--grpo-kl-beta=0")
    run = Run(Layout(dp=2, ep=2), has_experts=True, flags=accepting)
    for passes in ranks.run(
        gradients_before_and_after, run.layout, run, tmp_path, make_data(), *both_weights(run.has_experts)
    ):
        (before, metrics_before), (after, metrics_after) = passes
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert metrics_before == metrics_after
        assert max(float(gradient.abs().max()) for gradient in before) > 0


# The launcher's rounding


DTYPES = ("bf16", "int8", "fp8-e4m3")


def rounded_shards(run, folder, weights):
    """This rank's rounded shards of each type."""
    from megatron_rc.launch.training.attribution import rounded_weights

    trainer = make_trainer(run.words(folder))
    training_cases.load(trainer.chunks, weights)
    shards = megatron_shards(trainer.model)
    functions = [rounded_weights(trainer.model, dtype) for dtype in DTYPES]
    return [{shard.name: rounded(shard.name, shard.weight.detach()) for shard in shards} for rounded in functions]


def test_the_launchers_rounding_is_that_of_whole_weights(ranks, tmp_path):
    from megatron_rc.launch.engines.rounding import round_weight

    run = Run(Layout(tp=2))
    weights, _ = both_weights(False)
    results = ranks.run(rounded_shards, run.layout, run, tmp_path, weights)
    for (rank, by_dtype), (index, dtype) in itertools.product(enumerate(results), enumerate(DTYPES)):
        for name, shard in by_dtype[index].items():
            is_linear = "linear_" in name
            whole = round_weight(weights[name], dtype, is_linear)
            if shard.shape != whole.shape:
                dimension = next(dim for dim in range(2) if shard.shape[dim] != whole.shape[dim])
                whole = training_cases.cut_weight(name, whole, dimension, 2)[rank]
            assert torch.equal(shard, whole), name
