"""``scaling sweep``: plan, submit, watch and mend sweeps; each command calls ``scaling.sweeps``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from scaling.sweeps.plan import Plan
    from scaling.sweeps.status import RunStatus, SweepStatus

app = typer.Typer(help="Plan, submit, watch and mend sweeps, on Slurm or on this machine.", no_args_is_help=True)

Spec = Annotated[str, typer.Argument(help="A sweep's YAML file, or the name of a shipped preset.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change the sweep: lr=[1e-3,3e-3], schedule.steps=50, resources.time=30."
    ),
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run folders (default: the sweep's, else runs).")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
States = Annotated[
    list[str] | None, typer.Option("--state", help="Only runs in these states, e.g. failed:oom,running.")
]
Match = Annotated[str, typer.Option("--match", help="Only runs whose key or label this matches (part or pattern).")]
Store = Annotated[
    str | None, typer.Option(help="MLflow store to sync into (default: mlflow.db beside the run folders).")
]
Sync = Annotated[bool, typer.Option("--sync/--no-sync", help="Keep MLflow up to date meanwhile.")]
Retry = Annotated[
    list[str] | None,
    typer.Option(
        help="Train ended runs of a kind again: failed, oom, timeout, node, crash, diverged, cancelled, unknown."
    ),
]


def _plan(spec: str, settings: list[str] | None, out: Path | None) -> Plan:
    from scaling.sweeps.plan import plan
    from scaling.sweeps.spec import load_spec

    return plan(load_spec(spec, settings or []), out)


def _again(spec: str, settings: list[str] | None, out: Path | None, more: list[str] | None = None) -> Plan:
    """The plan as it was last submitted: with that submit's settings, unless others are given."""
    from scaling.sweeps.launch import remembered

    if settings is None:
        settings = remembered(_plan(spec, None, out))
    return _plan(spec, [*settings, *(more or [])], out)


def _print(tree: Any) -> None:
    typer.echo(json.dumps(tree, indent=1))


def _rows(
    plan: Plan, states: list[str] | None, match: str, sort: str = "", reverse: bool = False
) -> tuple[SweepStatus, list[RunStatus]]:
    from scaling.sweeps.status import choose, status

    now = status(plan)
    return now, choose(now.runs, states=states or (), pattern=match, sort=sort, reverse=reverse)


def _submit(
    sweep: Plan,
    *,
    executor: str | None,
    retry: list[str] | None,
    yes: bool,
    json_: bool,
    keys: frozenset[str] | None = None,
    workers: int | None = None,
    threads: int | None = None,
    feed: bool = False,
    dependency: str | None = None,
    snapshot: bool = True,
    store: str | None = None,
    spec: str = "",
) -> None:
    from scaling.sweeps.launch import launch

    report = launch(
        sweep, executor=executor, retry=retry or (), keys=keys, workers=workers, threads=threads, feed_all=feed,
        dependency=dependency, snapshot=snapshot, store=store, confirm=None if yes else _confirm,
    )  # fmt: skip
    if report.executor == "slurm" and report.jobs and store is not None:
        from scaling.sweeps.mirror import leave_behind

        typer.echo(leave_behind(sweep, spec, store), err=True)
    if json_:
        _print(report.tree())
    else:
        typer.echo(report.text())
    if not report.good:
        raise typer.Exit(1)


def _store(sweep: Plan, named: str | None) -> str:
    from scaling.sweeps.mirror import default_store

    return named or default_store(sweep.out)


def _confirm(question: str) -> bool:
    from scaling.errors import UsageError

    if not sys.stdin.isatty():
        raise UsageError(f"{question} Nobody is here to ask; say --yes")
    return typer.confirm(question, err=True)


@app.command(epilog="Example: scaling sweep plan fair --set seed=[0,1]")
def plan(
    spec: Spec,
    set_: Set = None,
    out: Out = None,
    gpu: Annotated[str | None, typer.Option(help="Device that times are estimated for, e.g. h100.")] = None,
    mfu: Annotated[float | None, typer.Option(help="Assumed share of the device's peak (default 0.4).")] = None,
    price: Annotated[float | None, typer.Option(help="Price of a GPU-hour.", min=0)] = None,
    rows: Annotated[int, typer.Option(help="Runs to list.", min=0)] = 40,
    script: Annotated[bool, typer.Option("--script", help="Show the sbatch script.")] = False,
    json_: Json = False,
) -> None:
    """Dry run: which runs there are, what is there already, what the rest will take. Exit status 1: Slurm refuses."""
    from scaling.sweeps.display import console, plan_tables
    from scaling.sweeps.preview import preview

    sweep = _plan(spec, set_, out)
    seen = preview(sweep, gpu=gpu, mfu=mfu, price=price)
    if json_:
        _print(seen.tree())
    else:
        console().print(
            plan_tables(sweep, seen.now, device=seen.device, price=seen.price, throttle=sweep.spec.throttle, rows=rows)
        )
        for text in [*seen.notes, *([seen.script] if script and seen.script else [])]:
            typer.echo(text)
    if seen.refused:
        raise typer.Exit(1)


