"""Megatron-Core's RouterReplay has no choice for a token whose expert is not known, and how this project makes one.

    python examples/upstream/router_replay.py

A token has no recorded experts if it is padding, the last one of a response, or came from an engine's prefix cache.
"""

import sys

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megatron_rc.launch.training.models.routing_replay import ReplayedRouter

UNKNOWN = -1
# Scores of 4 experts for 3 tokens; the engine chose experts 2 and 3 for the first two tokens.
SCORES = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4], [0.1, 0.6, 0.2, 0.1]])
RECORDED = torch.tensor([[2], [3], [UNKNOWN]])


def top_k(scores: torch.Tensor, k: int, **groups: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's own choice, as Megatron's router passes it to the replay."""
    values, experts = scores.topk(k)
    return values, experts


def of_megatron(recorded: torch.Tensor) -> str:
    """Megatron-Core's experts, or its error."""
    replay = RouterReplay()
    replay.set_target_indices(recorded)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    try:
        return str(replay.get_replay_topk(SCORES, 1, default_compute_topk=top_k)[1].flatten().tolist())
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    finally:
        RouterReplay.clear_global_router_replay_instances()


def of_this_project(recorded: torch.Tensor) -> str:
    """The experts of this project's object in RouterReplay's place."""
    replay = ReplayedRouter(layer=0, device=SCORES.device)
    replay.begin_pass()
    replay.experts = recorded
    replay.is_running = True
    return str(replay.get_replay_topk(SCORES, 1, default_compute_topk=top_k)[1].flatten().tolist())


if __name__ == "__main__":
    rows = {
        "the router alone": str(top_k(SCORES, 1)[1].flatten().tolist()),
        "RouterReplay, unknown as -1": of_megatron(RECORDED),
        "RouterReplay, unknown as 0": of_megatron(RECORDED.clamp(min=0)),
        "this project": of_this_project(RECORDED),
    }
    for name, found in rows.items():
        sys.stdout.write(f"{name:28} {found}\n")
