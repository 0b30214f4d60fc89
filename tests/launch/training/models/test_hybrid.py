"""Megatron-Core's HybridModel in the place of GPTModel: the same bits everywhere.

Both models run the same kernels in the same order, so weights, log-probs, gradients, metrics and files are compared
without a tolerance; that GPTModel's are right is shown by the other tests. Later layouts of one run are compared as the
layouts of a GPTModel are.
"""

from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megatron_rc.launch import export
from megatron_rc.launch.flags.checks.weights import check_bridge
from tests.launch.training.models.test_moe import EXPERTS as MIXTURE
from tests.launch.training.models.test_routing_replay import Replayed
from tests.support import training_cases
from tests.support.hybrid import HYBRID, IS_THERE, needs_hybrid
from tests.support.ranks import Layout
from tests.support.recorded_training import GPT2, LLAMA, flags, make_trainer, run_config, share
from tests.support.refusals import refused
from tests.support.training_cases import Case
from tests.support.training_runs import LIVE, run_training, without_times

KINDS = ("--model=gpt", HYBRID)
EXPERTS = ["--num-experts=4", "--moe-ffn-hidden-size=24", "--moe-layer-freq=[0]*1+[1]*3"]
LATENT = [word for word in LLAMA if "group" not in word]
LATENT += """--multi-latent-attention --q-lora-rank=12 --kv-lora-rank=8 --qk-head-dim=6 --qk-pos-emb-head-dim=4
--v-head-dim=10 --qk-layernorm""".split()
RECOMPUTED = "--recompute-granularity=full --recompute-method=uniform --recompute-num-layers=2".split()
SCALED = ["--use-rope-scaling", "--rope-scaling-factor=32"]
MODELS = {
    "llama": LLAMA,
    "llama3": [*LLAMA, *SCALED],
    "qwen3-untied": [*LLAMA, "--qk-layernorm", "--add-qkv-bias", "--untie-embeddings-and-output-weights"],
    "gpt2": GPT2,
    "experts": [*LLAMA, *EXPERTS],
    "latent": [*LATENT, *EXPERTS],
    "recomputed": [*LLAMA, *RECOMPUTED],
    "no-rope-in-some-layers": [*LLAMA, "--no-rope-freq=[0]*1+[1]*3"],
}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def build(words, kind):
    """A rank's model in float64."""
    from megatron_rc.launch.run_config import RunConfig
    from megatron_rc.launch.run_config.megatron_configs import build_transformer_config
    from megatron_rc.launch.training.models.build import build_chunks

    config = run_config([*words, kind], torch.distributed.get_world_size(), engine=False)
    with mock.patch.object(RunConfig, "dtype", torch.float64):
        (chunk,) = build_chunks(config, build_transformer_config(config))
    return chunk.to(torch.float64)


def results(words, kind):
    """Whether it is a HybridModel, the scores of some tokens, each parameter's weight and gradient; all float64."""
    from megatron_rc.launch.training.models.output import processed
    from megatron_rc.parallel import ParallelGroups, log_prob_processor

    chunk = build(words, kind)
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, 13, (2, 3, 8), generator=generator)
    factors = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    processor = log_prob_processor(ParallelGroups.from_megatron().tp, fused=True, vocab_size=13)
    positions = torch.arange(8).expand_as(tokens)
    scored = processed(chunk, processor, tokens, positions, None, labels=labels, loss_mask=torch.ones(3, 8))
    scores = torch.stack([one.double() for one in scored])
    (scores * factors).sum().backward()
    of_parameters = {name: (weight.detach(), weight.grad) for name, weight in training_cases.named([chunk])}
    is_hybrid = "HybridModel" in [base.__name__ for base in type(chunk).__mro__]
    return is_hybrid, scores.detach(), of_parameters


def both_results(words):
    return [results(words, kind) for kind in KINDS]


@needs_hybrid
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_the_gpt_model(ranks, tmp_path, name):
    """In float64, with every kind of layer, from weights that the same seed has drawn."""
    layout = Layout(tp=2, sp=True)
    for gpt, hybrid in ranks.run(both_results, layout, flags(tmp_path, *layout.flags(), model=MODELS[name])):
        assert (gpt[0], hybrid[0]) == (False, True)
        assert gpt[1].dtype == torch.float64
        assert torch.equal(gpt[1], hybrid[1])
        assert gpt[2].keys() == hybrid[2].keys()
        for parameter, (weight, gradient) in gpt[2].items():
            assert torch.equal(weight, hybrid[2][parameter][0]), parameter
            assert torch.equal(gradient, hybrid[2][parameter][1]), parameter
            assert gradient.any(), parameter


STEPS = {
    "tp2-dp2": Case(Layout(tp=2, dp=2), "decoupled"),
    "tp2-cp2-sp-packed": Case(Layout(tp=2, cp=2, sp=True), "bypass reinforce", packed=True, size=4),
    "pp2-vpp": Case(Layout(pp=2, vpp=True), "decoupled", variant=1, per_token_loss=True),
}


@needs_hybrid
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_optimizer_steps_in_layouts_are_those_of_the_gpt_model(ranks, tmp_path, case):
    """Metrics and gradients of real rollouts' steps, which the matrix compares with a float64 reference."""
    old, new = training_cases.weights()
    data = training_cases.make_data()
    everywhere = [
        ranks.run(training_cases.run_case, case.layout, [*case.words(tmp_path), kind], data, old, new) for kind in KINDS
    ]
    for gpt, hybrid in zip(*everywhere, strict=True):
        assert gpt.metrics == hybrid.metrics
        for one, other in zip(gpt.gradients, hybrid.gradients, strict=True):
            assert_equal(one, other)
            assert any(gradient.any() for gradient in one.values())


