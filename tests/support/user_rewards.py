"""Reward functions of a user's module; most of them do what the response tells them."""

import ctypes
import os
import re
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np

NUMBER = 3


def parts(prompt, response, label, record):
    """A dict of components."""
    reward = {"reward": float(response == label), "length": len(response)}
    return {**reward, "polite": 1.0} if "please" in response else reward


async def later(prompt, response, label, record):
    return 1.0


class _Later:
    async def __call__(self, prompt, response, label, record):
        return 1.0


called_later = _Later()


def one_by_one(prompt, response, label, record):
    yield 1.0


def everything(prompt, response, label, record):
    """1 if all four arguments arrive unchanged."""
    return float((prompt, response, label, record) == ("2 + 2 = ?", "5", {"is": (4,)}, {"level": 1, "é": None}))


def misbehave(prompt, response, label, record):
    what, _, argument = response.partition(" ")
    if what == "sleep":
        time.sleep(float(argument))
    elif what == "regex":  # holds the interpreter's lock
        re.match(r"(a+)+$", "a" * 40 + "b")
    elif what == "exit":
        os._exit(int(argument))
    elif what == "segfault":
        ctypes.string_at(0)
    elif what == "raise":
        raise ValueError(argument)
    elif what == "quit":
        sys.exit(4)
    elif what == "give":
        return GIVEN[argument]
    elif what == "print":
        sys.stdout.write(argument * 100_000)
        sys.stderr.write(argument * 100_000)
    elif what == "read":
        return len(input())
    elif what == "start":  # leaves another process running, and hangs
        subprocess.Popen(["sleep", argument])
        time.sleep(float(argument))
    elif what == "fork":  # both processes return
        os.fork()
    elif what == "heavy":
        return float("torch" in sys.modules or "megatron.core" in sys.modules)
    return 1.0


class Awkward:
    def __float__(self):
        raise RuntimeError("not today")

    def __repr__(self):
        raise RuntimeError("nor this")


GIVEN = {
    "numpy": np.float32(0.5),
    "fraction": Fraction(1, 2),
    "true": True,
    "none": None,
    "lambda": lambda: 1,
    "awkward": Awkward(),
    "nan": float("nan"),
    "beyond": 1e39,
    "without": {"fluency": 1},
    "nested": {"reward": {"reward": 1}},
    "taken": {"reward": 1, "mean": 2},
    "many": {"reward": 1, **{f"part{index}": index for index in range(40)}},
    "huge": {"reward": 1, "x" * 10_000_000: 1},
}


class Doubles:
    """A task: the answer to ``4`` is ``8``."""

    characters = "0123456789"
    max_response_length = 2

    def __init__(self, seed):
        self.seed = seed

    def problems(self, start, count, held_out=False):
        from megatron_rc.launch.tasks import Problem

        numbers = [(self.seed + number) % 5 + 5 * held_out for number in range(start, start + count)]
        return [Problem(str(number), label=str(2 * number)) for number in numbers]

    def reward(self, prompt, response, label, record):
        return {"reward": float(response == label), "ended": float(len(response) < 2)}


class Bare:
    """A task without a tokenizer's characters and without lengths: flags give both."""

    def __init__(self, seed):
        self.problems = Doubles(seed).problems

    def reward(self, prompt, response, label, record):
        return float(response == label)


def too_few(prompt, response):
    return 1.0


def short_ones(prompt, response, label, record):
    if len(response) > 3:
        raise ValueError(f"too long: {response}")
    return {"reward": 0.5, "short": len(response)}


def refuse(prompt, response, label, record):
    raise ValueError("none is good enough")


def length(prompt, response, label, record):
    return len(response)


def of_tokens(prompt, response, label, record, token_ids):
    """The characters of the response, its tokens, and its last token."""
    return {"reward": len(response), "tokens": len(token_ids), "last": token_ids[-1]}
