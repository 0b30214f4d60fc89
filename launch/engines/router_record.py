"""The experts that the routers of a ``transformers`` model choose while it samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class RouterRecord:
    """Record of all routers of a model, call by call; hooks stand in the model while it is open."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = model.modules()
        self._routers = [module for module in modules if type(module).__name__.lower().endswith("topkrouter")]
        if not self._routers:
            raise ValueError(f"{type(model).__name__} has no router: it has no experts to report")
        self._chosen: list[Tensor] = []  # [tokens of the call, top_k], router after router, call after call

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context that records the calls of the model inside, from none on."""
        self._chosen = []
        hooks = [router.register_forward_hook(self._note) for router in self._routers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, _: torch.nn.Module, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen.append(output[2].to("cpu", torch.int16))

    def of_responses(self, prompts: Sequence[int], responses: Sequence[int]) -> list[Tensor]:
        """[prompt + response − 1, layers with experts, top_k] int16 for each row of the batch.

        The first call read all prompts, padded on the left; each later call read the newest token of every row.
        ``prompts`` and ``responses`` are the numbers of tokens.
        """
        num_routers = len(self._routers)
        longest = max(prompts)
        starts = range(0, len(self._chosen), num_routers)
        calls = [self._chosen[start : start + num_routers] for start in starts]
        # [rows, tokens, layers, top_k] of each call.
        tables = [torch.stack(call, dim=1).unflatten(0, (len(prompts), -1)) for call in calls]
        whole = torch.cat(tables, dim=1)
        ends = (longest + response - 1 for response in responses)
        return [row[longest - prompt : end].clone() for row, prompt, end in zip(whole, prompts, ends, strict=True)]
