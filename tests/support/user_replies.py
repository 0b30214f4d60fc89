"""Replies of a user's module to guesses of the game in examples/guessing_game.py."""

import os
import sys
import time


def misbehave(prompt, response, label, record, turns):
    """Hang, end the process, call sys.exit, or give an observation, as the guess says."""
    if response == "1":
        time.sleep(60)
    elif response == "2":
        os._exit(3)
    elif response == "3":
        sys.exit(4)
    return ">"


def empty(prompt, response, label, record):
    return ""


def number(prompt, response, label, record):
    return 5


def foreign(prompt, response, label, record):
    return "<x"


def beyond(prompt, response, label, record):
    return [3, 99]


def unknown(prompt, response, label, record):
    return {"observation": ">", "extra": 1}


def unrewarded(prompt, response, label, record):
    return {"observation": ">", "reward": "much"}


def paid(prompt, response, label, record):
    """A quarter of the guess as the reward of each turn, and a question mark by its token id."""
    return {"observation": [10], "reward": int(response) / 4}


def again(prompt, response, label, record):
    """An observation of one to three tokens after every turn."""
    return "7" * (1 + len(response) % 3)


def dies_of_two(prompt, response, label, record):
    """End the process at a 2, call sys.exit at a 3, and else give an observation."""
    if "2" in response:
        os._exit(3)
    if "3" in response:
        sys.exit(4)
    return "7"


def by_length(prompt, response, label, record):
    """A question mark by its token id, and a reward for each character of the turn."""
    return {"observation": [10], "reward": len(response) / 8}


def after_observation(prompt, response, label, record, turns, token_ids):
    """A digit after a turn that ended with GLM's <|observation|>; other turns end the conversation."""
    return "7" if token_ids[-1] == 4 else None
