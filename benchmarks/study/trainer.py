"""One run of the study, in this process: ``python -m benchmarks.study.trainer <flags of the launcher>``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.study.design import GAVE_UP, Mismatch
from benchmarks.study.engine import ExactlyEvaluatedEngine, StudyEngine
from benchmarks.study.late import LateEngine
from benchmarks.study.settings import ENGINES
from megatron_rc.launch.ending import end_with_parent
from megatron_rc.launch.engines import RolloutEngine, registry
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.measures import shift

USAGE_ERROR = 2
STOPPED = 4


def register(mismatch: Mismatch) -> None:
    """Make ``--rollout-engine study-NAME`` known to this process."""
    arguments = mismatch.engine or {}
    make: Callable[..., RolloutEngine] = partial(StudyEngine, **arguments)
    if "late" in arguments:
        make = partial(LateEngine, **arguments)
    if "evaluates_exactly" in arguments:
        make = ExactlyEvaluatedEngine
    registry.ENGINES[f"study-{mismatch.name}"] = registry.EngineKind(make)


def main(words: Sequence[str]) -> None:
    """Train one run; end the process with 2 for flags that cannot work, and with 3 if training failed."""
    # A run that outlived its queue would write beside the next try of the same run.
    end_with_parent(os.getppid())
    # Before the launcher's parser is loaded, which lists the engines.
    for mismatch in ENGINES:
        register(mismatch)
    from megatron_rc.launch.flags.configure import configure
    from megatron_rc.launch.train_ppo import cpu_backend, ignore_megatron_warnings

    # The task has ten different answers: neighbouring log-probs are the same few pairs, which may resemble shifted
    # ones by chance. Nothing is shifted here, so the shift test is off.
    shift.SHIFT_RATIO = 0.0
    try:
        config, task = configure(words, 1)
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(USAGE_ERROR)
    ignore_megatron_warnings()
    with cpu_backend():
        from megatron_rc.launch.distributed import alone
        from megatron_rc.launch.errors import RunError
        from megatron_rc.launch.training.loop import train

        try:
            with alone(config):
                is_whole = train(config, task)
        except RunError as error:
            sys.stderr.write(f"error: {error}\n")
            sys.exit(GAVE_UP)
    if not is_whole:
        sys.exit(STOPPED)


if __name__ == "__main__":
    main(sys.argv[1:])
