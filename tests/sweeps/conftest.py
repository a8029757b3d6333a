"""Plans of toy runs, and a Slurm that exists in memory only."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from scaling.sweeps.plan import Plan, plan
from scaling.sweeps.slurm import Slurm, expand_ids
from scaling.sweeps.spec import load_spec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

SBATCH = """#!/bin/sh
[ -e "$FAKE_SLURM/refuse" ] && { cat "$FAKE_SLURM/refuse" >&2; exit 1; }
env | grep -E '^(SLURM|SBATCH)_' >"$FAKE_SLURM/environment"
number=$(cat "$FAKE_SLURM/next" 2>/dev/null || echo 100)
echo $((number + 1)) >"$FAKE_SLURM/next"
cp "$1" "$FAKE_SLURM/$number.sh"
echo "Submitted batch job $number"
"""


@dataclass
class FakeSlurm:
    """Answers what ``scaling.sweeps.slurm`` asks; ``jobs`` maps array tasks to squeue's state and reason."""

    folder: Path
    jobs: dict[str, tuple[str, str]] = field(default_factory=dict)
    records: list[tuple[str, str, str, str]] = field(default_factory=list)  # job, state, exit code, end
    down: bool = False
    accounting: bool = True
    max_array: int = 1001
    limit: int | None = None
    asked: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def slurm(self) -> Slurm:
        return Slurm(ask=self.ask, user="me")

    def refuse(self, message: str | None) -> None:
        """Let sbatch refuse with this message, or accept again."""
        if message is None:
            (self.folder / "refuse").unlink(missing_ok=True)
        else:
            (self.folder / "refuse").write_text(message, encoding="utf-8")

    def script(self, job: str) -> str:
        return (self.folder / f"{job}.sh").read_text(encoding="utf-8")

    def accepted(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("[0-9]*.sh"))

    def name(self, job: str) -> str:
        (line,) = [line for line in self.script(job).splitlines() if "--job-name" in line]
        return line.partition("=")[2]

    def ask(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.asked.append(tuple(command))
        if self.down:
            text = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
            return subprocess.CompletedProcess(command, 1, "", text)
        return subprocess.CompletedProcess(command, 0, self._answer(command), "")

    def _answer(self, command: Sequence[str]) -> str:
        match command[0]:
            case "squeue" if "--name" in command:
                names = command[command.index("--name") + 1].split(",")
                lines = []
                for ids, (state, reason) in self.jobs.items():
                    for job in expand_ids(ids):
                        if self.name(job.partition("_")[0]) in names:
                            lines.append(f"{job}|{state}|{reason}|n1|{self.name(job.partition('_')[0])}|1:00")
                return "\n".join(lines)
            case "squeue":
                return "\n".join(job for ids in self.jobs for job in expand_ids(ids))
            case "sacct":
                return "\n".join(
                    f"{job}|{state}|None|n1|{code}|60|{end}|{self.name(job.partition('_')[0])}"
                    for job, state, code, end in self.records
                )
            case "scontrol" if "config" in command:
                kind = "slurmdbd" if self.accounting else "none"
                enforce = "limits" if self.limit is not None else "none"
                return (f"MaxArraySize = {self.max_array}\nAccountingStorageType = accounting_storage/{kind}\n"
                        f"AccountingStorageEnforce = {enforce}\n")  # fmt: skip
            case "scontrol":
                return (
                    "PartitionName=main Default=YES MaxTime=1-00:00:00\nPartitionName=short Default=NO MaxTime=30:00\n"
                )
            case "sacctmgr":
                return f"{self.limit}\n"
            case "scancel":
                for job in command[1:]:
                    self.jobs[job] = ("CANCELLED", "None")
        return ""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    folder = tmp_path / "fake"
    folder.mkdir()
    for name in ("sbatch", "srun"):
        (folder / name).write_text(SBATCH, encoding="utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    return FakeSlurm(folder)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Plan]:
    """Make the plan of a sweep; keyword arguments are sections of its file."""

    def build(name: str = "toy", *, steps: int = 5, settings: tuple[str, ...] = (), **rest: Any) -> Plan:
        base = {
            "model": {"size": "50k"},
            "data": {"seq_len": 16, "batch_size": 2},
            "schedule": {"steps": steps},
            "run": {"device": "cpu"},
        }
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"base": base, **rest}), encoding="utf-8")
        return plan(load_spec(file, settings), tmp_path / "runs")

    return build


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let workers find the stand-in trainer, and say what it does by label of the run."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(HERE)]))

    def moods(**by_label: str) -> None:
        monkeypatch.setenv("TOY", json.dumps(by_label))

    return moods
