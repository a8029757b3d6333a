"""A pool of worker processes: feeds them runs, notices when one dies, passes signals on, leaves nothing behind.

Used by ``local`` on this machine and by ``task`` inside a Slurm job. A place (slot) is an environment, say one GPU's;
each has one worker, which trains run after run. Runs over several processes get a launcher of their own instead.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

from scaling.config.strict import build
from scaling.config.tree import RunConfig
from scaling.errors import ScalingError
from scaling.record import RunFolder
from scaling.sweeps.burial import bury
from scaling.sweeps.request import TRAINER, Outcome, Request

logger = logging.getLogger(__name__)

TICK_S: Final = 0.5
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


@dataclass(slots=True)
class _Worker:
    slot: int
    process: subprocess.Popen[bytes]
    request: Request | None = None
    buffer: bytes = b""
    once: bool = False


@dataclass(slots=True)
class Pool:
    """Runs requests in as many places as there are environments in ``slots``.

    Parameters
    ----------
    slots
        Variables to set for the worker in each place, over this process's environment.
    grace_s
        How long workers may take to save and leave when asked to; then they are killed.
    on_tick
        Called about twice a second and after each outcome, with the keys that are training.
    """

    slots: Sequence[Mapping[str, str]]
    trainer: str = TRAINER
    python: Sequence[str] = (sys.executable,)
    grace_s: float = 60.0
    on_tick: Callable[[frozenset[str]], None] = lambda keys: None
    on_outcome: Callable[[Outcome], None] = lambda outcome: None
    stopped_by: signal.Signals | None = None
    _hurry: bool = False
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _outcomes: dict[str, Outcome] = field(default_factory=dict)

    def run(self, requests: Iterable[Request]) -> dict[str, Outcome]:
        """Train all requests; returns when all are over, or all workers have left after a signal."""
        queue = deque(requests)
        previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        asked_s: float | None = None
        try:
            while queue or any(worker.request for worker in self._workers.values()):
                if self.stopped_by is not None:
                    if asked_s is None:
                        asked_s = time.monotonic()
                        self._announce()
                        self._signal_workers(signal.SIGTERM)
                    elif self._hurry or time.monotonic() - asked_s > self.grace_s:
                        self._signal_workers(signal.SIGKILL)
                    if not any(worker.request for worker in self._workers.values()):
                        break
                else:
                    self._feed(queue)
                self._listen(TICK_S)
                self.on_tick(frozenset(w.request.key for w in self._workers.values() if w.request))
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._dismiss()
        for request in queue:
            self._outcomes[request.key] = Outcome(key=request.key, outcome="waiting")
        return dict(self._outcomes)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stopped_by is signal.SIGINT and number == signal.SIGINT:
            self._hurry = True
        if self.stopped_by is None:  # the first one says why: USR2 before the limit may be followed by SIGTERM
            self.stopped_by = signal.Signals(number)

    def _announce(self) -> None:
        """Say what is waited for: saving can take as long as the grace time, and silence looks like a hang."""
        assert self.stopped_by is not None
        runs = sum(worker.request is not None for worker in self._workers.values())
        again = "; Ctrl-C again ends them at once" if self.stopped_by is signal.SIGINT else ""
        logger.warning(
            "%s: %d runs save their state and leave, at most %.0f s%s", self.stopped_by.name, runs, self.grace_s, again
        )

    def _feed(self, queue: deque[Request]) -> None:
        for slot in range(len(self.slots)):
            if not queue:
                return
            worker = self._workers.get(slot)
            if worker is not None and worker.request is not None:
                continue
            request = queue.popleft()
            if request.launcher or worker is None or worker.process.poll() is not None:
                if worker is not None:
                    self._retire(worker)
                worker = self._start(slot, request)
            worker.request = request
            if not worker.once:
                assert worker.process.stdin is not None
                try:
                    worker.process.stdin.write(request.line().encode("utf-8") + b"\n")
                    worker.process.stdin.flush()
                except BrokenPipeError:
                    pass  # it has died; its closed output says so in a moment

    def _start(self, slot: int, request: Request) -> _Worker:
        command = [*request.launcher, *self.python, "-u", "-m", "scaling.sweeps.worker", "--trainer", self.trainer]
        if logger.isEnabledFor(logging.DEBUG):
            command.append("--debug")
        if request.launcher:
            command += ["--once", request.line()]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if request.launcher else subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self.slots[slot]},
            start_new_session=True,  # a Ctrl-C reaches this process only, which then asks the workers to save and leave
        )
        worker = _Worker(slot=slot, process=process, once=bool(request.launcher))
        self._workers[slot] = worker
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)
        return worker

    def _listen(self, timeout_s: float) -> None:
        if not self._selector.get_map():
            time.sleep(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            worker: _Worker = key.data
            assert worker.process.stdout is not None
            data = os.read(worker.process.stdout.fileno(), 65_536)
            if not data:
                self._ended(worker)
                continue
            *lines, worker.buffer = (worker.buffer + data).split(b"\n")
            for line in lines:
                self._answered(worker, line)

    def _answered(self, worker: _Worker, line: bytes) -> None:
        try:
            answer = json.loads(line)
            outcome = Outcome(key=answer["key"], outcome=answer["outcome"], reason=answer["reason"])
        except (ValueError, KeyError, TypeError):
            logger.warning("a worker said something that is no answer: %r", line[:200])
            return
        if worker.request is not None and worker.request.key == outcome.key:
            worker.request = None
            self._settle(outcome)

    def _settle(self, outcome: Outcome) -> None:
        self._outcomes[outcome.key] = outcome
        self.on_outcome(outcome)

    def _ended(self, worker: _Worker) -> None:
        """A worker closed its output: it left as asked, or died with a run in its hands."""
        code = worker.process.wait()
        request = worker.request
        self._retire(worker)
        if request is None:
            return
        worker.request = None
        try:
            record = RunFolder(Path(request.out) / request.key).end()
        except ScalingError as error:
            self._settle(Outcome(key=request.key, outcome="failed", reason=str(error)))
            return
        if record is not None:
            self._settle(Outcome(key=request.key, outcome=record.status, reason=record.reason))
        elif self.stopped_by is not None:
            self._settle(Outcome(key=request.key, outcome="interrupted", reason=_how(code)))
        else:
            self._settle(self._bury(request, _how(code)))

    def _bury(self, request: Request, reason: str) -> Outcome:
        try:
            config = build(RunConfig, request.config, source=f"run {request.key}")
            bury(Path(request.out), config, kind="crash", reason=f"the training process {reason}")
        except ScalingError as error:
            logger.error("%s", error)
        return Outcome(key=request.key, outcome="failed", reason=reason)

    def _signal_workers(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                if number is signal.SIGKILL:
                    os.killpg(worker.process.pid, number)
                else:
                    worker.process.send_signal(number)

    def _retire(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        with contextlib.suppress(KeyError):
            self._selector.unregister(worker.process.stdout)
        worker.process.stdout.close()
        if worker.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                worker.process.stdin.close()
        if self._workers.get(worker.slot) is worker:
            del self._workers[worker.slot]

    def _dismiss(self) -> None:
        """Close the workers' input, which ends them, and insist where one does not go."""
        workers = list(self._workers.values())
        for worker in workers:
            if worker.request is not None:
                worker.process.terminate()
            self._retire(worker)
        for worker in workers:
            try:
                worker.process.wait(self.grace_s)
            except subprocess.TimeoutExpired:
                os.killpg(worker.process.pid, signal.SIGKILL)
                worker.process.wait()


def _how(code: int) -> str:
    """``was killed by SIGKILL`` or ``left with exit status 3``, with what is usually behind it."""
    if code >= 0:
        return f"left with exit status {code}"
    name = signal.Signals(-code).name
    hint = " (often the kernel's or Slurm's memory limit)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
