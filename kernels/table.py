"""The tables that ``scaling bench --table`` writes, and the form of the committed ``kernels/results.csv``.

After :mod:`scaling.kernels.benchmark` in the flow: rows come from there, one at a time, and each is in the file before
the next is measured, so that a failure or an interrupt loses nothing. No torch here: a file that is in the way is
refused before anything is loaded.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaling.errors import UsageError

_QUANTILES = ("ms_20", "ms_50", "ms_80")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Columns of a table.

    Parameters
    ----------
    key
        Columns that no two rows of a run share; the first of the table.
    measured
        Columns that follow, times in milliseconds, memory in bytes.
    digits
        Decimals of the times.
    """

    key: tuple[str, ...]
    measured: tuple[str, ...]
    digits: int

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns, in order."""
        return (*self.key, *self.measured)

    def cells(self, row: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, str]:
        """A row of the benchmark as text by column, with the versions it was measured with; "" where it has nothing.

        >>> KERNELS.cells({"operation": "receive", "ms": [0.1, 0.11, 0.12], "bytes": 96, "ceiling_share": 0.5}, {})
        {'operation': 'receive', ... 'ms_20': '0.1000', ... 'bytes': '96', 'ceiling_share': '0.500', 'gpu': '', ...}
        """
        values = {**row, **versions, **dict(zip(_QUANTILES, row.get("ms", ()), strict=False))}
        return {name: self._text(name, values.get(name, "")) for name in self.columns}

    def _text(self, name: str, value: object) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:.{self.digits if name.split('_')[0] == 'ms' or name == 'baseline_ms' else 3}f}"


STEPS = Form(
    key=("shape", "vocabulary", "method", "implementation", "dtype", "pass", "launch"),
    measured=(
        *_QUANTILES, "ratio", "baseline_ms", "peak_bytes", "peak_ratio", "baseline_peak_bytes", "gpu", "torch",
        "triton", "failed",
    ),
    digits=2,
)  # fmt: skip
KERNELS = Form(
    key=("operation", "shape", "dtype", "pass"),
    measured=(*_QUANTILES, "bytes", "ceiling_share", "gpu", "torch", "triton"),
    digits=4,
)


class Table:
    """A new CSV file that takes rows one at a time; it appears with the first.

    Raises
    ------
    UsageError
        If there is something at ``path`` already, or its folder is missing.
    """

    def __init__(self, path: Path, form: Form) -> None:
        self.path, self.form, self._rows = path, form, 0
        if path.exists() or path.is_symlink():
            raise UsageError(f"--table {path}: there already; give another name, or move it away")
        if not path.parent.is_dir():
            raise UsageError(f"--table {path}: there is no folder {path.parent}; make it, or give another name")

    def add(self, row: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        """Append a row and close the file again.

        Raises
        ------
        UsageError
            If the file cannot be written, or another process made it meanwhile.
        """
        try:
            with self.path.open("a" if self._rows else "x", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, self.form.columns, lineterminator="\n")
                if not self._rows:
                    writer.writeheader()
                writer.writerow(self.form.cells(row, versions))
        except OSError as error:
            raise UsageError(f"--table {self.path}: cannot be written ({error.strerror}); give another name") from None
        self._rows += 1
