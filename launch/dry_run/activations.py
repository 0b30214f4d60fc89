"""Bytes of activations on one rank, by formulas.

A model chunk is a chain of units: embedding, attention, MLP, attention, ..., head. Each saves bytes from its forward
to its backward, and needs more while its backward runs. A recomputed unit saves less, and needs what it did not save
in its backward. The formulas count the tensors that Megatron-Core's layers save, without fused kernels other than those
of norms and attention. On a CPU, PyTorch's norms and its latent attention keep more than a GPU's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_rc.launch.dry_run.batches import batch_numbers
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.parallel.linear import CHUNK_TOKENS
from megatron_rc.parallel.softmax import EAGER_ELEMENTS, LEAST_ROWS

_FLOAT32 = 4
_INDEX = 8  # bytes of an int64
_BOOL = 1  # byte of a bool
# Bytes of the states of PyTorch's two generators, which each recomputed unit keeps. With a GPU they are in host memory.
_GENERATOR_STATES = 2 * 5056


@dataclass(frozen=True)
class Unit:
    """Bytes of a part of a chunk for one micro-batch."""

    saved: int  # bytes from its forward to its backward
    backward: int  # the most bytes beside ``saved`` in its backward
    forward: int = 0  # the most bytes beside ``saved`` in its forward, if these are many


@dataclass(frozen=True)
class ChunkActivations:
    """Bytes of one model chunk for one micro-batch."""

    saved: int  # bytes from the forward to the backward, while other micro-batches are at work
    peak: int  # the most bytes at once, with logits
    logits: int  # the part of ``peak`` that is logits with their gradient
    shared: int  # Megatron's buffer for gathered tokens under sequence parallelism, which all chunks share


class ActivationSizes:
    """Formulas for the units of a run.

    Attributes:
        tokens: tokens of a micro-batch on this rank, [b · s/cp].
        residual: bytes of the residual stream of a micro-batch; a part of it under sequence parallelism.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        numbers = batch_numbers(config)
        parallel = config.parallel
        self.tp = parallel.tensor_model_parallel_size
        self.itemsize = config.dtype.itemsize
        self.rows = numbers["rows_of_a_micro_batch"]
        self.tokens = numbers["tokens_of_a_rank"]
        self.split_tokens = self.tokens // self.tp if parallel.sequence_parallel else self.tokens
        self.residual = self.split_tokens * config.transformer.hidden_size * self.itemsize
        self.recomputed = self._recomputed_modules()

    def chunk(self, expert_layers: Sequence[bool], *, is_first: bool, is_last: bool) -> ChunkActivations:
        """Return the bytes of a chunk with these layers; ``expert_layers`` says which of them have experts."""
        units = [self._input(is_first)]
        units += self._layers(expert_layers)
        logits = 0
        if is_last:
            head, logits = self._head()
            units.append(head)
        gathers = self.config.parallel.sequence_parallel and self.tp > 1
        return ChunkActivations(
            saved=sum(unit.saved for unit in units),
            peak=max(_forward_peak(units), _backward_peak(units)),
            logits=logits,
            shared=self.residual * self.tp if gathers else 0,
        )

    def _recomputed_modules(self) -> Sequence[str]:
        if self.config.compute.recompute_granularity != "selective":
            return ()
        modules: Sequence[str] = self.config.megatron.given.get("recompute_modules", ["core_attn"])
        return modules

    def _layers(self, expert_layers: Sequence[bool]) -> list[Unit]:
        """Return the units of all layers, with the run's full recomputation."""
        layers = [[self._attention(), self._experts() if has_experts else self._mlp()] for has_experts in expert_layers]
        compute = self.config.compute
        if compute.recompute_granularity != "full":
            return [unit for layer in layers for unit in layer]

        number = compute.recompute_num_layers or 1
        if compute.recompute_method == "block":
            # Each of the first layers is recomputed, the others are not.
            recomputed = [self._recomputed(layer) for layer in layers[:number]]
            return recomputed + [unit for layer in layers[number:] for unit in layer]
        groups = [layers[start : start + number] for start in range(0, len(layers), number)]
        return [self._recomputed([unit for layer in group for unit in layer]) for group in groups]

    def _recomputed(self, units: Sequence[Unit]) -> Unit:
        """Return the unit that keeps only the output of ``units``, and runs them again in the backward."""
        output = self.residual
        if self.config.megatron.given.get("distribute_saved_activations"):
            output //= self.tp
        # Beside the forward that runs again waits the gradient of its output.
        backward = max(_backward_peak(units), self.residual + _forward_peak(units))
        return Unit(saved=output + self._generator_states(), backward=backward)

    def _generator_states(self) -> int:
        return _GENERATOR_STATES if self.config.launch.on_cpu else 0

    def _norm(self, tokens: int, width: int) -> int:
        """Bytes that a norm keeps: its output and a number of each token; its input belongs to the unit before."""
        return tokens * (width * self.itemsize + _FLOAT32) + self._norm_on_cpu(tokens, width)

    def _norm_on_cpu(self, tokens: int, width: int) -> int:
        """Bytes that PyTorch's RMSNorm keeps on a CPU: normalized numbers, and a float32 copy of 16-bit inputs."""
        if not self.config.launch.on_cpu or self.config.transformer.normalization != "RMSNorm":
            return 0
        copies = 1 if self.itemsize == _FLOAT32 else 2
        return copies * tokens * width * _FLOAT32

    def _rotary(self, width: int) -> int:
        """Bytes of sines and cosines, of queries and of keys; all sequences of a padded micro-batch share them."""
        if not self.config.model.is_rotary:
            return 0
        positions = self.tokens // self.rows
        return 4 * positions * width * self.itemsize

    def _attention(self) -> Unit:
        """Norm, attention and the residual sum behind it."""
        transformer = self.config.transformer
        if self.config.latent is not None:
            projections, inputs, output, weights = self._latent_attention()
        else:
            projections, inputs, output, weights = self._grouped_attention()
        core = weights + self._attention_rows()
        norm = self._norm(self.split_tokens, transformer.hidden_size)
        saved = norm + projections + inputs + output + self.residual
        # Gradients of the residual, the output, and of queries, keys and values.
        gradients = self.residual + output + inputs + weights
        if "core_attn" in self.recomputed:
            return Unit(saved=saved + self._generator_states(), backward=core + gradients)
        return Unit(saved=saved + core, backward=gradients)

    def _attention_rows(self) -> int:
        """Bytes of the logarithm of each row's sum, which the attention keeps in float32."""
        return self.tokens * self.config.transformer.num_attention_heads // self.tp * _FLOAT32

    def _grouped_attention(self) -> tuple[int, int, int, int]:
        """Bytes of projections, of inputs of the attention, of its output, and of its weights (none)."""
        config = self.config
        transformer = config.transformer
        width = transformer.kv_channels
        bytes_of_width = self.tokens * width * self.itemsize // self.tp
        query = transformer.num_attention_heads * bytes_of_width
        key = transformer.num_query_groups * bytes_of_width
        rotates = config.model.is_rotary
        cp = config.parallel.context_parallel_size

        # Queries, keys and values are one product. Values are a view of it, which keeps all of it.
        projections = query + 2 * key
        inputs = query + key if rotates else 0
        if transformer.qk_layernorm:
            heads = (transformer.num_attention_heads + transformer.num_query_groups) // self.tp
            projections += query if transformer.num_query_groups < transformer.num_attention_heads else 0
            projections += self._norm_on_cpu(self.tokens * heads, width)
            if not rotates:
                inputs = query + key
        if rotates:
            projections += self._rotary(width)
        output = query
        if self._gathers_keys():
            # Gathered keys and values of all CP ranks replace those of this rank.
            inputs = (query if rotates else 0) + 2 * key * cp
            projections -= query + 2 * key if rotates else 0
        if config.training.rl_use_sequence_packing and self._is_local():
            output += query  # sequences are joined
        return projections, inputs, output, 0

    def _is_local(self) -> bool:
        return self.config.model.transformer_impl == "local"

    def _gathers_keys(self) -> bool:
        """Whether each CP rank gathers keys and values, as local layers do; Transformer Engine passes them around."""
        return self._is_local() and self.config.parallel.context_parallel_size > 1

    def _latent_attention(self) -> tuple[int, int, int, int]:
        """Bytes of projections, of inputs of the attention, of its output, and of the weights that a CPU keeps."""
        latent = self.config.latent
        assert latent is not None
        heads = self.config.transformer.num_attention_heads // self.tp
        query_width = latent.qk_head_dim + latent.qk_pos_emb_head_dim
        cp = self.config.parallel.context_parallel_size

        latents = self.split_tokens * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim) * self.itemsize
        if self.config.transformer.qk_layernorm:
            latents += self._norm(self.split_tokens, latent.kv_lora_rank)
        if latent.q_lora_rank is not None:
            latents += self.split_tokens * latent.q_lora_rank * self.itemsize
            if self.config.transformer.qk_layernorm:
                latents += self._norm(self.split_tokens, latent.q_lora_rank)
        projections = latents + self._rotary(latent.qk_pos_emb_head_dim)

        gathered = cp if self._gathers_keys() else 1
        weights = 0
        itemsize = self.itemsize
        if self.config.launch.on_cpu:
            # PyTorch has no fused kernel for values of another width on a CPU: it works in float32, and keeps the
            # softmax of all scores.
            itemsize = _FLOAT32
            weights = self.tokens * heads * (self.tokens // self.rows) * cp * itemsize
        query = self.tokens * heads * query_width * itemsize
        value = self.tokens * heads * latent.v_head_dim
        inputs = query + (query + value * itemsize) * gathered
        return projections, inputs, value * self.itemsize, weights

    def _mlp(self) -> Unit:
        """Norm, MLP and the residual sum behind it."""
        width = self.config.transformer.ffn_hidden_size // self.tp
        hidden, gradients = self._hidden(self.tokens, width)
        norm = self._norm(self.split_tokens, self.config.transformer.hidden_size)
        gradients += self.residual
        if "mlp" in self.recomputed:
            return Unit(saved=norm + self.residual + self._generator_states(), backward=hidden + gradients)
        return Unit(saved=norm + hidden + self.residual, backward=gradients)

    def _hidden(self, tokens: int, width: int, *, is_weighted: bool = False) -> tuple[int, int]:
        """Bytes that the hidden layer of an MLP keeps, and the gradients in its backward.

        ``is_weighted``: the hidden numbers are multiplied by the router's weight of their token.
        """
        size = tokens * width * self.itemsize
        # The gradient of the second matrix, before it is added to Megatron's buffer.
        matrix = width * self.config.transformer.hidden_size * self.itemsize
        if self.config.transformer.gated_linear_unit:
            # The first product (twice as wide), SiLU of one half, the other half, and their product.
            saved = 5 * size
            # Gradients of the product and of both halves; the product itself is free by then.
            gradients = max(2 * size, size + matrix)
        else:
            saved = 2 * size
            gradients = size + matrix
        if is_weighted:
            saved += size
        return saved, gradients

    def _experts(self) -> Unit:
        """Norm, router, experts and the residual sum behind them, if every expert gets the same number of tokens."""
        config = self.config
        experts = config.experts
        assert experts is not None
        hidden = config.transformer.hidden_size
        etp = config.expert_tensor_parallel_size
        ep = config.parallel.expert_model_parallel_size
        routed_tokens = self.split_tokens * experts.moe_router_topk * etp
        routed = routed_tokens * hidden * self.itemsize
        width = experts.moe_ffn_hidden_size // etp
        hidden_of_experts, _ = self._hidden(routed_tokens, width, is_weighted=True)
        # Experts run their backward one after the other.
        local_experts = experts.num_moe_experts // ep
        _, gradients_of_expert = self._hidden(-(-routed_tokens // local_experts), width, is_weighted=True)

        modules = self._routing() + routed + hidden_of_experts
        shared = 0
        if experts.moe_shared_expert_intermediate_size:
            shared, _ = self._hidden(self.tokens, experts.moe_shared_expert_intermediate_size // self.tp)
        backward = self.residual + routed + gradients_of_expert
        # Copies of all routed tokens: computed and joined; with all-to-all also sorted, and exchanged between ranks.
        if experts.moe_token_dispatcher_type == "allgather":
            forward = 2 * routed
            if ep > 1:
                forward += self.residual * ep * etp  # the tokens of all ranks
        else:
            forward = (4 if ep > 1 else 3) * routed
        forward -= self.residual  # the residual sum comes later
        saved = self._norm(self.split_tokens, hidden) + self.residual
        if "moe" in self.recomputed:
            again = modules + shared + max(backward, 2 * self.residual + forward)
            return Unit(saved=saved + self._generator_states(), backward=again)
        if "shared_experts" in self.recomputed:
            saved += self._generator_states() - shared
            backward += shared
        return Unit(saved=saved + modules + shared, backward=backward, forward=forward)

    def _routing(self) -> int:
        """Bytes that the router keeps: scores, chosen experts with their weights, and maps of tokens to experts."""
        experts = self.config.experts
        assert experts is not None
        # For each token and expert: float32 numbers, of which a sigmoid needs one more, and an entry of two bool maps.
        num_floats = 3 if experts.moe_router_score_function == "sigmoid" else 2
        bytes_of_expert = num_floats * _FLOAT32 + 2 * _BOOL
        # For each token and chosen expert: indices and weights.
        bytes_of_choice = 2 * _INDEX + 2 * _FLOAT32
        bytes_of_token = experts.num_moe_experts * bytes_of_expert + experts.moe_router_topk * bytes_of_choice
        return self.split_tokens * bytes_of_token

    def _input(self, is_first: bool) -> Unit:
        """The embedding, or what the stage before sent."""
        if not is_first:
            return Unit(saved=self.residual, backward=0)
        rows = self.config.model.padded_vocab_size // self.tp
        matrix = rows * self.config.transformer.hidden_size * self.itemsize
        return Unit(saved=self.residual, backward=matrix + self.residual)

    def _head(self) -> tuple[Unit, int]:
        """The final norm, the output layer and the log-probs; and the bytes of logits with their gradient."""
        hidden = self.config.transformer.hidden_size
        rows = self.config.model.padded_vocab_size // self.tp
        matrix = rows * hidden
        norm = self._norm(self.split_tokens, hidden)
        gathered = self.tokens * hidden * self.itemsize
        if self.config.training.fused_linear_log_probs:
            # The gradient of the output layer in float32 and in the weights' dtype, and a chunk of logits.
            logits = matrix * (_FLOAT32 + self.itemsize) + _FLOAT32 * CHUNK_TOKENS * rows
            chunk = CHUNK_TOKENS * rows * self.itemsize + self._scratch(CHUNK_TOKENS, rows)
            cast = 0 if self.itemsize == _FLOAT32 else matrix * self.itemsize
            return Unit(saved=norm, backward=gathered + matrix * _FLOAT32 + max(chunk, cast)), logits
        of_logits = self.tokens * rows * self.itemsize
        log_probs = 2 * of_logits + self._scratch(self.tokens, rows)
        output_layer = of_logits + matrix * self.itemsize + gathered
        return Unit(saved=norm, backward=max(log_probs, output_layer)), 2 * of_logits

    def _scratch(self, tokens: int, width: int) -> int:
        """Two scratch buffers for a block of tokens on a CPU; a GPU's kernels need none."""
        if not self.config.launch.on_cpu:
            return 0
        return 2 * min(tokens, max(LEAST_ROWS, EAGER_ELEMENTS // width)) * width * _FLOAT32


def _backward_peak(units: Sequence[Unit]) -> int:
    """Return the most bytes at once, while the units run backward from the last to the first."""
    return _peak(units, [unit.backward for unit in units])


def _forward_peak(units: Sequence[Unit]) -> int:
    """Return the most bytes at once, while the units run forward from the first to the last."""
    return _peak(units, [unit.forward for unit in units])


def _peak(units: Sequence[Unit], working: Sequence[int]) -> int:
    """Return the most bytes at once, if a unit at work needs ``working`` beside what it and those before it saved."""
    saved = accumulate(unit.saved for unit in units)
    return max(total + work for total, work in zip(saved, working, strict=True))
