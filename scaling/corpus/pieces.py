"""Pieces: the input cut into parts of some 16 MiB that workers read on their own, and the reading of them.

After ``inputs`` in ``scaling.corpus``. Where the cuts fall depends on the input alone, never on the number of workers,
so that an interrupted preparation goes on where it was. Plain files are cut by byte ranges and read by the workers;
packed ones are unpacked by the process that hands out pieces, and travel as bytes; Parquet is cut by row group.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from scaling.corpus.compression import decompressed
from scaling.corpus.documents import Document
from scaling.corpus.inputs import Input
from scaling.errors import DataError, DataUnavailable

PIECE_BYTES: Final = 16 * 2**20
_ROWS: Final = 256  # of a Parquet file, read at a time

NOT_UTF8: Final = "not UTF-8"
EMPTY: Final = "empty"


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Where a record's text and source are. Without ``source``, a ``source`` column counts where there is one."""

    text: str = "text"
    source: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of the input. ``name`` sorts pieces in the input's order; ``input_bytes`` is its size on disk.

    One of: several whole text files (``inputs``), a range of bytes of one file (``start``, ``length``), unpacked bytes
    of it (``data``), a row group of it (``row_group``), or documents as they are.
    """

    name: str
    input_bytes: int
    inputs: tuple[Input, ...] = ()
    start: int = 0
    length: int | None = None
    data: bytes | None = None
    row_group: int | None = None
    documents: tuple[Document, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """Inputs that are cut into pieces one after the other; feeds are independent of each other."""

    number: int
    inputs: tuple[Input, ...]

    def pieces(self) -> Iterator[Piece]:
        """The feed's pieces, in order.

        Raises
        ------
        DataError
            If a file cannot be read or is damaged.
        """
        first = self.inputs[0]
        if first.compression:
            cuts = _unpacked(first)
        elif first.kind == "parquet":
            cuts = _row_groups(first)
        elif len(self.inputs) > 1 or (first.kind == "text" and first.size <= PIECE_BYTES):
            total = sum(item.size for item in self.inputs)
            cuts = iter([{"inputs": self.inputs, "input_bytes": total}])
        else:
            cuts = _ranges(first)
        for count, cut in enumerate(cuts):
            yield Piece(**{"name": f"{self.number:07d}-{count:07d}", "inputs": self.inputs, **cut})


def feeds(inputs: Sequence[Input]) -> list[Feed]:
    """Consecutive small text files of one source share a feed; every other file has its own."""
    groups: list[list[Input]] = []
    size = 0
    for item in inputs:
        small = item.kind == "text" and not item.compression and item.size <= PIECE_BYTES
        fits = bool(groups) and small and size + item.size <= PIECE_BYTES and groups[-1][0].source == item.source
        if fits:
            groups[-1].append(item)
            size += item.size
        else:
            groups.append([item])
            size = item.size if small else PIECE_BYTES + 1
    return [Feed(number=number, inputs=tuple(group)) for number, group in enumerate(groups)]


def read_piece(piece: Piece, columns: Columns, counts: Counter[str]) -> Iterator[Document]:
    """The piece's documents; what is left out is counted by reason.

    Raises
    ------
    DataError
        If a file cannot be read, a line is not JSON, or a column is missing.
    """
    if piece.documents:
        yield from piece.documents
        return
    first = piece.inputs[0]
    if first.kind == "parquet":
        yield from _read_parquet(first, piece.row_group or 0, columns, counts)
    elif first.kind == "jsonl":
        yield from _read_lines(piece, columns, counts)
    elif piece.data is not None or piece.length is not None:
        yield from _read_text(_bytes_of(piece), first.source, counts)
    else:
        for item in piece.inputs:
            yield from _read_text(_read(item.path, 0, None), item.source, counts)


def _ranges(item: Input) -> Iterator[dict[str, Any]]:
    """Byte ranges that end at line ends."""
    start = 0
    try:
        with item.path.open("rb") as file:
            while start < item.size:
                file.seek(start + PIECE_BYTES - 1)
                file.readline()
                end = min(file.tell(), item.size) if start + PIECE_BYTES < item.size else item.size
                yield {"start": start, "length": end - start, "input_bytes": end - start}
                start = end
    except OSError as error:
        raise DataUnavailable(f"{item.path}: cannot be read ({error.strerror})") from None


def _unpacked(item: Input) -> Iterator[dict[str, Any]]:
    """Unpacked bytes, cut at line ends."""
    held = bytearray()
    told, searched = 0, 0
    for unpacked, position in decompressed(item.path, item.compression):
        held += unpacked
        while cut := held.find(b"\n", max(searched, PIECE_BYTES - 1)) + 1:
            yield {"data": bytes(held[:cut]), "input_bytes": position - told}
            told, searched = position, 0
            del held[:cut]
        searched = len(held)
    if held:
        yield {"data": bytes(held), "input_bytes": item.size - told}


def _row_groups(item: Input) -> Iterator[dict[str, Any]]:
    metadata = _parquet(item.path).metadata
    for group in range(metadata.num_row_groups):
        yield {"row_group": group, "input_bytes": item.size // metadata.num_row_groups}


def _bytes_of(piece: Piece) -> bytes:
    return piece.data if piece.data is not None else _read(piece.inputs[0].path, piece.start, piece.length)


def _read(path: Path, start: int, length: int | None) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(-1 if length is None else length)
    except OSError as error:
        raise DataUnavailable(f"{path}: cannot be read ({error.strerror})") from None


def _read_text(data: bytes, source: str, counts: Counter[str]) -> Iterator[Document]:
    """One document, or none."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        counts[NOT_UTF8] += 1
        return
    if text.strip():
        yield Document(text, source)
    else:
        counts[EMPTY] += 1


