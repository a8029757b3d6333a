"""The process that trains: runs of a sweep one after another, so that PyTorch is imported once.

Started by ``pool`` with requests on standard input (JSON, one a line) and answers on standard output; what the training
prints goes to the run's own log. One run's error never touches the next one, and a worker that dies takes its present
run alone with it. With ``--once`` it trains a single run, under ``srun`` or ``torchrun`` for several processes.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from scaling.stop import STOP, Interrupted

if __name__ == "__main__":
    STOP.listen()  # first of all: a signal may come at any time

from scaling.sweeps.request import LOG, TRAINER  # noqa: E402

logger = logging.getLogger(__name__)

BUSY_RETRY_S: Final = 5.0

_PR_SET_PDEATHSIG: Final = 1  # prctl(2)


def main() -> None:
    """Entry point of ``python -m scaling.sweeps.worker``."""
    parser = argparse.ArgumentParser(description="Train runs of a sweep; started by the sweep itself.")
    parser.add_argument("--trainer", default=TRAINER, help="module:function that trains one run")
    parser.add_argument("--once", metavar="REQUEST", help="train one run, given as JSON, then leave")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug logging")
    options = parser.parse_args()
    if options.debug:
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s: %(message)s")
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    try:
        if options.once is not None:
            _serve(options.once, options.trainer, answers)
            return
        while not STOP.requested:
            with STOP.interruptible():
                line = sys.stdin.readline()
            if not line:
                return
            _serve(line, options.trainer, answers)
    except (Interrupted, KeyboardInterrupt):
        return


def _serve(line: str, trainer: str, answers: TextIO) -> None:
    request = json.loads(line)
    _redirect(Path(request["out"]) / request["key"])
    answer = {"key": request["key"], **work(request, trainer)}
    sys.stdout.flush()
    sys.stderr.flush()
    if _rank() == 0:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def work(request: Mapping[str, Any], trainer: str = TRAINER) -> dict[str, str]:
    """Train one run and say how it ended: ``{"outcome": ..., "reason": ...}``.

    Outcomes are the end record's status; ``interrupted`` (asked to leave, saved, not over); ``busy`` (another process
    writes it).
    """
    from scaling.config.strict import build
    from scaling.config.tree import RunConfig
    from scaling.errors import LeaseError, ScalingError
    from scaling.record import RunFolder

    out, key = Path(request["out"]), request["key"]
    folder = RunFolder(out / key)
    config = build(RunConfig, request["config"], source=f"run {key}")
    train = _load(trainer)
    while True:
        try:
            train(config, out=out)
        except (Interrupted, KeyboardInterrupt):
            return _outcome(folder, "interrupted", "asked to leave")
        except LeaseError as error:
            if not request.get("wait_busy"):
                return {"outcome": "busy", "reason": str(error)}
            print(f"waiting: {error}", file=sys.stderr, flush=True)
            try:
                with STOP.interruptible():
                    time.sleep(BUSY_RETRY_S)
            except Interrupted:
                return {"outcome": "interrupted", "reason": str(error)}
            continue
        except ScalingError as error:
            # one line says what a user can cause; where it was raised says nothing more
            print(f"error: {error}", file=sys.stderr, flush=True)
            logger.debug("run %s", key, exc_info=True)
            return _failed(out, config, error)
        except Exception as error:
            traceback.print_exc()
            return _failed(out, config, error)
        return _outcome(folder, "interrupted", "asked to leave")


def _load(trainer: str) -> Callable[..., Any]:
    module, _, name = trainer.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def _outcome(folder: Any, otherwise: str, reason: str) -> dict[str, str]:
    record = folder.end()
    if record is None:
        return {"outcome": otherwise, "reason": reason}
    return {"outcome": record.status, "reason": record.reason}


def _failed(out: Path, config: Any, error: Exception) -> dict[str, str]:
    """Record a failure that the trainer did not record itself."""
    from scaling.errors import ScalingError
    from scaling.sweeps.burial import bury

    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    name = "" if isinstance(error, ScalingError) else f"{type(error).__name__}: "
    reason = f"{name}{error}".splitlines()[0] if str(error) else type(error).__name__
    try:
        bury(out, config, kind="oom" if out_of_memory else "crash", reason=reason)
    except ScalingError as second:  # a full disk: the answer still reaches the pool
        print(f"no end record: {second}", file=sys.stderr)
    return {"outcome": "failed", "reason": reason}


def _redirect(run: Path) -> None:
    """Send standard output and error to the run's log, where the folder can be written."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        os.dup2(2, 1)
        print(f"{run / LOG}: cannot be written ({error.strerror}); logging here", file=sys.stderr)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def _die_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent is gone, so that nothing goes on unseen."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
