"""How the model is cut over the ranks."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError, require_multiple
from megatron_rc.launch.run_config import RunConfig


def check_parallelism(config: RunConfig) -> None:
    """Tensor, pipeline, sequence and context parallelism, and the number of processes."""
    parallel, length, world = config.parallel, config.training.seq_length, config.launch.world_size
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    layout = f"--tensor-model-parallel-size {tp} · --pipeline-model-parallel-size {pp} · --context-parallel-size {cp}"
    if world < parallel.model_size:
        raise ConfigurationError(
            f"{layout} needs {parallel.model_size} processes, got {world}: start more, or split less"
        )
    if world % parallel.model_size:
        raise ConfigurationError(
            f"{layout} = {parallel.model_size} does not divide {world} processes: start a multiple of it"
        )
    require_multiple("num_layers", config.transformer.num_layers, "pipeline_model_parallel_size", pp)
    if parallel.sequence_parallel and tp == 1:
        raise ConfigurationError("--sequence-parallel needs --tensor-model-parallel-size above 1: drop it")
    if parallel.sequence_parallel and length // cp % tp:
        raise ConfigurationError(
            f"--sequence-parallel: --seq-length {length} / --context-parallel-size {cp} must be a multiple of "
            f"--tensor-model-parallel-size {tp}"
        )
    if cp > 1:
        require_multiple("seq_length", length, "context_parallel_size", cp, factor=2)
    if config.optimizer.use_distributed_optimizer and config.optimizer.optimizer != "adam":
        raise ConfigurationError(
            f"--use-distributed-optimizer works with --optimizer adam only, got {config.optimizer.optimizer}: drop one "
            "of them"
        )
