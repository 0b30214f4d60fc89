"""Whole runs on the ranks of the pool: their flags, start and results."""

import contextlib
import io
import logging
import os
import resource
import signal
from unittest import mock

import torch

from megatron_rc.launch.flags.configure import configure
from tests.support.runs import read, steps

# One small step an iteration, with rollouts of a real engine.
LIVE = ["--grpo-iterations=1", "--lr=1e-3", "--rollout-rs-threshold=0.5_2.5,10", "--run-name=run", "--lr-decay-iters=9"]
SHORT = ["--micro-batch-size=8", "--num-layers=2"]
LIVE += SHORT
# The same run with held-out problems.
HELD_OUT = ["--task=python:tests.support.user_rewards:Doubles", "--reward=exact", "--run-name=run", "--lr=1e-3"]
HELD_OUT += ["--max-response-length=8", "--grpo-iterations=1", "--micro-batch-size=2", "--num-layers=2"]
HELD_OUT += ["--grpo-prompts-per-step=2", "--grpo-group-size=2", "--global-batch-size=4"]
HELD_OUT += ["--rollout-rs-threshold=0.01_100,10"]


def run_training(arguments):
    """Run ``train`` as under torchrun; returns the error that it raised. An engine's error is of one rank alone."""
    from megatron_rc.launch.engines import EngineError
    from megatron_rc.launch.errors import RunError
    from megatron_rc.launch.training.loop import train

    config, task = configure(arguments, torch.distributed.get_world_size())
    try:
        train(config, task)
    except EngineError:  # the other ranks wait for this one
        raise
    except (RunError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def said_by_training(arguments):
    """(the error of a run or None, what it says on the terminal)."""
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        return run_training(arguments), errors.getvalue()


def rows(folder):
    return read(folder / "run")


def without_times(folder):
    return steps(folder / "run")


def tensors_of(state):
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else []
    return [tensor for value in values for tensor in tensors_of(value)]


def weights_of(chunks):
    return [weight.detach().clone() for chunk in chunks for weight in chunk.parameters()]


def equal(tensors, other_tensors):
    return all(torch.equal(a, b) for a, b in zip(tensors, other_tensors, strict=True))


def run_until_signal(arguments, step):
    """A run that is told to stop during a step; returns whether nothing is lost."""
    from megatron_rc.launch.training.loop import train
    from megatron_rc.launch.training.trainer import Trainer

    update = Trainer.update

    def stop(trainer, *args):
        metrics = update(trainer, *args)
        if trainer.iteration == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return metrics

    with mock.patch.object(Trainer, "update", stop):
        return train(*configure(arguments, torch.distributed.get_world_size()))


@contextlib.contextmanager
def small_files(limit):
    """No file of this process and its children grows further: what a full disk does, at a chosen place."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def agreed(results):
    """The result that all ranks have."""
    assert all(result == results[0] for result in results), results
    return results[0]


@contextlib.contextmanager
def logged():
    """The messages of the package's logger inside the block."""
    messages = []
    logger = logging.getLogger("megatron_rc")
    disabled = logging.root.manager.disable
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.disable(logging.NOTSET)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logging.disable(disabled)
        logger.removeHandler(handler)
