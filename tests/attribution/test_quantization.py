"""Rounded weights: against loops over elements, on shards, and as an engine joins its projections.

``tests/vllm/check_attribution.py`` compares them with vLLM's own functions.
"""

import pytest
import torch

from megatron_rc.attribution import (
    bf16,
    fp8_per_block,
    fp8_per_channel,
    fp8_per_tensor,
    int8_per_channel,
    quantized,
)

# All finite values of fp8 e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", Table 1): three bits of
# mantissa, exponents from -6 to 8, subnormals in steps of 2⁻⁹, at most 448.
GRID = sorted(
    {mantissa / 8 * 2.0**-6 for mantissa in range(8)}
    | {(1 + mantissa / 8) * 2.0**exponent for exponent in range(-6, 9) for mantissa in range(8)} - {480.0}
)


def nearest(value):
    """The values of the grid that are nearest; two at a midpoint."""
    distances = [abs(abs(value) - each) for each in GRID]
    least = min(distances)
    return [each if value >= 0 else -each for each, distance in zip(GRID, distances, strict=True) if distance == least]


def make_weight(rows=6, columns=10, seed=0):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight[1] *= 1e-3
    weight[2] = 0
    return weight.bfloat16()


def scales_of_elements(weight, kind):
    """The largest absolute value of the group of each element."""
    magnitude = weight.float().abs()
    if kind == "tensor":
        return magnitude.max().expand(weight.shape)
    if kind == "channel":
        return magnitude.max(dim=1, keepdim=True).values.expand(weight.shape)
    largest = torch.empty(weight.shape)
    for row in range(0, weight.shape[0], 4):
        for column in range(0, weight.shape[1], 4):
            largest[row : row + 4, column : column + 4] = magnitude[row : row + 4, column : column + 4].max()
    return largest


FP8 = {"tensor": fp8_per_tensor, "channel": fp8_per_channel, "block": lambda weight: fp8_per_block(weight, block=4)}


@pytest.mark.parametrize("kind", FP8)
def test_fp8_is_the_nearest_value_of_the_scaled_grid(kind):
    weight = make_weight()
    rounded = FP8[kind](weight)
    largest = scales_of_elements(weight, kind)
    for value, got, most in zip(weight.flatten(), rounded.flatten(), largest.flatten(), strict=True):
        scale = float(most) / 448
        if kind == "channel":
            scale = max(scale, 1 / (448 * 512))  # vLLM's least scale of a row
        if not scale:
            assert got == 0
            continue
        # Rounding of the quotient itself may decide between two neighbours that are equally near.
        assert min(abs(float(got) / scale - each) for each in nearest(float(value) / scale)) < 1e-3


def test_int8_is_the_nearest_of_255_levels_of_each_row():
    weight = make_weight().float()
    rounded = int8_per_channel(weight)
    for row, got in zip(weight, rounded, strict=True):
        step = float(row.abs().max()) / 127
        assert float((row - got).abs().max()) <= step / 2 * (1 + 1e-5)
        if step:
            levels = got / step
            torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-4)


def test_bf16_and_weights_of_zero():
    weight = make_weight()
    assert torch.equal(bf16(weight), weight.float())
    zero = torch.zeros(3, 5)
    for rounding in (fp8_per_tensor, fp8_per_channel, fp8_per_block, int8_per_channel):
        assert torch.equal(rounding(zero), zero)


@pytest.mark.parametrize("rounding", [fp8_per_tensor, fp8_per_channel, int8_per_channel])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_round_like_the_whole(rounding, dim):
    """If the largest values are those over all shards; rows that are whole need no other rank."""
    weight = make_weight()
    shards = weight.chunk(2, dim)
    per_channel = rounding is not fp8_per_tensor

    def over_ranks(largest):
        whole = weight.abs().amax(1, keepdim=True) if per_channel else weight.abs().amax()
        return whole.to(largest.dtype)

    # Each rank has the rows of its shard alone if rows are split.
    reduce = None if per_channel and dim == 0 else over_ranks
    joined = torch.cat([rounding(shard, reduce) for shard in shards], dim)
    assert torch.equal(joined, rounding(weight))
    if reduce is not None:
        assert not torch.equal(torch.cat([rounding(shard) for shard in shards], dim), joined)


def test_an_engine_joins_projections_and_leaves_the_rest_in_bf16():
    layer = "model.layers.0."
    names = [f"{layer}self_attn.{part}_proj.weight" for part in "qkvo"]
    names += [f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    others = ["model.embed_tokens.weight", "lm_head.weight", f"{layer}input_layernorm.weight"]
    weights = {name: (index + 1) * make_weight(seed=index).float() for index, name in enumerate([*names, *others])}
    weights[others[-1]] = weights[others[-1]][0]

    engine = quantized(weights, fp8_per_tensor)
    assert set(engine) == set(weights)
    for joined in (names[:3], names[3:4], names[4:6], names[6:]):
        expected = fp8_per_tensor(torch.cat([weights[name] for name in joined]).bfloat16())
        assert torch.equal(torch.cat([engine[name] for name in joined]), expected)
    assert not torch.equal(engine[names[0]], fp8_per_tensor(weights[names[0]].bfloat16()))
    for name in others:
        assert torch.equal(engine[name], bf16(weights[name]))
