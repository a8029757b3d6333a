"""The text that every machine with Python has: the standard library's own source, and its documentation where installed.

One of the readers of ``scaling.corpus``. Third-party packages and compiled files are left out; copies are dropped. The size depends on
the Python that runs: its version, and whether its tests and documentation were installed with it.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from scaling.corpus.documents import Document, digest, read_text_files

SOURCE: Final = "python"
SUFFIXES: Final = (".py", ".pyi", ".txt", ".rst")
OUTSIDE: Final = frozenset({"site-packages", "dist-packages", "__pycache__"})


def python_library_files() -> list[Path]:
    """Source and text files of the standard library, folder by folder in sorted order.

    ``pydoc_data/topics.py`` is the language reference as text; it comes with every installation.
    """
    roots = [Path(sysconfig.get_path("stdlib"))]
    version = sysconfig.get_python_version()
    data = Path(sysconfig.get_path("data"))
    roots += [path for path in (data / f"share/doc/python{version}", data / "share/doc/python") if path.is_dir()]
    files = []
    for root in roots:
        for folder, inner, names in os.walk(root):
            inner[:] = sorted(set(inner) - OUTSIDE)
            files += [Path(folder, name) for name in sorted(names) if name.endswith(SUFFIXES)]
    return [path for path in files if path.is_file()]


def python_library_documents(skipped: dict[str, int] | None = None) -> Iterator[Document]:
    """The standard library as documents, each text once.

    Parameters
    ----------
    skipped
        Counts what is left out, by reason: ``"not UTF-8"`` (the library's own encoding tests), ``"duplicate"``.
    """
    skipped = {} if skipped is None else skipped
    seen: set[bytes] = set()
    for document in read_text_files(python_library_files(), SOURCE, skipped):
        key = digest(document.encode())
        if key in seen:
            skipped["duplicate"] = skipped.get("duplicate", 0) + 1
            continue
        seen.add(key)
        yield document
