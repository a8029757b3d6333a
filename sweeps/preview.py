"""The dry run: states, estimates, the sbatch script and what Slurm would say to it, gathered for ``sweep plan``."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scaling.errors import ClusterError
from scaling.sweeps.array import Array, arrays
from scaling.sweeps.estimate import Device, concerns, gpu_hours, run_s, wall_s
from scaling.sweeps.plan import Plan
from scaling.sweeps.resources import clock
from scaling.sweeps.site import Site, load_site
from scaling.sweeps.slurm import Slurm
from scaling.sweeps.status import SweepStatus, status
from scaling.sweeps.submit import check_path, check_times

TRIED: Final = 8  # groups of equal resources that Slurm is asked about: each question takes a job id


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """Everything that ``sweep plan`` shows. ``refused`` says why Slurm would not take it."""

    plan: Plan
    now: SweepStatus
    device: Device | None
    price: float | None
    notes: tuple[str, ...] = ()
    refused: str = ""
    script: str = ""

    def tree(self) -> dict[str, Any]:
        """As plain data, for ``--json``."""
        device = self.device
        pending = [row.run for row in self.now.runs if row.state.state not in ("done", "diverged")]
        hours = gpu_hours(pending, device) if device else None
        return {
            "sweep": self.plan.spec.name,
            "out": str(self.plan.out),
            "merged": self.plan.merged,
            "counts": self.now.counts,
            "to_train": len(pending),
            "tokens": sum(run.tokens for run in pending),
            "flops": sum(run.flops for run in pending),
            "device": None if device is None else device.name,
            "assumed_mfu": None if device is None else device.mfu,
            "gpu_hours": hours,
            "cost": hours * self.price if hours is not None and self.price is not None else None,
            "wall_time_s": wall_s(pending, device, self.plan.spec.throttle) if device else None,
            "throttle": self.plan.spec.throttle,
            "notes": list(self.notes),
            "refused": self.refused,
            "script": self.script,
            "runs": [
                {
                    "key": row.run.key,
                    "label": row.run.label,
                    "block": row.run.block,
                    "assignment": dict(row.run.assignment),
                    "state": row.state.state,
                    "kind": row.state.kind,
                    "parameters": row.run.parameters,
                    "parameters_non_embedding": row.run.parameters_non_embedding,
                    "tokens": row.run.tokens,
                    "flops": row.run.flops,
                    "memory_bytes": row.run.memory_bytes,
                    "time_s": run_s(row.run, device) if device else None,
                    "concerns": concerns(row.run, device),
                }
                for row in self.now.runs
            ],
        }


def preview(
    plan: Plan,
    *,
    gpu: str | None = None,
    mfu: float | None = None,
    price: float | None = None,
    site: Site | None = None,
    slurm: Slurm | None = None,
) -> Preview:
    """Gather a dry run; asks Slurm only where it is installed and only to check, never to submit."""
    site = site or load_site()
    name = gpu or site.gpu
    device = Device.named(name, mfu if mfu is not None else site.mfu) if name else None
    rate = price if price is not None else plan.spec.price_per_gpu_hour
    if slurm is None and shutil.which("sbatch") is not None:
        slurm = Slurm()  # one for all questions, which keeps what it was told
    now = status(plan, slurm=slurm)
    notes, refused, script = _slurm_view(now, site, slurm)
    return Preview(
        plan=plan,
        now=now,
        device=device,
        price=rate if rate is not None else site.price_per_gpu_hour,
        notes=tuple(notes),
        refused=refused,
        script=script,
    )


def _slurm_view(now: SweepStatus, site: Site, slurm: Slurm | None) -> tuple[list[str], str, str]:
    """What Slurm would get for the runs that are due, what it says to it, why not, and the first array's script."""
    if slurm is None:
        return ["Slurm: not here (sbatch is not on PATH); sweep submit --executor local trains on this machine"], "", ""
    from scaling.sweeps.batch import executor, scrubbed_environment, task_command

    plan = now.plan
    due = [row.run for row in now.runs if row.state.state == "planned"]
    groups = arrays(due or plan.runs)
    folder = plan.sweep_folder / "arrays" / "TOKEN"

    def text(group: Array, count: int, place: Path) -> str:
        name = f"{plan.spec.name}.TOKEN"
        made = executor(place, group.resources, site, name=name, throttle=plan.spec.throttle, code=None)
        return made.text(task_command(folder, site, group.resources), count)

    with tempfile.TemporaryDirectory() as scratch:
        script = text(groups[0], len(groups[0].tasks), Path(scratch)).replace(scratch, str(folder))
        if not due:
            return ["Slurm: nothing to submit"], "", script
        jobs = sum(len(group.tasks) for group in groups)
        notes = [f"Slurm: {jobs} jobs in {len(groups)} group(s) of equal resources"]
        try:
            slurm.config()
        except ClusterError as error:  # not a refusal: nobody was asked
            return [*notes, f"Slurm: cannot be asked now ({error}); limits and requests are not checked"], "", script
        try:
            check_path(plan.sweep_folder.resolve())
            check_times(due, site, slurm)
            width, limit = slurm.max_array_index() + 1, slurm.submit_limit()
            cuts = sum(-(-len(group.tasks) // width) for group in groups)
            notes.append(f"Slurm: {cuts} array(s), an array has at most {width} jobs here (MaxArraySize)")
            if limit is not None:
                free = max(0, limit - slurm.in_queue())
                later = f"; {jobs - free} wait for --feed or the next submit" if jobs > free else ""
                notes.append(f"Slurm: at most {limit} jobs of yours in the queue, {free} free now{later}")
            file = Path(scratch) / "job.sh"
            for group in groups[:TRIED]:
                file.write_text(text(group, min(width, len(group.tasks)), Path(scratch)), encoding="utf-8")
                with scrubbed_environment():
                    asked = slurm.ask(("sbatch", "--test-only", str(file)))
                said = " ".join(asked.stderr.replace("sbatch: ", "").split())
                if asked.returncode != 0:
                    raise ClusterError(f"{said} (time={clock(group.resources.time_s)} gpus={group.resources.gpus} "
                                       f"nodes={group.resources.nodes}, {len(group.tasks)} jobs)")  # fmt: skip
                notes.append(f"Slurm: {said}")
        except ClusterError as error:
            return [*notes, f"Slurm: refused as planned: {error}"], str(error), script
    return notes, "", script
