"""Norms and attention for GPTModel without Transformer Engine.

Megatron's local norms refuse sequence parallelism, and its local attention refuses context parallelism; these modules
support both exactly, on any device.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, NamedTuple, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_rc.launch.training.models import packed_rope
from megatron_rc.launch.training.models.split_over_tp import SplitOverTp
from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.parallel.layout import SequenceLayout, shard_positions


class Run(NamedTuple):
    """Neighbouring sequences of one length in packed tokens."""

    number: int  # of sequences
    length: int  # local tokens of each

    @property
    def tokens(self) -> int:
        """Local tokens of all of them."""
        return self.number * self.length

    def rows(self, values: Tensor) -> Tensor:
        """[n, tokens of a sequence, heads, d], from its local tokens [t/cp, heads, d], or all [cp, t/cp, heads, d]."""
        if values.dim() == 3:
            return values.view(self.number, self.length, *values.shape[1:])
        size, _, *rest = values.shape
        by_rank = values.view(size, self.number, self.length, *rest)
        return by_rank.transpose(0, 1).reshape(self.number, size * self.length, *rest)


@dataclass
class PackedTokens(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of packed sequences, with the layout of this rank's tokens.

    Attributes:
        layout: this rank's tokens.
        masks: masks of this micro-batch, by local length and window; all layers share them.
    """

    layout: SequenceLayout | None = None
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: SequenceLayout, device: torch.device, positions: Tensor | None = None) -> PackedTokens:
        """Describe a packed layout; padding counts as tokens of its sequence, which the causal mask makes harmless.

        ``positions``, [t/cp] int64 on the device, are ``layout.positions()``, if they are there already.
        """
        bounds = torch.tensor([0, *accumulate(layout.full_lengths)], dtype=torch.int32)
        # The host does not wait until a GPU has done its earlier work.
        bounds = bounds.to(device, non_blocking=True)
        if positions is None:
            positions = layout.positions().to(device, non_blocking=True)
        packed_rope.register(bounds, positions)
        # With the sum of all lengths, Megatron would let rotary positions run on from sequence to sequence.
        longest = max(layout.full_lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            layout=layout,
        )

    @functools.cached_property
    def runs(self) -> list[Run]:
        """The sequences, in their order, by neighbours of equal length: a bin is sorted by length."""
        if self.layout is None:
            raise ValueError("packed tokens need packed_seq_params=PackedTokens.of(layout)")
        lengths = [length // self.layout.cp_size for length in self.layout.full_lengths]
        return [Run(number=len(list(equal)), length=length) for length, equal in groupby(lengths)]

    def mask(self, local_length: int, rank: int, size: int, window: int | None, device: torch.device) -> Tensor:
        """The causal mask of a sequence with so many tokens on a context-parallel rank: see ``_zigzag_mask``."""
        key = (local_length, window)
        if key not in self.masks:
            self.masks[key] = _zigzag_mask(local_length, rank, size, window, device)
        return self.masks[key]


class LocalNorm:
    """Builds torch's RMSNorm or LayerNorm from the arguments that Megatron gives to a norm.

    It is a class, because Megatron's specs call classes but not functions. Under sequence parallelism each rank sees
    its own tokens, so the weights' gradients are partial sums. The attribute ``sequence_parallel`` of a parameter makes
    ``finalize_model_grads`` sum them over the TP group.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        """Build the norm ``config.normalization`` over the last dimension of ``hidden_size``."""
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        norm: torch.nn.Module = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def use_local_layers(layer: Any, config: TransformerConfig) -> None:
    """Put this file's modules into Megatron's spec of a local layer."""
    layer.input_layernorm = layer.pre_mlp_layernorm = LocalNorm
    attention = layer.self_attention.submodules
    attention.core_attention = LocalAttention
    if config.multi_latent_attention:
        layer.self_attention.module = LocalLatentAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.kv_layernorm = LocalNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = LocalNorm


class LocalLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Multi-latent attention with unsharded projections to the latents, as with Transformer Engine.

    Megatron's local layer shards them, and the backward of its gather loses the gradients of other TP ranks' heads.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.q_lora_rank)
        self.linear_kv_down_proj = WholeLinear(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The modules of the spec, unchanged.

        For queries without a latent, megatron-core 0.19 would add a norm that published models do not have.
        """
        described: dict[str, Any] = vars(submodules)
        return described


class WholeLinear(torch.nn.Module):
    """A linear layer without a bias, with the same weight on all TP ranks.

    Its gradients under sequence parallelism are partial sums, as in :class:`LocalNorm`.
    """

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.empty(width, config.hidden_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        if config.perform_initialization:
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """The product ``[s, b, width]``, and None in the place of a bias."""
        return torch.nn.functional.linear(hidden, self.weight), None


class LocalAttention(SplitOverTp):
    """Causal scaled-dot-product attention over padded or packed sequences, sharded in zigzag over the CP group.

    Each rank gathers the keys and values of whole sequences; the backward is a reduce-scatter. A query sees the keys up
    to its own position in its own sequence, or the last ones of them in a layer with a window.

    With ``--softmax-type learnable`` each head has a sink, a number that stands beside a query's scores in the softmax
    and has no value: exp(score_j) / (exp(sink) + Σ_i exp(score_i)). The sinks are the parameter ``softmax_offset``,
    [heads/tp], as in Megatron's own attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        pg_collection: Any,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.cp_group = pg_collection.cp
        self.tp_group = pg_collection.tp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            # Megatron counts the keys before the query's own.
            self.window = config.window_size[0] + 1
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            self.softmax_offset = _make_sinks(config, group_size(self.tp_group))

    @property
    def needs_mask(self) -> bool:
        """Whether a query sees other keys than those up to its own position."""
        return self.window is not None or self.softmax_offset is not None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        packed_seq_params: PackedTokens | None = None,
        **_: Any,
    ) -> Tensor:
        """Attention of this rank's queries over the keys and values of all CP ranks.

        ``query`` is [s/cp, b, heads/tp, d], ``key`` and ``value`` are [s/cp, b, groups/tp, d]; packed, [t/cp, ...]
        without b. With multi-latent attention the values may have another d, which the result has too.
        ``attention_mask`` is ignored, because the mask is causal and padding is on the right. Returns
        [s/cp, b, heads/tp · d], packed [t/cp, heads/tp · d].
        """
        size = group_size(self.cp_group)
        if size > 1:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            key = gather(key, group=self.cp_group)
            value = gather(value, group=self.cp_group)
        if query.dim() == 4:
            mask = None
            if size > 1 or self.needs_mask:
                mask = _zigzag_mask(query.shape[0], group_rank(self.cp_group), size, self.window, query.device)
            by_sequence = [values.transpose(0, 1) for values in (query, key, value)]
            return self._attend(*by_sequence, mask=mask).transpose(0, 1).flatten(2)
        if packed_seq_params is None:
            raise ValueError("packed tokens need packed_seq_params=PackedTokens.of(layout)")
        return self._attend_packed(query, key, value, packed_seq_params)

    def _attend_packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedTokens) -> Tensor:
        """Attention of packed tokens: [t/cp, heads/tp · d], from the keys and values [t, groups/tp, d].

        All sequences in one call, if PyTorch has a kernel for that, and there are no sinks and no context parallelism.
        Else one call for neighbours of equal length: a mask over all packed tokens would compute the products of
        different sequences too.
        """
        size = group_size(self.cp_group)
        rank = group_rank(self.cp_group)
        # PyTorch's kernel for packed sequences has no sinks.
        if size == 1 and self.softmax_offset is None:
            attend_all = varlen_attention(query, value)
            if attend_all is not None:
                return self._attend_at_once(attend_all, query, key, value, packed).flatten(1)
        num_tokens = [run.tokens for run in packed.runs]
        queries = query.split(num_tokens)
        if size > 1:
            # Gathered keys lie one rank after the other: [cp, t/cp, groups/tp, d].
            key = key.unflatten(0, (size, -1))
            value = value.unflatten(0, (size, -1))
        keys = key.split(num_tokens, dim=-3)
        values = value.split(num_tokens, dim=-3)

        attended = []
        for run, run_query, run_key, run_value in zip(packed.runs, queries, keys, values, strict=True):
            mask = None
            if size > 1 or self.needs_mask:
                mask = packed.mask(run.length, rank, size, self.window, query.device)
            output = self._attend(run.rows(run_query), run.rows(run_key), run.rows(run_value), mask=mask)
            attended.append(output.flatten(0, 1))
        return torch.cat(attended).flatten(1)

    def _attend_at_once(
        self, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, packed: PackedTokens
    ) -> Tensor:
        """Attention of packed tokens by PyTorch's kernel for sequences of any lengths: [t, heads/tp, d]."""
        longest = packed.max_seqlen_q
        keys_before = -1 if self.window is None else self.window - 1  # -1: all of them
        return attend(
            query,
            key,
            value,
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            longest,
            longest,
            scale=self.scale,
            window_size=(keys_before, 0),  # causal
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None) -> Tensor:
        """Attention of b sequences of one length: [b, s/cp, heads/tp, d], from keys and values [b, s, groups/tp, d].

        ``mask``: [s/cp, s], True if the query sees the key; None: causal.
        """
        width = value.shape[-1]
        if self.softmax_offset is not None and mask is not None:
            query, key, value, mask = _with_sinks(query, key, value, mask, self.softmax_offset / self.scale)
        output = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return output.transpose(1, 2)[..., :width]


def _make_sinks(config: TransformerConfig, tp_size: int) -> torch.nn.Parameter:
    """Sinks of this rank's heads, [heads/tp]."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    sinks = torch.nn.Parameter(
        torch.empty(config.num_attention_heads // tp_size, dtype=config.params_dtype, device=device)
    )
    if config.perform_initialization:
        config.init_method(sinks)
    tensor_parallel.set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
    return sinks


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and mask of an attention whose scores have one more column, the sinks.

    Every vector gets one more entry. A query has its head's sink there, the keys of tokens 0. One more key has 1 there
    and is 0 elsewhere, so that its score is the sink; its value is 0.

    Args:
        query: [b, s/cp, heads/tp, d].
        key: [b, s, groups/tp, d].
        value: [b, s, groups/tp, d].
        mask: [s/cp, s], True if the query sees the key.
        sinks: [heads/tp], divided by the scale of the scores.
    """
    of_queries = sinks.to(query.dtype).unsqueeze(-1).expand(*query.shape[:-1], 1)
    pad = torch.nn.functional.pad
    of_key = key.new_zeros(key.shape[0], 1, key.shape[2], key.shape[3] + 1)
    of_key[..., -1] = 1
    return (
        torch.cat([query, of_queries], dim=-1),
        torch.cat([pad(key, (0, 1)), of_key], dim=1),
        pad(value, (0, 1, 0, 0, 0, 1)),
        pad(mask, (0, 1), value=True),
    )


def varlen_attention(query: Tensor, value: Tensor) -> Callable[..., Tensor] | None:
    """PyTorch's ``varlen_attn`` if it can compute the attention of these queries and values, or None.

    It is FlashAttention: for numbers of 16 bits, heads of one width up to 256, on GPUs from NVIDIA's Ampere on. PyTorch
    before 2.13 has no such function, or one without a scale and grouped queries.
    """
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    if query.shape[-1] != value.shape[-1] or query.shape[-1] > 256 or torch.version.hip is not None:
        return None
    return _varlen_function() if torch.cuda.get_device_capability(query.device) >= (8, 0) else None


@functools.cache
def _varlen_function() -> Callable[..., Tensor] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size", "enable_gqa"} <= parameters.keys():
        return None
    return cast(Callable[..., Tensor], varlen_attn)  # a tuple only if more than the output is asked for


# Layers with a window and layers without one need a mask each. More would keep [s/cp, s] on the device for lengths that
# may not come again.
@functools.lru_cache(maxsize=2)
def _zigzag_mask(local_length: int, rank: int, size: int, window: int | None, device: torch.device) -> Tensor:
    """[s/cp, s], True if this rank's query sees the gathered key; keys are in rank order.

    A query sees the last ``window`` keys up to its own; None: all of them.
    """
    positions = [shard_positions(local_length * size, each, size) for each in range(size)]
    keys_before = positions[rank].unsqueeze(1) - torch.cat(positions).unsqueeze(0)
    mask = keys_before >= 0
    if window is not None:
        mask = mask & (keys_before < window)
    return mask.to(device)
