"""Where a run goes on when it is started again, in words: the end of every line that says why a run broke off.

Below ``peers`` and ``ending``, whose errors end with it. Read from the names in the run folder, since the process that
tells may have lost the others, and a name without a dot means a complete checkpoint. No torch here.
"""

from __future__ import annotations

from pathlib import Path


def goes_on(checkpoints: Path | None, *, steps: int | None = None) -> str:
    """What the next start does.

    Parameters
    ----------
    checkpoints
        The folder of the run's checkpoints; ``None`` where it is not known yet.
    steps
        Of the whole schedule, for a run that has trained all of them.
    """
    if checkpoints is None:
        return "it goes on from its last checkpoint, or starts over where there is none"
    last = max((int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")), default=None)
    if last is None:
        return "it starts over, since no checkpoint was saved yet (run.checkpoint_every_minutes)"
    if last == steps:
        return "the state at the end is saved, nothing is trained again"
    return f"it goes on from its last checkpoint, of step {last}"
