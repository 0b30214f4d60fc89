"""Tables that the datasets library reads: its folders, Parquet and CSV."""

import json
import logging
import os
from decimal import Decimal

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks.prompt_data.files import open_rows
from tests.launch.tasks.prompt_data.test_files import ROWS, ignore, write

# As verl writes its data sets: the prompt is a list of structs, the label lies in a struct.
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{number} + 1 = ?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "scores": [0.5, 1.5], "is_easy": True, "note": None if number else "first"},
    }
    for number in range(5)
]


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The library, with a cache of its own for each test."""
    import datasets as library

    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return library


def rows_of(path):
    """All rows as they are checked, and as they are read by number."""
    seen = []
    rows = open_rows("--prompt-data", str(path), lambda index, row: seen.append((index, row)))
    assert seen == [(index, rows.row(index)) for index in range(len(rows))]
    return [row for _, row in seen]


def types_in(value):
    """The types in a value and in all that it holds."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {type(value)}.union(*map(types_in, inner))


@pytest.mark.parametrize("writer", ["datasets", "pandas"])
def test_parquet_gives_the_rows_that_were_written_as_plain_values(tmp_path, datasets, writer, capfd):
    import pandas

    path = tmp_path / "a.parquet"
    if writer == "pandas":
        pandas.DataFrame(VERL).to_parquet(path)
    else:
        datasets.Dataset.from_list(VERL).to_parquet(str(path))
    capfd.readouterr()
    results = rows_of(path)
    assert results == VERL
    assert set().union(*map(types_in, results)) == {dict, list, str, int, float, bool, type(None)}
    assert capfd.readouterr() == ("", ""), "every rank would draw the library's bars"
    assert open_rows("--prompt-data", str(path), ignore).where(2) == f"--prompt-data {path}, row 2"


def test_a_value_of_a_csv_file_is_a_text(tmp_path, datasets):
    """A number would not be what a response says: 007 is no 7, and a gap in a column would make 34 to 34.0."""
    text = '\ufeffquestion,answer,"an, other"\n"4, 5",007,1\n"two\nlines",34,\nx,NA,true\ny,1e5,"a ""b"""\n'
    for name in ("a.csv", "b.CSV"):
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
        assert rows_of(tmp_path / name) == [
            {"question": "4, 5", "answer": "007", "an, other": "1"},
            {"question": "two\nlines", "answer": "34", "an, other": None},
            {"question": "x", "answer": "NA", "an, other": "true"},
            {"question": "y", "answer": "1e5", "an, other": 'a "b"'},
        ]


BROKEN = {
    "a.csv": (b"a,b\n1,2\n3,4,5\n", "Expected 2 fields in line 3"),
    "b.csv": (b"", "no row"),
    "c.csv": (b"a,b\n", "no row"),
    "d.csv": (b"a,a\n1,2\n", "two columns 'a'"),
    "e.csv": (b"a\n\xff\n", "can't decode"),
    "f.parquet": (b"PAR1", "Parquet"),
    "g.parquet": (b'{"prompt": "a"}\n', "Parquet"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_table_that_cannot_be_read_is_one_sentence(tmp_path, datasets, name, capfd, caplog):
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ConfigurationError, match=f"^--eval-data {tmp_path}/{name} .*{message}.*HF_DATASETS_CACHE"
    ) as error:
        open_rows("--eval-data", str(tmp_path / name), ignore)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_a_table_that_is_not_there_is_named(tmp_path, datasets):
    for name in ("none.parquet", "none.csv"):
        with pytest.raises(ConfigurationError, match=f"^--prompt-data .*{name} cannot be read: No such file"):
            open_rows("--prompt-data", str(tmp_path / name), ignore)


def test_the_row_that_is_refused_is_named(tmp_path, datasets):
    def look(index, row):
        if row["label"] == 3:
            raise ValueError("is odd")

    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list(ROWS).to_parquet(str(path))
    with pytest.raises(ConfigurationError, match=r"^--prompt-data .*a.parquet, row 3 is odd$"):
        open_rows("--prompt-data", str(path), look)


def test_the_cache_knows_a_file_by_its_content(tmp_path, datasets):
    """The library itself would take an older copy of a file with the same path and time."""
    path = tmp_path / "a[1].parquet"
    digests = []
    for rows in (ROWS, ROWS[::-1], ROWS):
        datasets.Dataset.from_list(rows).to_parquet(str(path))
        os.utime(path, (1e9, 1e9))
        assert rows_of(path) == rows
        digests.append(open_rows("--prompt-data", str(path), ignore).digest)
    assert digests[0] == digests[2] != digests[1]


def test_a_number_with_all_its_digits_is_no_label(tmp_path, datasets):
    """Types that JSON lacks stay as they are, for rewards of the user's own."""
    import pandas

    pandas.DataFrame({"prompt": ["a"], "label": [Decimal("1.50")]}).to_parquet(tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [{"prompt": "a", "label": Decimal("1.50")}]


def test_json_lines_and_parquet_of_the_same_rows_are_alike(tmp_path, datasets):
    write(tmp_path / "a.jsonl", VERL)
    datasets.Dataset.from_list(VERL).to_parquet(str(tmp_path / "a.parquet"))
    assert rows_of(tmp_path / "a.parquet") == rows_of(tmp_path / "a.jsonl") == json.loads(json.dumps(VERL))


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
