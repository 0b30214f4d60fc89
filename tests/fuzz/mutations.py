"""Ways to spoil a file: bytes as a disk or a network would, and values as a careless or hostile writer would."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

# What stands where something else was expected.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e308, 5e-324, 2**31, 2**63, -(2**63) - 1, 10**400, -(10**400)),
    *(float("nan"), float("inf"), "", "0", "1e999", "nan", "none", "0.5_2", "1:0.8", "x", "\ud800", "\0", "..", "../x"),
    *("/etc/passwd", "a" * 10_000, [], {}, [[]], [None], [1, "a"], {"": 1}, {"x": {}}, [{}]),
)
DEPTH = 1_500


def spoilt_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bits flipped, bytes cut out, doubled, replaced or put in."""
    spoilt = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        offset = rng.randrange(len(spoilt) + 1)
        length = rng.choice((1, 1, 4, 64, 1024))
        how = rng.randrange(6)
        if how == 0 and offset < len(spoilt):
            spoilt[offset] ^= 1 << rng.randrange(8)
        elif how == 1:
            del spoilt[offset : offset + length]
        elif how == 2:
            spoilt[offset:offset] = spoilt[offset : offset + length]
        elif how == 3:
            spoilt[offset:offset] = rng.randbytes(length)
        elif how == 4:
            del spoilt[offset:]
        else:
            spoilt[offset:offset] = rng.choice(
                (b"[" * DEPTH, b'{"a":' * DEPTH, b"9" * 5000, b"\xff", b"\0", b"}", b"NaN")
            )
    return bytes(spoilt)


def spoilt_value(value: Any, rng: random.Random) -> Any:
    """The same with some of what it holds replaced, renamed, left out or nested deeply."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = _changed(value, rng)
    return value


def _changed(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        how = rng.randrange(8)
        if how == 0:
            del value[key]
        elif how == 1:
            value[rng.choice(("", "x", key + " ", key.upper()))] = value.pop(key)
        else:
            value[key] = _changed(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        value[index] = _changed(value[index], rng)
        return value
    return copy.deepcopy(rng.choice(VALUES))


def as_json(value: Any) -> bytes:
    """Numbers of any size included, and what no JSON has (NaN)."""
    return json.dumps(value).encode()
