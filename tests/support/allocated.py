"""Memory that PyTorch allocates in a process in which a rank builds its trainer and makes an optimizer step."""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_rc.launch.rollouts.teacher_prompts import TeacherRows
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.models.cpu import without_compiler
from megatron_rc.parallel import ParallelGroups
from megatron_rc.records.rollout import RolloutBatch
from tests.support.made_rollouts import made_batch
from tests.support.recorded_training import run_config

# Megatron-Core's first import: a compiler would take a second of it.
with without_compiler():
    from megatron_rc.launch.training.trainer import Trainer


def random_rollouts(config: RunConfig) -> RolloutBatch:
    """This replica's share of a rollout batch, with every sequence of full length."""
    rows = config.rollouts.sequences // config.data_parallel_size
    length = config.training.seq_length
    position = torch.arange(length).expand(rows, length)
    mask = position >= length - config.rollouts.max_response_length
    tokens = torch.randint(0, config.model.vocab_size, (rows, length))
    log_probs = -torch.rand(rows, length) - 1
    groups = torch.arange(rows) // config.rollouts.grpo_group_size
    return made_batch(tokens, mask, log_probs, torch.rand(rows), group_ids=groups)


class GlooAside(TorchDispatchMode):
    """Runs gloo's collectives on copies, in another thread than the profiler's.

    The profiler counts one thread's allocations. It would count a tensor for ever that a thread of gloo drops last.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # Messages to one rank stay on this thread.
        if func.namespace != "c10d" or func._opname.startswith(("send", "recv")):
            return func(*args, **(kwargs or {}))
        works: list[Any] = []

        def collective() -> None:
            with torch.no_grad():
                copies = tree_map_only(Tensor, torch.clone, args)
                outputs = func(*copies, **(kwargs or {}))
                works.extend(value for value in tree_leaves(outputs) if isinstance(value, torch.ScriptObject))
                torch.distributed.Work.unbox(works[0]).wait()
                for tensor, copy in zip(tree_leaves(args), tree_leaves(copies), strict=True):
                    if isinstance(tensor, Tensor):
                        tensor.copy_(copy)

        thread = threading.Thread(target=collective)
        thread.start()
        thread.join()
        outputs = args[0]
        return works[0] if isinstance(func._schema.returns[0].type, torch._C.ClassType) else (outputs, works[0])


def peak_bytes(arguments: list[str]) -> int:
    """The largest number of bytes allocated at once, from the model's first parameter to the end of a step."""
    # Memory that is older than the profile would be subtracted when it is freed.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, GlooAside():
        config = run_config(arguments, torch.distributed.get_world_size(), engine=False)
        trainer = Trainer(config, ParallelGroups.from_megatron())
        rollouts = random_rollouts(config)
        teacher_input = None
        if config.distillation is not None and config.distillation.teacher_prompt:
            teacher_input = TeacherRows(rollouts.tokens, torch.zeros(len(rollouts.tokens), dtype=torch.int64))
        prepared = trainer.prepare(rollouts, None, teacher_input)
        trainer.update(prepared, 0)
    return most_at_once(profiler)


def most_at_once(profiler: profile) -> int:
    """The largest number of bytes allocated at once, from a profiler's events."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
