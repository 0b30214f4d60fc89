"""Attribution in an own loop: the pass at the midpoint of both sets of weights, which are back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_rc.attribution.names import model_order
from megatron_rc.attribution.result import Attribution
from megatron_rc.attribution.shards import Shard
from megatron_rc.parallel.collectives import all_reduce_sum, every_text
from megatron_rc.parallel.groups import Group, group_device

# The engine's weights: by name, or a function of (name, the trainer's weight); shards like the trainer's.
EngineWeights = Mapping[str, Tensor] | Callable[[str, Tensor], Tensor]


def gauss_legendre(nodes: int) -> list[tuple[float, float]]:
    """Return (position, weight) of Gauss's and Legendre's nodes between 0 and 1; one node is the midpoint.

    Golub and Welsch 1969, "Calculation of Gauss Quadrature Rules": eigenvalues of the recurrence of Legendre's
    polynomials, weights from the first elements of the eigenvectors.
    """
    degrees = torch.arange(1, nodes, dtype=torch.float64)
    beside = degrees / (4 * degrees**2 - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    positions = (values + 1) / 2
    weights = vectors[0] ** 2
    return list(zip(positions.tolist(), weights.tolist(), strict=True))


def attribute(
    shards: Sequence[Shard],
    engine_weights: EngineWeights,
    backward: Callable[[Tensor | None], object],
    differences: Tensor | None,
    *,
    signed: bool = False,
    nodes: int = 1,
    intended_weights: EngineWeights | None = None,
    differences_of_weights: Callable[[], Tensor | None] | None = None,
    group: Group | None = None,
    counts_tokens: bool = True,
) -> Attribution:
    """Share the mismatch of engine and trainer out among the parameters.

        Σ_t a_t Δ_t  =  Σ_p ⟨∂/∂W_p Σ_t a_t log π_M(t),  W_p - W̃_p⟩  +  O(δ³) Σ_t abs(a_t),     M = (W + W̃) / 2

    with the trainer's weights W, the engine's W̃ and Δ_t = log π_W(t) - log π_W̃(t); a_t = D_t, or 1 if ``signed``.
    With several nodes the mean of the gradients at Gauss's and Legendre's nodes takes the place of the gradient at M.
    This is integrated gradients along the straight path (Sundararajan et al. 2017), with the differences as weights of
    the tokens.

    Weights have their bits back at the end, also after an exception, and gradients that were in ``.grad`` are back.
    Megatron's gradient buffers are 0 at the end: call this between two optimizer steps.

    Cost: ``nodes`` forward and backward passes. Host memory: a copy of this rank's weights. Device memory, beside the
    passes: one parameter's shard three times, four times with ``intended_weights``. The engine's weights are asked for
    ``2 * nodes`` times a shard, and once more with ``differences_of_weights``; the intended ones ``nodes`` times.

    Args:
        shards: this rank's parameters: :func:`shards_of` or :func:`megatron_shards`.
        engine_weights: the engine's weights: a mapping with every shard's name, or a function of (name, the trainer's
            shard) that returns the engine's shard, such as a rounding. Called for the same shards in the same order on
            all ranks of a TP group, so that it may make collectives there.
        backward: adds the gradients of Σ_t a_t log π(t) at the weights in place; the argument is a_t. Sums over all
            tokens of the batch: a factor such as 1 / number of tokens must be undone.
        differences: D_t = log π_train(t) - log π_rollout(t) of this rank's tokens, any shape, nats; 0 where a token
            does not train. None on ranks without tokens, such as earlier pipeline stages.
        signed: attribute Σ D_t instead of Σ D_t². Negative parts then belong to parameters that make the engine surer
            of what it sampled than the trainer is. The coefficients are 1 where D_t is not 0.
        nodes: passes. More help if the completeness is far from 1: 2 or 3, or 8 for a gross error.
        intended_weights: the weights W* that the engine should have, such as the trainer's rounded to its format; given
            like ``engine_weights``. A part is then the sum of ⟨∂/∂W_p, W_p - W*_p⟩, which the format makes, and the
            excess ⟨∂/∂W_p, W*_p - W̃_p⟩, which is exactly 0 unless the engine has other weights than it should.
            ``engine_weights`` must come from elsewhere, such as the engine itself.
        differences_of_weights: called once with the engine's weights in place; returns Δ_t, like ``differences``, for
            ``completeness``.
        group: ranks with different parts of the model or of the gradients; None: this process has all.
        counts_tokens: whether this rank adds its tokens to the measured sum. True on one of several ranks with the
            same tokens, as those of a TP group.

    Returns:
        The attribution, equal on all ranks of ``group``.

    Collectives: those of ``backward`` and of the functions given; over ``group`` a gather of the names and one SUM of
    a double for each parameter of the model, two with ``intended_weights``, and two more.

    Raises:
        ValueError: ``nodes`` is below 1; the engine's or the intended weights lack a name or have another shape; a
            parameter without gradient differs.
    """
    if nodes < 1:
        raise ValueError(f"nodes is {nodes}: give 1 or more")
    coefficients = differences
    if signed and differences is not None:
        coefficients = (differences != 0).to(differences.dtype)

    path = _Path(shards, engine_weights, intended_weights)
    parts = {shard.name: _zero(shard.weight.device) for shard in shards}
    excess = {shard.name: _zero(shard.weight.device) for shard in shards}
    of_weights = None
    with path.walked():
        for position, weight in gauss_legendre(nodes):
            path.move_to(position)
            backward(coefficients)
            for name, part, excess_part in path.products():
                parts[name] += weight * part
                excess[name] += weight * excess_part
        if differences_of_weights is not None:
            path.move_to(0.0)
            of_weights = _product(coefficients, differences_of_weights(), counts_tokens)

    measured = _product(coefficients, differences, counts_tokens)
    return _over_ranks(parts, None if intended_weights is None else excess, measured, of_weights, group)


class _Path:
    """The straight line from the engine's weights to the trainer's, on which a model's weights are moved."""

    def __init__(
        self, shards: Sequence[Shard], engine_weights: EngineWeights, intended_weights: EngineWeights | None
    ) -> None:
        self.shards = shards
        self.engine_weights = engine_weights
        self.intended_weights = intended_weights
        self.originals: list[Tensor] = []

    @contextmanager
    def walked(self) -> Iterator[None]:
        """Context in which the weights may be moved; afterwards weights and ``.grad`` are as before, bit for bit."""
        gradients = [shard.weight.grad for shard in self.shards]
        self.originals = [shard.weight.detach().to("cpu", copy=True) for shard in self.shards]
        try:
            self._clear_gradients()
            yield
        finally:
            self._clear_gradients()
            for shard, original, gradient in zip(self.shards, self.originals, gradients, strict=True):
                shard.weight.data.copy_(original)
                shard.weight.grad = gradient

    @torch.no_grad()
    def move_to(self, position: float) -> None:
        """Put the weights at a position of the line: 0 are the engine's, 1 the trainer's."""
        for shard, trainer, engine in self._ends():
            # Exact where both are equal, whatever the position.
            shard.weight.data.copy_(torch.lerp(engine, trainer, position))

    @torch.no_grad()
    def products(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (name, ⟨gradient, W - W̃⟩, ⟨gradient, W* - W̃⟩) of each shard, and remove the gradient.

        The last is 0 if there are no intended weights W*.
        """
        for shard, trainer, engine in self._ends():
            difference = trainer - engine
            if not shard.weight.requires_grad and difference.any():
                raise ValueError(
                    f"{shard.name} differs between engine and trainer but has requires_grad=False, so that its part "
                    "is unknown: call requires_grad_(True) for the attribution"
                )
            part = shard.product(difference)
            excess = _zero(shard.weight.device)
            if self.intended_weights is not None:
                intended = _weight_of(self.intended_weights, "intended_weights", shard.name, trainer)
                excess = shard.product(intended.to(engine) - engine)
            yield shard.name, part, excess
            shard.clear_gradient()

    def _ends(self) -> Iterator[tuple[Shard, Tensor, Tensor]]:
        """Yield each shard with the trainer's and the engine's weight, on its device, float32 at least."""
        for shard, original in zip(self.shards, self.originals, strict=True):
            trainer = original.to(shard.weight.device)
            engine = _weight_of(self.engine_weights, "engine_weights", shard.name, trainer)
            dtype = torch.promote_types(trainer.dtype, torch.float32)
            yield shard, trainer.to(dtype), engine.to(shard.weight.device, dtype)

    def _clear_gradients(self) -> None:
        for shard in self.shards:
            shard.clear_gradient()


def _weight_of(weights: EngineWeights, argument: str, name: str, trainer: Tensor) -> Tensor:
    """Return the weight of a shard from an argument of :func:`attribute`."""
    if callable(weights):
        weight = weights(name, trainer)
    elif name in weights:
        weight = weights[name]
    else:
        raise ValueError(f"{argument} has no {name}: give the weights of all shards")
    if weight.shape != trainer.shape:
        raise ValueError(f"{argument}: {name} is {tuple(weight.shape)}, the trainer's {tuple(trainer.shape)}")
    return weight.detach()


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def _product(coefficients: Tensor | None, differences: Tensor | None, counts_tokens: bool) -> Tensor:
    """Σ a_t D_t of this rank, 0-D float64."""
    if coefficients is None or differences is None or not counts_tokens:
        return _zero(torch.device("cpu"))
    return (coefficients.detach().double() * differences.detach().double()).sum()


def _over_ranks(
    parts: Mapping[str, Tensor],
    excess: Mapping[str, Tensor] | None,
    measured: Tensor,
    of_weights: Tensor | None,
    group: Group | None,
) -> Attribution:
    """Add up the parts of all ranks."""
    names_of_ranks = [text.split("\n") for text in every_text("\n".join(parts), group) if text]
    names = sorted({name for names in names_of_ranks for name in names}, key=model_order)

    device = group_device(group)
    absent = _zero(device)
    sums = [measured, absent if of_weights is None else of_weights]
    sums += [parts.get(name, absent) for name in names]
    if excess is not None:
        sums += [excess.get(name, absent) for name in names]
    summed = all_reduce_sum(torch.stack([value.to(device) for value in sums]), group)

    measured_sum, sum_of_weights, *values = summed.tolist()
    return Attribution(
        parts=dict(zip(names, values[: len(names)], strict=True)),
        measured=measured_sum,
        of_weights=None if of_weights is None else sum_of_weights,
        excess=None if excess is None else dict(zip(names, values[len(names) :], strict=True)),
    )
