"""Prompt files that the ``datasets`` library reads: its own folders, Parquet and CSV. Rows are memory-mapped."""

from __future__ import annotations

import csv
import glob
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_rc.launch.errors import ConfigurationError, one_line, require
from megatron_rc.launch.tasks.prompt_data.rows import Row

TABLES = (".parquet", ".csv")
_CSV = ".csv"
# A mark of the byte order at the start of a CSV file is no part of the first column's name.
_ENCODING = "utf-8-sig"
_ROWS = 1000  # rows that are read at once
_BLOCK_BYTES = 1 << 20


class Table:
    """Rows of a data set of the ``datasets`` library; ``digest`` is a hash of its content."""

    def __init__(self, flag: str, path: str, check_row: Callable[[int, Row], None]) -> None:
        """Load the data set, hash its content, and check every row.

        Args:
            flag: the flag that names it, for errors.
            path: a folder, or a Parquet or CSV file.
            check_row: called once with each row and its number; raises ValueError for a bad one.

        Raises:
            ConfigurationError: it cannot be loaded, or has a bad row.
        """
        self.flag = flag
        self.path = path
        is_folder = os.path.isdir(path)
        require("datasets", f"{flag} {path}, a folder," if is_folder else f"{flag} {path}", "data")
        if is_folder:
            self._dataset = _load_folder(flag, path)
            self.digest = _digest_of_rows(self._dataset)
        else:
            # The digest names the file's folder in the cache of datasets, so it comes first.
            self.digest = _digest_of_file(flag, path)
            self._dataset = _load_file(flag, path, self.digest)
        for index, row in enumerate(_rows(self._dataset)):
            try:
                check_row(index, row)
            except ValueError as error:
                raise ConfigurationError(f"{self.where(index)} {error}") from error

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._dataset)

    def row(self, index: int) -> Row:
        """Read one row."""
        row: Row = self._dataset[index]
        return row

    def where(self, index: int) -> str:
        """Name of a row for errors: flag, file and place in it."""
        return f"{self.flag} {self.path}, row {index}"


def _rows(dataset: Any) -> Iterator[Row]:
    """Yield all rows; reading many at once takes a fraction of the time."""
    for columns in dataset.iter(batch_size=_ROWS):
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


def _load_folder(name: str, path: str) -> Any:
    """Load a folder that ``Dataset.save_to_disk`` wrote."""
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(path)
    except Exception as error:  # broken folders raise many kinds of errors
        raise ConfigurationError(
            f"{name} {path} is a folder that datasets cannot load ({error}): write it with save_to_disk, or "
            "give a file of JSON lines, Parquet or CSV"
        ) from error
    if isinstance(dataset, DatasetDict):
        if not dataset:
            raise ConfigurationError(f"{name} {path} holds no split: give a folder with rows")
        first = Path(path) / next(iter(dataset))
        raise ConfigurationError(f"{name} {path} holds the splits {', '.join(dataset)}: name one, such as {first}")
    return dataset


def _load_file(name: str, path: str, digest: bytes) -> Any:
    """Load a Parquet or CSV file, which the library converts once into a file of its cache.

    The library takes an older file of its cache if path and time are the same. A folder for each content makes sure
    that the content is the same too.
    """
    from datasets import Dataset, config

    cache = Path(config.HF_DATASETS_CACHE) / "megatron_rc" / digest.hex()
    # Names may have characters that stand for others in a pattern.
    pattern = glob.escape(os.path.abspath(path))
    try:
        with _quietly():
            if Path(path).suffix.lower() == _CSV:
                return _csv(path, pattern, cache)
            return Dataset.from_parquet(pattern, cache_dir=str(cache))
    except Exception as error:  # broken files raise many kinds of errors
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ConfigurationError(
            f"{name} {path} cannot be read by datasets ({one_line(cause)}): mend the file, or name a folder with room "
            f"for a copy as HF_DATASETS_CACHE, which is {config.HF_DATASETS_CACHE}"
        ) from error


def _csv(path: str, pattern: str, cache: Path) -> Any:
    """Load a CSV file with every value as a text, because 007 is no 7 to a rule; an empty value becomes None."""
    from datasets import Dataset, Features, Value

    with open(path, encoding=_ENCODING, newline="") as file:
        reader = csv.reader(file)
        columns = next(reader, [])
        if next(reader, None) is None:
            raise ValueError("it has no row below the names of its columns")
    twice = next((column for column in columns if columns.count(column) > 1), None)
    if twice is not None:
        raise ValueError(f"it has two columns {twice!r}")
    return Dataset.from_csv(
        pattern,
        features=Features({column: Value("string") for column in columns}),
        cache_dir=str(cache),
        encoding=_ENCODING,
        keep_default_na=False,
        na_values=[""],
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Context without the library's progress bars and log, which every rank would write."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    had_bars = not are_progress_bars_disabled()
    verbosity = logging.get_verbosity()
    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            enable_progress_bars()


def _digest_of_rows(dataset: Any) -> bytes:
    """Hash of the stored rows: decoded objects such as images would differ between processes."""
    digest = hashlib.blake2b(digest_size=8)
    for rows in dataset.with_format("arrow").iter(batch_size=_ROWS):
        for row in rows.to_pylist():
            digest.update(repr(row).encode("utf-8", "surrogatepass"))
    return digest.digest()


def _digest_of_file(name: str, path: str) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    try:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise ConfigurationError(f"{name} {path} cannot be read: {error.strerror}") from error
    return digest.digest()
