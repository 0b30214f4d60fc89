"""The divergence as a result of the output processor, through logits and from hidden states, in float64."""

import itertools

import pytest
import torch

from megatron_rc.parallel import TeacherStates, TeacherTopK, log_prob_processor
from tests.parallel.test_processor import LENGTH, ROWS, TEMPERATURE, VOCABULARY, arguments, data, support
from tests.support.divergence_oracle import divergence, of_top_k

TEACHER_HIDDEN = 9
TEACHER_TEMPERATURE = 1.3
FACTOR = 0.5  # of the student's logits
TEACHER_FACTOR = 2.0
BETA = 0.3
FEW = 3


def of_teacher():
    """(hidden states [s, b, h_T], weight, bias)."""
    generator = torch.Generator().manual_seed(12)
    shapes = ((LENGTH, ROWS, TEACHER_HIDDEN), (VOCABULARY, TEACHER_HIDDEN), (VOCABULARY,))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def call(fused, teacher, **options):
    """(divergence, gradients of hidden states and weight, what Megatron passed)."""
    passed = arguments(scale_logits=lambda logits: logits * FACTOR)
    passed["hidden_states"].requires_grad_()
    processor = log_prob_processor(
        fused=fused, temperature=TEMPERATURE, sum_squares=True, chunk_size=5, teacher=teacher, **options
    )
    results = processor(**passed)
    without = log_prob_processor(fused=fused, temperature=TEMPERATURE, sum_squares=True, chunk_size=5, **options)(
        **arguments(scale_logits=lambda logits: logits * FACTOR)
    )
    assert all(torch.equal(value, other) for value, other in zip(results[:-1], without, strict=True))
    values = results[-1]
    coefficients = data()[4][0]
    gradients = torch.autograd.grad(
        (coefficients * values).sum(), [passed["hidden_states"], passed["output_layer"].weight]
    )
    return values.detach(), gradients, passed


def assert_same(results, wanted_of):
    """``wanted_of`` makes the divergences, [b, s], of the student's logits."""
    values, gradients, passed = results
    hidden = passed["hidden_states"].detach().requires_grad_()
    weight = passed["output_layer"].whole.clone().requires_grad_()
    logits = (hidden @ weight.t()).transpose(0, 1) * FACTOR / TEMPERATURE
    expected = torch.where(passed["labels"] != -100, wanted_of(logits), 0)
    wanted_gradients = torch.autograd.grad((data()[4][0] * expected).sum(), [hidden, weight])
    torch.testing.assert_close(values, expected.detach(), rtol=1e-11, atol=1e-12)
    for got, want in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("with_kept", [False, True])
@pytest.mark.parametrize("temperature", [None, TEACHER_TEMPERATURE])
def test_a_teachers_hidden_states_give_the_divergence_of_the_whole_vocabulary(fused, with_kept, temperature):
    hidden, weight, bias = of_teacher()
    teacher = TeacherStates(
        hidden_states=hidden,
        weight=weight,
        bias=bias,
        kind="jsd",
        beta=BETA,
        temperature=temperature,
        scale_logits=lambda logits: logits * TEACHER_FACTOR,
    )
    kept = data()[3]

    def wanted(logits):
        teacher_logits = (hidden @ weight.t() + bias).transpose(0, 1) * TEACHER_FACTOR / (temperature or TEMPERATURE)
        return divergence("jsd", logits, teacher_logits, beta=BETA, kept=kept if with_kept else None)

    assert_same(call(fused, teacher, **support(kept) if with_kept else {}), wanted)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tail", ["sampled", "rest", "none"])
def test_a_teachers_few_tokens_are_in_the_order_of_the_labels(fused, tail):
    teacher_logits = torch.randn(ROWS, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(3)).double()
    log_probs = teacher_logits.log_softmax(-1)
    # Another number of tokens at each position.
    counts = torch.arange(ROWS * LENGTH) % (FEW + 1)
    ids = [row.topk(int(count)).indices for row, count in zip(log_probs.flatten(0, 1), counts, strict=True)]
    known = [row[of_row] for row, of_row in zip(log_probs.flatten(0, 1), ids, strict=True)]
    labels = data()[1].clamp(min=0)
    of_labels = log_probs.gather(2, labels.unsqueeze(2)).squeeze(2)
    teacher = TeacherTopK(
        ids=torch.cat(ids),
        offsets=torch.tensor([0, *counts.tolist()]).cumsum(0),
        log_probs=torch.cat(known),
        tail=tail,
        label_log_probs=of_labels if tail == "sampled" else None,
    )

    def wanted(logits):
        rows = []
        for number, place in enumerate(itertools.product(range(ROWS), range(LENGTH))):
            of_position = ids[number].tolist()
            label = int(labels[place])
            rows.append(of_top_k(tail, "reverse_kl", logits[place], teacher_logits[place], of_position, label=label))
        return torch.stack(rows).view(ROWS, LENGTH)

    assert_same(call(fused, teacher), wanted)


def test_what_cannot_be_is_refused():
    few = {
        "ids": torch.zeros(1, dtype=torch.int64),
        "offsets": torch.tensor([0, 1]),
        "log_probs": torch.zeros(1),
        "tail": "rest",
    }
    hidden, weight, _ = of_teacher()
    for make, message in (
        (lambda: TeacherTopK(**few | {"tail": "others"}), "tail='others'"),
        (lambda: TeacherTopK(**few | {"ids": [0]}), "ids is a list"),
        (lambda: TeacherTopK(**few, beta=0.5), r"beta=0\.5"),
        (lambda: TeacherStates(hidden_states=hidden, weight=weight, kind="kl"), "kind='kl'"),
        (lambda: TeacherStates(hidden_states=None, weight=weight), "hidden_states is a NoneType"),
        (lambda: log_prob_processor(teacher=TeacherTopK(**few), **support(data()[3])), "support_ids"),
        (lambda: log_prob_processor(teacher=TeacherTopK(**few))(**arguments()), "teacher_offsets has 2 numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    tanh = TeacherStates(hidden_states=hidden, weight=weight, scale_logits=torch.tanh)
    with pytest.raises(ValueError, match="scale_logits"):
        log_prob_processor(teacher=tanh)(**arguments())
    log_prob_processor(teacher=tanh, fused=False)(**arguments())


def test_both_gradients_of_the_weight_go_to_main_grad():
    hidden, weight, _ = of_teacher()
    teacher = TeacherStates(hidden_states=hidden, weight=weight)
    config = type("Config", (), {"gradient_accumulation_fusion": True})
    accumulated = arguments(config=config)
    plain = arguments()
    layer = accumulated["output_layer"]
    layer.weight.main_grad = torch.zeros_like(layer.whole)
    for passed in (accumulated, plain):
        log_probs, _, values = log_prob_processor(teacher=teacher)(**passed)
        (log_probs.sum() + values.sum()).backward()
    torch.testing.assert_close(layer.weight.main_grad, plain["output_layer"].weight.grad, rtol=1e-12, atol=1e-12)
    assert not layer.weight.grad.any(), "autograd gets zeros, for Megatron's hook"
