"""The commands of the analysis as a user calls them: JSON alone, what the screen shows, nonsense refused in a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scaling.analysis.backtest import backtest
from scaling.analysis.columns import load_table
from scaling.analysis.frontier import compute_frontier
from scaling.analysis.isoflop import fit_isoflop
from scaling.cli.main import main
from scaling.errors import TableError
from tests.analysis.synthetic import sweep, table
from tests.analysis.test_laws_properties import grid

ARMS = ("--baseline", "baseline")
NONSENSE = [
    (("fit", "law", "--form", "power", "--draws", "0"), "draws must be 2 or more, got 0"),
    (("fit", "law", "--form", "power", "--random-seed", "-1"), "the random seed must be 0 or more, got -1"),
    (("fit", "law", "--form", "power", "--cluster", "nope"), "cluster column 'nope' is not in the table; it has: "),
    (("fit", "law", "--form", "power", "--cluster", "same"), "cluster column 'same' has one value"),
    (("fit", "law", "--form", "power", "--weights", "below"), "weights in column 'below' must be numbers of 0 or more"),
    (("fit", "backtest", "--form", "power", "--level", "7"), "level must lie between 0 and 1, got 7.0; write 95% as"),
    (("fit", "isoflop", "--level", "1"), "level must lie between 0 and 1, got 1.0"),
    (("fit", "isoflop", "--noise-sd", "-1"), "noise_sd must be a positive number of nats, got -1.0"),
    (("fit", "frontier", "--budgets", "1e21", "--draws", "1"), "draws must be 2 or more, got 1"),
    (("compare", "speedup", *ARMS, "--level", "95"), "level must lie between 0 and 1, got 95.0"),
    (("compare", "speedup", *ARMS, "--draws", "-1"), "draws must be 0 or more, got -1"),
    (("compare", "speedup", *ARMS, "--noise-sd", "0"), "noise_sd must be a positive number of nats, got 0.0"),
    (("compare", "seeds", *ARMS, "--level", "0"), "level must lie between 0 and 1, got 0.0"),
    (("compare", "seeds", *ARMS, "--noise-sd", "-1"), "noise_sd must be a positive number of nats, got -1.0"),
    (("noise", "floor", "--level", "2"), "level must lie between 0 and 1, got 2.0"),
]


@pytest.mark.parametrize(("arguments", "message"), NONSENSE, ids=[" ".join(a[:2] + a[-2:]) for a, _ in NONSENSE])
def test_nonsense_is_refused_in_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    path = tmp_path / "runs.csv"
    table().assign(same="x", below=-1.0).to_csv(path, index=False)
    status, out, err = run(*arguments[:2], "--runs", str(path), *arguments[2:])
    assert status in (1, 2) and not out and err.count("\n") == 1 and message in err, err


def test_other_nonsense(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = run("noise", "power", "--sd", "0.001", "--power", "2")
    assert status == 2 and not out and "power must lie between 0 and 1, got 2.0" in err
    status, _, err = run("compare", "items", "--gains", "1", "--losses", "2", "--level", "95")
    assert status == 2 and "level must lie between 0 and 1" in err
    for name in ("empty.csv", "empty.parquet"):
        (tmp_path / name).touch()
        with pytest.raises(TableError, match=rf"{name}: cannot be read as \.(csv|parquet) \("):
            load_table(tmp_path / name)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command as a user calls it: exit status, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["scaling", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return call


def test_commands(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    """One JSON object on stdout, nothing else; one line on stderr and the right exit status otherwise."""
    path = tmp_path / "runs.csv"
    table().to_csv(path, index=False)
    status, out, _ = run("compare", "speedup", "--runs", str(path), "--baseline", "baseline", "--json")
    assert status == 0 and json.loads(out)["new"]["estimate"]["speedup"] == pytest.approx(1.25, rel=0.02)
    _, out, _ = run("fit", "law", "--runs", str(path), "--form", "power", "--interval", "delta", "--json")
    assert {"estimate", "standard_error", "interval", "n", "df", "status", "objective", "conventions", "warnings",
    "dropped",
            "checklist"} <= set(json.loads(out))  # fmt: skip
    status, out, err = run("fit", "law", "--runs", str(path), "--columns", "N=Nn")
    assert (status, out, err.count("\n")) == (1, "", 1) and "is not in the table" in err
    status, out, err = run("fit", "law", "--runs", str(path), "--form", "powr")
    assert (status, out) == (2, "") and "did you mean 'power'" in err
    grid_path, bowls, n = tmp_path / "grid.csv", tmp_path / "bowls.csv", np.geomspace(1e7, 1e9, 7)
    grid(sd=0.003).to_csv(grid_path, index=False)
    profiles = [(n, c, 3 + 0.01 * np.log(n / np.sqrt(c / 120)) ** 2) for c in (1e17, 1e18, 1e19)]
    pd.concat(pd.DataFrame(dict(zip(("N", "C", "loss"), p, strict=True))) for p in profiles).to_csv(bowls, index=False)
    one = tmp_path / "one.csv"
    table(scales=1).to_csv(one, index=False)
    status, out, _ = run("compare", "speedup", "--runs", str(one), "--baseline", "baseline", "--json")
    assert status == 1 and json.loads(out)["new"]["status"] == "refused"
    for arguments in (
        ("compare", "seeds", "--runs", str(path), "--baseline", "baseline"),
        ("compare", "items", "--gains", "123", "--losses", "81"),
        ("noise", "floor", "--runs", str(path)),
        ("noise", "power", "--sd", "0.001", "--difference", "0.002", "--seeds", "2,3", "--scales", "1"),
        ("fit", "backtest", "--runs", str(path), "--form", "power"),
        ("fit", "frontier", "--runs", str(grid_path), "--budgets", "1e20,1e21", "--draws", "200"),
        ("fit", "isoflop", "--runs", str(bowls), "--noise-sd", "0.002", "--draws", "200"),
        ("fit", "isoflop", "--runs", str(bowls), "--curve", "parabola"),
    ):
        status, out, err = run(*arguments)
        assert status == 0 and not err, err
        assert out.count("\n") > 3
        status, out, err = run(*arguments, "--json")
        assert status == 0 and not err and isinstance(json.loads(out), dict), arguments


def test_numbers_of_the_fits_in_json(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    """What the commands print with --json is what the functions return, to the last digit, under the agreed names."""
    grid_path, bowls, n = tmp_path / "grid.csv", tmp_path / "bowls.csv", np.geomspace(1e7, 1e9, 7)
    grid(sd=0.003).to_csv(grid_path, index=False)
    profiles = [(n, c, 3 + 0.01 * np.log(n / np.sqrt(c / 120)) ** 2) for c in (1e17, 1e18, 1e19)]
    pd.concat(pd.DataFrame(dict(zip(("N", "C", "loss"), p, strict=True))) for p in profiles).to_csv(bowls, index=False)
    names = {"estimate", "standard_error", "interval", "n", "df", "status", "conventions", "warnings", "dropped",
             "checklist"}  # fmt: skip
    flags = ("--level", "0.9", "--draws", "100", "--random-seed", "3", "--json")
    options = {"level": 0.9, "draws": 100, "rng": 3}
    _, out, _ = run("fit", "frontier", "--runs", str(grid_path), "--budgets", "1e20,1e21", *flags)
    wanted = compute_frontier(load_table(grid_path), budgets=[1e20, 1e21], **options)  # type: ignore[arg-type]
    assert json.loads(out) == json.loads(wanted.to_json()) and names <= set(json.loads(out))
    assert set(json.loads(out)["interval"]["low"]) == set(wanted.estimate) and "N*[1e+21]" in wanted.estimate
    _, out, _ = run("fit", "isoflop", "--runs", str(bowls), "--noise-sd", "0.002", *flags)
    isoflop = fit_isoflop(load_table(bowls), noise=0.002, **options)  # type: ignore[arg-type]
    assert json.loads(out) == json.loads(isoflop.to_json()) and names <= set(json.loads(out))
    assert isoflop.estimate["N_exponent"] == pytest.approx(0.5, abs=0.02)
    _, out, _ = run("fit", "isoflop", "--runs", str(bowls), "--curve", "parabola", "--json")
    assert json.loads(out)["interval"] is None and json.loads(out)["estimate"]["N_exponent"] == pytest.approx(0.5)
    _, out, _ = run("fit", "backtest", "--runs", str(grid_path), "--level", "0.8", "--json")
    assert json.loads(out) == json.loads(backtest(load_table(grid_path), level=0.8).to_json())
    _, out, _ = run("fit", "law", "--runs", str(grid_path), "--level", "0.999", "--draws", "200")
    assert "  99.9% interval: cluster bootstrap" in out and "warning few-draws: " in out


def test_what_a_person_looks_for_is_on_the_screen(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    path = tmp_path / "runs.csv"
    sweep(np.random.default_rng(0), speedups={"new": 1.25, "other": 1.1}).to_csv(path, index=False)
    _, out, _ = run("compare", "speedup", "--runs", str(path), "--baseline", "baseline", "--draws", "0")
    assert (
        all(f"\n     s{k} " in out for k in range(5)) and "noise floor: SD " in out and "trend over scales: p " in out
    )
    _, out, _ = run("compare", "seeds", "--runs", str(path), "--baseline", "baseline")
    assert "exact sign flips of 15 pairs: p " in out and "smallest possible 6.1e-05" in out
    assert "corrected for 2 methods: Dunnett " in out and "runs of one seed correlate by " in out
    _, out, _ = run("compare", "items", "--gains", "27", "--losses", "13")
    assert "mid-p 0.02753, exact p 0.03848" in out and "converged" not in out
    _, out, _ = run("noise", "floor", "--runs", str(path))
    assert "15 configurations, SD " in out and "Levene p " in out
    _, out, _ = run("noise", "power", "--sd", "0.00116", "--seeds", "3", "--scales", "1")
    assert "power, simulated" in out and "0.00356" in out
    _, out, _ = run("fit", "backtest", "--runs", str(path), "--form", "power")
    assert "extrapolated" in out and "median error" in out
