"""``python:pkg.module:name``: what is found, and one sentence where nothing is."""

import subprocess
import sys

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.python_specs import load_python
from tests.support.paths import ROOT

HERE = "tests.support.user_rewards"


@pytest.mark.parametrize("given", ["a", "a:", ":b", "a:b:c", "a/b.py:c", ".a:b"])
def test_what_is_written_otherwise_is_refused(given):
    with pytest.raises(ConfigurationError, match=r"^--reward python:.*: write it as python:pkg\.module:name, which is"):
        load_python(f"python:{given}", "--reward")


MISSING = {
    f"{HERE}:nothing": f"^--task python:{HERE}:nothing: {HERE} has no nothing: is the name right",
    "no_such_module:name": "there is no module no_such_module: start the run in the folder that holds it, or name",
    "json.tool.deeper:name": "there is no module json.tool.deeper: start",
    f"{HERE}.py:parts": rf"there is no module {HERE}\.py: leave out \.py, as in python:{HERE}:name$",
}


@pytest.mark.parametrize("spec", MISSING)
def test_what_is_not_there_is_named(spec):
    with pytest.raises(ConfigurationError, match=MISSING[spec]):
        load_python(f"python:{spec}", "--task")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = 1\nraise ValueError('no GPU')\n", "ValueError: no GPU"),
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("def f(:\n", r"SyntaxError: invalid syntax"),
        ("import sys\nsys.exit('done')\n", "SystemExit: done"),
    ],
)
def test_a_module_that_raises_keeps_its_traceback(tmp_path, monkeypatch, text, error):
    (tmp_path / "own.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    with pytest.raises(ConfigurationError) as caught:
        load_python("python:own:f", "--reward")
    *traceback, sentence = str(caught.value).splitlines()
    assert sentence.startswith(f"--reward python:own:f: own cannot be imported, it raises {error}")
    assert f'File "{tmp_path}/own.py", line' in "\n".join(traceback)
    assert "importlib" not in "\n".join(traceback)


def test_the_current_directory_holds_modules_even_where_a_file_was_started(tmp_path):
    """As torchrun starts ``launch/train_ppo.py``: its folder is looked into, the current one is not."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.py").write_text("number = 7\n")
    (tmp_path / "start.py").write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\n"
        "from megatron_rc.launch.python_specs import load_python\n"
        "sys.exit(load_python('python:mine:number', '--reward'))\n"
    )
    assert subprocess.run([sys.executable, tmp_path / "start.py"], cwd=tmp_path / "here").returncode == 7
