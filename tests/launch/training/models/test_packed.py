"""The attention of packed tokens: rotary embeddings by one gather, sequences of equal length in one call."""

import inspect
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from megatron_rc.launch.training.models import local_layers
from megatron_rc.launch.training.models.local_layers import LocalAttention, PackedTokens
from megatron_rc.launch.training.models.packed_rope import use_gathered_angles
from megatron_rc.parallel.layout import SequenceLayout
from tests.support.by_sequence import attention_by_sequence
from tests.support.far_device import GPU, far_device

LENGTHS = (24, 16, 16, 16, 8, 8, 24)
HEADS = 3
WIDTH = 16  # of a head
ROTATED = 8  # entries of a head that are rotated
# Megatron-Core has renamed the argument for latent attention, whose published weights lie interleaved.
PARAMETERS = inspect.signature(rope_utils._apply_rotary_pos_emb_bshd).parameters
LATENT = "mla_rotary_interleaved" if "mla_rotary_interleaved" in PARAMETERS else "multi_latent_attention"
KINDS = {"llama": {}, "interleaved": {"rotary_interleaved": True}, "latent, YaRN": {LATENT: True, "mscale": 1.3}}


def packed_layout(lengths=LENGTHS, rank=0, size=1):
    """The layout of whole lengths on one context-parallel rank."""
    bounds = [0, *accumulate(length // size for length in lengths)]
    return SequenceLayout.packed(bounds, cp_rank=rank, cp_size=size)


def cp_group(rank, size):
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def rotated(tokens, packed, angles, group, kind):
    """Return the rotated tokens, and the gradient of the sum of their squares at the tokens."""
    leaf = tokens.clone().requires_grad_()
    output = rope_utils._apply_rotary_pos_emb_thd(leaf, packed.cu_seqlens_q, angles, cp_group=group, **kind)
    (gradient,) = torch.autograd.grad(output.square().sum(), leaf)
    return output.detach(), gradient


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("lengths", [LENGTHS, (24,)], ids=["several", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_angles_are_those_of_megatron(rank, size, kind, lengths, dtype):
    use_gathered_angles()
    generator = torch.Generator().manual_seed(0)
    layout = packed_layout(lengths, rank, size)
    registered = PackedTokens.of(layout, torch.device("cpu"))
    # Megatron's own function rotates tokens whose bounds are not registered: a copy of the bounds is not.
    unregistered = PackedTokens.of(layout, torch.device("cpu"))
    unregistered.cu_seqlens_q = unregistered.cu_seqlens_q.clone()
    tokens = torch.randn(sum(lengths) // size, HEADS, WIDTH, generator=generator).to(dtype)
    # Width 8 of 16: the rest of a head is not rotated. The angles reach further than the longest sequence.
    angles = torch.randn(max(lengths) + 1, 1, 1, ROTATED, generator=generator)
    group = cp_group(rank, size)
    output, gradient = rotated(tokens, registered, angles, group, kind)
    megatron_output, megatron_gradient = rotated(tokens, unregistered, angles, group, kind)
    assert not torch.equal(output, tokens)
    assert torch.equal(output, megatron_output)
    assert torch.equal(gradient, megatron_gradient)


def test_angles_are_gathered_once_for_all_layers_and_anew_for_others():
    use_gathered_angles()
    packed = PackedTokens.of(packed_layout(), torch.device("cpu"))
    tokens = torch.ones(sum(LENGTHS), HEADS, WIDTH)
    first, second = torch.rand(2, max(LENGTHS), 1, 1, ROTATED)
    outputs = []
    for angles in (first, second, first):
        output, _ = rotated(tokens, packed, angles, cp_group(rank=0, size=1), kind={})
        outputs.append(output)
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def attention(width=WIDTH, value_width=WIDTH, dtype=torch.float32):
    """Return the core attention of a process without context parallelism, and [queries, keys, values] for it."""
    config = SimpleNamespace(kv_channels=width, window_size=None, window_attn_skip_freq=None, softmax_type="vanilla")
    module = LocalAttention(config, 1, pg_collection=SimpleNamespace(cp=None, tp=None), softmax_scale=0.3)
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, width), (2, width), (2, value_width))  # (heads, width) of queries, keys and values
    inputs = [torch.randn(sum(LENGTHS), *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return module, inputs


def with_gradients(output, inputs):
    """Return the output, and the gradients of the sum of its squares at the inputs."""
    return [output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]


def attended(module, inputs, packed):
    """Return the outputs of the attention, and the gradients at queries, keys and values."""
    return with_gradients(module(*inputs, packed_seq_params=packed), inputs)


@pytest.mark.parametrize("value_width", [WIDTH, 2 * WIDTH], ids=["one width", "wide values"])
def test_sequences_of_equal_length_are_attended_in_one_call(value_width, monkeypatch):
    module, inputs = attention(value_width=value_width)
    packed = PackedTokens.of(packed_layout(), torch.device("cpu"))
    calls = []
    scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention

    def counted(query, *rest, **options):
        num_sequences, _, num_tokens, _ = query.shape
        calls.append((num_sequences, num_tokens))
        return scaled_dot_product_attention(query, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    results = attended(module, inputs, packed)
    assert calls == [(1, 24), (3, 16), (2, 8), (1, 24)], "(sequences, tokens of each)"

    bounds = packed.cu_seqlens_q
    expected_output = attention_by_sequence(
        *inputs, bounds, bounds, 24, 24, scale=module.scale, window_size=(-1, 0), enable_gqa=True
    ).flatten(1)
    expected_results = with_gradients(expected_output, inputs)
    for result, expected in zip(results, expected_results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def test_a_gpu_gets_all_sequences_at_once_and_the_host_waits_for_none(monkeypatch):
    """On the pretended GPU, with a stand-in for PyTorch's kernel."""
    monkeypatch.setattr(local_layers, "_varlen_function", lambda: attention_by_sequence)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    use_gathered_angles()
    module, inputs = attention(dtype=torch.bfloat16)
    layout = packed_layout()
    cpu_results = attended(module, inputs, PackedTokens.of(layout, torch.device("cpu")))
    angles = torch.rand(max(LENGTHS), 1, 1, ROTATED)

    with far_device() as device:
        gpu_inputs = [values.detach().to(GPU).requires_grad_() for values in inputs]
        positions = layout.positions().to(GPU)
        gpu_angles = angles.to(GPU)
        device.waits.clear()
        packed = PackedTokens.of(layout, GPU, positions)
        queries = gpu_inputs[0]
        rotated_queries = rope_utils._apply_rotary_pos_emb_thd(
            queries, packed.cu_seqlens_q, gpu_angles, cp_group=cp_group(rank=0, size=1)
        )
        rotated_queries.sum().backward()
        gpu_results = attended(module, gpu_inputs, packed)
        assert not device.waits

    for gpu_result, cpu_result in zip(gpu_results, cpu_results, strict=True):
        torch.testing.assert_close(gpu_result.cpu(), cpu_result, rtol=1e-2, atol=1e-2)


def test_what_the_kernel_cannot_compute_goes_by_runs(monkeypatch):
    monkeypatch.setattr(local_layers, "_varlen_function", lambda: attention_by_sequence)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))

    def suits(dtype=torch.bfloat16, width=WIDTH, value_width=WIDTH):
        """Return whether the kernel computes the attention of one token on the pretended GPU."""
        with far_device():
            query = torch.ones(1, 1, width, dtype=dtype, device=GPU)
            value = torch.ones(1, 1, value_width, dtype=dtype, device=GPU)
            return local_layers.varlen_attention(query, value) is not None

    assert suits()
    assert not suits(dtype=torch.float32)
    assert not suits(value_width=8)
    assert not suits(width=512, value_width=512)
    cpu_query, cpu_value = torch.ones(2, 1, 1, WIDTH, dtype=torch.bfloat16)
    assert local_layers.varlen_attention(cpu_query, cpu_value) is None, "on a CPU"
    # A GPU before Ampere.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not suits()


def test_the_kernel_of_this_pytorch_has_the_arguments():
    local_layers._varlen_function.cache_clear()
    kernel = local_layers._varlen_function()
    assert kernel is not None
    expected_names = list(inspect.signature(attention_by_sequence).parameters)
    kernel_names = list(inspect.signature(kernel).parameters)
    assert kernel_names[:7] == expected_names[:7]
