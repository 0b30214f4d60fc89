"""Number of ranks in each dimension of a run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rc.launch.run_config import RunConfig


@dataclass(frozen=True)
class Layout:
    """Number of ranks in each dimension."""

    tp: int
    cp: int
    pp: int
    dp: int

    @classmethod
    def of(cls, config: RunConfig) -> Layout:
        """Return the layout of a run."""
        parallel = config.parallel
        return cls(
            tp=parallel.tensor_model_parallel_size,
            cp=parallel.context_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            dp=config.data_parallel_size,
        )

    def __str__(self) -> str:
        return f"TP {self.tp} × CP {self.cp} × PP {self.pp} × DP {self.dp}"
