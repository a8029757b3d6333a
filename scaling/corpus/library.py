"""The text that every machine with Python has: the standard library's own source, and its documentation if installed.

One of the inputs of ``scaling.corpus``. Third-party packages and compiled files are left out. The size depends on the
Python that runs: its version, and whether its tests and documentation were installed with it.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from scaling.corpus.documents import Document, digest

LIBRARY: Final = "python-library"  # what `scaling data prepare` calls it
SOURCE: Final = "python"
SUFFIXES: Final = (".py", ".pyi", ".txt", ".rst")
OUTSIDE: Final = frozenset({"site-packages", "dist-packages", "__pycache__"})


def python_library_files() -> list[Path]:
    """Source and text files of the standard library, folder by folder in sorted order.

    ``pydoc_data/topics.py`` is the language reference as text; it comes with every installation.
    """
    version = sysconfig.get_python_version()
    shared = Path(sysconfig.get_path("data"), "share", "doc")
    files: list[Path] = []
    for root in (Path(sysconfig.get_path("stdlib")), shared / f"python{version}", shared / "python"):
        for folder, inner, names in os.walk(root):
            inner[:] = sorted(set(inner) - OUTSIDE)
            files += [Path(folder, name) for name in sorted(names) if name.endswith(SUFFIXES)]
    return [path for path in files if path.is_file()]


def python_library_documents(skipped: dict[str, int] | None = None) -> Iterator[Document]:
    """The standard library as documents, each text once.

    Parameters
    ----------
    skipped
        Counts what is left out, by reason: ``"not UTF-8"`` (the library's own encoding tests), ``"duplicate"``,
        ``"empty"``.
    """
    counts = {} if skipped is None else skipped
    seen: set[bytes] = set()
    for path in python_library_files():
        data = path.read_bytes()
        key = digest(data)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            reason = "not UTF-8"
        else:
            if text.strip() and key not in seen:
                seen.add(key)
                yield Document(text, SOURCE)
                continue
            reason = "duplicate" if text.strip() else "empty"
        counts[reason] = counts.get(reason, 0) + 1
