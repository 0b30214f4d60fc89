"""Whether this machine has an NVIDIA GPU. Needs Python alone, since it is asked before anything is installed."""

import ctypes
import sys
from pathlib import Path
from typing import NoReturn

NO_GPU = 77  # exit status: nothing could be tested


def count_gpus() -> int:
    """GPUs that programs may use, as the driver counts them; ``CUDA_VISIBLE_DEVICES`` hides some."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        # A driver in an odd place: PyTorch may still find it.
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    number = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number))
    return 0 if failed else number.value


def require_gpu(target: str) -> int:
    """The number of GPUs; without one the process says so and ends."""
    number = count_gpus()
    if not number:
        end(f"no NVIDIA GPU was found here: run `make {target}` on a machine that has one", NO_GPU)
    return number


def end(message: str, status: int) -> NoReturn:
    """One sentence, and the exit status."""
    sys.stderr.write(f"error: {message}\n")
    sys.exit(status)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
