"""Submitting and ending runs of a plan, for the tests against a Slurm in memory."""

from __future__ import annotations

from typing import Any

from scaling.record import EndRecord, RunFolder
from scaling.sweeps.submit import Submitter


def submitter(planned: Any, fake: Any, **rest: Any) -> Submitter:
    return Submitter(plan=planned, slurm=fake.slurm, snapshot=rest.pop("snapshot", False), **rest)


def over(planned: Any, key: str, word: str = "done", **details: str) -> None:
    run = planned.by_key[key]
    folder = RunFolder.create(planned.out, run.config)
    folder.finish(EndRecord(status=word, step=1, ended_ms=1, attempt=1, reason="x", details=details))  # type: ignore[arg-type]