@app.command(epilog="Examples: scaling sweep submit fair --yes; scaling sweep submit my.yaml --executor local --detach")
def submit(
    spec: Spec,
    set_: Set = None,
    out: Out = None,
    executor: Annotated[str | None, typer.Option(help="slurm or local (default: slurm where sbatch is).")] = None,
    retry: Retry = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before many jobs.")] = False,
    feed: Annotated[bool, typer.Option("--feed", help="Stay, and submit the rest as the queue makes room.")] = False,
    after: Annotated[str | None, typer.Option("--after", help="sbatch dependency, e.g. afterok:123.")] = None,
    snapshot: Annotated[bool, typer.Option(help="Jobs run a copy of the code as it is now.")] = True,
    workers: Annotated[int | None, typer.Option(help="local: runs at a time.")] = None,
    threads: Annotated[int | None, typer.Option(help="local: threads of each run.")] = None,
    store: Store = None,
    sync: Sync = True,
    detach: Annotated[bool, typer.Option("--detach", help="local: go on when this terminal is closed.")] = False,
    json_: Json = False,
) -> None:
    """Train what is missing: arrays on Slurm (returns at once), or workers on this machine. Submit again at will."""
    from scaling.sweeps.launch import executor_name, remembering

    sweep = _plan(spec, set_, out)
    if detach:
        from scaling.errors import UsageError
        from scaling.sweeps.local import detach as start

        if executor_name(executor) != "local":
            raise UsageError("--detach is for --executor local; a submit to Slurm returns at once")
        pid, log = start([word for word in sys.argv[1:] if word != "--detach"], sweep.sweep_folder)
        _print({"pid": pid, "log": str(log)}) if json_ else typer.echo(f"process {pid}, log {log}")
        return
    with remembering(sweep, set_ or []):
        _submit(
            sweep, executor=executor, retry=retry, yes=yes, json_=json_, workers=workers, threads=threads, feed=feed,
            dependency=after, snapshot=snapshot, store=_store(sweep, store) if sync else None, spec=spec,
        )  # fmt: skip


@app.command(
    epilog="Examples: scaling sweep status fair --state failed,running --sort loss; scaling sweep status fair --json"
)
def status(
    spec: Spec,
    set_: Set = None,
    out: Out = None,
    state: States = None,
    match: Match = "",
    sort: Annotated[str, typer.Option(help="Column: loss, step, tokens_per_s, eta_s, attempts, label, ...")] = "",
    reverse: Annotated[bool, typer.Option("--reverse", help="Largest first.")] = False,
    json_: Json = False,
) -> None:
    """The state of every run, with Slurm's own word and reason. Exit status 0: all over with results; 1: not yet."""
    from scaling.sweeps.display import console, status_table

    now, rows = _rows(_again(spec, set_, out), state, match, sort, reverse)
    if json_:
        _print({"sweep": now.plan.spec.name, "counts": now.counts, "over": now.over, "trouble": now.trouble,
                "runs": [row.row() for row in rows]})  # fmt: skip
    else:
        console().print(status_table(now, rows))
    if not now.good:
        raise typer.Exit(1)


@app.command(epilog="Example: scaling sweep watch fair --notify \"mail -s '{sweep}: {event} {runs}' me@example.org\"")
def watch(
    spec: Spec,
    set_: Set = None,
    out: Out = None,
    notify: Annotated[str | None, typer.Option(help="Command to run when a run fails and when all is over.")] = None,
    store: Store = None,
    sync: Sync = True,
    mirror: Annotated[bool, typer.Option("--mirror", hidden=True)] = False,
    json_: Json = False,
) -> None:
    """Follow a sweep to its end; asks Slurm at most every 30 s. Leave with Ctrl-C, the sweep goes on."""
    from scaling.sweeps.display import LiveStatus
    from scaling.sweeps.mirror import alone, synced
    from scaling.sweeps.site import load_site
    from scaling.sweeps.watch import Watch

    sweep = _again(spec, set_, out)
    if mirror:  # left behind by a submit: nobody looks, and whoever watches gets the notifications
        with alone(sweep), synced(sweep.out, _store(sweep, store)):
            Watch(plan=sweep).run()
        return
    with synced(sweep.out, _store(sweep, store) if sync else None), LiveStatus() as live:
        now = Watch(plan=sweep, show=live.show, command=notify or load_site().notify).run()
    if json_:
        _print({"sweep": now.plan.spec.name, "counts": now.counts, "over": now.over})
    if not now.good:
        raise typer.Exit(1)


