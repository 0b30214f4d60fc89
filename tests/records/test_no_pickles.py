"""Reading runs no code: the sources that read or write pickles."""

import re

from tests.support.paths import ROOT

# One import stands on each line, as the linter wants it.
UNSAFE = re.compile(
    r"^\s*(import|from) (pickle|_pickle|cloudpickle|dill|shelve|marshal|joblib)\b|\btorch\.(load|save)\(|"
    r"\b(np|numpy)\.load\((?!.*allow_pickle=False)|allow_pickle=(?!False)|\b(to|read)_pickle\(",
    re.MULTILINE,
)

# Messages between this project's own processes; Megatron's checkpoints, with an unpickler that knows their contents;
# and tensors by name, which PyTorch reads with weights_only=True.
PICKLES = {
    "launch/rewards/pool.py",
    "launch/rewards/worker.py",
    "launch/training/checkpoints/unpickling.py",
    "megatron_rc/records/tensor_files.py",
}


def test_no_other_source_reads_or_writes_pickles():
    files = [
        path for folder in ("megatron_rc", "parallel", "launch", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 60
    unsafe_files = {
        path.relative_to(ROOT).as_posix() for path in files if UNSAFE.search(path.read_text(encoding="utf-8"))
    }
    assert unsafe_files == PICKLES


def test_tensors_by_name_are_read_safely():
    source = (ROOT / "megatron_rc/records/tensor_files.py").read_text(encoding="utf-8")
    assert source.count("torch.load(") == source.count("weights_only=True)") == 1
