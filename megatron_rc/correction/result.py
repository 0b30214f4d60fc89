"""What a correction gives: weights and mask of the local tokens, and what is known of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.checks.bad_tokens import describe_bad_token
from megatron_rc.correction.checks.shift import find_lag
from megatron_rc.correction.metrics import Statistics, derive_metrics
from megatron_rc.correction.token_pass.terms import Columns
from megatron_rc.settings.config import RolloutCorrectionConfig

_SIDES = {
    "sequence_ids": "lie in [0, 2²¹)",
    "mini_batch_ids": "lie in [0, num_mini_batches)",
    "group_ids": "lie in [0, num_groups)",
    "policy_versions": "be at most current_version",
    "advantages": "be finite",
    "rewards": "be finite",
}


@dataclass(frozen=True)
class HeaderShape:
    """What lies where in a header: sums of some shape each, then maxima of one number each."""

    sums: tuple[tuple[str, tuple[int, ...]], ...]
    maxima: tuple[str, ...]

    @classmethod
    def of(cls, sums: Columns, maxima: Columns) -> HeaderShape:
        """The shape of a header that has these sums, then these maxima."""
        entries, extremes = (
            [
                (name, () if isinstance(key, tuple) else tuple(value.shape))
                for key, value in columns.items()
                for name in (key if isinstance(key, tuple) else (key,))
            ]
            for columns in (sums, maxima)
        )
        return cls(tuple(entries), tuple(name for name, _ in extremes))

    def __len__(self) -> int:
        return sum(math.prod(shape) for _, shape in self.sums) + len(self.maxima)

    @property
    def num_sums(self) -> int:
        """How many numbers of the header add up; the rest are maxima."""
        return len(self) - len(self.maxima)

    def unpack(self, header: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(sums, maxima) by name, as views of the header."""
        pieces = header[: self.num_sums].split([math.prod(shape) for _, shape in self.sums])
        sums = {name: piece.view(shape) for (name, shape), piece in zip(self.sums, pieces, strict=True)}
        return sums, dict(zip(self.maxima, header[self.num_sums :].unbind(), strict=True))

    def read(self, values: list[float]) -> Statistics:
        """Sums, tables and maxima by name, from a header on the host."""
        numbers: dict[str, float] = {}
        tables: dict[str, Any] = {}
        start = 0
        for name, shape in self.sums:
            size, width = math.prod(shape), math.prod(shape[1:])
            part = values[start : start + size]
            if not shape:
                numbers[name] = part[0]
            elif len(shape) == 1:
                tables[name] = part
            else:
                tables[name] = [part[row * width : (row + 1) * width] for row in range(shape[0])]
            start += size
        return Statistics(numbers, tables, dict(zip(self.maxima, values[start:], strict=True)))


class CorrectionResult:
    """Weights and mask of the local tokens, and what is known of the whole batch.

    Attributes:
        weights: like ``response_mask`` (a list if that was one): detached importance weights, 0 where the mask is, or
            None where no weights are asked for (and on pipeline stages without log-probs).
        mask: likewise, bool: the accepted tokens m'; None on pipeline stages without log-probs.
        sequence_lengths: [n] float64: tokens of each local sequence in the loss's denominator; None likewise.
        header: 1-D float64, the global sums and maxima that everything else is read from.
        shape: what lies where in it.
    """

    def __init__(
        self,
        config: RolloutCorrectionConfig,
        shape: HeaderShape,
        header: Tensor,
        *,
        weights: Tensor | list[Tensor] | None = None,
        mask: Tensor | list[Tensor] | None = None,
        sequence_lengths: Tensor | None = None,
    ) -> None:
        self.config = config
        self.shape = shape
        self.header = header
        self.weights = weights
        self.mask = mask
        self.sequence_lengths = sequence_lengths
        self._host: Statistics | None = None

    @property
    def denominators(self) -> Tensor:
        """[num_mini_batches, 4] float64: tokens and sequences under the response mask, then under m'."""
        return self.shape.unpack(self.header)[0]["mini_batches"]

    @property
    def skip(self) -> Tensor:
        """[num_mini_batches] bool: no token is accepted, the optimizer step must not be made."""
        return self.denominators[:, 2] == 0

    def check(self) -> None:
        """Raise the same error on every rank if any rank held data that cannot be right.

        Host synchronisations: one, shared with ``metrics()``.

        Raises:
            ValueError: a log-prob at a trained position is NaN, infinite or positive (unless ``bad_log_probs`` rejects
                those): names the policy, the lowest sample and position, and how many there are. Ids, versions, rewards
                or advantages out of range. Rollout log-probs shifted by one position.
        """
        sums, maxima = self.on_host().sums, self.on_host().maxima
        for name, remedy in _SIDES.items():
            if sums[f"bad_{name}"]:
                raise ValueError(
                    f"{name}: {sums[f'bad_{name}']:.0f} values of the batch are out of range, all must {remedy}"
                )
        if self.config.bad_log_probs == "error" and sums["bad_tokens"]:
            raise ValueError(describe_bad_token(-maxima["-bad_key"], sums["bad_tokens"], bool(sums["default_ids"])))
        lag = find_lag(sums)
        if lag:
            raise ValueError(
                f"the rollout log-probs are shifted by {lag:+d} position against the training "
                "log-probs: align both to the label tokens (labels = tokens shifted left by one, before any sharding)"
            )

    def metrics(self) -> dict[str, float]:
        """Metrics of the whole batch, equal on every rank; see ``docs/metrics.md``. Raises no data error."""
        return derive_metrics(self.on_host(), self.config)

    def denominators_on_host(self) -> list[list[float]]:
        """``denominators`` as Python floats, from the same host synchronisation as ``check()``."""
        rows: list[list[float]] = self.on_host().tables["mini_batches"]
        return rows

    def on_host(self) -> Statistics:
        """The header on the host, by name: the one synchronisation, made once."""
        if self._host is None:
            self._host = self.shape.read(self.header.tolist())
        return self._host


def merge_headers(shape: HeaderShape, headers: Sequence[Tensor]) -> Tensor:
    """One header of several batches: sums added, maxima taken."""
    stacked = torch.stack(list(headers))
    return torch.cat([stacked[:, : shape.num_sums].sum(0), stacked[:, shape.num_sums :].amax(0)])
