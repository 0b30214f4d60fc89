"""Calls of the log-prob functions with difficult rows, and the textbook's results in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rc.parallel import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy
from tests.support.softmax_oracle import log_probs_entropy_squares


@dataclass(frozen=True)
class Case:
    """One call; the last ``width - columns`` columns are padding, and ``gap`` more lie between the rows."""

    columns: int
    width: int
    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    gap: int = 0
    used: tuple[int, ...] = (0, 1, 2)  # results that the loss depends on: log-probs, entropy, Σπ²
    inplace: bool = False
    entropy: bool = True
    large: bool = False  # with blocks of the size on GPUs
    kept: int = 0  # number of kept tokens of all rows but the last, which counts the whole vocabulary; 0: no support

    def logits(self, device: str | torch.device = "cpu") -> Tensor:
        """The logits, [5, width]; NaN in columns that must not be read."""
        logits = 4 * torch.randn(5, self.width + self.gap, generator=self.generator(), dtype=torch.float64)
        logits[0] += 100  # would overflow without the maximum
        logits[1, : self.columns // 2] = -torch.inf  # whole blocks, from the first
        logits[2, 1 : self.columns : 3] = -torch.inf
        logits[3] = torch.nan
        logits[:, self.columns :] = torch.nan
        return logits.to(device, self.dtype)[:, : self.width].requires_grad_()

    def labels(self) -> Tensor:
        """Labels of a probability above 0, except in row 3, which does not count."""
        last = self.columns - 1
        return torch.tensor([last, last, 0, 10**9, last // 2])

    def mask(self) -> Tensor:
        """The mask, [5], not contiguous."""
        mask = torch.tensor([True, True, True, False, True])
        return torch.stack([mask, ~mask], dim=1)[:, 0]

    def supports(self) -> list[Tensor]:
        """The kept tokens of each row, the label among them."""
        orders = [torch.randperm(self.columns, generator=self.generator()) for _ in range(4)]
        rows = []
        for label, order in zip(self.labels(), orders, strict=False):
            other_ids = order[order != label][: self.kept - 1]
            rows.append(torch.cat([label[None], other_ids]))
        no_ids = orders[0][:0]
        return [*rows, no_ids]

    def coefficients(self) -> Tensor:
        """Coefficients of the results in the loss, [3, 5]."""
        return torch.randn(3, 5, generator=self.generator(), dtype=torch.float64)

    def generator(self) -> torch.Generator:
        """A generator with the same numbers on every device."""
        return torch.Generator().manual_seed(self.columns)


def results(case: Case, device: str | torch.device = "cpu") -> dict[str, Any]:
    """The results that were asked for, the gradient, and the logits after the backward."""
    logits = case.logits(device)
    labels = case.labels().to(device)
    mask = case.mask().to(device)
    options: dict[str, Any] = {
        "vocab_size": case.columns,
        "temperature": case.temperature,
        "mask": torch.stack([mask, mask], dim=1)[:, 0],  # not contiguous
        "inplace_backward": case.inplace,
    }
    if case.kept:
        kept_ids = case.supports()
        offsets = torch.tensor([0, *map(len, kept_ids)]).cumsum(0)
        options["support_ids"] = torch.cat(kept_ids).to(device)
        options["support_offsets"] = offsets.to(device)
    if case.entropy:
        values = vocab_parallel_log_probs_and_entropy(logits, labels, sum_squares=True, **options)
    else:
        values = (vocab_parallel_log_probs(logits, labels, **options),)

    coefficients = case.coefficients().to(device)
    sum((coefficients[index] * values[index]).sum() for index in case.used).backward()
    return {"values": [value.detach() for value in values], "grad": logits.grad, "after": logits.detach()}


def textbook(case: Case) -> list[Tensor]:
    """Log-probs, entropy, Σπ² and the gradient at the logits, in float64, by autograd of the formulas."""
    logits = case.logits().detach().double().requires_grad_()
    rows = case.mask().nonzero().squeeze(1)
    counted = logits[rows, : case.columns] / case.temperature
    is_kept = None
    if case.kept:
        supports = case.supports()
        is_kept = torch.zeros_like(counted, dtype=torch.bool)
        for flags, row in zip(is_kept, rows, strict=True):
            flags[:] = len(supports[row]) == 0
            flags[supports[row]] = True
    values = torch.zeros(3, 5, dtype=torch.float64)
    values[:, rows] = log_probs_entropy_squares(counted, case.labels()[rows], kept=is_kept)
    sum((case.coefficients()[index] * values[index]).sum() for index in case.used).backward()
    return [*values.detach(), logits.grad]


def bad_logits(device: str | torch.device = "cpu") -> Tensor:
    """All results for four rows with one NaN or inf, in the first or last block, and one row without."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    for row, column, value in ((0, 3, torch.nan), (1, 299, torch.nan), (2, 3, torch.inf), (3, 299, torch.inf)):
        logits[row, column] = value
    logits = logits.to(device)
    labels = torch.full((5,), 7, device=device)
    values = vocab_parallel_log_probs_and_entropy(logits, labels, sum_squares=True)
    return torch.stack([*values, vocab_parallel_log_probs(logits, labels)])
