"""The two forms of the token pass: buffers, which a CPU takes, give what the expressions give, to the last bit."""

import dataclasses
import math

import pytest
import torch

from megatron_rc.correction.token_pass import dispatch
from tests.support.correction_cases import CASES, make_batch
from tests.support.correction_comparison import correct, pack, use_blocks


def both_forms(monkeypatch, name, batch, **more):
    """(by buffers, by expressions), and that they are two."""
    used = []
    for form in ("BufferedBlock", "ExpressionBlock"):
        right = getattr(dispatch, form)
        monkeypatch.setattr(dispatch, form, lambda *given, form=form, right=right: used.append(form) or right(*given))
    found = []
    for buffered in (True, False):
        monkeypatch.setattr(dispatch, "takes_buffers", lambda device, buffered=buffered: buffered)
        used.clear()
        found.append(correct(name, batch, **more))
        assert set(used) == {"BufferedBlock" if buffered else "ExpressionBlock"}
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("num_tokens", [37, 10**6])
def test_both_forms_give_the_same(name, dtype, packed, num_tokens, monkeypatch):
    """With NaN wherever no token counts."""
    use_blocks(monkeypatch, num_tokens)
    batch, more = make_batch(CASES[name], 5), {}
    assert batch.train[~batch.mask].isnan().all()
    batch = dataclasses.replace(batch, train=batch.train.to(dtype), rollout=batch.rollout.to(dtype))
    if packed:
        batch, more["layout"], _ = pack(batch)
    buffered, plain = both_forms(monkeypatch, name, batch, **more)
    assert torch.equal(buffered.header, plain.header)
    assert torch.equal(buffered.mask, plain.mask)
    assert buffered.weights is None or torch.equal(buffered.weights, plain.weights)
    assert torch.equal(buffered.sequence_lengths, plain.sequence_lengths)


@pytest.mark.parametrize("length", [1024, 1031, 2048])
def test_both_forms_add_up_long_rows_alike(length, monkeypatch):
    """Runs that float32 adds up, and one that it does not; log-probs that are unusable in every way."""
    batch = make_batch(CASES["bad tokens"], 1)
    repeats = math.ceil(length / batch.mask.shape[1])
    wide = {name: getattr(batch, name).repeat(1, repeats)[:, :length] for name in ("train", "rollout", "mask")}
    wide = {name: value.float() if value.is_floating_point() else value for name, value in wide.items()}
    buffered, plain = both_forms(monkeypatch, "bad tokens", dataclasses.replace(batch, **wide))
    torch.testing.assert_close(buffered.header, plain.header, rtol=1e-12, atol=0)
    assert torch.equal(buffered.mask, plain.mask)


def test_a_cpu_takes_buffers_and_a_gpu_expressions():
    assert dispatch.takes_buffers(torch.device("cpu"))
    assert not dispatch.takes_buffers(torch.device("cuda", 1))


@pytest.mark.parametrize("names", [("mask",), ("train", "rollout"), ("mask", "train", "rollout")], ids="+".join)
def test_both_forms_take_tokens_that_lie_transposed_in_memory(names, monkeypatch):
    """Megatron's tensors are [s, b]: their transposes are [b, s], and not contiguous."""
    batch = make_batch(CASES["token"], 5)
    turned = {name: getattr(batch, name).t().contiguous().t() for name in names}
    assert not any(value.is_contiguous() for value in turned.values())
    want = correct("token", batch)
    for got in both_forms(monkeypatch, "token", dataclasses.replace(batch, **turned)):
        assert torch.equal(got.header, want.header)
        assert torch.equal(got.mask, want.mask)
        assert torch.equal(got.weights, want.weights)
