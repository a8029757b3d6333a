"""What a report can show beside runs: probes of routing, timings, answers to test items, downstream scores.

After ``disagreement`` and ``items``, before ``findings``. Each comes in a file of its own, written by another command
of this tool or by hand; nothing here is measured. Probes and downstream scores are also found in run folders, where
``scaling probe disagreement RUN --save`` and ``scaling eval RUN`` put them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.analysis.items import compare_items
from scaling.analysis.result import Result
from scaling.errors import TableError
from scaling.record import DOWNSTREAM, DOWNSTREAM_FINAL, DOWNSTREAM_RESULTS, PROBE

Floats = NDArray[np.float64]
SCORES: Final = ("method", "task", "score")  # needed; size, seed and se are read where they are there
SCORE_PREFIX: Final = "score/"  # columns of a run table: score/MMLU, and score_se/MMLU with its standard error
_RESULTS: Final = f"{DOWNSTREAM}/{DOWNSTREAM_FINAL}/{DOWNSTREAM_RESULTS}"
_ERROR_PREFIX: Final = "score_se/"
_FILES: Final = {
    "answers": "a .csv or .parquet file with columns item, method and correct",
    "scores": "a .csv or .parquet file with columns method, task and score",
    "timings": "what `scaling bench kernels|train --json` printed, as a .json file, or the same as .csv or .parquet",
}
_STEP: Final = ("shape", "vocabulary", "method", "pass", "launch")
_KERNEL: Final = ("operation", "shape", "pass")


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A probe of one trained model; Q sequences, S sites, K draws, N sources, H heads.

    Parameters
    ----------
    learned, random
        Disagreement of the heads (Q, S), and with random queries of the same norms (Q, S, K).
    weights
        (S, N, H) mean weight of each source; NaN where a site does not see it.
    """

    source: str
    name: str
    method: str
    size: str
    seed: int | None
    heads: int
    sites: NDArray[np.int64]
    learned: Floats
    random: Floats
    weights: Floats

    @property
    def excess(self) -> Floats:
        """(Q,) learned minus random, the mean over sites and draws."""
        difference: Floats = self.learned.mean(axis=1) - self.random.mean(axis=(1, 2))
        return difference


@dataclass(frozen=True, kw_only=True, slots=True)
class Supplements:
    """All of it; empty parts are left out of tables, figures and report."""

    probes: tuple[Probe, ...] = ()
    steps: pd.DataFrame | None = None
    kernels: pd.DataFrame | None = None
    items: Mapping[str, Result] = field(default_factory=dict)
    scores: pd.DataFrame | None = None


def collect(
    *,
    runs: str | None = None,
    only: Collection[str] | None = None,
    probes: Sequence[str] = (),
    benches: Sequence[str] = (),
    items: str | None = None,
    scores: str | None = None,
    baseline: str | None = None,
) -> Supplements:
    """Read what was given, and what lies in the run folders of ``runs``: probes, and scores where none are given.

    Parameters
    ----------
    runs, only
        Source of the runs, of which only a folder of run folders is looked into; keys of the runs that count.
    probes, benches
        ``.npz`` files of ``scaling probe``; what ``scaling bench kernels|train --json`` printed, or the same as CSV.
    items
        CSV or Parquet: item, method, correct (0 or 1), and task and cluster where there are any.
    scores
        CSV or Parquet, one row a score: method, task, score; size, seed and se (its standard error) where known.
    baseline
        Method of the items that the others are compared with; default ``baseline``.

    Raises
    ------
    TableError, UsageError
        If a file is missing, of another kind, or lacks a column.
    """
    folder = Path(runs) if runs is not None and Path(runs).is_dir() else None
    steps, kernels = _benches(benches)
    answers = {} if items is None else compare_items(_table(items, "answers"), baseline=baseline or "baseline")
    return Supplements(
        probes=tuple(read_probe(path) for path in (*_of_runs(folder, only, PROBE), *map(Path, probes))),
        steps=steps,
        kernels=kernels,
        items=answers,
        scores=read_scores(scores) if scores is not None else run_scores(_of_runs(folder, only, _RESULTS)),
    )


def _of_runs(folder: Path | None, only: Collection[str] | None, place: str) -> list[Path]:
    """A file of every run folder that has it, of the runs that count."""
    found = [] if folder is None else sorted(folder.glob(f"*/{place}"))
    return [path for path in found if only is None or path.relative_to(str(folder)).parts[0] in only]


