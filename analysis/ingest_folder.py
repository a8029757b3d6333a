"""Reader of run folders: the same fields and histories as from a store that the syncer filled, without a store.

One of the three readers; see ``raw``. Tags, parameters and status come from ``scaling.tracking``, so that both ways
agree by construction.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

from scaling.analysis.collector import Collector
from scaling.analysis.ingest_cache import fingerprint
from scaling.analysis.raw import Progress, Query, Raw
from scaling.errors import RecordError
from scaling.record import END, Point, RunFolder, run_folders
from scaling.tracking import conventions
from scaling.tracking.conventions import CURVES, STORE_STATUS, TERMINAL
from scaling.tracking.journal import seal
from scaling.tracking.metrics import store_name
from scaling.tracking.standing import JobState, standing


def read_folders(
    out: Path, query: Query, *, job_state: JobState | None = None, progress: Progress | None = None
) -> tuple[Raw, dict[str, str]]:
    """Read the run folders under ``out``; also returns damaged folders: key -> reason.

    Raises
    ------
    RecordError
        If ``out`` is not a folder.
    """
    import pandas as pd

    rows: dict[str, dict[str, object]] = {}
    fields: dict[str, dict[str, object]] = defaultdict(dict)
    damaged: dict[str, str] = {}
    collector = Collector()
    folders = run_folders(out)
    for number, folder in enumerate(folders):
        if query.only is None or folder.key in query.only:
            try:
                _read(folder, query, out.resolve().name, job_state, rows, fields, collector)
            except RecordError as error:
                damaged[folder.key] = str(error)
        if progress is not None:
            progress("run folders", number + 1, len(folders))
    runs = pd.DataFrame.from_dict(
        rows, orient="index", columns=["name", "experiment", "status", "started_ms", "ended_ms"]
    )
    runs = runs.astype(
        {"name": "string", "experiment": "string", "status": "string", "started_ms": "Int64", "ended_ms": "Int64"}
    )
    series = {
        name: pd.Series(values, dtype=object if name[:3] in ("tag", "par") else None) for name, values in fields.items()
    }
    return Raw(runs=runs, fields=series, points=collector.points() if query.histories is not None else None), damaged


def folder_fingerprints(out: Path, query: Query) -> dict[str, str]:
    """Run key -> a text that changes when the folder does; a run that is not over looks new every time."""
    marks: dict[str, str] = {}
    for folder in run_folders(out):
        files = seal(folder)
        over = any(name == END for name, _, _ in files)
        marks[folder.key] = fingerprint(files, query.sweep, "" if over else time.time_ns())
    return marks


def _read(
    folder: RunFolder,
    query: Query,
    default: str,
    job_state: JobState | None,
    rows: dict[str, dict[str, object]],
    fields: dict[str, dict[str, object]],
    collector: Collector,
) -> None:
    config, attempts, end = folder.config(), folder.attempts(), folder.end()
    if query.sweep is not None and query.sweep not in (config.run.sweep, default):
        return
    stands = standing(folder, attempts, end, job_state)
    points = list(folder.points())
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in CURVES}
    for point in points:
        for name, value in point.metrics.items():
            if name in curves:
                curves[name].append((point.step, value))
    curve = conventions.curve_hash(curves) if stands.status in TERMINAL else ""
    if end is not None and stands.status in TERMINAL:
        last = {name: (step, value) for name, (step, _, value) in conventions.last_values(points).items()}
        finals = conventions.final_metrics(end, last)
        points.append(Point(step=end.step, time_ms=end.ended_ms, metrics=finals, attempt=end.attempt))
    shown = conventions.view(folder, config=config, attempts=attempts, end=end, standing=stands, curve=curve)
    key = folder.key
    rows[key] = {
        "name": shown.name,
        "experiment": config.run.sweep or default,
        "status": STORE_STATUS[stands.status],
        "started_ms": shown.started_ms,
        "ended_ms": stands.ended_ms,
    }
    for kind, mapping in (("tag", shown.tags), ("param", shown.params)):
        for name in query.names(kind):
            if name in mapping:
                fields[f"{kind}:{name}"][key] = mapping[name]
    latest = {store_name(name): (step, value) for name, (step, _, value) in conventions.last_values(points).items()}
    for name in query.names("metric"):
        if name in latest:
            fields[f"metric:{name}"][key] = latest[name][1]
    if "step:" in query.fields and latest:
        fields["step:"][key] = max(step for step, _ in latest.values())
    if query.histories is not None:
        named = ((store_name(name), point, value) for point in points for name, value in point.metrics.items())
        cells = [
            (name, point.step, point.time_ms, value)
            for name, point, value in named
            if not query.histories or name in query.histories
        ]
        if cells:
            collector.extend(key, *zip(*cells, strict=True))
