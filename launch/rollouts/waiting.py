"""Where ranks wait for the engines of all replicas: not in a collective, whose limit is for what takes moments."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from megatron_rc.launch.run_config import RunConfig

# A rank looks again after this share of what it has waited; the store's own wait would warn of every timeout.
_SHARE, _SHORTEST, _LONGEST = 0.01, 1e-3, 0.5
# What engines that give up at the limit have left to say so.
_GRACE_SECONDS = 60


class EngineWaits:
    """The ranks' meetings after each work of the engines, through the store that they met by.

    Args:
        config: of the run.
        replica: of this rank.
        is_engine_rank: this rank is the one of its replica that works.
    """

    def __init__(self, config: RunConfig, replica: int, is_engine_rank: bool) -> None:
        self.config, self.replica, self.is_engine_rank = config, replica, is_engine_rank
        self.seconds = 60 * config.launch.rollout_wait_minutes
        self._meetings, self._store = 0, None
        if dist.get_world_size() > 1:
            store = _get_default_store()
            # The first of all ranks and the last of them count to the same whole number of worlds.
            before = (store.add("collectors of rollouts", 1) - 1) // dist.get_world_size()
            self._store = PrefixStore(f"rollouts of collector {before}", store)

    def meet(self, what: str) -> None:
        """Wait until the engines of all replicas are through.

        Raises:
            RuntimeError: an engine neither ended nor gave up in time.
        """
        if self._store is None:
            return
        self._meetings += 1
        if self.is_engine_rank:
            self._store.set(self._key(self.replica), "through")
            self._store.delete_key(self._key(self.replica, self._meetings - 1))
        keys = [self._key(replica) for replica in range(self.config.data_parallel_size)]
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < self.seconds + _GRACE_SECONDS:
            if self._store.check(keys):
                return
            time.sleep(min(max(_SHARE * waited, _SHORTEST), _LONGEST))
        missing = [str(replica) for replica, key in enumerate(keys) if not self._store.check([key])]
        raise RuntimeError(
            f"{what} did not end in {self.config.launch.rollout_wait_minutes} minutes (--rollout-wait-minutes) on the "
            f"data-parallel replicas {', '.join(missing)}, and could not be given up"
        )

    def _key(self, replica: int, meeting: int | None = None) -> str:
        return f"{self._meetings if meeting is None else meeting} {replica}"
