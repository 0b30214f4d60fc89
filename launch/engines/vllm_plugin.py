"""vLLM's plugin: it makes the receiver of ``--rollout-weight-transfer gloo|nccl|ipc`` known to every process of vLLM.

vLLM finds :func:`register` by an entry point of this package, which has to be installed beside vLLM. A server takes
weights with ``--weight-transfer-config '{"backend": "megatron_rc"}'``.
"""

from __future__ import annotations

import contextlib

from megatron_rc.launch.engines.weight_stream import BACKEND


def register() -> None:
    """Register the receiver in this process, for the process that makes one; vLLM may call this several times."""
    with contextlib.suppress(ImportError):  # vLLM before 0.32 has no such engines
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        if BACKEND not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(
                BACKEND, "megatron_rc.launch.engines.vllm_receiver", "StreamReceiver"
            )
