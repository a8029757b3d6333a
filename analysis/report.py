"""Writes the report: the only module of ``analysis`` that puts tables and figures into files.

Last in the flow. ``build_report`` takes tidy runs and their histories, has everything computed (``findings``), and
writes one folder: ``report.html`` (a single file that asks the network for nothing), ``report.md``, ``runs.csv``,
``results.json``, ``tables/*.{csv,md,tex,html}``, ``figures/*.{png,pdf,svg,csv}``, and ``latex/report.tex``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pandas as pd

from scaling.analysis import catalog, latex, page, provenance, svg
from scaling.analysis.figures import style
from scaling.analysis.findings import Findings
from scaling.analysis.gallery import Picture
from scaling.analysis.inquiry import inquire
from scaling.analysis.sections import sections
from scaling.analysis.summary import summarize
from scaling.analysis.supplements import Supplements
from scaling.analysis.tables import render
from scaling.analysis.tables.table import Table
from scaling.errors import ScalingError, UsageError

_LOG = logging.getLogger(__name__)
FIGURE_FORMATS: Final = ("png", "pdf", "svg")
TABLE_FORMATS: Final = ("csv", "md", "tex", "html")


def build_report(
    table: pd.DataFrame,
    histories: pd.DataFrame | None = None,
    *,
    out: Path,
    baseline: str | None = None,
    title: str = "Scaling report",
    dropped: Sequence[tuple[str, str]] = (),
    command: str | None = None,
    extra_provenance: Mapping[str, str] | None = None,
    supplements: Supplements | None = None,
    findings: Findings | None = None,
    formats: Sequence[str] = FIGURE_FORMATS,
) -> Path:
    """Analyse runs and write the report.

    Parameters
    ----------
    table
        Tidy runs (``scaling.analysis.schema``); missing columns are taken as empty.
    histories
        Long table of metrics (``run_key``, ``metric``, ``step``, ``time_ms``, ``value``), for the loss curves.
    out
        Folder to write to; made if absent, its report files replaced.
    baseline
        Method that the others are compared with; default ``"baseline"`` where there is one.
    dropped
        Runs left out before, as (run, reason).
    command, extra_provenance
        What to type to make this again; further terms for the provenance section.
    supplements
        Probes, timings, answers and scores to show beside the runs.
    findings
        Already computed findings; default: computed here.
    formats
        Formats of the figure files.

    Returns
    -------
    Path
        ``out / "report.html"``.

    Raises
    ------
    TableError
        If the table holds no run.
    UsageError
        If a format is not offered.
    ScalingError
        If ``out`` cannot be written to.
    """
    for fmt in formats:
        if fmt not in FIGURE_FORMATS:
            raise UsageError(f"--formats: {fmt!r} is not offered; allowed: {', '.join(FIGURE_FORMATS)}")
    found = findings or inquire(table, histories, baseline=baseline, dropped=dropped, supplements=supplements)
    csv_text = str(found.table.to_csv(index=False, lineterminator="\n"))
    origin = provenance.gather(found.table, csv_text=csv_text, command=command, extra=extra_provenance)
    summary = summarize(found)
    parts = sections(found, catalog.pictures(found), origin)
    drawn: dict[str, tuple[str, str]] = {}
    try:
        for folder in (out, out / "tables", out / "figures", out / "latex"):
            folder.mkdir(parents=True, exist_ok=True)
        _write(out / "runs.csv", csv_text)
        results = {name: result.to_dict() for name, result in found.results.items()}
        _write(out / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
        for section in parts:
            for item in section.tables:
                write_table(item, out / "tables")
            for picture in section.pictures:
                drawn[picture.name] = _draw(picture, out / "figures", formats)
        _write(out / "report.md", page.markdown(title, summary, parts))
        _write(out / "latex" / "report.tex", latex.document(title, summary, parts))
        target = out / "report.html"
        _write(target, page.html(title, summary, parts, drawn))
    except OSError as error:
        raise ScalingError(f"{out}: the report cannot be written ({error.strerror}); choose another --out") from None
    _LOG.info("report of %d runs written to %s", len(found.table), target)
    return target


def attachments(out: Path) -> list[Path]:
    """Files of a written report worth keeping with the sweep it is about: the page, figures as PNG, tables as CSV."""
    return [out / "report.html", *sorted((out / "figures").glob("*.png")), *sorted((out / "tables").glob("*.csv"))]


def write_table(table: Table, folder: Path, formats: Sequence[str] = TABLE_FORMATS) -> list[Path]:
    """Write a table in each format; the paths written."""
    paths = []
    for fmt in formats:
        path = folder / f"{table.name}.{fmt}"
        _write(path, render.write(table, fmt))
        paths.append(path)
    return paths


def write_picture(picture: Picture, folder: Path, formats: Sequence[str] = FIGURE_FORMATS) -> list[Path]:
    """Draw a picture and write it in each format, its data as CSV beside it; the paths written."""
    with style.context():
        encoded = svg.encode(picture.draw(style.WIDE_IN), formats)
    return _save(picture, encoded, folder)


def write_figure(picture: Picture, path: Path) -> Path:
    """Draw a picture into one file of the format that its name says.

    Raises
    ------
    UsageError
        If that format is not offered.
    ScalingError
        If the file cannot be written.
    """
    fmt = path.suffix[1:].lower()
    if fmt not in FIGURE_FORMATS:
        raise UsageError(f"{path}: format {fmt!r} is not offered; allowed: {', '.join(FIGURE_FORMATS)}")
    with style.context():
        encoded = svg.encode(picture.draw(style.WIDE_IN), (fmt,))
    try:
        return _write(path, encoded[fmt])
    except OSError as error:
        raise ScalingError(f"{path}: cannot be written ({error.strerror}); choose another --out") from None


def _draw(picture: Picture, folder: Path, formats: Sequence[str]) -> tuple[str, str]:
    """Write the picture's files; return it for the page, wide and narrow."""
    with style.context():
        encoded = svg.encode(picture.draw(style.WIDE_IN), {*formats, "svg"})
        narrow = svg.encode(picture.draw(style.NARROW_IN), ("svg",))
    _save(picture, {fmt: encoded[fmt] for fmt in formats}, folder)
    return svg.inline(encoded["svg"], f"{picture.name}-w"), svg.inline(narrow["svg"], f"{picture.name}-n")


def _save(picture: Picture, encoded: Mapping[str, bytes], folder: Path) -> list[Path]:
    paths = []
    for fmt, data in encoded.items():
        paths.append(_write(folder / f"{picture.name}.{fmt}", data))
    paths.append(_write(folder / f"{picture.name}.csv", str(picture.data.to_csv(index=False, lineterminator="\n"))))
    return paths


def _write(path: Path, content: str | bytes) -> Path:
    """Write beside and rename, so that a reader sees the old file or the whole new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path
