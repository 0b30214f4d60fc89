"""Attention with sinks and windows, padded and packed, against a softmax in float64 that is written out."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rc.launch.training.models.local_layers import LocalAttention, PackedTokens
from megatron_rc.parallel.layout import SequenceLayout

HEADS = 6
GROUPS = 2
WIDTH = 8  # of a head
SCALE = 0.4
LENGTHS = (9, 9, 5, 1)
# Megatron's number of keys before the query's own.
KEYS_BEFORE = 3


def make_attention(layer_number, softmax_type, has_window):
    """The attention of a layer; every third one has full attention."""
    config = SimpleNamespace(
        kv_channels=WIDTH,
        num_attention_heads=HEADS,
        window_size=(KEYS_BEFORE, 0) if has_window else None,
        window_attn_skip_freq=3,
        softmax_type=softmax_type,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=True,
        init_method=torch.nn.init.normal_,
    )
    torch.manual_seed(3)
    return LocalAttention(config, layer_number, pg_collection=SimpleNamespace(cp=None, tp=None), softmax_scale=SCALE)


def make_inputs(*shape):
    generator = torch.Generator().manual_seed(4)
    heads = (HEADS, GROUPS, GROUPS)
    return [torch.randn(*shape, number, WIDTH, generator=generator).requires_grad_() for number in heads]


def expected_attention(query, key, value, sinks, window):
    """Outputs of one sequence, [s, heads · d], of float64 inputs [s, heads, d]; a loop over queries and heads."""
    rows = []
    for position in range(query.shape[0]):
        first = 0 if window is None else max(0, position - window + 1)
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            weights = (SCALE * key[first : position + 1, group] @ query[position, head]).exp()
            total = weights.sum()
            if sinks is not None:
                total = total + sinks[head].exp()
            heads.append(weights / total @ value[first : position + 1, group])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def compare(module, inputs, run, expected, upstream):
    """Compare outputs and gradients, those of the sinks included, with the float64 ones."""
    leaves = [*inputs, *module.parameters()]
    output = run(*inputs)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-6)
    results = torch.autograd.grad((output * upstream).sum(), leaves)
    wanted = torch.autograd.grad((expected * upstream).sum(), leaves)
    for gradient, wanted_gradient in zip(results, wanted, strict=True):
        assert wanted_gradient.abs().max() > 0
        torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=1e-5)


# Layer 3 has full attention.
KINDS = [(1, "learnable", True), (3, "learnable", True), (2, "vanilla", True), (1, "learnable", False)]


@pytest.mark.parametrize(("layer_number", "softmax_type", "has_window"), KINDS)
def test_padded_and_packed_attention_is_the_softmax_with_its_sinks(layer_number, softmax_type, has_window):
    module = make_attention(layer_number, softmax_type, has_window)
    sinks = module.softmax_offset
    assert (sinks is None) == (softmax_type == "vanilla")
    assert sinks is None or sinks.tensor_model_parallel
    doubles = None if sinks is None else sinks.double()
    window = KEYS_BEFORE + 1 if has_window and layer_number != 3 else None
    generator = torch.Generator().manual_seed(5)

    inputs = make_inputs(11, 2)
    sequences = [[values[:, row].double() for values in inputs] for row in range(2)]
    expected = torch.stack([expected_attention(*values, doubles, window) for values in sequences], dim=1)
    compare(module, inputs, module, expected, torch.randn(11, 2, HEADS * WIDTH, generator=generator))

    bounds = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    packed = PackedTokens.of(SequenceLayout.packed(bounds), torch.device("cpu"))
    inputs = make_inputs(sum(LENGTHS))
    sequences = zip(*(values.double().split(LENGTHS) for values in inputs), strict=True)
    expected = torch.cat([expected_attention(*values, doubles, window) for values in sequences])

    def run(*values):
        return module(*values, packed_seq_params=packed)

    compare(module, inputs, run, expected, torch.randn(sum(LENGTHS), HEADS * WIDTH, generator=generator))
