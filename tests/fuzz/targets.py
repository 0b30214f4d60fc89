"""The readers of the project, each with good content to be spoilt and the errors that it may end in."""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megatron_rc import RolloutCorrectionConfig
from megatron_rc.doctor.inputs import read_evidence
from megatron_rc.doctor.report import as_json as report_of
from megatron_rc.doctor.report import examine, in_words
from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.answers import make_asks
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.sglang_client import SglangClient
from megatron_rc.launch.engines.vllm_client import VllmClient
from megatron_rc.launch.engines.weight_versions import VersionRange
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.launch_file import read_launch_file
from megatron_rc.launch.flags.saved_settings import SETTINGS, checkpoint_settings
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.launch.tasks.prompt_data.rows import parse_line
from megatron_rc.launch.training.checkpoints.unpickling import read_index
from megatron_rc.launch.weights.architecture import read_architecture
from megatron_rc.launch.weights.load import open_weights
from megatron_rc.records.formats.jsonl import read_jsonl, to_json_lines
from megatron_rc.records.formats.slime import from_slime, to_slime
from megatron_rc.records.rollout import SamplingParams, load_rollouts, save_rollouts
from megatron_rc.settings.dialects import DIALECTS
from tests.fuzz.mutations import as_json, spoilt_bytes, spoilt_value
from tests.support.records import example

# How a file is spoilt: as bytes, or as the value that it is the text of.
Spoil = Callable[[random.Random], Any]


@dataclass(frozen=True)
class Target:
    """A reader.

    Attributes:
        spoil: makes an input.
        read: gives it to the reader; whatever it returns is good.
        errors: those that a user may see.
        share: of the cases, where a case is dear.
    """

    spoil: Spoil
    read: Callable[[Any, Path], object]
    errors: tuple[type[Exception], ...] = (ValueError,)
    share: float = 1.0


def text_of(value: Any, depth: int = 100_000) -> Spoil:
    """JSON, spoilt as bytes or as what it says; now and then nested too deep to be parsed."""

    def spoil(rng: random.Random) -> bytes:
        if rng.random() < 0.02:
            return b'{"a": ' + b"[" * depth
        return as_json(spoilt_value(value, rng)) if rng.random() < 0.7 else spoilt_bytes(as_json(value), rng)

    return spoil


def file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """The reader of a file of this name, which is written first."""

    def run(content: bytes, folder: Path) -> object:
        (folder / name).write_bytes(content)
        return read(folder / name)

    return run


# Good content


def lines() -> list[Any]:
    """Records as JSON lines; each token is the only one that the engine kept."""
    records = [json.loads(line) for line in to_json_lines(example())]
    return [record | {"support": [[token] for token in record["tokens"]]} for record in records]


def spoilt_lines(rng: random.Random) -> bytes:
    records = lines()
    index = rng.randrange(len(records))
    return b"\n".join(text_of(record)(rng) if row == index else as_json(record) for row, record in enumerate(records))


