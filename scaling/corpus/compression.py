"""Streams of compressed files: gzip, xz, Zstandard, each read in bounded memory and checked to its end.

Below the readers of ``scaling.corpus``. The standard file objects are not used because they hide how far into the file
they are, and because Zstandard's takes a file that was cut short for a whole one.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import zstandard

from scaling.errors import DataError, DataUnavailable

_INPUT_BYTES: Final = 64 * 2**10  # read at a time; text unpacks to some five times as much

_DECODERS: Final[dict[str, Callable[[], Any]]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),  # 31: with a gzip header (zlib manual, inflateInit2)
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(),  # 2**31: zstd --long=31
}
COMPRESSIONS: Final = tuple(_DECODERS)


def decompressed(path: Path, suffix: str) -> Iterator[tuple[bytes, int]]:
    """Bytes of the unpacked file, each with the number of packed bytes read so far; files joined end to end are one.

    Raises
    ------
    DataError
        If the file cannot be read, is damaged, or ends too early.
    """
    decoder: Any = None
    try:
        with path.open("rb") as file:
            while data := file.read(_INPUT_BYTES):
                while data:
                    if decoder is None:
                        data = data.lstrip(b"\0")  # padding between members, which all three formats' tools allow
                        if not data:
                            break
                        decoder = _DECODERS[suffix]()
                    unpacked = decoder.decompress(data)
                    data = decoder.unused_data if decoder.eof else b""
                    if decoder.eof:
                        decoder = None
                    if unpacked:
                        yield unpacked, file.tell()
    except (zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        raise DataError(f"{path}: damaged {suffix} file ({error}); fetch it again") from None
    except OSError as error:
        raise DataUnavailable(f"{path}: cannot be read ({error.strerror})") from None
    if decoder is not None:
        raise DataError(f"{path}: damaged {suffix} file (it ends too early); fetch it again")
