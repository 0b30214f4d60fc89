"""The README's commands on Debian's present releases, without a compiler."""

import logging
import re
import shutil
import time

import pytest

from tests.support.minimal_debian import CHECKOUT, RELEASES, MinimalDebian, why_not

# All that a first test on such a machine leaves out.
SKIPPED = ("reasoning-gym is not installed", "this Megatron-Core ")

log = logging.getLogger(__name__)


@pytest.fixture(params=RELEASES)
def debian(request, tmp_path):
    """The machine, removed at the end: with a CUDA build of PyTorch it takes 7 GB."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = tmp_path / request.param
    try:
        yield MinimalDebian(request.param, folder)
    finally:
        if folder.exists():
            shutil.rmtree(folder)


def run(debian, command, **options):
    """Output of a command, which must succeed."""
    begin = time.monotonic()
    done = debian.run(command, **options)
    log.info("%s, %s: %.0f s\n%s", debian.folder.name, command, time.monotonic() - begin, done.stdout[-1500:])
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def test_the_two_commands_need_no_compiler(debian):
    """And no network once everything is installed."""
    assert not [name for name in ("cc", "gcc", "clang") if (debian.folder / "usr/bin" / name).exists()]

    training = 'make run FLAGS="--train-iters 4"'
    first = run(debian, training)
    assert f"== virtual environment in .venv, with {RELEASES[debian.folder.name]}." in first
    assert "finished at step 4" in first
    log.info(run(debian, f"du -sh --exclude=runs {CHECKOUT}"))

    again = run(debian, training, offline=True)
    assert "finished at step 4" in again
    assert "== virtual environment" not in again

    tested = run(debian, "make test-fast", offline=True)
    assert re.search(r"^=+ [\d,]+ passed", tested, flags=re.MULTILINE)
    skipped = re.findall(r"^SKIPPED .+", tested, flags=re.MULTILINE)
    assert not [line for line in skipped if not any(reason in line for reason in SKIPPED)]
