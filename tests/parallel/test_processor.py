"""The ``output_processor`` on Megatron's GPTModel against a Llama in plain torch, in float64; values and all gradients.

From Megatron-Core 0.18 on GPTModel itself calls the processor; before, the launcher calls it in the output layer's
place, with the same keyword arguments.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from megatron_rc.parallel import (
    ParallelGroups,
    log_prob_processor,
)
from tests.support import training_cases, training_oracle
from tests.support.ranks import Layout
from tests.support.recorded_training import LLAMA, flags, run_config
from tests.support.softmax_oracle import log_probs_entropy_squares

ROWS = 3
LENGTH = 8
VOCABULARY = training_oracle.VOCABULARY
TEMPERATURE = 0.7
FACTOR = 0.5
HEAD = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: through logits or not, and which tokens the log-probs and the entropy are over."""

    fused: bool
    kept: str = ""  # "log-probs" or "both" are over the kept tokens
    scaled: bool = False  # the model multiplies its logits, as with muP
    masked: bool = True  # a loss mask, of floats; without one the label -100 says what does not count
    called: bool = True  # GPTModel itself calls the processor, as from 0.18 on


CASES = (
    *(Case(fused, kept) for fused, kept in itertools.product((True, False), ("", "log-probs", "both"))),
    *(Case(fused, scaled=True, masked=False) for fused in (True, False)),
    *(Case(fused, called=False) for fused in (True, False)),
)


def data():
    """(tokens, labels, loss mask, kept tokens [b, s, v], coefficients of the two results in the loss)."""
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    mask = (torch.rand(ROWS, LENGTH, generator=generator) < 0.8).float()
    labels[mask == 0] = -100
    kept = torch.rand(ROWS, LENGTH, VOCABULARY, generator=generator) < 0.5
    kept.scatter_(2, labels.clamp(min=0).unsqueeze(2), True)
    kept |= torch.rand(ROWS, LENGTH, 1, generator=generator) < 0.25
    return tokens, labels, mask, kept, torch.randn(2, ROWS, LENGTH, generator=generator, dtype=torch.float64)


def support(kept):
    """Ids and offsets of the kept tokens; a position with all of them has no ids."""
    ids = [row.nonzero().flatten().flip(0) if not row.all() else row.new_zeros(0).long() for row in kept.flatten(0, 1)]
    offsets = torch.tensor([0, *map(len, ids)]).cumsum(0)
    return {"support_ids": torch.cat(ids), "support_offsets": offsets}


def model_weights(tied):
    weights = training_oracle.make_weights(1)
    if not tied:
        generator = torch.Generator().manual_seed(9)
        weights[HEAD] = torch.randn(weights[EMBEDDING].shape, generator=generator) / 4
    return weights


def reference(case, tied):
    """(log-probs, entropies, gradients of all weights) on one process, one sequence after the other."""
    tokens, labels, _, kept, coefficients = data()
    weights = {name: value.double().requires_grad_() for name, value in model_weights(tied).items()}
    head = weights[EMBEDDING if tied else HEAD][:VOCABULARY]
    factor = (FACTOR if case.scaled else 1) / TEMPERATURE
    logits = torch.stack([training_oracle.last_hidden(weights, row) @ head.T * factor for row in tokens])
    results = log_probs_entropy_squares(
        logits, labels, kept=kept if case.kept else None, entropy_over_kept=case.kept == "both"
    )[:2]
    gradients = torch.autograd.grad((results * coefficients).sum(), list(weights.values()))
    return results.detach(), dict(zip(weights, gradients, strict=True))


# On the ranks


def build(words, tied):
    """This rank's GPTModel with the weights of the reference."""
    from megatron_rc.launch.run_config import RunConfig
    from megatron_rc.launch.run_config.megatron_configs import build_transformer_config
    from megatron_rc.launch.training.models.build import build_chunks

    config = run_config(words, torch.distributed.get_world_size(), engine=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunConfig, "dtype", torch.float64)
        (chunk,) = build_chunks(config, build_transformer_config(config))
    chunk.to(torch.float64)
    # Megatron computes the frequencies in float32.
    width = training_oracle.WIDTH
    frequencies = training_oracle.ROTARY_BASE ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    chunk.rotary_pos_emb.inv_freq = frequencies
    training_cases.load([chunk], model_weights(tied))
    return chunk


def options_of(case):
    kept = {} if not case.kept else support(data()[3]) | {"entropy_over_support": case.kept == "both"}
    group = ParallelGroups.from_megatron().tp
    return {"tp_group": group, "vocab_size": VOCABULARY, "temperature": TEMPERATURE, "chunk_size": 5} | kept


def call(chunk, case):
    """The model's results with the processor."""
    from megatron_rc.launch.training.models import output

    tokens, labels, mask, *_ = data()
    chunk._scale_logits = (lambda logits: logits * FACTOR) if case.scaled else (lambda logits: logits)
    processor = log_prob_processor(fused=case.fused, **options_of(case))
    positions = torch.arange(LENGTH).expand_as(tokens)
    loss_mask = mask if case.masked else None
    with pytest.MonkeyPatch.context() as patch:
        if not case.called:
            patch.setattr(output, "_has_hook", lambda forward: False)
        return output.processed(chunk, processor, tokens, positions, None, labels=labels, loss_mask=loss_mask)


