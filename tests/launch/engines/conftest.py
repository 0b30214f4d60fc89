from tests.support.rollout_servers import engine, server

__all__ = ["engine", "server"]
