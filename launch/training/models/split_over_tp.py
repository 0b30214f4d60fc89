"""Modules whose parameters belong to heads, of which each tensor-parallel rank holds some."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_rc.parallel.groups import Group


class SplitOverTp(torch.nn.Module):
    """Module whose parameters are cut in their first dimension over the ranks of ``tp_group``."""

    tp_group: Group | None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the parameters for Megatron's distributed checkpoints, as Megatron's own modules store theirs."""
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            dict.fromkeys(state, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return sharded