def read_probe(path: Path) -> Probe:
    """A probe's file.

    Raises
    ------
    TableError
        If it is missing or not one.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            held = {name: arrays[name] for name in arrays.files}
        run: dict[str, Any] = json.loads(str(held["run"])) if "run" in held else {}
        learned, random, weights = (held[name].astype(np.float64) for name in ("learned", "random", "weights"))
        sites = held["sites"].astype(np.int64)
    except (OSError, ValueError, KeyError, EOFError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else "is no file of a probe"
        raise TableError(f"{path}: {reason}; make it with `scaling probe disagreement RUN --out FILE.npz`") from None
    return Probe(
        source=str(path),
        name=str(run.get("name") or path.stem),
        method=str(run.get("method") or ""),
        size=str(run.get("size") or ""),
        seed=run.get("seed"),
        heads=weights.shape[-1],
        sites=sites,
        learned=learned,
        random=random,
        weights=weights,
    )


def read_scores(path: str) -> pd.DataFrame:
    """A long table of scores: method, size, task, score, se, seed; raises as ``collect`` does."""
    frame = _table(path, "scores")
    for name in SCORES:
        if name not in frame.columns:
            have = ", ".join(map(str, frame.columns))
            raise TableError(
                f"{path}: column {name!r} missing; it has: {have}; scores need method, task and score, one row a score"
            )
    return _scores(frame)


def run_scores(paths: Sequence[Path]) -> pd.DataFrame | None:
    """Scores that ``scaling eval`` left in run folders: a task's accuracy; ``None`` where there is none."""
    rows = []
    for path in paths:
        try:
            tasks = json.loads(path.read_text(encoding="utf-8"))
            for task, found in tasks.items():
                if found["main"] is not None:
                    number = found["metrics"][found["main"]]
                    who = {name: found["how"][name] for name in ("method", "size", "seed")}
                    rows.append({**who, "task": task, "score": number["value"], "se": number["stderr"]})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TableError(f"{path}: damaged ({error!r}); evaluate the run again with `scaling eval`") from None
    return _scores(pd.DataFrame(rows)) if rows else None


def wide_scores(runs: pd.DataFrame) -> pd.DataFrame | None:
    """Scores that stand in the run table, as columns ``score/TASK``; ``None`` where there is none."""
    parts = []
    for column in runs.columns:
        if str(column).startswith(SCORE_PREFIX):
            task = str(column).removeprefix(SCORE_PREFIX)
            error = f"{_ERROR_PREFIX}{task}"
            parts.append(
                runs[["method", "size", "seed"]].assign(
                    task=task, score=runs[column], se=runs[error] if error in runs.columns else np.nan
                )
            )
    return _scores(pd.concat(parts, ignore_index=True)) if parts else None


def _scores(frame: pd.DataFrame) -> pd.DataFrame:
    try:
        numbers = {
            name: pd.to_numeric(frame[name]).astype("float64") if name in frame.columns else np.nan
            for name in ("score", "se")
        }
    except (ValueError, TypeError) as error:
        raise TableError(f"scores: {error}; columns score and se must hold numbers") from None
    texts = {
        name: frame[name].astype("string") if name in frame.columns else pd.Series(pd.NA, frame.index, dtype="string")
        for name in ("method", "size", "task")
    }
    seed = frame["seed"] if "seed" in frame.columns else pd.Series(pd.NA, frame.index)
    long = pd.DataFrame({**texts, **numbers, "seed": seed})
    return long.assign(size=long["size"].fillna("all")).dropna(subset=["method", "task", "score"])


def _benches(paths: Sequence[str]) -> tuple[pd.DataFrame | None, pd.DataFrame | None]:
    steps, kernels = [], []
    for path in paths:
        frame = _bench(path)
        if set(_STEP) <= set(frame.columns):
            steps.append(frame)
        elif set(_KERNEL) <= set(frame.columns):
            kernels.append(frame)
        else:
            have = ", ".join(map(str, frame.columns))
            raise TableError(
                f"{path}: neither timings of steps ({', '.join(_STEP)}) nor of kernels ({', '.join(_KERNEL)}); it has: "
                f"{have}; write it with `scaling bench train --json` or `scaling bench kernels --json`"
            )
    return tuple(pd.concat(parts, ignore_index=True) if parts else None for parts in (steps, kernels))  # type: ignore[return-value]


def _bench(path: str) -> pd.DataFrame:
    """Rows of a benchmark, quantiles of the time as ms_20, ms_50, ms_80."""
    if Path(path).suffix != ".json" or not Path(path).is_file():
        return _table(path, "timings")
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
        rows, versions = list(tree["rows"]), dict(tree.get("versions", {}))
    except OSError as error:
        raise TableError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise TableError(f"{path}: is not what `scaling bench kernels|train --json` prints") from None
    flat = []
    for row in rows:
        quantiles = row.get("ms") or (None, None, None)
        named = dict(zip(("ms_20", "ms_50", "ms_80"), quantiles, strict=True))
        flat.append({**{key: value for key, value in row.items() if key != "ms"}, **named, **versions})
    return pd.DataFrame(flat)


def _table(path: str, what: str) -> pd.DataFrame:
    from scaling.analysis.columns import load_file

    return load_file(path, f"{what} come from {_FILES[what]}")
