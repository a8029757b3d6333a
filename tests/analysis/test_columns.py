"""Tables are read, their columns mapped by name or arithmetic, their rows filtered; what cannot be is told."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from scaling.analysis.columns import filter_rows, load_table, map_columns
from scaling.analysis.fit import fit_law
from scaling.errors import TableError, UsageError
from tests.analysis.synthetic import table


def test_missing_columns_are_listed() -> None:
    with pytest.raises(TableError, match="column 'D' missing; the table has: N, loss; map it with --columns D="):
        fit_law(pd.DataFrame({"N": [1.0, 2.0], "loss": [3.0, 2.0]}))


def test_misnamed_column_says_what_is_meant() -> None:
    with pytest.raises(TableError, match="column 'Model Sise' is not in the table; did you mean 'Model Size'"):
        map_columns(pd.DataFrame({"Model Size": [1.0]}), "N=Model Sise")


def test_expressions() -> None:
    raw = pd.DataFrame({"Model Size": [10.0], "Training FLOP": [600.0], "loss": [3.0]})
    mapped = map_columns(raw, "N=Model Size,C=Training FLOP,D=C/(6*N)")
    assert mapped["D"].tolist() == [10.0]
    assert map_columns(raw, "N=2*Model Size**2")["N"].tolist() == [200.0]
    assert len(filter_rows(mapped, ["loss<4.9", "N>=10 and C<1e3"])) == 1


@pytest.mark.parametrize(
    "text", ["N=__import__('os').system('true')", "N=loss.values", "N=[1]", "N=loss[0]", "N=f(loss)"]
)
def test_only_arithmetic_is_evaluated(text: str) -> None:
    with pytest.raises((UsageError, TableError), match="not allowed|cannot parse|is not in the table"):
        map_columns(pd.DataFrame({"loss": [3.0]}), text)


@pytest.mark.parametrize(
    ("text", "message"), [("N", "is not NAME=COLUMN"), ("N=(1+", "cannot parse"), ("=x", "is not NAME=COLUMN")]
)
def test_mapping_that_cannot_be_parsed(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        map_columns(pd.DataFrame({"loss": [3.0]}), text)


def test_filters() -> None:
    with pytest.raises(TableError, match="leaves no row of 1"):
        filter_rows(pd.DataFrame({"loss": [3.0]}), "loss<1")
    with pytest.raises(UsageError, match="is not a comparison"):
        filter_rows(pd.DataFrame({"loss": [3.0]}), "loss+1")


def test_files(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="no such file"):
        load_table(tmp_path / "absent.csv")
    (tmp_path / "runs.txt").write_text("x")
    with pytest.raises(TableError, match=r"unknown kind of table '.txt'; allowed: .parquet, .csv"):
        load_table(tmp_path / "runs.txt")
    table().to_parquet(tmp_path / "runs.parquet")
    assert len(load_table(tmp_path / "runs.parquet")) == 30
