"""Reader of MLflow servers: pages of runs, and histories in bulk by several threads.

One of the three readers; see ``raw``. Histories come from the bulk end point of MLflow's own UI: one metric of up to
100 runs a request. It cuts silently at 25,000 rows, so that a full page is asked for again in halves; the end point
with an interval samples and is never used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from scaling.analysis.ingest_cache import fingerprint
from scaling.analysis.raw import Points, Progress, Query, Raw, decode
from scaling.tracking.connection import Server
from scaling.tracking.store import normalise

logger = logging.getLogger(__name__)

API: Final = "/api/2.0/mlflow"
BULK: Final = "/ajax-api/2.0/mlflow/metrics/get-history-bulk"
FULL_PAGE: Final = 25_000  # rows at which the bulk end point cuts (mlflow/server/handlers.py, MAX_HISTORY_RESULTS)
MAX_RUNS: Final = 100  # a bulk request
PAGE: Final = 1_000  # runs a page of runs/search
THREADS: Final = 8
TIMEOUT_S: Final = 120.0


Listing = dict[str, tuple[dict[str, Any], str]]  # run id -> (the run as the server says it, its experiment's name)


def list_server(url: str, query: Query, *, progress: Progress | None = None) -> Listing:
    """Runs that the query means, without histories."""
    server = _Connections(normalise(url))
    return {run["info"]["run_id"]: (run, name) for run, name in _runs(server, query, progress)}


def server_fingerprints(listing: Listing) -> dict[str, str]:
    """Run id -> a text that changes when the run gets points or another status."""
    marks: dict[str, str] = {}
    for run_id, (run, _) in listing.items():
        info, metrics = run["info"], run["data"].get("metrics", [])
        if {"key": "kind", "value": "sweep"} in run["data"].get("tags", []):
            continue  # a parent is no row of the table
        last = max(((int(m.get("step", 0)), int(m.get("timestamp", 0))) for m in metrics), default=(0, 0))
        marks[run_id] = fingerprint(info["status"], info.get("end_time"), len(metrics), *last)
    return marks


def read_server(
    url: str,
    query: Query,
    *,
    listing: Listing | None = None,
    progress: Progress | None = None,
    threads: int = THREADS,
) -> Raw:
    """Read runs of a server; ``listing`` saves asking for the runs again.

    Raises
    ------
    StoreUnavailable
        If the server does not answer.
    StoreError
        If it refuses.
    """
    import pandas as pd

    server = _Connections(normalise(url))
    found = listing if listing is not None else list_server(url, query, progress=progress)
    if query.only is not None:
        found = {run_id: value for run_id, value in found.items() if run_id in query.only}
    rows: dict[str, dict[str, Any]] = {}
    fields: dict[str, dict[str, Any]] = {}
    steps: dict[str, dict[str, int]] = {}  # metric -> run -> its highest step
    wanted = {kind: set(query.names(kind)) for kind in ("tag", "param", "metric")}
    for run_id, (run, experiment) in found.items():
        info, data = run["info"], run["data"]
        ended = info.get("end_time") if info["status"] != "RUNNING" else None
        rows[run_id] = {
            "name": info.get("run_name", ""),
            "experiment": experiment,
            "status": info["status"],
            "started_ms": int(info.get("start_time") or 0),
            "ended_ms": int(ended) if ended is not None else None,
        }
        for kind, plural in (("tag", "tags"), ("param", "params")):
            for pair in data.get(plural, []):
                if pair["key"] in wanted[kind]:
                    fields.setdefault(f"{kind}:{pair['key']}", {})[run_id] = pair.get("value", "")
        for metric in data.get("metrics", []):
            value, step = float(metric["value"]), int(metric.get("step", 0))
            steps.setdefault(metric["key"], {})[run_id] = step
            if metric["key"] in wanted["metric"]:
                fields.setdefault(f"metric:{metric['key']}", {})[run_id] = float(decode([value], [False])[0])
        if data.get("metrics"):
            fields.setdefault("step:", {})[run_id] = max(int(metric.get("step", 0)) for metric in data["metrics"])
    columns = {"name": "string", "experiment": "string", "status": "string", "started_ms": "Int64", "ended_ms": "Int64"}
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=list(columns)).astype(columns)
    frame.index = pd.Index(frame.index, dtype=object)
    series = {
        name: pd.Series(values, dtype=object if name.startswith(("tag", "param")) else None)
        for name, values in fields.items()
    }
    points = None
    if query.histories is not None:
        chosen = {name: runs for name, runs in steps.items() if not query.histories or name in query.histories}
        points = _points(server, chosen, progress, threads)
    return Raw(runs=frame, fields=series, points=points)


class _Connections:
    """One kept connection a thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._local = threading.local()

    @property
    def mine(self) -> Server:
        if not hasattr(self._local, "server"):
            self._local.server = Server(self._url, timeout_s=TIMEOUT_S)
        server: Server = self._local.server
        return server


