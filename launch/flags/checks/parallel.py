"""How the model is cut over the ranks."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError, require_multiple
from megatron_rc.launch.run_config import RunConfig


def _check_stages(config: RunConfig) -> None:
    """Layers on the pipeline stages, of which the ends may have numbers of their own."""
    layers, pp = config.transformer.num_layers, config.parallel.pipeline_model_parallel_size
    ends = dict(zip(("first", "last"), config.megatron.layers_at_ends, strict=True))
    given = {f"--decoder-{end}-pipeline-num-layers {number}": number for end, number in ends.items() if number}
    if not given or pp == 1:
        require_multiple("num_layers", layers, "pipeline_model_parallel_size", pp)
        return
    if config.parallel.virtual_pipeline_model_parallel_size is not None:
        raise ConfigurationError(
            f"{next(iter(given))} with --num-layers-per-virtual-pipeline-stage: virtual stages have equally many "
            "layers; drop one of them"
        )
    left, others = layers - sum(given.values()), pp - len(given)
    if left < others or (left % others if others else left):
        raise ConfigurationError(
            f"--num-layers {layers} less {' and '.join(given)} leaves {left} layers, which are not spread evenly over "
            f"{others} other pipeline stages: change one of them"
        )


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
    _check_stages(config)
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
