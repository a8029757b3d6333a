"""Which files a corpus is read from: the arguments of ``scaling data prepare``, turned into a sorted list of files.

Before ``pieces`` in ``scaling.corpus``. An argument is ``[NAME=]PATH``; PATH is a file, a folder (read recursively), a
glob pattern, or ``python-library``. NAME is what its documents' source is called; by default what a record's ``source``
says, else the file's or folder's name.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from scaling.corpus.compression import COMPRESSIONS
from scaling.corpus.library import LIBRARY, SOURCE, python_library_files
from scaling.errors import DataError

Kind = Literal["jsonl", "parquet", "text"]

JSON_SUFFIXES: Final = (".jsonl", ".ndjson")
PARQUET_SUFFIXES: Final = (".parquet",)
TEXT_SUFFIXES: Final = tuple(
    (
        ".txt .text .md .rst .tex .texi .org .adoc .pod .html .htm .xml .csv .tsv .json .yaml .yml .toml .ini "
        ".cfg .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .java .kt .scala .go .rs .swift .js .jsx "
        ".ts .tsx .css .rb .pl .pm .php .lua .r .jl .m .f .f90 .hs .ml .mli .el .lisp .scm .clj .erl .ex .exs "
        ".v .vhdl .sql .sh .bash .zsh .ps1 .cmake .mk .s .asm .lean .agda "
    ).split()
)
_HIDDEN_FOLDERS: Final = frozenset({"__pycache__", "node_modules"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One file: what it holds, how it is packed, its source's name, its size on disk and time of change.

    ``named`` says that the argument named the source, which then holds for every record.
    """

    path: Path
    kind: Kind
    compression: str
    source: str
    size: int
    mtime_ns: int
    named: bool


def find_inputs(arguments: Sequence[str | Path], suffixes: Sequence[str] = ()) -> tuple[list[Input], dict[str, int]]:
    """Files of all arguments, in the arguments' order, sorted within each, and how many were passed over by reason.

    Parameters
    ----------
    suffixes
        Further file name endings to read as text (``.log``).

    Raises
    ------
    DataError
        If an argument matches nothing, or a file that was named (not found in a folder) has an unknown ending.
    """
    inputs: list[Input] = []
    skipped: Counter[str] = Counter()
    for argument in map(str, arguments):
        name, pattern = _named(argument)
        if pattern == LIBRARY and not Path(pattern).exists():
            inputs += [_input(path, ("text", ""), name, SOURCE) for path in python_library_files()]
        elif Path(pattern).is_dir():
            inputs += _tree(Path(pattern), name, suffixes, skipped)
        else:
            inputs += _files(pattern, name, suffixes)
    return inputs, dict(skipped)


def file_kind(path: Path, suffixes: Sequence[str] = ()) -> tuple[Kind, str] | None:
    """What a file's name says it holds, and how it is packed; ``None`` where it says nothing."""
    name, compression = path.name.lower(), ""
    for ending in COMPRESSIONS:
        if name.endswith(ending):
            name, compression = name.removesuffix(ending), ending
    if name.endswith(JSON_SUFFIXES):
        return "jsonl", compression
    if name.endswith(PARQUET_SUFFIXES) and not compression:
        return "parquet", ""
    if name.endswith((*TEXT_SUFFIXES, *suffixes)):
        return "text", compression
    return None


def _named(argument: str) -> tuple[str | None, str]:
    name, sign, rest = argument.partition("=")
    if sign and name and os.sep not in name and not Path(argument).exists():
        return name, rest
    return None, argument


def _tree(folder: Path, name: str | None, suffixes: Sequence[str], skipped: Counter[str]) -> Iterator[Input]:
    own = folder.resolve().name
    for parent, inner, names in os.walk(folder):
        inner[:] = sorted(sub for sub in inner if sub not in _HIDDEN_FOLDERS and not sub.startswith("."))
        for file in sorted(names):
            path = Path(parent, file)
            kind = file_kind(path, suffixes)
            if kind is None or not path.is_file():
                skipped["unknown ending"] += 1
            else:
                yield _input(path, kind, name, own)


def _files(pattern: str, name: str | None, suffixes: Sequence[str]) -> Iterator[Input]:
    paths = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
    files = [path for path in map(Path, paths) if path.is_file()]
    if not files:
        raise DataError(
            f"{pattern}: no such file or folder, and no file matches it as a pattern; give files, folders, "
            f"quoted patterns such as 'src/**/*.py', or {LIBRARY}"
        )
    for path in files:
        kind = file_kind(path, suffixes)
        if kind is None:
            raise DataError(
                f"{path}: unknown ending; known are {', '.join((*JSON_SUFFIXES, *PARQUET_SUFFIXES))}, text and source "
                f"files, packed as {', '.join(COMPRESSIONS)}; "
                f"to read it as text give --text-suffix {path.suffix or '.NAME'}"
            )
        yield _input(path, kind, name, path.name.split(".")[0])


def _input(path: Path, kind: tuple[Kind, str], name: str | None, own: str) -> Input:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    return Input(
        path=path,
        kind=kind[0],
        compression=kind[1],
        source=name or own,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        named=name is not None,
    )
