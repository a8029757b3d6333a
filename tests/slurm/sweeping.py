"""Submitting to a real Slurm, and what tests wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scaling.sweeps.site import Site
from scaling.sweeps.status import status
from scaling.sweeps.submit import Submitter

TOY = "toy_trainer:train"


def submitter(planned: Any, **rest: Any) -> Submitter:
    return Submitter(plan=planned, site=rest.pop("site", Site(partition="main")), **rest)


def running(planned: Any, step: int = 1) -> Callable[[], Any]:
    """For ``wait``: the status, once every run has journalled a step and none is over."""

    def look() -> Any:
        now = status(planned)
        steps = [row.look.step if row.look is not None and row.look.attempts else None for row in now.runs]
        return now if all(reached is not None and reached >= step for reached in steps) else None

    return look