def train(words, steps):
    """Metrics of the steps up to this number; then a checkpoint is written."""
    trainer = make_trainer(words)
    results = []
    for index in range(trainer.iteration, steps):
        results.append(trainer.update(trainer.prepare(share(trainer, index)), 0).metrics)
    trainer.save()
    return results


PPO = ["--num-layers=3", "--lr=1e-3", "--advantage-estimator=gae", "--critic-lr=2e-3", "--grpo-kl-beta=0.05"]
SPREAD = ["--use-distributed-optimizer", *EXPERTS, "--moe-layer-freq=[0]*1+[1]*2"]


@needs_hybrid
@pytest.mark.parametrize(
    ("layout", "more"), [(Layout(tp=2, sp=True), []), (Layout(dp=2), SPREAD)], ids=["plain", "distributed-experts"]
)
def test_a_run_goes_on_with_either_model(ranks, tmp_path, layout, more):
    """Policy, critic, reference and optimizers, to the last bit; and on stages with one layer and with two."""
    (gpt, hybrid), arguments = KINDS, flags(tmp_path, *PPO, *more)

    def to_step(steps, kind, save, *words_of_layout, layout=layout, load=None):
        places = [f"--save={tmp_path}/{save}", *([f"--load={tmp_path}/{load}"] if load else [])]
        return ranks.run(train, layout, [*arguments, *layout.flags(), kind, *places, *words_of_layout], steps)[0]

    whole = to_step(3, gpt, "whole")
    assert to_step(1, hybrid, "one") == whole[:1]
    assert to_step(2, gpt, "two", load="one") == whole[1:2]
    assert to_step(3, hybrid, "three", load="two") == whole[2:]
    stages = Layout(pp=2)
    uneven = "--decoder-first-pipeline-num-layers=1"
    (last,) = to_step(3, hybrid, "stages", uneven, layout=stages, load="two")
    assert last == pytest.approx(whole[2], rel=1e-4, abs=1e-4)


@needs_hybrid
def test_a_run_with_an_engine_is_the_gpt_models(ranks, tmp_path):
    """Rollouts of an engine, steps, checkpoints, and the trained model as a Hugging Face directory."""
    layout = Layout(tp=2, dp=2)
    results = []
    saved = []
    for kind in KINDS:
        folder = tmp_path / kind
        more = [*LIVE, "--train-iters=3", kind, f"--save={folder}/save", f"--save-hf={folder}/hf", *layout.flags()]
        assert set(ranks.run(run_training, layout, flags(folder, *more))) == {None}
        results.append(without_times(folder))
        saved.append(load_file(folder / "hf" / "step-3" / "model.safetensors"))
    assert results[0] == results[1]
    assert [row["step"] for row in results[1]] == [1, 2, 3]
    assert_equal(*saved)
    export.main([f"--load={folder}/save", f"--save-hf={folder}/exported"])
    assert_equal(saved[1], load_file(folder / "exported" / "model.safetensors"))


@needs_hybrid
def test_replayed_experts_are_those_of_the_whole_layers(ranks, tmp_path):
    case = Replayed(Layout(pp=2), "decoupled")
    given = [training_cases.make_data(MIXTURE, case.replayed), *training_cases.weights(MIXTURE)]
    gpt, hybrid = (
        ranks.run(training_cases.run_case, case.layout, [*case.words(tmp_path), kind], *given) for kind in KINDS
    )
    for one, other in zip(gpt, hybrid, strict=True):
        assert one.metrics == other.metrics
        assert one.metrics[0]["routing/differing"] > 0.1
        for gradients, others in zip(one.gradients, other.gradients, strict=True):
            assert_equal(gradients, others)


def recomputed_units(words):
    """Number of calls that recompute, in a forward pass."""
    from megatron.core import tensor_parallel

    with mock.patch.object(tensor_parallel, "checkpoint", wraps=tensor_parallel.checkpoint) as calls:
        both = []
        for kind in KINDS:
            results(words, kind)
            both.append(calls.call_count)
            calls.reset_mock()
    return both


@needs_hybrid
def test_a_recomputed_unit_has_as_many_layers(ranks, tmp_path):
    assert ranks.run(recomputed_units, Layout(), flags(tmp_path, model=MODELS["recomputed"])) == [[2, 2]]


@needs_hybrid
@pytest.mark.processes
@pytest.mark.parametrize("model", ["llama", "experts"])
def test_the_dry_run_names_the_memory_of_a_gpt_model(tmp_path, model):
    from megatron_rc.launch.dry_run.memory import stage_memories

    layout = Layout(pp=2)
    arguments = flags(tmp_path, *layout.flags(), "--advantage-estimator=gae", model=MODELS[model])
    gpt, hybrid = (stage_memories(run_config([*arguments, kind], layout.world, engine=False)) for kind in KINDS)
    assert gpt == hybrid


@pytest.mark.skipif(IS_THERE, reason="this Megatron-Core has a HybridModel")
def test_an_older_version_has_no_such_model(tmp_path):
    with refused("--model hybrid | megatron-core 0.18 | Python 3.12 | --model gpt"):
        run_config(flags(tmp_path, HYBRID), engine=False)


@needs_hybrid
def test_a_bridge_of_gpt_names_is_refused(tmp_path):
    config = run_config(flags(tmp_path, HYBRID))
    files = {"weights_bridge": "mbridge"}
    model = {"transformer_impl": "transformer_engine"}
    with refused("--weights-bridge mbridge | GPTModel | --model gpt"):
        check_bridge(config.changed(checkpoints=files, model=model), samples=True)
