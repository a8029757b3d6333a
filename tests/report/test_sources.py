"""Reports from real sources through the command line: IsoFLOP data, a table of many methods, a store's sweep."""

from __future__ import annotations

import importlib.util
import itertools
import sqlite3
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from scaling.analysis.figures import fits
from scaling.analysis.isoflop import fit_isoflop
from scaling.cli.main import app
from tests.conftest import ROOT

pytestmark = pytest.mark.slow


def call(*words: str) -> str:
    called = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert called.exit_code == 0, called.output
    return called.output


def test_the_isoflop_figure_on_published_profiles(shared: Path, tmp_path: Path) -> None:
    """Porian et al.'s sweep of their Kaplan setting: eight sizes or more at each budget."""
    points = pd.read_csv(shared / "data" / "porian-discrepancies" / "isoflop_points.csv")
    keys = {"dataset": "rw", "hparams": "base", "warmup": "long", "decay": "kaplan", "param_count": "kaplan"}
    chosen = points[(points[list(keys)] == pd.Series(keys)).all(axis=1) & points["val"].eq("train")]
    chosen.to_csv(tmp_path / "points.csv", index=False)
    columns = "N=n,D=t,C=flops"  # and no column for a method: all runs are of one
    out = tmp_path / "isoflop.svg"
    call("report", "figure", str(tmp_path / "points.csv"), "isoflop", "--columns", columns, "--out", str(out))
    assert out.read_bytes().startswith(b"<?xml")
    call(
        "report",
        "build",
        str(tmp_path / "points.csv"),
        "--columns",
        columns,
        "--out",
        str(tmp_path),
        "--formats",
        "svg",
    )
    drawn = pd.read_csv(tmp_path / "figures" / "isoflop.csv")
    counts = chosen.groupby("flops")["n"].nunique()
    assert set(drawn["budget"].round(-10)) <= set(chosen["flops"].round(-10)) and drawn["budget"].nunique() >= 5
    for budget, part in drawn.groupby("budget"):
        assert (
            len(part) in counts[np.isclose(counts.index.to_numpy(dtype=float), float(str(budget)), rtol=1e-3)].tolist()
        )
        optimum = part["optimum"].dropna().unique()
        assert len(optimum) <= 1 and all(part["N"].min() < one < part["N"].max() for one in optimum)
    accepted = drawn.dropna(subset=["optimum"]).groupby("budget")["optimum"].first()
    assert len(accepted) >= 5 and accepted.is_monotonic_increasing


def test_many_methods_without_sizes_can_be_followed(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data" / "modded-nanogpt-optim"
    columns = "loss=final_val_loss,method=group,D=last_step"
    words = ["report", "build", str(folder / "runs_final.csv"), "--columns", columns, "--formats", "svg"]
    curves = ["--curves", str(folder / "val_curves.csv")]
    call(*words, *curves, "--out", str(tmp_path / "bare"))
    told = (tmp_path / "bare" / "report.md").read_text(encoding="utf-8")
    assert "578 runs of 42 methods" in told and "standard deviation of 0.0012 nats" in told
    assert "no baseline was named" in told and "**Methods by scale.** Mean held-out loss" in told
    main = pd.read_csv(tmp_path / "bare" / "tables" / "main.csv")
    assert (main["fewest"] < main["most"]).any() and not main.duplicated(["size", "method"]).any()
    means = main.set_index("method")["mean"]
    given = pd.read_csv(folder / "runs_final.csv").groupby("group")["final_val_loss"].mean()
    assert means["20260430_muonh"] == pytest.approx(given["20260430_muonh"])
    assert pd.read_csv(tmp_path / "bare" / "runs.csv").shape[0] == 578
    # Ten curves stand in the logs twice (single and bundled): their copies count once.
    dropped = pd.read_csv(tmp_path / "bare" / "tables" / "dropped.csv")
    assert len(dropped) == 10 and set(dropped["reason"]) == {"duplicate: same curve hash"}
    call(*words, "--out", str(tmp_path / "based"), "--baseline", "20260503_normuon")
    based = (tmp_path / "based" / "report.md").read_text(encoding="utf-8")
    assert "compared with 20260503\\_normuon" in based and "## Loss differences, seed by seed" in based
    assert "| minus 20260503\\_normuon |" in based


def _folders() -> ModuleType:
    spec = importlib.util.spec_from_file_location("folders", ROOT / "tests" / "tracking" / "folders.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_report_is_an_artifact_of_the_sweep_s_parent_run(tmp_path: Path) -> None:
    folders = _folders()
    for method in ("baseline", "mhar"):
        for seed in range(2):
            folders.make_run(tmp_path / "runs", seed=seed, method=method)
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    words = ["report", "build", str(tmp_path / "runs"), "--out", str(tmp_path / "report"), "--formats", "png"]
    call(*words, "--mlflow", store)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        rows = database.execute(
            "select r.artifact_uri, k.value from runs r join tags k on k.run_uuid = r.run_uuid and k.key = 'kind'"
        ).fetchall()
    parents = [uri for uri, kind in rows if kind == "sweep"]
    assert len(parents) == 1 and len(rows) == 5
    kept = Path(parents[0].removeprefix("file://")) / "figures"
    assert (kept / "report.html").read_bytes() == (tmp_path / "report" / "report.html").read_bytes()
    names = {path.name for path in kept.iterdir()}
    assert {path.name for path in (tmp_path / "report" / "figures").glob("*.png")} <= names
    assert {path.name for path in (tmp_path / "report" / "tables").glob("*.csv")} <= names
    before = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    call("runs", "sync", str(tmp_path / "runs"), "--store", store)
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == before


@pytest.mark.parametrize("curve", ["akima", "parabola"])
def test_isoflop_minima_lie_at_the_bottom_of_the_curves_drawn(curve: str) -> None:
    """Losses that are no parabola: the curve drawn is the one whose minimum the fit takes."""
    sizes = np.geomspace(1e6, 1e9, 9)
    rows = [
        {"N": n, "C": c, "loss": 2 + 50 * (n / 1e6) ** -0.6 + 300 * (n / c * 1e9) ** 0.4}
        for c in (1e17, 1e18, 1e19)
        for n in sizes
    ]
    fit = fit_isoflop(pd.DataFrame(rows), curve=curve)
    lines = fits.isoflop(fit).axes[0].get_lines()
    minima = [(before, line) for before, line in itertools.pairwise(lines) if line.get_marker() == "D"]
    assert len(minima) == sum(profile["optimum"] is not None for profile in fit.details["profiles"]) >= 2
    for drawn, marker in minima:
        lowest = float(np.min(np.asarray(drawn.get_ydata(), dtype=float)))
        assert float(np.asarray(marker.get_ydata(), dtype=float)[0]) == pytest.approx(lowest, rel=1e-3)
