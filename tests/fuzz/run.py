"""Tries spoilt inputs on every reader: ``python -m tests.fuzz.run [MINUTES]``, or a few of them in the suite.

What is found belongs into ``CORPUS``, which the suite tries too.
"""

from __future__ import annotations

import hashlib
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from tests.fuzz.targets import TARGETS

_DEEP = b'{"a": ' + b"[" * 100_000
# What once ended otherwise (RecursionError, TypeError, AttributeError, OverflowError) or was read although it must not.
CORPUS: tuple[tuple[str, Any], ...] = (
    *((name, _DEEP) for name in ("json lines", "llama", "weights", "vllm", "sglang", "checkpoint settings")),
    ("correction, verl", b"a: " + b"[" * 500),
    ("launch file", b"- " * 500),
    ("correction, megatron_rc", b"a: 2026-99-99"),
    *((f"correction, {dialect}", b"3: 1\nuse_tis: true") for dialect in ("megatron_rc", "slime", "verl")),
    *(("weights", b'{"weight_map": {"a": %s}}' % name) for name in (b"{}", b"0", b'"../a"', b'"/a"', b'""')),
    *(
        (
            f"correction, {dialect}",
            b'{"algorithm": {"rollout_correction": {"rollout_is_threshold": -1%s}}}' % (b"0" * 400),
        )
        for dialect in ("slime", "verl", "verl-2025-11")
    ),
    ("weights", b'{"weight_map": {"a": "' + b"a" * 10_000 + b'"}}'),
    ("weights", b'{"weight_map": "\xe5' + b"a" * 30_000),
    ("llama", b'{"model_type": {}}'),
    ("llama", b'{"model_type": "llama", "hidden_size": ' + b"9" * 400 + b"}"),
    ("doctor, metrics", b'{"step": 1, "rollout_corr/kl": ' + b"9" * 400 + b"}"),
    ("doctor, responses", b'{"rollout_log_probs": [-1.0], "loss_mask": [' + b"9" * 400 + b"]}"),
    ("slime", [1.5]),
    ("slime", [{"index": 0, "group_index": 0, "tokens": [1, 2], "response_length": 1, "reward": 10**400}]),
)
SECONDS = 5.0


def cases(name: str, count: int) -> int:
    """How many of so many cases this target gets."""
    return max(1, round(count * TARGETS[name].share))


def case(name: str, number: int) -> Any:
    """An input; always the same one."""
    seed = hashlib.sha256(f"{name}/{number}".encode()).digest()
    return TARGETS[name].spoil(random.Random(seed))


def check(name: str, content: Any, folder: Path) -> str | None:
    """Read one input; None if that works, or is refused in one sentence, else what went wrong."""
    target = TARGETS[name]
    began = time.monotonic()
    why = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.read(content, folder)
    except target.errors as error:
        if not str(error).strip() or "\n" in str(error):
            why = f"{type(error).__name__} is no sentence: {str(error)[:300]!r}"
        # A name in the message may be as long as the input; more is not.
        elif len(str(error)) > 20_000:
            why = f"a message of {len(str(error))} characters"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {str(error)[:300]} ({Path(last.filename).name}:{last.lineno})"
    if why is None and time.monotonic() - began > SECONDS:
        why = f"took {time.monotonic() - began:.0f} s"
    return None if why is None else f"{name}: {why}\ninput: {repr(content)[:600]}"


def main() -> None:
    """Try new cases until the time is over, and print each kind of finding once."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    end = time.monotonic() + 60 * minutes
    number = 0
    seen = set()
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            for name in TARGETS:
                if number % round(1 / TARGETS[name].share):
                    continue
                finding = check(name, case(name, number), Path(folder))
                if finding and finding[:80] not in seen:
                    seen.add(finding[:80])
                    sys.stdout.write(f"{finding}\n\n")
            number += 1
    sys.stdout.write(f"{number} rounds over {len(TARGETS)} readers, {len(seen)} kinds of findings\n")
    sys.exit(bool(seen))


if __name__ == "__main__":
    main()
