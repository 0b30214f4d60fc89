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
HEADS, WIDTH, ROTATED = 3, 16, 8
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
    """(the rotated tokens, gradient at the tokens)."""
    leaf = tokens.clone().requires_grad_()
    found = rope_utils._apply_rotary_pos_emb_thd(leaf, packed.cu_seqlens_q, angles, cp_group=group, **kind)
    (gradient,) = torch.autograd.grad(found.square().sum(), leaf)
    return found.detach(), gradient


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("lengths", [LENGTHS, (24,)], ids=["several", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_angles_are_those_of_megatron(rank, size, kind, lengths, dtype):
    use_gathered_angles()
    generator = torch.Generator().manual_seed(0)
    layout = packed_layout(lengths, rank, size)
    packed = PackedTokens.of(layout, torch.device("cpu"))
    by_megatron = PackedTokens.of(layout, torch.device("cpu"))
    unknown = by_megatron.cu_seqlens_q.clone()  # Megatron's own function takes what is not registered
    by_megatron.cu_seqlens_q = unknown
    tokens = torch.randn(sum(lengths) // size, HEADS, WIDTH, generator=generator).to(dtype)
    # Width 8 of 16: the rest of a head is not rotated. The angles reach further than the longest sequence.
    angles = torch.randn(max(lengths) + 1, 1, 1, ROTATED, generator=generator)
    group = cp_group(rank, size)
    got = rotated(tokens, packed, angles, group, kind)
    want = rotated(tokens, by_megatron, angles, group, kind)
    assert not torch.equal(got[0], tokens)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_angles_are_gathered_once_for_all_layers_and_anew_for_others():
    use_gathered_angles()
    packed = PackedTokens.of(packed_layout(), torch.device("cpu"))
    tokens = torch.ones(sum(LENGTHS), HEADS, WIDTH)
    first, second = torch.rand(2, max(LENGTHS), 1, 1, ROTATED)
    found = [rotated(tokens, packed, angles, cp_group(0, 1), {})[0] for angles in (first, second, first)]
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def attention(width=WIDTH, value_width=WIDTH, dtype=torch.float32):
    """(Megatron's core attention of one rank, its scale, queries, keys and values)."""
    config = SimpleNamespace(kv_channels=width)
    module = LocalAttention(config, pg_collection=SimpleNamespace(cp=None), softmax_scale=0.3)
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, width), (2, width), (2, value_width))
    given = [torch.randn(sum(LENGTHS), *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return module, given


def attended(module, given, packed):
    """(the outputs, gradients at queries, keys and values)."""
    output = module(*given, packed_seq_params=packed)
    return output.detach(), *torch.autograd.grad(output.square().sum(), given)


@pytest.mark.parametrize("value_width", [WIDTH, 2 * WIDTH], ids=["one width", "wide values"])
def test_sequences_of_equal_length_are_attended_in_one_call(value_width, monkeypatch):
    module, given = attention(value_width=value_width)
    packed = PackedTokens.of(packed_layout(), torch.device("cpu"))
    calls = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def counted(query, *rest, **options):
        calls.append(tuple(query.shape[0:3:2]))
        return plain(query, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    got = attended(module, given, packed)
    assert calls == [(1, 24), (3, 16), (2, 8), (1, 24)], "(sequences, tokens of each)"
    bounds = packed.cu_seqlens_q
    expected = attention_by_sequence(
        *given, bounds, bounds, 24, 24, scale=module.scale, window_size=(-1, 0), enable_gqa=True
    ).flatten(1)
    want = expected.detach(), *torch.autograd.grad(expected.square().sum(), given)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_gpu_gets_all_sequences_at_once_and_the_host_waits_for_none(monkeypatch):
    """On the pretended GPU, with a stand-in for PyTorch's kernel."""
    monkeypatch.setattr(local_layers, "_varlen_function", lambda: attention_by_sequence)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    use_gathered_angles()
    module, given = attention(dtype=torch.bfloat16)
    layout = packed_layout()
    want = attended(module, given, PackedTokens.of(layout, torch.device("cpu")))
    angles = torch.rand(max(LENGTHS), 1, 1, ROTATED)
    with far_device() as device:
        there = [values.detach().to(GPU).requires_grad_() for values in given]
        positions = layout.positions().to(GPU)
        gpu_angles = angles.to(GPU)
        device.waits.clear()
        packed = PackedTokens.of(layout, GPU, positions)
        turned = rope_utils._apply_rotary_pos_emb_thd(
            there[0], packed.cu_seqlens_q, gpu_angles, cp_group=cp_group(0, 1)
        )
        turned.sum().backward()
        got = attended(module, there, packed)
        assert not device.waits
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-2, atol=1e-2)


def test_what_the_kernel_cannot_compute_goes_by_runs(monkeypatch):
    monkeypatch.setattr(local_layers, "_varlen_function", lambda: attention_by_sequence)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))

    def suits(dtype=torch.bfloat16, width=WIDTH, value_width=WIDTH):
        with far_device():
            query, value = (torch.ones(1, 1, size, dtype=dtype, device=GPU) for size in (width, value_width))
            return local_layers.varlen_attention(query, value) is not None

    assert suits()
    assert not suits(dtype=torch.float32)
    assert not suits(value_width=8)
    assert not suits(width=512, value_width=512)
    assert local_layers.varlen_attention(*torch.ones(2, 1, 1, WIDTH, dtype=torch.bfloat16)) is None, "on a CPU"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not suits()


def test_the_kernel_of_this_pytorch_has_the_arguments():
    local_layers._varlen_function.cache_clear()
    found = local_layers._varlen_function()
    assert found is not None
    names = inspect.signature(attention_by_sequence).parameters
    assert list(names)[:7] == list(inspect.signature(found).parameters)[:7]
