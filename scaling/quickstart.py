"""The whole main job, small: real text, a grid trained on this machine, tracked, analysed, reported.

Near the end of the flow, where every part meets: ``corpus`` makes a token store of the Python standard library,
``sweeps`` plans and trains the preset ``quickstart``, ``tracking`` feeds MLflow meanwhile, ``analysis`` reads the store
back and judges. Everything is under one folder and is taken up again where it was left: a second call trains nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from scaling import __version__
from scaling.errors import DataError, RecordError
from scaling.record import END, write_atomically
from scaling.sweeps.plan import Plan, plan
from scaling.sweeps.spec import load_spec

if TYPE_CHECKING:
    from scaling.analysis.findings import Findings

PRESET: Final = "quickstart"
VOCAB_SIZE: Final = 1024
HELD_OUT_FRACTION: Final = 0.1
TEXT_BYTES: Final = 8 * 2**20  # of text: about three times what the largest run reads, so that nothing is repeated
BPE_SAMPLE_BYTES: Final = 4 * 2**20  # more costs seconds and gains 2% of bytes a token
FREE_BYTES: Final = 256 * 2**20  # of disk: runs, checkpoints, store and report take less than half of it
SYNC_S: Final = 20.0  # between two looks of the syncer at the run folders
REPORT: Final = Path("report") / "report.html"
ANSWER: Final = Path("report") / "answer.json"
ANALYSIS: Final = Path(__file__).resolve().with_name("analysis").resolve()  # a link in a checkout


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a quickstart made. ``trained`` runs were trained by this call, ``finished`` ones had been before.

    ``answer`` holds the findings (``text``, ``results``, ``refusals``); ``None`` after an interruption.
    """

    out: Path
    report: Path
    store_uri: str
    trained: int
    finished: int
    unfinished: int
    interrupted: bool
    wall_time_s: float
    times_s: dict[str, float]
    answer: dict[str, Any] | None


def quickstart(out: Path, *, workers: int | None = None, say: Callable[[str], None] = lambda text: None) -> Outcome:
    """Train, track, analyse and report the preset ``quickstart`` under ``out``.

    Parameters
    ----------
    out
        Folder for everything: ``text`` (token store), ``runs``, ``mlflow.db``, ``report``.
    workers
        Runs at a time; default: one a core.
    say
        Told what happens now, one line each.

    Raises
    ------
    DataError
        If this Python has no standard library source to read.
    RecordError
        If ``out`` cannot be written to, or the disk is nearly full.
    """
    began_s = time.monotonic()
    times: dict[str, float] = {}
    _require_room(out)
    with _timed(times, "text"):
        store = _text(out / "text", say)
    sweep = _plan(out, store)
    store_uri = f"sqlite:///{(out / 'mlflow.db').resolve()}"
    with _timed(times, "training"):
        trained, finished, interrupted = _train(sweep, store_uri, workers, say)
    answer = None
    if not interrupted:
        answer = _remembered(out, sweep)
        if answer is None:
            with _timed(times, "tracking"):
                _sync(sweep, store_uri, say)
            with _timed(times, "analysis and report"):
                answer = _judge(sweep, store_uri, out, say)
    return Outcome(
        out=out,
        report=out / REPORT,
        store_uri=store_uri,
        trained=trained,
        finished=finished,
        unfinished=len(sweep.runs) - trained - finished,
        interrupted=interrupted,
        wall_time_s=time.monotonic() - began_s,
        times_s=times,
        answer=answer,
    )


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    times[name] = time.monotonic() - began_s


