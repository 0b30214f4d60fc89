"""Reading runs no code: the sources that read or write pickles."""

import ast

from tests.support.paths import ROOT

LOADERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}


def unsafe(source):
    """The places of a source that read or write pickles."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in names if name.split(".")[0] in LOADERS)
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            name, given = _name(node.func), {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            method, allows = name.rpartition(".")[2], given.get("allow_pickle") is not False
            loads = name in ("torch.load", "torch.save") or (name in ("np.load", "numpy.load") and allows)
            if loads or method in ("to_pickle", "read_pickle") or ("allow_pickle" in given and allows):
                yield name


def _name(node):
    """``torch.load`` of a call's function; the owner is empty if it is an expression."""
    if isinstance(node, ast.Attribute):
        return f"{getattr(node.value, 'id', '')}.{node.attr}"
    return node.id


# Messages between this project's own processes; Megatron's checkpoints, with an unpickler that knows their contents;
# and tensors by name, which PyTorch reads with weights_only=True.
PICKLES = {
    "launch/rewards/pool.py",
    "launch/rewards/worker.py",
    "launch/training/checkpoints/unpickling.py",
    "launch/training/checkpoints/pieces.py",
    "megatron_rc/records/tensor_files.py",
}


def test_no_other_source_reads_or_writes_pickles():
    files = [
        path for folder in ("megatron_rc", "parallel", "launch", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 60
    found = {path.relative_to(ROOT).as_posix() for path in files if list(unsafe(path.read_text(encoding="utf-8")))}
    assert found == PICKLES


def test_tensors_by_name_are_read_safely():
    source = (ROOT / "megatron_rc/records/tensor_files.py").read_text(encoding="utf-8")
    assert source.count("torch.load(") == source.count("weights_only=True)") == 1


SOURCES = """import pickle; import os, pickle as p; from pickle import loads; from cloudpickle.compat import x;
import joblib; torch.load(path); torch.load(path, weights_only=True); torch.save(a, b); np.load(path);
numpy.load(path, allow_pickle=True); read(path, allow_pickle=flag); pd.read_pickle(path); frame.to_pickle(path)"""


def test_pickles_are_seen():
    for source in SOURCES.split(";"):
        assert list(unsafe(source.strip())), source
    assert not list(unsafe("np.load(path, allow_pickle=False); json.load(file); import json; model.load(path)"))