LLAMA = {
    **{"model_type": "llama", "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48, "rope_theta": 1e4},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    **{"max_position_embeddings": 64, "vocab_size": 13, "tie_word_embeddings": True, "attention_bias": False},
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
}
QWEN3_MOE = LLAMA | {
    **{"model_type": "qwen3_moe", "rope_scaling": None, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    **{"moe_intermediate_size": 16, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
}
CORRECTION = {
    **{"rollout_is": "token", "rollout_is_threshold": "0.5_2", "rollout_is_batch_normalize": True},
    **{"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.5_2.5,0.27", "bypass_mode": False},
}
OTHERS = {"algorithm": {"rollout_correction": CORRECTION}, "use_tis": True, "tis_clip": 2.0, "loss_fn": {"x": 1}}
LAUNCH = {"num-layers": 2, "swiglu": True, "lr": 1e-3, "task": "count_up", "rollout-is-threshold": "0.5_2"}
KEPT = [[3], [4, 5]]


def _experts(write: Callable[[io.BytesIO], object]) -> str:
    """Experts of three tokens in a model of one layer, as a server writes them."""
    content = io.BytesIO()
    write(content)
    return base64.b64encode(content.getvalue()).decode()


VLLM = {
    **{"model": "m", "prompt_token_ids": [1, 2]},
    "choices": [
        {"token_ids": [3, 4], "finish_reason": "length", "sampling_mask": KEPT}
        | {"logprobs": {"content": [{"token_id": 3, "logprob": -1.0}, {"token_id": 4, "logprob": -0.5}]}}
        | {"weight_versions": [{"version": "0", "start": 0, "end": 2}]}
        | {"routed_experts": _experts(lambda file: np.save(file, np.ones((3, 1, 1), dtype=np.uint8)))}
    ],
}
SGLANG = {
    "output_ids": [3, 4],
    "meta_info": {"output_token_logprobs": [[-1.0, 3, None], [-0.5, 4, None]], "finish_reason": {"type": "length"}}
    | {"prompt_tokens": 2, "weight_version": "0"}
    | {"output_token_sampling_mask": KEPT, "output_token_sampling_logprobs": [0.0, -0.5]}
    | {"routed_experts": _experts(lambda file: file.write(np.ones(3, dtype=np.int32).tobytes()))},
}


METRICS = {
    **{"step": 1, "rollout_corr/kl": 1e-3, "rollout_corr/k3_kl": 1e-3, "rollout_corr/rollout_is_eff_sample_size": 0.9},
    **{f"rollout_corr/log_ratio_p{percent}": 0.1 for percent in ("01", "05", "25", "50", "95", "99")},
    **{"rollout_corr/chi2_seq": 0.5, "rollout_corr/chi2_token": 0.1, "response_length/mean": 5.0},
}
RESPONSE = {
    **{"generation_logprobs": [-1.0, -0.5, -0.25], "prev_logprobs": [-1.0, -0.5, -0.125], "token_mask": [0, 1, 1]},
    **{"sample_mask": 1.0, "reward": 1.0, "uid": "a", "weight_versions": ["3"]},
}


def examined(path: Path) -> object:
    """All that the doctor says of a file."""
    report = examine(read_evidence(path))
    return in_words(report), report_of(report)


def yaml_of(value: Any) -> Spoil:
    """JSON is YAML; spoilt bytes of it are more kinds of YAML."""
    plain = "\n".join(f"{key}: {item}" for key, item in value.items() if not isinstance(item, dict)).encode()
    special = (b"? [a]\n: 1", b"? {a: 1}\n: 1", b"1: 2", b"&a [*a]", b"a: &a [*a]", b"a: !!python/object:os.x {}")
    special += (
        b"a: 2026-99-99",
        b"null: 1",
        b"a: *b",
        b"<<: 3",
        b"a: 0o9",
        b"a: " + b"[" * 500,
        b"- " * 500,
        b"1.5: x",
    )

    def spoil(rng: random.Random) -> bytes:
        how = rng.random()
        if how < 0.15:
            return rng.choice((b"", plain + b"\n")) + rng.choice(special)
        return spoilt_bytes(plain, rng) if how < 0.4 else text_of(value, 500)(rng)

    return spoil


class AnswerFrom(HttpClient):
    """A server that answers everything with the same bytes."""

    def __init__(self, content: bytes) -> None:
        super().__init__("http://localhost:1")
        self.content = content

    def call(self, method: str, path: str, body: Any = None) -> bytes:
        return self.content


def asked(server: type[Any], content: bytes) -> object:
    """One sample of a server with this answer, which is asked for experts and kept tokens."""
    http = AnswerFrom(content)
    client = server(http, experts_shape=(1, 1), reports_support=True)
    client.model = "m"
    client.keeps_version = True
    (ask,) = make_asks([[1, 2]], SamplingParams(top_p=0.9), 2, 0, ResponseEnds((12,)))
    return client.read(ask, http.json("POST", "/"), VersionRange(0, 0))


def rollouts_file(rng: random.Random) -> bytes:
    """A safetensors file of records, spoilt in its header or anywhere."""
    content = _ROLLOUTS
    (length,) = struct.unpack("<Q", content[:8])
    if rng.random() < 0.4:
        return spoilt_bytes(content, rng)
    header = json.loads(content[8 : 8 + length])
    if rng.random() < 0.5:
        header_of_record = json.loads(header["__metadata__"]["megatron_rc"])
        header["__metadata__"]["megatron_rc"] = text_of(header_of_record)(rng).decode(errors="replace")
        written = as_json(header)
    else:
        written = text_of(header)(rng)
    return struct.pack("<Q", len(written)) + written + content[8 + length :]


def _rollouts() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save_rollouts(example(), Path(folder) / "r")
        return (Path(folder) / "r").read_bytes()


def _of_verl(write: Callable[[io.BytesIO, dict[str, torch.Tensor]], object]) -> bytes:
    """A file of tensors by verl's names."""
    content = io.BytesIO()
    rows = torch.full((3, 4), -0.5)
    write(
        content, {"rollout_log_probs": rows, "old_log_probs": rows, "response_mask": rows < 0, "rm_scores": rows.sum(1)}
    )
    return content.getvalue()


_OF_TORCH = _of_verl(lambda file, tensors: torch.save(tensors, file))
_OF_NUMPY = _of_verl(lambda file, tensors: np.savez(file, **{name: one.numpy() for name, one in tensors.items()}))
_ROLLOUTS = _rollouts()
_TENSORS = save({"a": torch.ones(2)})
_INDEX = pickle.dumps(
    Metadata(
        state_dict_metadata={"a": BytesStorageMetadata()},
        storage_data={MetadataIndex("a"): _StorageInfo("__0_0.distcp", 0, 10)},
    )
)


def weights(content: bytes, folder: Path) -> None:
    """A directory with an index, of which one file is there."""
    (folder / "model.safetensors.index.json").write_bytes(content)
    (folder / "a.safetensors").write_bytes(_TENSORS)
    with open_weights(folder) as files:
        files.check("a")


def slime_samples(rng: random.Random) -> Any:
    """Samples with one kept token at each position of the response."""
    samples = to_slime(example(False))
    for sample in samples:
        length = sample["response_length"]
        sample["rollout_top_p_token_ids"] = sample["tokens"][-length:] if length else []
        sample["rollout_top_p_token_offsets"] = list(range(length + 1))
    return [spoilt_value(sample, rng) for sample in samples]


def _correction(dialect: str) -> Target:
    value = CORRECTION if dialect == "megatron_rc" else OTHERS | CORRECTION
    read = file("c.yaml", lambda path: RolloutCorrectionConfig.from_yaml(path, dialect=dialect))
    return Target(yaml_of(value), read, (ValueError, TypeError), share=0.1)


_CONFIG = file("config.json", lambda path: read_architecture(path.parent))
TARGETS: dict[str, Target] = {
    "json lines": Target(spoilt_lines, file("r.jsonl", lambda path: list(read_jsonl(path, 2)))),
    "rollouts": Target(rollouts_file, file("r.safetensors", load_rollouts)),
    "doctor, metrics": Target(text_of(METRICS), file("m.jsonl", examined), share=0.3),
    "doctor, columns": Target(
        text_of({name: [value] * 9 for name, value in METRICS.items()}), file("m.json", examined)
    ),
    "doctor, csv": Target(
        lambda rng: spoilt_bytes(b"Step,rollout_corr/kl\n1,0.5\n2,\n", rng), file("m.csv", examined), share=0.3
    ),
    "doctor, responses": Target(text_of(RESPONSE), file("r.jsonl", examined), share=0.3),
    "doctor, torch": Target(lambda rng: spoilt_bytes(_OF_TORCH, rng), file("r.pt", examined), share=0.3),
    "doctor, numpy": Target(lambda rng: spoilt_bytes(_OF_NUMPY, rng), file("r.npz", examined), share=0.3),
    "slime": Target(slime_samples, lambda listed, _: from_slime(listed, sampling=SamplingParams(), policy_version=0)),
    "llama": Target(text_of(LLAMA), _CONFIG, (ConfigurationError,)),
    "qwen3_moe": Target(text_of(QWEN3_MOE), _CONFIG, (ConfigurationError,)),
    "weights": Target(text_of({"weight_map": {"a": "a.safetensors"}}), weights),
    "launch file": Target(yaml_of(LAUNCH), file("l.yaml", lambda path: read_launch_file(str(path))), share=0.1),
    "vllm": Target(text_of(VLLM), lambda slime_lists, _: asked(VllmClient, slime_lists), (EngineError,)),
    "sglang": Target(text_of(SGLANG), lambda slime_lists, _: asked(SglangClient, slime_lists), (EngineError,)),
    "prompt rows": Target(text_of({"prompt": "1 + 1", "label": ["2"]}), lambda slime_lists, _: parse_line(slime_lists)),
    "checkpoint settings": Target(
        text_of({"model": {"a": 1}, "experts": None}), file(SETTINGS, lambda path: checkpoint_settings(path.parent))
    ),
    "checkpoint index": Target(lambda rng: spoilt_bytes(_INDEX, rng), file(".metadata", read_index)),
    **{f"correction, {dialect}": _correction(dialect) for dialect in ("megatron_rc", *DIALECTS)},
}
