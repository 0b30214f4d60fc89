"""What each parameter contributes to the mismatch of engine and trainer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from megatron_rc.attribution.names import place_of
from megatron_rc.attribution.verdict import PREFIX

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Attribution:
    """The parts of all parameters of the whole model in Σ a_t D_t over the trained tokens; equal on every rank.

    D_t = log π_train(t) - log π_rollout(t), in nats. The coefficients a_t are D_t themselves, so that the sum is twice
    the k2 divergence, or 1, so that it is Σ D_t.

    Attributes:
        parts: c_p of each parameter by its name in the whole model, in the order of the layers. A part is negative
            where a parameter's error cancels another's.
        measured: Σ a_t D_t.
        of_weights: Σ a_t Δ_t, where Δ_t is what the trainer's kernels make of both sets of weights: the sum that the
            parts approximate. None unless it was measured.
        excess: the summand of each part that comes from the distance between the engine's weights and those that it
            should have; exactly 0 where they are equal. None if the intended weights were not given.
    """

    parts: Mapping[str, float]
    measured: float
    of_weights: float | None = None
    excess: Mapping[str, float] | None = None

    @property
    def total(self) -> float:
        """Σ c_p: the part of ``measured`` that the weights explain."""
        return sum(self.parts.values())

    @property
    def explained(self) -> float:
        """Σ c_p / Σ a_t D_t: may be negative or above 1; 0 if nothing was measured."""
        return self.share(self.total)

    @property
    def rest(self) -> float:
        """The share of ``measured`` that is in no weight: kernels, activations, KV cache, sampling."""
        return self.share(self.measured - self.total)

    @property
    def completeness(self) -> float | None:
        """Σ c_p / Σ a_t Δ_t, 1 if the nodes are enough; None unless Δ_t was measured, 0 if it is 0 everywhere."""
        if self.of_weights is None:
            return None
        return self.total / self.of_weights if self.of_weights else 0.0

    def share(self, part: float) -> float:
        """Return a part over ``measured``; 0 if nothing was measured."""
        return part / self.measured if self.measured else 0.0

    def by_layer(self) -> dict[int, float]:
        """Return the part of each layer, in nats²; parameters outside of the layers are in none."""
        return self._summed(lambda name: place_of(name).layer)

    def by_kind(self) -> dict[str, float]:
        """Return the part of each kind of parameter: embedding, attention, mlp, router, experts, norms, head."""
        return self._summed(lambda name: place_of(name).kind)

    def by_layer_and_kind(self) -> dict[tuple[int | None, str], float]:
        """Return the part of each kind in each layer; layer None: outside of the layers."""
        return self._summed(lambda name: place_of(name)[:2])

    def by_expert(self) -> dict[tuple[int, int], float]:
        """Return the part of each expert by (layer, expert)."""

        def expert_of(name: str) -> tuple[int, int] | None:
            layer, _, expert = place_of(name)
            return None if layer is None or expert is None else (layer, expert)

        return self._summed(expert_of)

    def largest(self, count: int = 10) -> list[tuple[str, float]]:
        """Return the parameters with the largest parts as (name, share of ``measured``), the largest first."""
        ordered = sorted(self.parts.items(), key=lambda part: part[1], reverse=True)
        return [(name, self.share(part)) for name, part in ordered[:count]]

    def largest_excess(self, count: int = 10) -> list[tuple[str, float]]:
        """Return the parameters with the largest excess of either sign as (name, share of ``measured``).

        Parameters whose weights are as intended are left out. The sign only says whether the unintended weights add to
        the rest of the mismatch or happen to cancel some of it.
        """
        differing = [(name, excess) for name, excess in (self.excess or {}).items() if excess]
        differing.sort(key=lambda item: abs(item[1]), reverse=True)
        return [(name, self.share(excess)) for name, excess in differing[:count]]

    def metrics(self) -> dict[str, float]:
        """Return shares of ``measured``: explained, rest, ``layer_<i>`` and kinds; completeness if it is known.

        With an excess also ``excess``, the sum of the sizes of all parameters' excess, which is 0 if all weights are as
        intended, and ``excess_layer_<i>`` and ``excess_<kind>``: the same of the layers, and of the kinds outside of
        the layers, that have one.
        """
        metrics = {f"{PREFIX}explained": self.explained, f"{PREFIX}rest": self.rest}
        if self.completeness is not None:
            metrics[f"{PREFIX}completeness"] = self.completeness
        for layer, part in self.by_layer().items():
            metrics[f"{PREFIX}layer_{layer}"] = self.share(part)
        for kind, part in self.by_kind().items():
            metrics[f"{PREFIX}{kind}"] = self.share(part)
        if self.excess is not None:
            excess = self._excess_by_place(self.excess)
            metrics[f"{PREFIX}excess"] = sum(excess.values())
            metrics |= {f"{PREFIX}excess_{place}": share for place, share in excess.items()}
        return metrics

    def _excess_by_place(self, excess: Mapping[str, float]) -> dict[str, float]:
        """Return the sizes of the excess of each layer, ``layer_<i>``, and kind outside of the layers, that has one.

        As shares of ``measured``. Signs would let two wrong weights of a layer cancel.
        """

        def place_name(name: str) -> str:
            layer, kind, _ = place_of(name)
            return kind if layer is None else f"layer_{layer}"

        sizes = {name: abs(value) for name, value in excess.items() if value}
        return {place: self.share(size) for place, size in _summed(sizes, place_name).items()}

    def _summed(self, key_of: Callable[[str], K | None]) -> dict[K, float]:
        """Sum the parts by a key of their names; names without a key are left out."""
        return _summed(self.parts, key_of)


def _summed(values: Mapping[str, float], key_of: Callable[[str], K | None]) -> dict[K, float]:
    """Sum the values by a key of their names; names without a key are left out."""
    sums: dict[K, float] = {}
    for name, value in values.items():
        key = key_of(name)
        if key is not None:
            sums[key] = sums.get(key, 0.0) + value
    return sums
