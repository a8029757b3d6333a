"""A plan as it would be submitted: script, cuts, limits, Slurm's refusals; the profile of a site."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from scaling.errors import ConfigError, GridError
from scaling.sweeps import preview as preview_module
from scaling.sweeps.preview import preview
from scaling.sweeps.site import Site, load_site
from scaling.sweeps.slurm import Slurm
from tests.sweeps.submitting import over, submitter


def test_preview_shows_script_cuts_and_limits(make: Any, fake: Any) -> None:
    fake.max_array, fake.limit = 4, 6
    planned = make(grid={"seed": {"range": [0, 9]}}, price_per_gpu_hour=2.0)
    seen = preview(planned, gpu="h100", site=Site(), slurm=fake.slurm)
    notes = "\n".join(seen.notes)
    assert "10 jobs in 1 group(s)" in notes and "3 array(s), an array has at most 4 jobs" in notes
    assert "at most 6 jobs of yours in the queue, 6 free now; 4 wait for --feed" in notes
    assert any(command[:2] == ("sbatch", "--test-only") for command in fake.asked)
    assert "#SBATCH --array=0-9" in seen.script and fake.accepted() == []
    tree = seen.tree()
    assert tree["cost"] == pytest.approx(tree["gpu_hours"] * 2.0) and len(tree["runs"]) == 10
    late = preview(make(resources={"time": "2d"}), site=Site(), slurm=fake.slurm)
    assert any("refused as planned" in note and "exceeds the MaxTime" in note for note in late.notes)
    assert "exceeds the MaxTime" in late.refused and late.refused == late.tree()["refused"] and not seen.refused
    fake.down = True
    away = preview(planned, site=Site(), slurm=fake.slurm)
    assert "Slurm: cannot be asked now" in away.notes[-1] and not away.refused


def test_a_plan_asks_scontrol_each_question_once(make: Any, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where runs were submitted before, whose states are asked for, and jobs may go to several partitions."""
    fake.limit = 100
    submitter(make(grid={"seed": [0]}), fake).submit()
    fake.asked.clear()
    monkeypatch.setattr(preview_module, "Slurm", lambda: fake.slurm)  # as the command calls it, without one of its own
    seen = preview(make(grid={"seed": [0, 1, 2]}), site=Site(partition="main,short"))
    assert any(command[0] == "sacct" for command in fake.asked)
    assert not seen.refused and "at most 100 jobs of yours" in " ".join(seen.notes)
    asked = [command for command in fake.asked if command[0] == "scontrol"]
    assert sorted(asked) == [("scontrol", "-o", "show", "partition"), ("scontrol", "show", "config")]


def test_preview_asks_slurm_about_every_kind_of_job_that_is_due(make: Any, fake: Any) -> None:
    by = [{"when": {"size": "160k"}, "time": 60}]
    planned = make(grid={"size": ["50k", "160k"], "seed": [0, 1]}, resources={"time": 10, "by": by})
    preview(planned, site=Site(), slurm=fake.slurm)
    assert sum(command[:2] == ("sbatch", "--test-only") for command in fake.asked) == 2
    for run in planned.runs[:2]:
        over(planned, run.key)
    seen = preview(planned, site=Site(), slurm=fake.slurm)
    assert seen.notes[0] == "Slurm: 2 jobs in 1 group(s) of equal resources" and "--time=10\n" in seen.script
    original = fake.ask

    def refuses(command: Any) -> Any:
        if command[0] == "sbatch":
            return subprocess.CompletedProcess(command, 1, "", "allocation failure: Invalid feature specification\n")
        return original(command)

    seen = preview(planned, site=Site(), slurm=Slurm(ask=refuses, user="me"))
    assert "Invalid feature specification (time=0:10:00 gpus=0 nodes=1, 2 jobs)" in seen.refused
    for run in planned.runs[2:]:
        over(planned, run.key)
    assert preview(planned, site=Site(), slurm=fake.slurm).notes == ("Slurm: nothing to submit",)


def test_site_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "site.yaml"
    monkeypatch.setenv("SCALING_SITE", str(file))
    file.write_text(
        "partition: gpu\nsetup: [a, b]\nsbatch: {--exclusive: true, nice: 5}\nenv: {A: 1}\n", encoding="utf-8"
    )
    site = load_site()
    assert (site.partition, site.setup, site.sbatch, site.env) == (
        "gpu",
        ("a", "b"),
        {"exclusive": "", "nice": "5"},
        {"A": "1"},
    )
    file.write_text("partitoin: gpu\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"site\.yaml:1: unknown key 'partitoin'; did you mean 'partition'"):
        load_site()
    file.write_text("sbatch: {signal: KILL@5}\n", encoding="utf-8")
    with pytest.raises(
        GridError, match=r"site\.yaml: sbatch: signal is set by the sweep itself; use resources\.signal"
    ):
        load_site()
    file.write_text("env: {a-b: 1}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'a-b' is no name of a variable"):
        load_site()
    monkeypatch.delenv("SCALING_SITE")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    assert load_site() == Site()