@app.command(epilog="Examples: scaling sweep logs fair --state failed; scaling sweep logs fair --match 50k-mhar -n 50")
def logs(
    spec: Spec,
    set_: Set = None,
    out: Out = None,
    state: States = None,
    match: Match = "",
    lines: Annotated[int, typer.Option("-n", "--lines", help="Lines of each log.", min=1)] = 20,
    json_: Json = False,
) -> None:
    """The end of runs' logs, where they are, and the first line that names an error."""
    from scaling.sweeps.logs import log_of

    now, rows = _rows(_again(spec, set_, out), state, match)
    found = [log_of(now.plan, row) for row in rows]
    if json_:
        _print([{"key": log.key, "label": log.label, "files": [str(file) for file in log.files], "error": log.error}
                for log in found])  # fmt: skip
        return
    if not found:
        typer.echo("no such runs", err=True)
    for log in found:
        if not log.files:
            typer.echo(f"== {log.label} ({log.key}): no log yet")
        else:
            typer.echo(f"== {log.label} ({log.key}): {', '.join(map(str, log.files))}")
            typer.echo(f"first error: {log.error}" if log.error else "no line that names an error")
            typer.echo(log.tail(lines))


@app.command(epilog="Examples: scaling sweep cancel fair --match lr0.03; scaling sweep cancel fair --yes")
def cancel(
    spec: Spec,
    set_: Set = None,
    out: Out = None,
    state: States = None,
    match: Match = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json_: Json = False,
) -> None:
    """Cancel runs of this sweep, with one scancel; runs save themselves first and can be submitted again."""
    from scaling.sweeps.cancel import cancel as take_out
    from scaling.sweeps.slurm import Slurm

    now, rows = _rows(_again(spec, set_, out), state, match)
    live = [row for row in rows if row.state.state in ("queued", "running", "stalled", "requeued", "unknown")]
    if len(live) > 1 and not yes and not _confirm(f"Cancel {len(live)} runs of {now.plan.spec.name}?"):
        raise typer.Exit(1)
    done = take_out(now.plan, live, Slurm(), everything=not state and not match)
    if json_:
        _print({"jobs": done.jobs, "runs": done.runs, "pools": done.pools})
    else:
        pools = f", {len(done.pools)} local pool(s) told to stop" if done.pools else ""
        typer.echo(f"cancelled {len(done.jobs)} jobs with {len(done.runs)} runs{pools}")


@app.command(epilog="Example: scaling sweep retry fair --kind oom --memory 64G --runs-per-gpu 1")
def retry(
    spec: Spec,
    set_: Set = None,
    out: Out = None,
    kind: Annotated[list[str] | None, typer.Option(help="Kinds of ended runs (default: failed).")] = None,
    match: Match = "",
    memory: Annotated[str | None, typer.Option(help="Memory to ask for this time, e.g. 64G.")] = None,
    time: Annotated[str | None, typer.Option(help="Time to ask for this time, e.g. 8h.")] = None,
    runs_per_gpu: Annotated[int | None, typer.Option(help="Runs to share a GPU this time.")] = None,
    executor: Annotated[str | None, typer.Option(help="slurm or local (default: slurm where sbatch is).")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before many jobs.")] = False,
    json_: Json = False,
) -> None:
    """Train ended runs again from their last checkpoint; their earlier records are kept."""
    more = {"memory": memory, "time": time, "runs_per_gpu": runs_per_gpu}
    changes = [f"resources.{key}={value}" for key, value in more.items() if value is not None]
    sweep = _again(spec, set_, out, changes)
    from scaling.sweeps.retry import check_kinds

    kinds = check_kinds(kind or ["failed"])
    _, rows = _rows(sweep, None, match)
    keys = frozenset(row.run.key for row in rows if row.state.state in kinds or row.state.kind in kinds)
    _submit(sweep, executor=executor, retry=list(kinds), yes=yes, json_=json_, keys=keys)
