"""The sbatch script of an array, made and submitted through submitit's executor, without its pickles.

Used by ``submit`` and shown by ``plan``. submitit knows sbatch's options and writes the script; the job runs
``scaling.sweeps.task`` instead of submitit's unpickler, because that one drops the signal without ``srun``, ignores
SIGTERM, counts any short job as timed out, and leaves a file for every task behind when sbatch refuses.

How a task starts was measured (Slurm 22.05): under ``srun`` it gets USR2 before the limit, and SIGTERM as soon as a
preemption's grace time begins; with ``exec`` in the batch shell's place (and ``--signal=B:``) SIGTERM comes only when
the grace time is over. So tasks run under ``srun``. A run over several processes starts its own ``srun`` step, and its
task sits in the batch shell.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import submitit
from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import _make_sbatch_string

from scaling.errors import ClusterError
from scaling.sweeps.resources import Resources
from scaling.sweeps.site import Site

KEPT: Final = frozenset({"SLURM_CONF"})  # where the cluster is; every other SLURM_* belongs to the job we are in


class ArrayExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor for an array that runs one command per task."""

    def submit_tasks(self, command: str, count: int) -> str:
        """Submit; returns the job id.

        Raises
        ------
        ClusterError
            If sbatch refuses or cannot be reached; the text carries its message.
        """
        self.parameters["map_count"] = count
        try:
            with scrubbed_environment():
                return str(self._submit_command(command).job_id)
        except (FailedJobError, OSError) as error:
            raise ClusterError(f"sbatch: {_message(str(error))}") from None

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return script_text(command, Path(self.folder), dict(self.parameters))

    def text(self, command: str, count: int) -> str:
        """The script that ``submit_tasks`` would hand to sbatch."""
        return script_text(command, Path(self.folder), {**self.parameters, "map_count": count})


def executor(
    folder: Path,
    resources: Resources,
    site: Site,
    *,
    name: str,
    throttle: int | None,
    code: Path | None,
    dependency: str | None = None,
) -> ArrayExecutor:
    """An executor whose jobs ask for these resources at this site."""
    made = ArrayExecutor(folder=folder)
    gpu_options: dict[str, Any] = {}
    if resources.gpus:
        if site.gpu_option == "gres":
            gpu_options["gres"] = f"{site.gres}:{resources.gpus}"
        else:
            gpu_options["gpus_per_node"] = resources.gpus
    lines = []
    if resources.distributed:  # until our process listens; an ignored signal stays ignored through exec
        lines.append("trap '' USR2")
    lines += [f"module load {shlex.quote(module)}" for module in site.modules]
    lines += list(site.setup)
    lines += [f"export {key}={shlex.quote(value)}" for key, value in sorted(site.env.items())]
    if code is not None:
        lines.append("export PYTHONSAFEPATH=1  # the folder that the job starts in may hold the code as it is now")
        lines.append(f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}")
    extra: dict[str, Any] = {
        "signal": f"{'B:' if resources.distributed else ''}USR2@{resources.signal_s}",
        "requeue": True,
        **{key: True if value == "" else value for key, value in {**site.sbatch, **resources.sbatch}.items()},
    }
    if dependency is not None:
        extra["dependency"] = dependency
        extra["kill-on-invalid-dep"] = "yes"
    made.update_parameters(
        job_name=name,
        wckey=None,
        partition=site.partition,
        account=site.account,
        qos=site.qos,
        time=-(-resources.time_s // 60),
        nodes=resources.nodes,
        ntasks_per_node=max(1, resources.gpus) if resources.distributed else 1,
        cpus_per_task=max(1, resources.cpus // (max(1, resources.gpus) if resources.distributed else 1)),
        mem=None if resources.memory_mib is None else f"{resources.memory_mib}M",
        setup=lines,
        array_parallelism=throttle or 1_000_000,
        stderr_to_stdout=True,
        use_srun=not resources.distributed,
        srun_args=[f"--cpus-per-task={resources.cpus}", "--open-mode=append"],
        additional_parameters=extra,
        **gpu_options,
    )
    return made


def task_command(folder: Path, site: Site, resources: Resources) -> str:
    """The shell command of a task; in the batch shell's place where the task makes its own steps."""
    place = "exec " if resources.distributed else ""
    return f"{place}{site.python_command} -u -m scaling.sweeps.task {shlex.quote(str(folder))}"


def script_text(command: str, folder: Path, parameters: Mapping[str, Any]) -> str:
    """submitit's script, with the throttle left out where there is none."""
    text = str(_make_sbatch_string(command=command, folder=folder, **parameters))
    count = parameters["map_count"]
    return text.replace(f"--array=0-{count - 1}%{count}", f"--array=0-{count - 1}")


@contextmanager
def scrubbed_environment() -> Iterator[None]:
    """Without the variables of a job that this process may itself run in, which sbatch and srun would obey."""
    stale = {k: v for k, v in os.environ.items() if k.startswith(("SLURM_", "SBATCH_", "SRUN_")) and k not in KEPT}
    for name in stale:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(stale)


def _message(text: str) -> str:
    """Slurm's own words out of submitit's report."""
    lines = [line.strip() for line in text.splitlines() if "sbatch:" in line or "slurm" in line.lower()]
    words = [line.removeprefix("sbatch:").strip().removeprefix("error:").strip() for line in lines]
    return "; ".join(dict.fromkeys(words)) or " ".join(text.split())
