"""Output projections of attention, MLP and experts with a bias, or with a norm behind them, for Megatron's specs."""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megatron_rc.launch.training.models.local_layers import LocalNorm


def use_output_bias(layer: Any) -> None:
    """Give the output projection of the attention a bias, in a layer's spec; Megatron would give all others one too."""
    attention = layer.self_attention.submodules
    attention.linear_proj = _with_bias(attention.linear_proj)


@functools.cache
def _with_bias(linear: type) -> type:
    """Subclass of a linear layer that always has a bias; of such a subclass itself."""
    if getattr(linear, "always_has_bias", False):
        return linear

    class WithBias(linear):  # type: ignore[misc]
        always_has_bias = True

        def __init__(self, *args: Any, bias: bool, **more: Any) -> None:
            super().__init__(*args, bias=True, **more)

    return WithBias


def use_norms_after(layer: Any, *, also_before: bool) -> None:
    """Norm the outputs of attention and MLP before they are added to the residual, in a local layer's spec.

    ``also_before``: keep the norms of their inputs.
    """
    attention = layer.self_attention.submodules
    has_bias = getattr(attention.linear_proj, "always_has_bias", False)
    attention.linear_proj = _with_bias(LinearThenNorm) if has_bias else LinearThenNorm
    _submodules_of(layer.mlp).linear_fc2 = LinearThenNorm
    if not also_before:
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp


def use_expert_bias(layer: Any) -> None:
    """Let the experts of a layer be trained with biases, in a local layer's spec; a layer without experts stays."""
    experts = getattr(_submodules_of(layer.mlp), "experts", None)
    if experts is not None:
        _submodules_of(experts).linear_fc2 = OutputOfExpert


def _submodules_of(spec: Any) -> Any:
    """Submodules of a module; Megatron-Core 0.16 has a spec of the module, 0.19 a partial call of its class."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


class OutputOfExpert(RowParallelLinear):  # type: ignore[misc]
    """Megatron's row-parallel linear layer of an expert that one rank has whole, without a reduction of its output.

    Megatron's MLP adds the bias to the output in place, which autograd forbids behind the reduction.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.explicit_expert_comm = True


class LinearThenNorm(RowParallelLinear):  # type: ignore[misc]
    """Megatron's row-parallel linear layer with a norm of its output, bias included."""

    def __init__(self, *args: Any, config: TransformerConfig, **more: Any) -> None:
        super().__init__(*args, config=config, **more)
        self.post_layernorm = LocalNorm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, values: Tensor) -> tuple[Tensor, None]:
        """The norm of the product, [s, b, hidden], [s/tp, b, hidden] with SP; None in the place of a bias."""
        output, bias = super().forward(values)
        if bias is not None:
            output = output + bias
        return self.post_layernorm(output), None
