"""The report as files: complete, self-contained, escaped, honest about small grids, and quick with many runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from scaling.analysis.catalog import picture
from scaling.analysis.report import build_report, write_picture
from scaling.analysis.source import read_sweep, sweep_of
from scaling.analysis.summary import summarize
from scaling.analysis.whole import complete, pick_baseline
from scaling.errors import ScalingError, TableError
from tests.conftest import missing

EVIL = '"><script>window.bad=1</script><img src=x onerror=window.bad=1>'


@pytest.fixture(scope="module")
def small(planted: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = planted.table()
    return build_report(
        runs, planted.histories(runs), out=tmp_path_factory.mktemp("small"), command="scaling report build x"
    )


class Page(HTMLParser):
    """Tags with attributes, identifiers, and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_every_file_is_there(small: Path) -> None:
    names = {str(path.relative_to(small.parent)) for path in small.parent.rglob("*") if path.is_file()}
    for figure in ("scaling-curves", "loss-curves"):
        assert {f"figures/{figure}.{kind}" for kind in ("png", "pdf", "svg", "csv")} <= names
    for table in ("runs", "speedups", "speedups-by-scale"):
        assert {f"tables/{table}.{kind}" for kind in ("csv", "md", "tex", "html")} <= names
    assert {"report.html", "report.md", "runs.csv", "results.json"} <= names
    assert not [name for name in names if Path(name).name.startswith(".")]


def test_the_page_asks_the_network_for_nothing_and_has_no_identifier_twice(small: Path) -> None:
    page = Page(small.read_text(encoding="utf-8"))
    for tag, attributes in page.tags:
        for name in ("src", "href", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    identifiers = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(identifiers) == len(set(identifiers))
    assert "url(http" not in small.read_text(encoding="utf-8") and "@import" not in small.read_text(encoding="utf-8")


def test_links_inside_the_page_lead_somewhere(small: Path) -> None:
    page = Page(small.read_text(encoding="utf-8"))
    identifiers = {attributes["id"] for _, attributes in page.tags if attributes.get("id")}
    targets = {str(a["href"])[1:] for tag, a in page.tags if tag == "a" and str(a.get("href", "")).startswith("#")}
    assert targets <= identifiers


def test_the_same_runs_give_the_same_figures(planted: ModuleType, tmp_path: Path) -> None:
    runs = planted.table(sizes=2)
    found = planted.findings(runs, planted.histories(runs))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_picture(picture(found, "seed-deltas"), tmp_path / folder)
    for name in ("seed-deltas.pdf", "seed-deltas.svg", "seed-deltas.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_planted_speedup_is_in_the_summary_and_the_results(planted: ModuleType, small: Path) -> None:
    results = json.loads((small.parent / "results.json").read_text(encoding="utf-8"))["speedup mhar"]
    assert results["interval"]["low"]["speedup"] < planted.SPEEDUP < results["interval"]["high"]["speedup"]
    assert "mhar reaches baseline's loss with less compute" in small.read_text(encoding="utf-8").replace("&#39;", "'")


def test_a_noisy_tiny_grid_says_what_it_cannot_show(planted: ModuleType, tmp_path: Path) -> None:
    page = (
        build_report(planted.table(sigma=0.05), None, out=tmp_path, formats=())
        .with_name("report.md")
        .read_text(encoding="utf-8")
    )
    shown, rest = page.split("## What they do not show")
    assert "with less compute" not in shown
    assert "Whether mhar saves compute" in rest and "proves nothing about the methods" in rest
    assert "seeds a cell" in rest.split("## What it would take to know more")[1]


def test_strings_from_runs_are_escaped_everywhere(planted: ModuleType, tmp_path: Path) -> None:
    runs = planted.table(sizes=1, methods=("baseline", EVIL), evil=EVIL)
    page = Page(
        build_report(runs, planted.histories(runs), out=tmp_path, title=EVIL, formats=()).read_text(encoding="utf-8")
    )
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in page.tags}
    assert any(EVIL in word for word in page.words)


@pytest.mark.parametrize(("sizes", "methods", "seeds"), [(1, ("baseline",), 1), (2, ("baseline", "mhar"), 2)])
def test_grids_too_small_for_a_law_still_report(
    planted: ModuleType, tmp_path: Path, sizes: int, methods: tuple[str, ...], seeds: int
) -> None:
    runs = planted.table(sizes=sizes, methods=methods, seeds=seeds)
    text = build_report(runs, planted.histories(runs, points=2), out=tmp_path, formats=()).read_text(encoding="utf-8")
    assert "with less compute" not in text
    if len(methods) > 1:
        assert "compute" in text and "too-few-scales" not in text  # a reason in words, not a code


def test_a_table_without_baseline_reports_and_asks_for_one(planted: ModuleType, tmp_path: Path) -> None:
    runs = planted.table(methods=("adam", "muon"))
    text = build_report(runs, None, out=tmp_path, formats=()).with_name("report.md").read_text(encoding="utf-8")
    assert "Name the method that the others are compared with" in text.replace("\\", "")


def test_a_foreign_table_needs_method_and_loss_only(tmp_path: Path) -> None:
    runs = pd.DataFrame({"method": ["a", "a", "b"], "val_loss": [3.0, 3.1, 2.9]})
    assert build_report(runs, None, out=tmp_path, formats=()).is_file()


def test_bad_tables_are_refused_with_what_is_there(planted: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="holds no run"):
        complete(planted.table().iloc[:0])
    with pytest.raises(
        TableError,
        match="column 'val_loss' is missing; the table has: method, loss; name it with --columns loss=COLUMN",
    ):
        complete(pd.DataFrame({"method": ["a"], "loss": [1.0]}))
    text = pd.DataFrame({"method": ["a", "b"], "val_loss": ["3.1", "abc"]})
    wanted = r"column 'val_loss' holds text \('abc' in row 2\) .* map another column with --columns loss=COLUMN"
    with pytest.raises(TableError, match=wanted):
        complete(text)
    assert list(complete(text.replace("abc", "2.5"))["val_loss"]) == [3.1, 2.5]
    with pytest.raises(TableError, match=r"column 'seed' holds text \('x' in row 1\)"):
        complete(text.replace("abc", "2.5").assign(seed=["x", "1"]))
    with pytest.raises(TableError, match=r"baseline 'basline' is not a method of the table; did you mean 'baseline'\?"):
        pick_baseline(planted.table(), "basline")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ScalingError, match="the report cannot be written .*choose another --out"):
        build_report(planted.table(sizes=1, seeds=1), None, out=tmp_path / "file")


