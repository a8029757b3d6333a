"""The dry run: states, estimates, the sbatch script and what Slurm would say to it, gathered for ``sweep plan``."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaling.errors import ClusterError
from scaling.sweeps.array import arrays
from scaling.sweeps.estimate import Device, concerns, gpu_hours, run_s, wall_s
from scaling.sweeps.plan import Plan
from scaling.sweeps.site import Site, load_site
from scaling.sweeps.slurm import Slurm
from scaling.sweeps.status import SweepStatus, status
from scaling.sweeps.submit import check_times


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """Everything that ``sweep plan`` shows."""

    plan: Plan
    now: SweepStatus
    device: Device | None
    price: float | None
    notes: tuple[str, ...] = ()
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
    notes, script = _slurm_view(plan, site, slurm)
    return Preview(
        plan=plan,
        now=status(plan, slurm=slurm),
        device=device,
        price=rate if rate is not None else site.price_per_gpu_hour,
        notes=tuple(notes),
        script=script,
    )


def _slurm_view(plan: Plan, site: Site, slurm: Slurm | None) -> tuple[list[str], str]:
    """What Slurm would get, and what it says to it."""
    if slurm is None and shutil.which("sbatch") is None:
        return ["Slurm: not here (sbatch is not on PATH); sweep submit --executor local trains on this machine"], ""
    from scaling.sweeps.batch import executor, scrubbed_environment, task_command

    slurm = slurm or Slurm()
    groups = arrays(plan.runs)
    jobs = sum(len(group.tasks) for group in groups)
    folder = plan.sweep_folder / "arrays" / "TOKEN"
    with tempfile.TemporaryDirectory() as scratch:
        made = executor(
            Path(scratch),
            groups[0].resources,
            site,
            name=f"{plan.spec.name}.TOKEN",
            throttle=plan.spec.throttle,
            code=None,
        )
        command = task_command(folder, site, groups[0].resources)
        script = made.text(command, len(groups[0].tasks)).replace(scratch, str(folder))
        notes = [f"Slurm: {jobs} jobs in {len(groups)} group(s) of equal resources"]
        try:
            check_times(plan.runs, site, slurm)
            width, limit = slurm.max_array_index() + 1, slurm.submit_limit()
            cuts = sum(-(-len(group.tasks) // width) for group in groups)
            notes.append(f"Slurm: {cuts} array(s), an array has at most {width} jobs here (MaxArraySize)")
            if limit is not None:
                free = max(0, limit - slurm.in_queue())
                later = f"; {jobs - free} wait for --feed or the next submit" if jobs > free else ""
                notes.append(f"Slurm: at most {limit} jobs of yours in the queue, {free} free now{later}")
            file = Path(scratch) / "job.sh"
            file.write_text(made.text(command, min(width, len(groups[0].tasks))), encoding="utf-8")
            with scrubbed_environment():
                asked = slurm.ask(("sbatch", "--test-only", str(file)))
            notes.append("Slurm: " + " ".join(asked.stderr.replace("sbatch: ", "").split()))
        except ClusterError as error:
            notes.append(f"Slurm: refused as planned: {error}")
    return notes, script
