"""Files of JSON lines, and folders of the datasets library."""

import gzip
import importlib
import importlib.util
import json
import os
import tracemalloc

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks.prompt_data.files import JsonLines, open_rows

ROWS = [{"prompt": f"{number}", "label": number} for number in range(5)]


def ignore(index, row):
    """Looks at nothing."""


def write(path, rows=ROWS, end="\n"):
    path.write_text("".join(json.dumps(row) + end for row in rows), newline="")
    return str(path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_are_read_by_number(tmp_path, end):
    seen = []
    path = write(tmp_path / "a.jsonl", end=end)
    rows = open_rows("--prompt-data", path, lambda index, row: seen.append((index, row)))
    assert seen == list(enumerate(ROWS))
    assert [rows.row(index) for index in (4, 0, 2)] == [ROWS[4], ROWS[0], ROWS[2]]
    assert rows.where(2) == f"--prompt-data {path}, line 3"
    same, other = (write(tmp_path / name, rows, end) for name, rows in (("b", ROWS), ("c", ROWS[::-1])))
    digests = [open_rows("--prompt-data", one, ignore).digest for one in (same, other)]
    assert rows.digest == digests[0] != digests[1]


def test_rows_stay_on_the_disk(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "x" * 2000}] * 2000)
    tracemalloc.start()
    rows = JsonLines("--prompt-data", path, ignore)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 64 * len(rows)


def test_what_editors_leave_is_no_row(tmp_path):
    """A mark of the byte order, no newline at the end, or several."""
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}')
    (tmp_path / "b.jsonl").write_bytes(b'{"a": 1}\n{"a": 2}\n\n \n')
    for name in ("a", "b"):
        rows = open_rows("--prompt-data", str(tmp_path / f"{name}.jsonl"), ignore)
        assert [rows.row(index)["a"] for index in range(len(rows))] == [1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n\n", "a.jsonl is empty"),
        (b'{"a": 1}\n\n{"a": 2}\n', "a.jsonl, line 2 is empty"),
        (b'{"a": 1}\n\xff\n', "a.jsonl, line 2 is not UTF-8"),
        (b'[\n{"a": 1}\n]', "a.jsonl is one JSON value over several lines"),
        (gzip.compress(b'{"a": 1}\n', mtime=0), "a.jsonl is .* gzip"),
        (b'{"a": 1}\nPAR1\n', "a.jsonl, line 2 is not JSON"),
    ],
)
def test_broken_files_are_named_by_line(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"^--eval-data .*{message}"):
        open_rows("--eval-data", str(path), ignore)


def test_what_cannot_be_read_or_can_be_read_once_is_refused(tmp_path, monkeypatch):
    """Reading a pipe or a device would block, or take the rows from the next rank."""
    os.mkfifo(tmp_path / "pipe")
    for path, message in {
        f"{tmp_path}/pipe": f"^--prompt-data {tmp_path}/pipe is no regular file",
        f"{tmp_path}/none.jsonl": r"none\.jsonl cannot be read: No such file or directory",
    }.items():
        with pytest.raises(ConfigurationError, match=message):
            open_rows("--prompt-data", path, ignore)

    def look(index, row):
        if row["label"] == 3:
            raise ValueError("is odd")

    with pytest.raises(ConfigurationError, match=r"^--prompt-data .*a.jsonl, line 4 is odd$"):
        open_rows("--prompt-data", write(tmp_path / "a.jsonl"), look)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"a folder, needs datasets.*pip install .*\[data\]'"):
        open_rows("--prompt-data", str(tmp_path), ignore)


def test_a_file_that_is_replaced_or_gone_during_the_run_is_noticed(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = open_rows("--prompt-data", write(path), ignore)
    (tmp_path / "b.jsonl").write_bytes(path.read_bytes())
    (tmp_path / "b.jsonl").replace(path)
    with pytest.raises(ConfigurationError, match=r"a\.jsonl has changed since"):
        rows.row(1)
    path.unlink()
    with pytest.raises(ConfigurationError, match=r"a\.jsonl cannot be read any more"):
        rows.row(1)


@pytest.fixture
def datasets():
    """The library, imported by the tests that need it alone: its import takes two seconds."""
    return importlib.import_module("datasets")


def test_a_folder_of_the_datasets_library(tmp_path, datasets):
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    datasets.Dataset.from_list(ROWS[::-1]).save_to_disk(str(tmp_path / "other"))
    seen = []
    path = str(tmp_path / "saved")
    rows = open_rows("--prompt-data", path, lambda index, row: seen.append(row))
    assert seen == ROWS
    assert rows.row(3) == ROWS[3]
    assert len(rows) == 5
    assert rows.where(3) == f"--prompt-data {path}, row 3"
    same, other = (open_rows("--prompt-data", str(tmp_path / name), ignore).digest for name in ("saved", "other"))
    assert rows.digest == same != other


def test_folders_that_are_no_data_set(tmp_path, datasets):
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=data, test=data).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ConfigurationError, match=r"holds the splits train, test: name one, such as .*splits/train"):
        open_rows("--prompt-data", str(tmp_path / "splits"), ignore)
    assert len(open_rows("--prompt-data", str(tmp_path / "splits" / "train"), ignore)) == 5
    with pytest.raises(ConfigurationError, match=r"is a folder that datasets cannot load .*save_to_disk"):
        open_rows("--prompt-data", str(tmp_path), ignore)