def _runs(server: _Connections, query: Query, progress: Progress | None) -> Iterator[tuple[dict[str, Any], str]]:
    """Runs (as the server says them) with their experiments' names; some may come twice."""
    experiments: dict[str, str] = {}
    body: dict[str, Any] = {"max_results": PAGE}
    while True:
        answer = server.mine.post(f"{API}/experiments/search", body)
        experiments |= {one["experiment_id"]: one["name"] for one in answer.get("experiments", [])}
        if not answer.get("next_page_token"):
            break
        body["page_token"] = answer["next_page_token"]
    searches: list[tuple[list[str], list[str]]] = [(list(experiments), [])]
    if query.sweep is not None:
        named = [key for key, name in experiments.items() if name == query.sweep]
        tagged = _equals("tag:sweep", query.sweep)
        searches = [(list(experiments), [tagged] if tagged else [])]
        if named:
            searches.append((named, []))
    for places, filters in searches:
        # A server has no OR: the alternatives of one comparison are asked for one after another.
        for more in _alternatives(query):
            text = " and ".join([*filters, *more])
            for number, run in enumerate(_search(server, places, text)):
                if query.sweep is None or _belongs(run, query.sweep, experiments):
                    yield run, experiments[run["info"]["experiment_id"]]
                if progress is not None:
                    progress("runs", number + 1, 0)


def _search(server: _Connections, places: Sequence[str], text: str) -> Iterator[dict[str, Any]]:
    body: dict[str, Any] = {"experiment_ids": list(places), "max_results": PAGE, "run_view_type": "ACTIVE_ONLY"}
    if text:
        body["filter"] = text
    while places:
        answer = server.mine.post(f"{API}/runs/search", body)
        yield from answer.get("runs", [])
        if not answer.get("next_page_token"):
            return
        body["page_token"] = answer["next_page_token"]


def _belongs(run: Mapping[str, Any], sweep: str, experiments: Mapping[str, str]) -> bool:
    tags = {pair["key"]: pair.get("value", "") for pair in run["data"].get("tags", [])}
    return tags.get("sweep") == sweep or experiments[run["info"]["experiment_id"]] == sweep


def _alternatives(query: Query) -> list[list[str]]:
    """Filters that together let through every run the first decidable comparison lets through."""
    for places, sign, value in query.conditions:
        texts: list[str] = []
        for place in places:
            kind, _, name = place.partition(":")
            if isinstance(value, str):
                text = _equals(place, value) if sign == "=" else None
            else:
                text = f"metrics.`{name}` {sign} {value!r}" if kind == "metric" and "`" not in name else None
            if text is None:
                break
            texts.append(text)
        else:
            return [[text] for text in texts]
    return [[]]


def _equals(place: str, value: str) -> str | None:
    """MLflow's filter for a tag or parameter, ``None`` where its language cannot say it."""
    kind, _, name = place.partition(":")
    if kind not in ("tag", "param") or "`" in name or "'" in value or not value.isprintable():
        return None
    return f"{kind}s.`{name}` = '{value}'"


def _points(
    server: _Connections, metrics: Mapping[str, Mapping[str, int]], progress: Progress | None, threads: int
) -> Points:
    runs = sorted({run for members in metrics.values() for run in members})
    position = {run: i for i, run in enumerate(runs)}
    names = sorted(metrics)
    columns: tuple[list[int], list[int], list[int], list[int], list[float]] = ([], [], [], [], [])
    lock = threading.Lock()
    total, done = sum(map(len, metrics.values())), 0

    def take(name: str, chunk: Sequence[str]) -> None:
        nonlocal done
        rows = _bulk(server.mine, name, chunk)
        code = names.index(name)
        with lock:
            columns[0].extend(position[row["run_id"]] for row in rows)
            columns[1].extend([code] * len(rows))
            columns[2].extend(int(row["step"]) for row in rows)
            columns[3].extend(int(row["timestamp"]) for row in rows)
            columns[4].extend(float(row["value"]) for row in rows)
            done += len(chunk)
            if progress is not None:
                progress("metrics of runs", done, total)

    with ThreadPoolExecutor(threads) as pool:
        work = [
            pool.submit(take, name, chunk)
            for name, members in metrics.items()
            for chunk in _chunks(server.mine, name, members)
        ]
        for one in work:
            one.result()
    values = decode(columns[4], [False] * len(columns[4]))
    run, metric, step, time_ms, _ = columns
    return Points(runs=runs, metrics=names, run=run, metric=metric, step=step, time_ms=time_ms, value=values)


def _chunks(server: Server, name: str, members: Mapping[str, int]) -> Iterator[list[str]]:
    """Runs in groups whose points of one metric fit on a page, judged by the longest run's."""
    longest = max(members, key=lambda run: members[run])
    rows = len(_bulk(server, name, [longest]))
    size = max(1, min(MAX_RUNS, (FULL_PAGE - 1) // max(1, rows)))
    ordered = sorted(members)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def _bulk(server: Server, name: str, runs: Sequence[str]) -> list[dict[str, Any]]:
    """All points of one metric of some runs; a page that is full is asked for again in halves."""
    answer = server.get(BULK, run_id=list(runs), metric_key=name, max_results=FULL_PAGE)
    rows: list[dict[str, Any]] = answer.get("metrics", [])
    if len(rows) < FULL_PAGE:
        return rows
    if len(runs) > 1:
        half = len(runs) // 2
        return _bulk(server, name, runs[:half]) + _bulk(server, name, runs[half:])
    return list(_paged(server, name, runs[0]))


def _paged(server: Server, name: str, run: str) -> Iterator[dict[str, Any]]:
    """One metric of one run, however long, page by page."""
    token = ""
    while True:
        more = {"page_token": token} if token else {}
        answer = server.get(f"{API}/metrics/get-history", run_id=run, metric_key=name, max_results=FULL_PAGE, **more)
        for row in answer.get("metrics", []):
            yield {**row, "run_id": run}
        token = answer.get("next_page_token", "")
        if not token:
            return
