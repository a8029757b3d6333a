"""From anyone's table to the short names every analysis uses: N, D, C, loss, method, seed, lr, H, kv.

Stands between files (or ``ingest`` for stores) and the analyses. A mapping takes a column's name, spaces allowed, or
an arithmetic expression of columns and of names mapped before it (``D=C/(6*N)``); expressions are parsed into a
syntax tree and only arithmetic is evaluated. A filter is one comparison (``loss<4.9``) or several joined by ``and``.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaling.analysis.schema import CANONICAL
from scaling.errors import TableError, UsageError, nearest

if TYPE_CHECKING:
    import pandas as pd

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
STORE_PREFIXES = ("sqlite:", "postgresql", "http:", "https:", "file:", "mysql", "mssql")


def load_table(
    source: str | Path, *, columns: str | None = None, where: str | Sequence[str] | None = None
) -> pd.DataFrame:
    """Read runs from a file or a store and give the columns their short names.

    Parameters
    ----------
    source
        A ``.parquet`` or ``.csv`` file (``.gz`` and ``.xz`` read too), a folder of a run store, or a store's address.
    columns
        ``"N=Model Size,C=Training FLOP,D=C/(6*N)"``; without it the tidy table's own columns are taken.
    where
        Comparisons rows must satisfy, of short names or columns.

    Raises
    ------
    TableError
        When the file is missing or of another kind, or a column does not exist (the message lists those that do).
    UsageError
        When a mapping or comparison cannot be parsed.
    """
    return filter_rows(map_columns(_read(source), columns), where)


def load_file(path: str | Path, expected: str) -> pd.DataFrame:
    """Read a table that is not of runs; ``expected`` tells in an error what such tables come from.

    Raises
    ------
    UsageError
        When it is a folder or a store.
    TableError
        When the file is missing or of another kind.
    """
    if str(path).startswith(STORE_PREFIXES) or Path(path).is_dir():
        raise UsageError(f"{path}: is no file; {expected}")
    if not Path(path).is_file():
        raise TableError(f"{path}: no such file; {expected}")
    return load_table(path)


def _read(source: str | Path) -> pd.DataFrame:
    import pandas as pd

    text = str(source)
    if text.startswith(STORE_PREFIXES) or Path(text).is_dir():
        from scaling.analysis.ingest import read_runs

        return read_runs(text).table
    path = Path(text)
    if not path.is_file():
        raise TableError(f"{text}: no such file; runs come from a .parquet or .csv file, or an MLflow store's address")
    suffixes = [s for s in path.suffixes if s not in (".gz", ".xz", ".zst", ".bz2")]
    kind = suffixes[-1] if suffixes else ""
    try:
        if kind == ".parquet":
            return pd.read_parquet(path)
        if kind in (".csv", ".tsv"):
            return pd.read_csv(path, sep="\t" if kind == ".tsv" else ",")
    except (ValueError, OSError) as error:  # pandas' and pyarrow's own errors are kinds of these
        raise TableError(f"{text}: cannot be read as {kind} ({str(error).splitlines()[0]})") from error
    raise TableError(f"{text}: unknown kind of table {kind!r}; allowed: .parquet, .csv, .tsv")


def map_columns(table: pd.DataFrame, columns: str | None = None) -> pd.DataFrame:
    """Add the short names to a copy of ``table``; without ``columns``, those of the tidy run table.

    Short names that the table already has are kept.
    """
    out = table.copy()
    if columns:
        for name, text in parse_mapping(columns).items():
            out[name] = out[text] if text in out.columns else _evaluate(text, out)
    for short, long in CANONICAL.items():
        if short not in out.columns and long in out.columns:
            out[short] = out[long]
    return out


def parse_mapping(text: str) -> dict[str, str]:
    """Split ``"N=a b,D=C/(6*N)"`` at the commas outside brackets.

    >>> parse_mapping("N=Model Size,D=C/(6*N)")
    {'N': 'Model Size', 'D': 'C/(6*N)'}

    Raises
    ------
    UsageError
        When a part has no ``=`` or an empty side.
    """
    parts, depth, current = [], 0, ""
    for c in text:
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += c
    mapping: dict[str, str] = {}
    for part in [*parts, current]:
        name, found, value = part.partition("=")
        if not found or not name.strip() or not value.strip():
            raise UsageError(
                f"--columns: {part.strip()!r} is not NAME=COLUMN or NAME=EXPRESSION, e.g. N=params,D=C/(6*N)"
            )
        mapping[name.strip()] = value.strip()
    return mapping


def filter_rows(table: pd.DataFrame, where: str | Sequence[str] | None) -> pd.DataFrame:
    """Rows that satisfy every comparison; the index keeps the row numbers of the file.

    Raises
    ------
    UsageError
        When a comparison cannot be parsed.
    TableError
        When no row is left, or a column does not exist.
    """
    tests = [where] if isinstance(where, str) else list(where or [])
    out = table
    for text in tests:
        keep = _evaluate(text, out, comparison=True)
        out = out[keep.to_numpy(dtype=bool, na_value=False)]
        if out.empty:
            raise TableError(f"--where {text!r} leaves no row of {len(table)}")
    return out


def _evaluate(text: str, table: pd.DataFrame, *, comparison: bool = False) -> Any:
    option = "--where" if comparison else "--columns"
    quoted, names = _quote_spaced(text, [str(c) for c in table.columns])
    try:
        tree = ast.parse(quoted, mode="eval").body
    except SyntaxError as error:
        if not comparison and not any(c in text for c in "+-*/()"):
            raise TableError(_missing(text, table)) from error
        raise UsageError(f"{option}: cannot parse {text!r}; use columns, numbers, + - * / ** and brackets") from error
    if comparison and not isinstance(tree, (ast.Compare, ast.BoolOp)):
        raise UsageError(f"--where: {text!r} is not a comparison such as loss<4.9")
    return _visit(tree, table, names, option, text)


def _quote_spaced(text: str, columns: Sequence[str]) -> tuple[str, Mapping[str, str]]:
    """Replace column names that are no identifiers by placeholders, the longest first."""
    names: dict[str, str] = {}
    for k, column in enumerate(sorted((c for c in columns if not c.isidentifier()), key=len, reverse=True)):
        if column and not column.isnumeric() and column in text:
            names[f"_column_{k}_"] = column
            text = text.replace(column, f"_column_{k}_")
    return text, names


def _visit(node: ast.expr, table: pd.DataFrame, names: Mapping[str, str], option: str, text: str) -> Any:
    def again(child: ast.expr) -> Any:
        return _visit(child, table, names, option, text)

    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float, str))
        and not isinstance(node.value, bool)
    ):
        return node.value
    if isinstance(node, ast.Name):
        column = names.get(node.id, node.id)
        if column not in table.columns:
            raise TableError(_missing(column, table))
        return table[column]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](again(node.left), again(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -again(node.operand)
    if isinstance(node, ast.Compare) and option == "--where" and all(type(op) in _COMPARE for op in node.ops):
        sides = [again(node.left), *(again(c) for c in node.comparators)]
        keep = _COMPARE[type(node.ops[0])](sides[0], sides[1])
        for k, op in enumerate(node.ops[1:], start=1):
            keep = keep & _COMPARE[type(op)](sides[k], sides[k + 1])
        return keep
    if isinstance(node, ast.BoolOp) and option == "--where":
        parts = [again(v) for v in node.values]
        out = parts[0]
        for part in parts[1:]:
            out = out & part if isinstance(node.op, ast.And) else out | part
        return out
    raise UsageError(
        f"{option}: {ast.unparse(node)!r} in {text!r} is not allowed; use columns, numbers, + - * / ** and brackets"
    )


def _missing(column: str, table: pd.DataFrame) -> str:
    return f"column {column!r} is not in the table; {nearest(column, [str(c) for c in table.columns])}"
