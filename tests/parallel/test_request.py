"""Requests for log-probs in every form, against log_softmax in float64; values and gradients."""

import dataclasses
import logging

import pytest
import torch
from torch import nn

from megatron_rc.parallel import LogProbRequest
from tests.support.ranks import Layout
from tests.support.softmax_oracle import log_probs_entropy_squares

ROWS = 3
LENGTH = 6
HIDDEN = 4
VOCABULARY = 12
FORMS = ("bs", "sb", "t")
KINDS = ("logits", "hidden states")


class Linear(nn.Module):
    """A linear layer that adds something to its product, with the name of peft's LoRA layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.weight = layer.weight
        self.more = torch.full((VOCABULARY,), 0.1, dtype=torch.float64)

    def forward(self, hidden):
        return self.layer(hidden) + self.more.cumsum(0)


def data(form):
    """(hidden states [b, s, h], output layer, labels and mask in the form's shape)."""
    torch.manual_seed(5)
    hidden = torch.randn(ROWS, LENGTH, HIDDEN, dtype=torch.float64, requires_grad=True)
    layer = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY - 2, (ROWS, LENGTH))
    mask = torch.rand(ROWS, LENGTH) < 0.7
    shape = (-1,) if form == "t" else (ROWS, LENGTH)
    return hidden, layer, labels.view(shape), mask.view(shape)


def in_form(values, form):
    return {"bs": values, "sb": values.transpose(0, 1), "t": values.flatten(0, 1)}[form]


def reference(logits, labels, mask, temperature=1.0, kept=None):
    """Log-probs (over the kept tokens) and entropies, 0 outside of the mask, of logits in the labels' order."""
    scaled = logits.reshape(*labels.shape, -1) / temperature
    return log_probs_entropy_squares(scaled, labels, counted=mask, kept=kept)[:2]


def backward_of(results, inputs):
    """The gradients of a sum that weighs log-probs and entropies differently."""
    return torch.autograd.grad((results[0] * results[0]).sum() + 0.3 * results[1].sum(), inputs, retain_graph=True)


def compare(answer, expected, inputs):
    for got, expected_value in zip(
        [*answer, *backward_of(answer, inputs)], [*expected, *backward_of(expected, inputs)], strict=True
    ):
        torch.testing.assert_close(got, expected_value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_form(form, kind):
    hidden, layer, labels, mask = data(form)
    logits = layer(hidden)
    expected = reference(2 * logits[..., : VOCABULARY - 2], labels, mask, 0.7)
    source = {"logits": in_form(logits, form)}
    if kind == "hidden states":
        source = {"hidden_states": in_form(hidden, form), "output_layer": layer}
    request = LogProbRequest(
        labels=labels,
        layout=form,
        mask=mask.float(),
        vocab_size=VOCABULARY - 2,
        temperature=0.7,
        scale_logits=lambda values: 2 * values,
        **source,
    )
    compare(request.answer(), expected, [hidden, layer.weight])


@pytest.mark.parametrize("kind", KINDS)
def test_kept_tokens(kind):
    hidden, layer, labels, mask = data("bs")
    kept = torch.rand(ROWS * LENGTH, VOCABULARY) < 0.5
    kept.scatter_(1, labels.view(-1, 1), True)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(1).cumsum(0)])
    source = {"logits": layer(hidden)} if kind == "logits" else {"hidden_states": hidden, "output_layer": layer}
    support = {"support_ids": kept.nonzero()[:, 1], "support_offsets": offsets}
    answer = LogProbRequest(labels=labels, layout="bs", mask=mask, **source, **support).answer()
    expected = reference(layer(hidden), labels, mask, kept=kept.view(ROWS, LENGTH, -1))
    compare(answer, expected, [hidden, layer.weight])


def test_a_bias_tied_weights_and_tokens_without_a_label():
    hidden, _, labels, mask = data("sb")
    layer = nn.Linear(HIDDEN, VOCABULARY, dtype=torch.float64)
    tied = torch.randn(VOCABULARY, HIDDEN).double()
    source = {"hidden_states": in_form(hidden, "sb"), "output_layer": layer, "layout": "sb"}
    answer = LogProbRequest(labels=labels.where(mask, -100), output_weight=tied.requires_grad_(), **source).answer()
    compare(answer, reference(hidden @ tied.t() + layer.bias, labels, mask), [hidden, tied, layer.bias])


SOFT_CAP = 0.5


def capped(logits):
    return SOFT_CAP * torch.tanh(logits / SOFT_CAP)