def _read_lines(piece: Piece, columns: Columns, counts: Counter[str]) -> Iterator[Document]:
    item = piece.inputs[0]
    for index, line in enumerate(_bytes_of(piece).split(b"\n")):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            counts[NOT_UTF8] += 1
            continue
        except ValueError as error:
            raise DataError(
                f"{_line(piece, index)} is not JSON ({error}): {line[:60]!r}...; repair or remove it"
            ) from None
        if not isinstance(record, dict):
            raise DataError(
                f"{_line(piece, index)} holds {type(record).__name__}, not an object: {line[:60]!r}...; "
                "repair or remove it"
            )
        problem = _problem(record, columns)
        if problem is not None:
            raise DataError(f"{_line(piece, index)}: {problem}, or repair or remove the line")
        yield from _record(item, record, columns, counts)


def _line(piece: Piece, index: int) -> str:
    """File and number of a piece's line. Lines before the piece are counted anew: only an error asks for them."""
    count = 0
    for cut in Feed(number=0, inputs=piece.inputs).pieces():
        if cut.name.rpartition("-")[2] == piece.name.rpartition("-")[2]:
            break
        count += _bytes_of(cut).count(b"\n")
    return f"{piece.inputs[0].path}: line {count + index + 1}"


def _problem(record: dict[str, Any], columns: Columns) -> str | None:
    """Why a record cannot be read, and what to do."""
    for wanted in (columns.text, columns.source):
        if wanted is not None and wanted not in record:
            return _missing(wanted, list(record), wanted == columns.text)
    text = record[columns.text]
    if text is not None and not isinstance(text, str):
        return f"column {columns.text!r} holds {type(text).__name__}, not text; name another column with --text-column"
    return None


def _record(item: Input, record: dict[str, Any], columns: Columns, counts: Counter[str]) -> Iterator[Document]:
    text = record[columns.text]
    if text is None or not text.strip():
        counts[EMPTY] += 1
        return
    # a name on the command line holds for all records, unless a column was named there too
    source = None if item.named and columns.source is None else record.get(columns.source or "source")
    yield Document(text, item.source if source is None else str(source))


def _missing(wanted: str, there: Sequence[str], is_text: bool) -> str:
    option = "--text-column" if is_text else "--source-column"
    return f"no column {wanted!r}; it has {', '.join(map(repr, there)) or 'none'}; name one with {option}"


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, "damaged or not Parquet", error) from None


def _read_parquet(item: Input, row_group: int, columns: Columns, counts: Counter[str]) -> Iterator[Document]:
    import pyarrow as pa

    file = _parquet(item.path)
    names = file.schema_arrow.names
    for wanted in (columns.text, columns.source):
        if wanted is not None and wanted not in names:
            raise DataError(f"{item.path}: {_missing(wanted, names, wanted == columns.text)}")
    source = columns.source or "source"
    wanted_columns = [name for name in dict.fromkeys((columns.text, source)) if name in names]
    try:
        for rows in file.iter_batches(batch_size=_ROWS, row_groups=[row_group], columns=wanted_columns):
            for record in rows.to_pylist():
                problem = _problem(record, columns)  # of the whole column, which has one type
                if problem is not None:
                    raise DataError(f"{item.path}: {problem}")
                yield from _record(item, record, columns, counts)
    except UnicodeDecodeError:
        raise DataError(f"{item.path}: column {columns.text!r} is not UTF-8 in row group {row_group}") from None
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(item.path, "damaged Parquet", error) from None


def _unreadable(path: Path, damaged: str, error: Exception) -> DataError:
    """Damage, or what the system says; pyarrow raises ``OSError`` for both, with a number for the system's own."""
    if isinstance(error, OSError) and error.errno is not None:
        return DataUnavailable(f"{path}: cannot be read ({os.strerror(error.errno)})")
    return DataError(f"{path}: {damaged} ({_one_line(error)}); fetch it again")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