def _require_room(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RecordError(f"{out}: cannot be written ({error.strerror}); choose another --out") from None
    free = shutil.disk_usage(out).free
    if free < FREE_BYTES:
        raise RecordError(
            f"{out}: {free / 2**20:.0f} MiB free, {FREE_BYTES / 2**20:.0f} MiB are needed; "
            "free space or choose another --out"
        )


def _text(folder: Path, say: Callable[[str], None]) -> Path:
    """The token store of the standard library's text, made once."""
    from scaling.corpus import prepare, python_library_documents
    from scaling.corpus.documents import digest
    from scaling.tokens import META

    if (folder / META).exists():
        return folder
    say("reading the Python standard library and training a byte-level BPE on it")
    skipped: dict[str, int] = {}
    documents = sorted(python_library_documents(skipped), key=lambda document: digest(document.encode()))
    kept, size = [], 0
    for document in documents:
        if size < TEXT_BYTES:
            kept.append(document)
            size += len(document.encode())
    if size < TEXT_BYTES // 2:
        raise DataError(
            f"the Python standard library here has {size} bytes of text, {TEXT_BYTES // 2} are needed; "
            "install the library's source, or train on your own text: scaling data prepare, scaling sweep submit"
        )
    made = prepare(
        kept,
        folder,
        vocab_size=VOCAB_SIZE,
        held_out_fraction=HELD_OUT_FRACTION,
        bpe_sample_bytes=BPE_SAMPLE_BYTES,
    )
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "none"
    say(f"{len(kept)} files, {size / 1e6:.1f} MB, {made.num_tokens:,} tokens (left out: {left_out})")
    return folder


def _plan(out: Path, store: Path) -> Plan:
    spec = load_spec(PRESET, [f"data.path={store}"])
    return plan(spec, out / "runs")


def _train(sweep: Plan, store_uri: str, workers: int | None, say: Callable[[str], None]) -> tuple[int, int, bool]:
    """Train what is not finished, with a syncer beside it; how many, how many were finished, whether broken off."""
    from scaling.record import RunFolder
    from scaling.sweeps.display import Progress
    from scaling.sweeps.local import run_local
    from scaling.tracking.follower import Follower

    def finished() -> int:
        ends = [RunFolder(sweep.out / run.key).end() for run in sweep.runs]
        return sum(end is not None and end.status in ("done", "diverged") for end in ends)

    before = finished()
    if before == len(sweep.runs):
        say(f"all {before} runs are finished; nothing to train")
        return 0, before, False
    say(f"training {len(sweep.runs) - before} of {len(sweep.runs)} runs (Ctrl-C saves and leaves; call again to go on)")
    follower = Follower(sweep.out, store_uri=store_uri, experiment=PRESET, interval_s=SYNC_S)
    with follower, Progress(sweep) as progress:
        report = run_local(sweep, workers=workers, on_tick=progress.tick)
    return finished() - before, before, report.stopped_by is not None


def _sync(sweep: Plan, store_uri: str, say: Callable[[str], None]) -> None:
    from scaling.tracking import sync

    report = sync(sweep.out, store_uri=store_uri, experiment=PRESET)
    if not report.ok:
        say(
            f"MLflow: {report.unavailable or report.problems[0].reason}; the runs are safe, `scaling runs sync` retries"
        )


def _judge(sweep: Plan, store_uri: str, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Read the runs back, compute, write the report; the findings are kept for the next call."""
    from scaling.analysis.ingest import read_runs
    from scaling.analysis.inquiry import inquire
    from scaling.analysis.report import build_report

    say("reading the runs back from MLflow, fitting, comparing, drawing")
    read = read_runs(store_uri, sweep=PRESET, histories=True)
    dropped = [(drop.run or "", drop.reason) for drop in read.dropped]
    found = inquire(read.table, read.histories, dropped=dropped)
    build_report(
        read.table,
        read.histories,
        out=(out / REPORT).parent,
        title="Quickstart: baseline and MHAR on the Python standard library",
        dropped=dropped,
        command=f"scaling quickstart --out {out}",
        findings=found,
    )
    answer = {
        "of": _state(sweep),
        "text": _told(found),
        "results": {name: result.to_dict() for name, result in found.results.items()},
        "refusals": [{"what": item.what, "reason": item.reason} for item in found.failures],
    }
    write_atomically(out / ANSWER, json.dumps(answer, indent=1) + "\n")
    return answer


def _told(found: Findings) -> str:
    """The findings as tables for a terminal."""
    from scaling.analysis.tables import core
    from scaling.analysis.tables.plain import plain

    base = found.baseline or "baseline"
    parts = []
    if found.speedups:
        table = core.speedups(found.speedups, baseline=base, conventions=found.conventions)
        parts.append(plain(table, only=("method", "speedup", "scales", "extrapolated", "n", "verdict")))
    if found.deltas:
        parts.append(
            plain(core.seed_deltas(found.deltas, baseline=base), only=("method", "size", "delta", "n", "p", "verdict"))
        )
    if found.noises:
        parts.append(plain(core.noise(found.noises), only=("kind", "sd", "n", "df", "use")))
    parts += [f"not shown: {item.what.lower()}: {item.reason}" for item in found.failures]
    return "\n\n".join(parts)


def _state(sweep: Plan) -> str:
    """Hash of all end records and of the code that judges them: what an older version found may be wrong."""
    digest = hashlib.sha256(__version__.encode())
    for module in sorted(ANALYSIS.rglob("*.py")):
        digest.update(module.read_bytes())
    for run in sorted(sweep.runs, key=lambda run: run.key):
        end = sweep.out / run.key / END
        digest.update(run.key.encode() + (end.read_bytes() if end.exists() else b""))
    return digest.hexdigest()


def _remembered(out: Path, sweep: Plan) -> dict[str, Any] | None:
    """The findings of an earlier call on the very same end records, if its report is still there."""
    try:
        answer: dict[str, Any] = json.loads((out / ANSWER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return answer if answer.get("of") == _state(sweep) and (out / REPORT).exists() else None
