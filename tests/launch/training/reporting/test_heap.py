"""Free memory between blocks that are in use goes back to the system."""

import psutil
import torch

from megatron_rc.launch.training.reporting.machine_metrics import trim_heap

MEGABYTE = 1 << 20


def test_gaps_between_tensors_are_given_back():
    process = psutil.Process()
    tensors = [torch.ones(4000) for _ in range(8000)]
    del tensors[1::2], tensors[::8]
    full = process.memory_info().rss
    trim_heap(7)
    assert full - process.memory_info().rss < 20 * MEGABYTE
    trim_heap(200)
    assert full - process.memory_info().rss > 30 * MEGABYTE