def gradients_of(chunk, results):
    """Each parameter's gradient; shards of one token's share are added over the ranks, as Megatron does at the end."""
    chunk.zero_grad()
    (torch.stack([values.double() for values in results]) * data()[4]).sum().backward()
    gradients = {}
    for name, parameter in training_cases.named([chunk]):
        gradients[name] = parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(gradients[name])
    return gradients


def run_cases(words, tied):
    """(results, gradients) of each case on this rank, and which dimension of each weight is split."""
    chunk = build(words, tied)
    outcomes = []
    for case in CASES:
        results = call(chunk, case)
        outcomes.append((torch.stack(results).detach(), gradients_of(chunk, results)))
    split = {n: p.partition_dim for n, p in training_cases.named([chunk]) if getattr(p, "tensor_model_parallel", False)}
    return outcomes, split


def words_of(folder, layout, tied):
    return flags(folder, *layout.flags(), *([] if tied else ["--untie-embeddings-and-output-weights"]), model=LLAMA)


@pytest.mark.parametrize(
    ("layout", "tied"), [(Layout(), False), (Layout(tp=2), True), (Layout(tp=2, sp=True), False)], ids=str
)
def test_models_with_the_processor_match_the_reference(ranks, tmp_path, layout, tied):
    outcomes = ranks.run(run_cases, layout, words_of(tmp_path, layout, tied), tied)
    split = outcomes[0][1]
    for case, *of_ranks in zip(CASES, *(results for results, _ in outcomes), strict=True):
        want, gradients = reference(case, tied)
        for results, _ in of_ranks:
            torch.testing.assert_close(
                results, want, rtol=1e-9, atol=1e-9, msg=lambda text, case=case: f"{case}: {text}"
            )
        for name, gradient in gradients.items():
            shards = [of_rank[name] for _, of_rank in of_ranks]
            got = training_cases.join_weight(name, shards, split[name]) if name in split else shards[0]
            torch.testing.assert_close(
                got, gradient, rtol=1e-8, atol=1e-9, msg=lambda text, case=case: f"{case}: {text}"
            )
    for cases in (dict(zip(CASES, of_rank, strict=True)) for of_rank, _ in outcomes):
        for fused in (True, False):
            results_inside, grads = cases[Case(fused)]
            results_in_place, others = cases[Case(fused, called=False)]
            assert torch.equal(results_inside, results_in_place), (
                "in the place of the output layer's forward the bits are the same"
            )
            assert all(torch.equal(grad, others[name]) for name, grad in grads.items())


# Without a model


def gather(layer, inputs):
    layer.weight.data.copy_(layer.whole)


class Layer(torch.nn.Module):
    """An output layer whose weight is complete only when its hook has run."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.whole = torch.randn(VOCABULARY, 6, generator=generator, dtype=dtype)
        self.weight = torch.nn.Parameter(torch.zeros_like(self.whole))
        self.register_forward_pre_hook(gather)

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        assert runtime_gather_output is False
        return hidden @ (self.weight if weight is None else weight).t(), None


def arguments(**more):
    """What Megatron passes, with arguments that the processor does not read."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(LENGTH, ROWS, 6, generator=generator, dtype=torch.float64)
    passed = {"hidden_states": hidden, "output_layer": Layer(), "output_weight": None, "labels": data()[1]}
    unread = ("input_ids", "position_ids", "attention_mask", "decoder_input", "inference_context", "context")
    passed |= dict.fromkeys((*unread, "packed_seq_params", "runtime_gather_output", "compute_language_model_loss"))
    return passed | {"loss_mask": None, "scale_logits": lambda logits: logits, "config": None} | more


@pytest.mark.parametrize("fused", [True, False])
def test_hooks_of_the_output_layer_run_before_its_weight_is_read(fused):
    passed = arguments()
    layer = passed["output_layer"]
    log_probs, entropy, squares = log_prob_processor(fused=fused, sum_squares=True)(**passed)
    logits = (passed["hidden_states"] @ layer.whole.t()).transpose(0, 1)
    want = log_probs_entropy_squares(logits, data()[1])
    torch.testing.assert_close(torch.stack([log_probs, entropy, squares]), want, rtol=1e-12, atol=1e-12)
    assert "forward" not in vars(layer), "the layer has its own forward again"


def test_gradients_go_to_main_grad_if_megatron_accumulates_there():
    config = type("Config", (), {"gradient_accumulation_fusion": True})
    accumulated = arguments(config=config)
    plain = arguments()
    layer = accumulated["output_layer"]
    layer.weight.main_grad = torch.zeros_like(layer.whole)
    for passed in (accumulated, plain):
        log_prob_processor()(**passed)[0].sum().backward()
    assert torch.equal(layer.weight.main_grad, plain["output_layer"].weight.grad)
    assert layer.weight.grad_added_to_main_grad
    assert not layer.weight.grad.any(), "autograd gets zeros, for Megatron's hook"
    del layer.weight.main_grad
    with torch.no_grad():
        log_prob_processor()(**accumulated)


ERRORS = {
    "labels": ({}, {"labels": torch.zeros(LENGTH, dtype=torch.int64)}),
    "loss_mask": ({}, {"loss_mask": [1]}),
    "scale_logits": ({}, {"scale_logits": torch.tanh}),
    "temperature=0": ({"temperature": 0.0}, {}),
    "support_offsets": ({"support_ids": torch.zeros(1).long(), "support_offsets": torch.tensor([0, 1])}, {}),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument(message):
    settings, changes = ERRORS[message]
    with pytest.raises(ValueError, match=message):
        log_prob_processor(**settings)(**arguments(**changes))
