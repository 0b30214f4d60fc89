"""Lines on standard error: control characters that others wrote do nothing to the terminal."""

import logging
import subprocess
import sys

from megatron_rc.launch.python_specs import in_words
from megatron_rc.launch.rewards.outcome import outcome_of, read_score
from megatron_rc.launch.standard_error import VisibleFormatter, say_error
from tests.support.paths import ROOT

# Clears the screen; the same by one byte; turns the rest of the line around; moves to its beginning.
HOSTILE = "no \x1b[2J and \x9b2J and \u202e and \r, but 坏 · × \t\nanother line"
SEEN = "no \\x1b[2J and \\x9b2J and \\u202e and \\r, but 坏 · × \t\nanother line"


def test_what_others_wrote_is_escaped(capsys):
    say_error(HOSTILE)
    assert capsys.readouterr().err == f"error: {SEEN}\n"
    record = logging.LogRecord("", logging.WARNING, "", 0, "%s", (HOSTILE,), None)
    assert VisibleFormatter("%(message)s").format(record) == SEEN
    # Errors of reward functions are escaped too.
    assert in_words(ValueError("\x1b]0;title\x07")) == "ValueError: \\x1b]0;title\\x07"

    def raise_hostile():
        raise ValueError(HOSTILE)

    failure = outcome_of(raise_hostile, read_score).failure
    assert failure.startswith("raised ValueError: no \\x1b[2J and \\x9b2J and \\u202e and")
    assert failure.isprintable()


def test_a_traceback_is_escaped():
    code = "from megatron_rc.launch.standard_error import outlast_reader; outlast_reader(); raise ValueError('\x1b[2J')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("ValueError: \\x1b[2J\n")
