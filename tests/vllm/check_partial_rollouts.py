"""Weights that change while vLLM's server samples: each token is scored again by the weights of its version.

``python -m tests.vllm.check_partial_rollouts FILE`` writes the server's answers for the tests that need no vLLM.
"""

import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.vllm_server import ROUTE
from megatron_rc.records.rollout import SamplingParams
from tests.support.partial_rollouts import CONFIG, farthest, weights_of
from tests.vllm.check_vllm import served

PROMPTS = [[3 + index, 5, 6] for index in range(8)]
TOKENS, SEED = 280, 1
CLOSE, FAR = 1e-4, 1e-2


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    for rig in served(Path(tmp_path_factory.mktemp("server")), CONFIG):
        rig.engine.partial_rollouts = True
        rig.engine.load_weights(weights_of(0), 0)
        rig.engine.sample(PROMPTS, SamplingParams(), 4, SEED)  # the first requests take longer
        rig.engine.load_weights(weights_of(0), 0)
        yield rig.engine


def sample_over(engine, versions, seconds=0.3):
    """Responses that were under way when the engine got the weights of each version, so many seconds apart."""
    found, errors = [], []

    def sample():
        try:
            found.extend(engine.sample(PROMPTS, SamplingParams(), TOKENS, SEED))
        except EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=sample)
    thread.start()
    for version in versions:
        time.sleep(seconds)
        engine.load_weights(weights_of(version), version)
    thread.join()
    if errors:
        raise errors[0]
    return found
