"""What a Slurm job of a sweep runs: trains the runs of its array task, saves them when asked to, lets them go on.

Started by the script that ``batch`` writes. Near the time limit Slurm sends USR2: runs save themselves, the job
puts itself back into the queue, same id, same folders. On SIGTERM (preemption, scancel) runs save themselves too, and
Slurm decides: a preempted job comes back by itself, a cancelled one does not. A task whose runs are all over leaves at
once.
"""

from __future__ import annotations

import signal

_EARLY: list[int] = []
if __name__ == "__main__":  # in the job alone: whoever imports this for its names must still end on SIGTERM
    for _number in (signal.SIGTERM, signal.SIGUSR2):  # before anything else: until here the shell has ignored USR2
        signal.signal(_number, lambda number, frame: _EARLY.append(number))

import logging  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, Final  # noqa: E402

from scaling.config.strict import build  # noqa: E402
from scaling.config.tree import RunConfig  # noqa: E402
from scaling.errors import ScalingError  # noqa: E402
from scaling.record import RunFolder, read_lines  # noqa: E402
from scaling.sweeps.burial import bury  # noqa: E402
from scaling.sweeps.pool import Pool  # noqa: E402
from scaling.sweeps.request import TRAINER, Request  # noqa: E402

logger = logging.getLogger(__name__)

MANIFEST: Final = "tasks.jsonl"
END_WAIT_S: Final = 900.0  # for Slurm to end a job that it has asked to leave: KillWait, or a preemption's grace time


def main(folder: Path) -> int:
    """Run this array task; returns the job's exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    task = read_lines(folder / MANIFEST)[int(os.environ["SLURM_ARRAY_TASK_ID"])]
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    runs = [run for run in task["runs"] if not _over(run)]
    job = f"{os.environ.get('SLURM_ARRAY_JOB_ID')}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    logger.info("job %s, start %d, on %s: %d of %d runs to train",
                job, restarts + 1, os.uname().nodename, len(runs), len(task["runs"]))  # fmt: skip
    if not runs:
        return 0
    if restarts > task["max_requeues"]:
        _give_up(runs, f"started {restarts} times again without coming to its end")
        return 1
    pool = Pool(slots=_slots(task), trainer=task.get("trainer", TRAINER), grace_s=float(task["signal_s"]))
    if _EARLY:
        pool.stopped_by = signal.Signals(_EARLY[0])
    outcomes = pool.run(_requests(runs, task))
    for outcome in outcomes.values():
        logger.info("run %s: %s %s", outcome.key, outcome.outcome, outcome.reason)
    left = [run for run in runs if outcomes[run["key"]].outcome in ("interrupted", "waiting", "busy")]
    if pool.stopped_by is not None and left:
        return _leave(left, pool.stopped_by, restarts, task)
    return 0 if all(outcome.outcome in ("done", "diverged") for outcome in outcomes.values()) else 1


def _leave(left: list[dict[str, Any]], number: signal.Signals, restarts: int, task: Mapping[str, Any]) -> int:
    """Runs are saved but not over: come back, or say why not."""
    if number is signal.SIGUSR2:
        if restarts >= task["max_requeues"]:
            _give_up(left, f"ran out of time {restarts + 1} times; raise time or max_requeues")
            return 1
        raw = os.environ["SLURM_JOB_ID"]
        logger.info("time is nearly up: %d runs saved, requeueing job %s", len(left), raw)
        asked = subprocess.run(["scontrol", "requeue", raw], capture_output=True, text=True, check=False)
        if asked.returncode != 0:
            message = " ".join(asked.stderr.split())
            logger.error("scontrol requeue: %s", message)
            _give_up(left, f"ran out of time and could not be requeued ({message})")
            return 1
    else:
        logger.info("%s: %d runs saved", number.name, len(left))
    # A job that leaves by itself now counts as ended, and a preempted one would not come back.
    until_s = time.monotonic() + END_WAIT_S
    while time.monotonic() < until_s:
        time.sleep(1)
    return 128 + number


def _over(run: Mapping[str, Any]) -> bool:
    """Whether a run has its end record; a damaged one is the trainer's to complain about."""
    try:
        return RunFolder(Path(run["out"]) / run["key"]).end() is not None
    except ScalingError:
        return False


def _give_up(runs: list[dict[str, Any]], reason: str) -> None:
    for run in runs:
        try:
            config = build(RunConfig, run["config"], source=f"run {run['key']}")
            bury(Path(run["out"]), config, kind="timeout", reason=reason)
        except ScalingError as error:
            logger.error("%s", error)


def _slots(task: Mapping[str, Any]) -> list[dict[str, str]]:
    """One place for each run that trains at the same time; packed runs see the same GPU."""
    concurrent = int(task["concurrent"])
    cpus = int(os.environ.get("SLURM_CPUS_ON_NODE", "1"))
    processes = max(1, int(task["gpus"])) if task["distributed"] else concurrent
    threads = str(max(1, cpus // processes))
    return [{"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} for _ in range(concurrent)]


def _requests(runs: list[dict[str, Any]], task: Mapping[str, Any]) -> list[Request]:
    launcher: tuple[str, ...] = ()
    if task["distributed"]:
        gpus, nodes = max(1, int(task["gpus"])), int(task["nodes"])
        cpus = max(1, int(os.environ.get("SLURM_CPUS_ON_NODE", "1")) // gpus)
        launcher = ("srun", "--unbuffered", "--kill-on-bad-exit=1", f"--nodes={nodes}", f"--ntasks={nodes * gpus}",
                    f"--ntasks-per-node={gpus}", f"--cpus-per-task={cpus}")  # fmt: skip
    return [
        Request(key=run["key"], config=run["config"], out=run["out"], launcher=launcher, wait_busy=True) for run in runs
    ]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
