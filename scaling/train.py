"""One training run from its configuration to its end record: the life of a run folder.

Last of the trainer's modules; the command line, the sweeps and the quickstart call ``train``. It resolves the
configuration, takes the lease, resumes from the newest whole checkpoint, lets ``loop`` train, and records how the run
ended: done, diverged or failed. A run that was asked to leave has no end record; the next start goes on with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scaling import memory, peers, precision
from scaling.accounting import count_parameters
from scaling.checkpoint import Checkpoints
from scaling.config.tree import RunConfig
from scaling.distributed import World, join
from scaling.ending import TRIED_AGAIN, leave_permanent, leave_record, leave_weights
from scaling.errors import ConfigError, MemoryShortage, ScalingError
from scaling.evaluate import Evaluation
from scaling.kernels import dispatch
from scaling.lease import TTL_S, Lease
from scaling.loop import Loop, Progress
from scaling.meter import Diverged
from scaling.record import CHECKPOINTS, EVALUATIONS, Attempt, EndRecord, RunFolder, append_line, encode, now_ms
from scaling.resolve import resolve
from scaling.revision import recorded
from scaling.stop import STOP
from scaling.tokens import TokenStore
from scaling.tracking.direct import tracking

logger = logging.getLogger(__name__)

FINISHED = ("done", "diverged")  # ends that trying again would only repeat


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """What the first process settles for all: the run's folder, its end if it has one, the attempt's number."""

    folder: RunFolder
    end: EndRecord | None
    attempt: int
    lease: Lease | None


def train(config: RunConfig, *, out: Path, progress: Callable[[Progress], None] | None = None) -> EndRecord:
    """Train a run in ``out/<run key>``, or go on with it; a finished run returns at once.

    Parameters
    ----------
    config
        As written; it is resolved here.
    out
        Folder of run folders.
    progress
        Called on the first process at each journal line.

    Returns
    -------
    EndRecord
        As written to the folder; with status ``cancelled``, and not written, if the run was asked to leave (SIGINT,
        SIGTERM, SIGUSR2) and saved its state.

    Raises
    ------
    ScalingError
        For what a user can cause: a wrong configuration, a missing store, a folder in use, memory or disk exhausted,
        another process of the run killed.
    """
    installed = STOP.listen()
    world: World | None = None
    lease: Lease | None = None
    try:
        config = resolve(config)
        if not config.data.path:
            raise ConfigError("data.path is missing; give the folder of a token store (`scaling data prepare`)")
        store = TokenStore.open(config.data.path)
        store.require_vocabulary(config.model.vocab_size)
        store.require_alignment()
        if config.run.threads is not None:
            torch.set_num_threads(config.run.threads)
        precision.set_determinism(config.run.deterministic)
        world = join(config.run)
        with peers.explained(world.rank, world.size):
            start = _start(config, out, world)
        lease = start.lease
        if start.end is not None:
            return start.end
        with tracking(config.run.track if world.is_first else None, start.folder):
            return _Attempt(config, store, world, start, progress).run()
    finally:
        if lease is not None:
            lease.release()
        if world is not None:
            world.leave()
        if installed:
            STOP.forget()


def _start(config: RunConfig, out: Path, world: World) -> _Start:
    """Open the folder and take the lease, on the first process; others learn what it found, or its error."""
    start: _Start | None = None
    shared: tuple[Path, EndRecord | None, int] | ScalingError | None = None
    if world.is_first:
        try:
            start = _open(config, out)
            shared = (start.folder.path, start.end, start.attempt)
        except ScalingError as error:
            shared = error
    shared = world.share(shared)
    if isinstance(shared, ScalingError):
        raise shared
    assert shared is not None
    path, end, attempt = shared
    return start or _Start(folder=RunFolder(path), end=end, attempt=attempt, lease=None)


def _open(config: RunConfig, out: Path) -> _Start:
    folder = RunFolder.create(out, config)
    end = folder.end()
    if end is not None and end.status in FINISHED:
        return _Start(folder=folder, end=end, attempt=end.attempt, lease=None)
    # a requeued job may find its own earlier start on a lost node, whose silence has to last a while to prove anything
    wait_s = TTL_S + 5 if "SLURM_JOB_ID" in os.environ else 0.0
    lease = Lease.take(folder.path, wait_s=wait_s)
    try:
        end = folder.end()  # whoever held the lease may have finished meanwhile
        if end is not None and end.status in FINISHED:
            lease.release()
            return _Start(folder=folder, end=end, attempt=end.attempt, lease=None)
        folder.reopen()
        return _Start(folder=folder, end=None, attempt=folder.next_attempt(), lease=lease)
    except BaseException:
        lease.release()
        raise


class _Attempt:
    """One start of a run, under the lease."""

    def __init__(
        self,
        config: RunConfig,
        store: TokenStore,
        world: World,
        start: _Start,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._config, self._store, self._world = config, store, world
        self._folder, self._number, self._lease = start.folder, start.attempt, start.lease
        self._progress = progress if world.is_first else None
        self._rows = memory.micro_batch_rows(config, world)
        self._loop: Loop | None = None
        self._over = False  # whether the end record of a finished run is written

    def run(self) -> EndRecord:
        try:
            with self._memory_explained(), self._loss_of_a_process_explained():
                return self._train()
        except Diverged as diverged:
            return self._diverged(diverged)
        except Exception as error:
            if self._over:  # what it was to leave is there, whatever happened to another process after that
                raise
            try:
                self._end("failed", reason=_one_line(error))
            except ScalingError as second:  # what failed first is the news
                logger.warning("no end record: %s", second)
            raise

    def _train(self) -> EndRecord:
        world, config = self._world, self._config
        loop = self._loop = Loop(
            config,
            self._store,
            world,
            rows=self._rows,
            write=self._write,
            keep_evaluation=self._keep,
            progress=self._progress,
        )
        checkpoints = Checkpoints(
            self._folder.path / CHECKPOINTS, world, keep=config.run.keep_checkpoints, guard=self._guard
        )
        newest = checkpoints.latest()
        if newest is not None:
            loop.restore(checkpoints, newest)
            logger.info("resuming from step %d of %d (%s)", loop.step, loop.steps, newest.path)
        if world.is_first:
            self._folder.begin(self._attempt(loop.step))
        try:
            finished = loop.run(checkpoints)
        finally:
            checkpoints.finish(outlook=TRIED_AGAIN if loop.step >= loop.steps else "training goes on")
        if not finished:
            assert STOP.signal is not None or world.size > 1, "only a signal breaks a run off"
            name = STOP.signal.name if STOP.signal is not None else "a signal to another process"
            saved = ", saved" if loop.step else ""
            reason = f"left on {name} after step {loop.step} of {loop.steps}{saved}; run again to go on"
            logger.info("%s", reason)
            return self._record("cancelled", reason=reason)
        leave_weights(loop, checkpoints, world, save_weights=config.run.save_weights, guard=self._guard)
        record = self._record("done")
        leave_record(lambda: self._finish(record), loop, checkpoints, world)
        self._over = True
        if world.is_first:
            checkpoints.prune(keep=0)
        leave_permanent(loop, checkpoints, world)
        return record

    def _diverged(self, diverged: Diverged) -> EndRecord:
        assert self._loop is not None
        starts = self._loop.batch_starts(diverged.step)
        shown = ", ".join(map(str, starts[:8])) + (", ..." if len(starts) > 8 else "")
        reason = f"{diverged}, on the sequences that start at tokens {shown} of the store"
        logger.warning("diverged: %s", reason)
        details = {"diverged_step": diverged.step, "batch_starts": starts}
        return self._end("diverged", step=diverged.step, reason=reason, details=details)

    @contextlib.contextmanager
    def _memory_explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not memory.is_out_of_memory(error):
                raise
            raise MemoryShortage(
                f"out of memory with micro-batches of {self._rows} sequences on {_device_name(self._world.device)}; "
                f"estimated GiB a device: {memory.plan(self._config, self._world, self._rows)}; "
                f"{memory.remedy(self._config, self._world, self._rows)}"
            ) from error

    def _loss_of_a_process_explained(self) -> AbstractContextManager[None]:
        return peers.explained(self._world.rank, self._world.size, self._folder.path / CHECKPOINTS)

    def _guard(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        if not self._world.is_first:
            return
        self._guard()
        encoded = {name: encode(value) for name, value in metrics.items()}
        append_line(self._folder.journal(self._number), {"step": step, "time_ms": now_ms(), "metrics": encoded})

    def _keep(self, evaluation: Evaluation) -> None:
        if self._world.is_first:
            self._guard()
            evaluation.write(self._folder.path / EVALUATIONS)

    def _end(
        self, status: Any, *, step: int | None = None, reason: str = "", details: dict[str, Any] | None = None
    ) -> EndRecord:
        record = self._record(status, step=step, reason=reason, details=details)
        if self._world.is_first:
            self._finish(record)
        return record

    def _finish(self, record: EndRecord) -> None:
        self._guard()
        self._folder.finish(record)

    def _record(
        self, status: Any, *, step: int | None = None, reason: str = "", details: dict[str, Any] | None = None
    ) -> EndRecord:
        loop = self._loop
        count = count_parameters(self._config.model)
        return EndRecord(
            status=status,
            step=step if step is not None else (loop.step if loop else 0),
            ended_ms=now_ms(),
            attempt=self._number,
            reason=reason,
            final={} if loop is None else {**loop.final, **loop.totals()},
            details={
                "schedule_finished": status == "done",
                "steps_planned": self._config.schedule.steps,
                "eval_fingerprint": None if loop is None else loop.evaluator.fingerprint,
                "n_params": count.total,
                "n_params_non_embedding": count.non_embedding,
                **(details or {}),
            },
        )

    def _attempt(self, step: int) -> Attempt:
        arithmetic = precision.compute_arithmetic(self._config.precision, self._world.device)
        return Attempt(
            attempt=self._number,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ms=now_ms(),
            resumed_from_step=step,
            job_id=os.environ.get("SLURM_JOB_ID"),
            restart_count=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            environment={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "device": _device_name(self._world.device),
                "processes": str(self._world.size),
                "parallel": self._config.run.parallel,
                "compute": arithmetic,
                "micro_batch_size": str(self._rows),
                **recorded(),
                **{f"kernels.{operation}": choice for operation, choice in self._kernels().items()},
            },
        )

    def _kernels(self) -> dict[str, str]:
        """Which implementation runs each operation that has kernels, and why."""
        settings = self._config.run
        recomputed = settings.activation_checkpointing != "none"
        return dispatch.describe(self._world.device, sharded=settings.parallel == "fsdp2", recomputed=recomputed)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
