"""What a run that is trained to its end leaves: its weights, whatever the disk does.

Between ``loop``, ``checkpoint`` and ``train``, which writes the end record after it. Where training took a while since
the last checkpoint, the state at the end is saved first; where the weights then do not fit on the disk, checkpoints
that nobody needs any more make room; where that is not enough, the next start finds the state and trains nothing again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from torch import Tensor

from scaling.checkpoint import Checkpoints
from scaling.distributed import World, as_sharded
from scaling.errors import CheckpointError, RecordError
from scaling.loop import Loop
from scaling.resumption import goes_on

logger = logging.getLogger(__name__)

WORTH_SAVING_S: Final = 60.0  # training that is not done again for want of a checkpoint, which costs seconds
# A permanent checkpoint of the last step, before older ones have made room.
TRIED_AGAIN: Final = "it is tried again when the weights are written and older checkpoints are gone; free space now"


def leave_weights(
    loop: Loop, checkpoints: Checkpoints, world: World, *, save_weights: bool, guard: Callable[[], None]
) -> None:
    """Write ``final/`` of a finished run; all processes of the run call it together.

    Parameters
    ----------
    guard
        Called before anything is written; raises where another process has taken the run over.

    Raises
    ------
    CheckpointError
        If the weights cannot be written; says where the run goes on.
    """
    loop.save_end(checkpoints, after_s=WORTH_SAVING_S)
    if not save_weights:
        return
    weights = {"model": _whole(loop.transformer.state_dict())}
    if loop.optimizer.ema:
        with loop.averaged():
            weights["ema"] = _whole(loop.transformer.state_dict())

    def write() -> None:
        guard()
        checkpoints.write_final(weights)

    problem = _attempted(write, checkpoints, world)
    if problem is not None:
        loop.save_end(checkpoints)
        raise CheckpointError(f"{problem}; free space and run again: {goes_on(checkpoints.folder, steps=loop.steps)}")


def leave_record(write: Callable[[], None], loop: Loop, checkpoints: Checkpoints, world: World) -> None:
    """Write the end record of a finished run, by ``write`` on the first process; all of the run call it together.

    Raises
    ------
    RecordError
        If it cannot be written; says where the run goes on.
    """
    problem = _attempted(write, checkpoints, world)
    if problem is not None:
        loop.save_end(checkpoints)
        raise RecordError(f"{problem}; run again: {goes_on(checkpoints.folder, steps=loop.steps)}")


def leave_permanent(loop: Loop, checkpoints: Checkpoints, world: World) -> None:
    """Save the permanent checkpoint that is due at the end once more, where it did not fit on the disk before.

    Called when all that a finished run does not need is gone: no time has more room. All processes of the run call it
    together; where it does not fit even now, the log says so.
    """
    if loop.permanent_due and not world.share(checkpoints.holds(loop.step)):
        loop.save_end(
            checkpoints,
            otherwise="the run is done without it, and its next start does not try again; to have it, free space, "
            f"remove end.json and run again: {goes_on(checkpoints.folder)}",
        )


def _attempted(write: Callable[[], None], checkpoints: Checkpoints, world: World) -> str | None:
    """Why something could not be written on the first process, room made and tried again; the same on all."""
    problem = _problem(write) if world.is_first else None
    if problem is not None and checkpoints.make_room():
        logger.warning("%s; older checkpoints were removed to make room", problem.partition(";")[0])
        problem = _problem(write)
    shared: str | None = world.share(problem)
    return shared


def _problem(write: Callable[[], None]) -> str | None:
    try:
        write()
    except (CheckpointError, RecordError) as error:
        return str(error)
    return None


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the host; every process takes part in putting shards together."""
    whole = {}
    for name, tensor in tensors.items():
        sharded = as_sharded(tensor)
        full = tensor if sharded is None else sharded.full_tensor()
        whole[name] = full.detach().to("cpu", copy=True).contiguous()
    return whole