def of_tp_ranks(form, mode, is_sequence_parallel):
    """Differences of log-probs, entropies and this rank's gradients: Megatron's output layer and a whole one."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    hidden, whole, labels, mask = data(form)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=is_sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
    )
    layer = ColumnParallelLinear(
        HIDDEN, VOCABULARY, config=config, init_method=nn.init.zeros_, bias=False, gather_output=False
    )
    rank = parallel_state.get_tensor_model_parallel_rank()
    group = parallel_state.get_tensor_model_parallel_group()
    layer.weight.data.copy_(whole.weight.data.chunk(2)[rank])
    scale = capped if mode == "auto" else None
    expected = reference(whole(hidden) if scale is None else scale(whole(hidden)), labels, mask)
    of_hidden, of_weight = backward_of(expected, [hidden, whole.weight])
    # With sequence parallelism a rank has its share of the tokens, and of their gradients.
    share = torch.zeros(LENGTH, dtype=torch.bool).index_fill(0, torch.arange(LENGTH).chunk(2)[rank], True)
    share = share if is_sequence_parallel else torch.ones_like(share)
    source = {"hidden_states": in_form(hidden[:, share], form), "output_layer": layer, "scale_logits": scale}
    request = {"labels": labels, "layout": form, "mask": mask, **source}
    results = LogProbRequest(**request, tp_group=group).answer(mode)
    of_hidden = of_hidden * share.view(1, -1, 1)
    with pytest.raises(ValueError, match="tp_group has 1 ranks and the output layer is split over 2"):
        LogProbRequest(**request).answer(mode)
    expected = [*expected, of_hidden, of_weight.chunk(2)[rank]]
    results = [*results, *backward_of(results, [hidden, layer.weight])]
    return [(got - want).abs().max().item() for got, want in zip(results, expected, strict=True)]


@pytest.mark.parametrize(
    ("form", "mode", "is_sequence_parallel"),
    [*((form, "strict", False) for form in FORMS), ("sb", "auto", False), ("bs", "strict", True), ("bs", "auto", True)],
)
def test_ranks_that_share_the_vocabulary(ranks, form, mode, is_sequence_parallel):
    for differences in ranks.run(of_tp_ranks, Layout(tp=2), form, mode, is_sequence_parallel):
        assert max(differences) < 1e-12


def test_an_output_layer_that_does_more_is_refused_or_its_logits_are_stored(caplog):
    hidden, layer, labels, mask = data("bs")
    adapted = Linear(layer)
    request = LogProbRequest(labels=labels, layout="bs", mask=mask, hidden_states=hidden, output_layer=adapted)
    with pytest.raises(ValueError, match=r"test_request\.Linear.*mode='auto'"):
        request.answer()
    with caplog.at_level(logging.WARNING, "megatron_rc"):
        answers = [request.answer("auto") for _ in range(2)]
    assert [record.message.count("test_request.Linear") for record in caplog.records] == [1]
    compare(answers[1], reference(adapted(hidden), labels, mask), [hidden, layer.weight])


def test_a_soft_cap_is_refused_or_its_logits_are_stored():
    hidden, layer, labels, mask = data("sb")
    source = {"hidden_states": in_form(hidden, "sb"), "output_layer": layer, "scale_logits": capped}
    request = LogProbRequest(labels=labels, layout="sb", mask=mask, **source)
    with pytest.raises(ValueError, match="scale_logits"):
        request.answer("strict")
    compare(request.answer("auto"), reference(capped(layer(hidden)), labels, mask), [hidden, layer.weight])
    with pytest.raises(ValueError, match=r"scale_logits makes 1\.0 of 1 and 5\.0 of"):
        dataclasses.replace(request, scale_logits=lambda logits: logits.clamp(-5, 5)).answer()


def test_a_changed_layer_is_refused_or_its_logits_are_stored():
    hidden, layer, labels, mask = data("bs")
    request = LogProbRequest(labels=labels, layout="bs", mask=mask, hidden_states=hidden, output_layer=layer)
    handle = layer.register_forward_hook(lambda _layer, _inputs, logits: 3 * logits)
    with pytest.raises(ValueError, match="forward hooks"):
        request.answer()
    compare(request.answer("auto"), reference(layer(hidden), labels, mask), [hidden, layer.weight])
    handle.remove()
    plain = layer.forward
    layer.forward = lambda hidden: plain(hidden) + hidden.sum(-1, keepdim=True) * torch.arange(VOCABULARY)
    with pytest.raises(ValueError, match="another forward"):
        request.answer()
    compare(request.answer("auto"), reference(layer(hidden), labels, mask), [hidden, layer.weight])
    with pytest.raises(ValueError, match="output_weight with a Linear, whose forward takes no weight"):
        dataclasses.replace(request, output_weight=layer.weight).answer("auto")


def test_a_layer_that_gathers_its_logits_is_refused():
    hidden, layer, labels, mask = data("bs")
    layer.forward = lambda hidden: torch.zeros(*hidden.shape[:-1], 2 * VOCABULARY, dtype=torch.float64)
    request = LogProbRequest(labels=labels, layout="bs", mask=mask, hidden_states=hidden, output_layer=layer)
    with pytest.raises(ValueError, match="has 12 rows and makes 24 logits"):
        request.answer("auto")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "logits and hidden_states"),
        ({"hidden_states": torch.zeros(1, 2, 3)}, "output_layer"),
        ({"logits": torch.zeros(1, 2, 3), "layout": "bsh"}, "layout='bsh'"),
        ({"logits": torch.zeros(1, 2, 3), "mode": "try"}, "mode='try'"),
    ],
)
def test_wrong_requests(arguments, message):
    arguments = {"labels": torch.zeros(1, 2, dtype=torch.int64), "layout": "bs"} | arguments
    mode = arguments.pop("mode", "strict")
    with pytest.raises(ValueError, match=message):
        LogProbRequest(**arguments).answer(mode)