def test_the_summary_tells_the_planted_findings(planted: ModuleType) -> None:
    summary = summarize(planted.findings(planted.table()))
    assert summary.headline == "16 runs of 2 methods, 4 sizes, 2 seeds, compared with baseline."
    assert any("a speedup of 1.25× (95% interval 1.15× to 1.35×)" in line for line in summary.shown)
    assert any("standard deviation of 0.0040 nats" in line for line in summary.shown)
    assert any("IsoFLOP" in line for line in summary.not_shown)


def test_markdown_links_the_figures_that_were_written(small: Path) -> None:
    text = small.with_name("report.md").read_text(encoding="utf-8")
    links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert links and all((small.parent / link).is_file() for link in links)


def test_a_sweep_names_its_runs_and_says_where_they_are_missing(tmp_path: Path) -> None:
    assert sweep_of(str(tmp_path)) is None and sweep_of("sqlite:///mlflow.db") is None and sweep_of("runs.csv") is None
    sweep = sweep_of("quickstart", settings=["seed=[0]"], folder=tmp_path)
    assert sweep is not None and sweep.folder == tmp_path and len(sweep.runs) == 8
    with pytest.raises(TableError, match="holds no finished run of the 8 planned; train the sweep first"):
        read_sweep(sweep)


@pytest.mark.slow
def test_ten_times_the_runs_cost_much_less_than_ten_times(planted: ModuleType, tmp_path: Path) -> None:
    def cost_s(seeds: int) -> tuple[float, Path]:
        runs = planted.table(sizes=8, methods=("baseline", "a", "b", "c", "d"), seeds=seeds)
        assert len(runs) == 40 * seeds
        began = time.process_time()
        page = build_report(runs, planted.histories(runs, points=20), out=tmp_path / str(seeds), formats=("png",))
        return time.process_time() - began, page

    few_s, _ = cost_s(5)
    many_s, page = cost_s(50)
    assert many_s < 6 * few_s
    assert page.stat().st_size < 12e6


@pytest.mark.slow
def test_the_latex_document_compiles(small: Path) -> None:
    if shutil.which("pdflatex") is None:
        missing("pdflatex (Debian packages texlive-latex-base and texlive-latex-recommended)")
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "report.tex"],
        cwd=small.parent / "latex", capture_output=True, text=True, errors="replace", timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert (small.parent / "latex" / "report.pdf").read_bytes().startswith(b"%PDF-")


@pytest.mark.slow
def test_hostile_strings_compile_too(planted: ModuleType, tmp_path: Path) -> None:
    if shutil.which("pdflatex") is None:
        missing("pdflatex (Debian packages texlive-latex-base and texlive-latex-recommended)")
    hostile = r"50% of a_b & #1 {x} \input ^~ $y$ ● 優 Ж"  # some of these letters pdflatex has no font for
    runs = planted.table(sizes=2, methods=("baseline", hostile))
    page = build_report(runs, None, out=tmp_path, title=hostile, formats=("pdf",))
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "report.tex"],
        cwd=page.parent / "latex", capture_output=True, text=True, errors="replace", timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
