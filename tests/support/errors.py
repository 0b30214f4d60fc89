"""The largest of several errors, for an assertion that it is small."""

import math
from collections.abc import Iterable


def largest_error(errors: Iterable[float]) -> float:
    """The largest error; NaN if any error is NaN, which Python's ``max`` may drop.

    Raises:
        ValueError: no errors, so that nothing was compared.
    """
    sizes = [float(error) for error in errors]
    if not sizes:
        raise ValueError("no errors to compare: nothing was measured")
    return math.nan if any(map(math.isnan, sizes)) else max(sizes)
