"""No input, however spoilt, ends a reader in anything but one sentence; ``make fuzz`` tries more of them for longer."""

import dataclasses

import pytest

from tests.fuzz.mutations import as_json
from tests.fuzz.run import CORPUS, case, cases, check
from tests.fuzz.targets import LLAMA, METRICS, QWEN3_MOE, SGLANG, TARGETS, VLLM, lines

CASES = 60
HUGE = {"rollout_corr/k3_kl": 1e308, "rollout_corr/chi2_token": 0.5}


@pytest.mark.parametrize("name", TARGETS)
def test_spoilt_input_is_one_error(tmp_path, name):
    findings = [
        finding for number in range(cases(name, CASES)) if (finding := check(name, case(name, number), tmp_path))
    ]
    assert not findings, findings[0]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *[("vllm", [VLLM]), ("sglang", [SGLANG]), ("llama", [LLAMA]), ("qwen3_moe", [QWEN3_MOE])],
        *[("json lines", lines()), ("doctor, metrics", [METRICS]), ("doctor, metrics", [METRICS | HUGE])],
    ],
    ids=["vllm", "sglang", "llama", "qwen3_moe", "json lines", "metrics", "huge metrics"],
)
def test_input_that_is_not_spoilt_is_read_to_its_end(tmp_path, name, values):
    TARGETS[name].read(b"\n".join(map(as_json, values)), tmp_path)


@pytest.mark.parametrize(("name", "content"), CORPUS, ids=[f"{place}-{name}" for place, (name, _) in enumerate(CORPUS)])
def test_what_was_found_is_refused(tmp_path, name, content):
    assert check(name, content, tmp_path) is None
    with pytest.raises(TARGETS[name].errors):
        TARGETS[name].read(content, tmp_path)


def test_an_error_that_is_none_of_a_users_is_a_finding(tmp_path, monkeypatch):
    def fails(_, __):
        raise ZeroDivisionError("here")

    monkeypatch.setitem(TARGETS, "llama", dataclasses.replace(TARGETS["llama"], read=fails))
    assert "ZeroDivisionError: here" in check("llama", b"{}", tmp_path)
