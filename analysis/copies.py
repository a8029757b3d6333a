"""Rows that say nothing of noise: runs of one cell with equal losses, where other cells show how much runs vary.

Between ``screen`` and ``fit``. The rule of comparisons (``cells.without_copies``) for the rows of a law: each such cell
counts as one run. Where no cell has runs that differ, nothing was measured and all rows stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from scaling.analysis.cells import constant
from scaling.analysis.result import Caution
from scaling.analysis.screen import Screened, numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray


def cell_labels(x: Mapping[str, NDArray[np.float64]], groups: NDArray[np.str_] | None) -> list[str]:
    """Label of each row's cell: its variables to nine digits, and its group."""
    columns = [np.round(np.log(value), 9).astype(str) for value in x.values()]
    if groups is not None:
        columns.append(groups)
    return ["|".join(parts) for parts in zip(*columns, strict=True)]


def without_copies(screened: Screened, variables: tuple[str, ...], by: str | None) -> Screened:
    """One row of each cell whose rows have equal losses, and a caution; no run is left out by that, copies are one."""
    frame = screened.frame
    groups = None if by is None else frame[by].to_numpy(dtype=str)
    cells = np.array(cell_labels({name: numbers(frame, name) for name in variables}, groups))
    loss_n = numbers(frame, "loss")
    members = [np.flatnonzero(cells == cell) for cell in dict.fromkeys(cells)]
    several = [rows for rows in members if len(rows) > 1]
    copied = [rows for rows in several if constant(loss_n[rows])]
    if not copied or len(copied) == len(several):
        return screened
    keep = np.ones(len(frame), dtype=bool)
    keep[np.concatenate([rows[1:] for rows in copied])] = False
    text = (
        f"{len(copied)} of {len(several)} cells with several runs have equal losses: copies of one run, or seeds that "
        f"change nothing; each counts as one run, {int(np.sum(~keep))} rows fewer; check the runs' seeds, then train "
        "with others"
    )
    return replace(
        screened,
        frame=frame[keep].reset_index(drop=True),
        cautions=(*screened.cautions, Caution(code="copied-rows", message=text)),
    )
