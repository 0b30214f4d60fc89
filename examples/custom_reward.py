"""A reward of one's own: ``--reward python:examples.custom_reward:last_number``.

It is called once for each response, in a separate process with a time limit. docs/data.md has its possible results.
"""

import re


def last_number(*, prompt: str, response: str, label: object, record: dict[str, object]) -> dict[str, float]:
    """Nine tenths for the right number at the end, one tenth for a short answer; ``reward`` is trained on.

    Args:
        prompt: the text of the problem.
        response: the text of the answer, without its end token.
        label: the problem's label.
        record: the prompt's line in its file; empty for other tasks.
    """
    numbers = re.findall(r"-?\d+", response)
    right = float(numbers[-1:] == [str(label)])
    short = float(len(response) < 40)
    return {"reward": 0.9 * right + 0.1 * short, "right": right, "short": short}
