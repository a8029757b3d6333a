"""One run folder into one MLflow run: made or found, described, its new points sent, ended.

Between ``syncer`` (which goes over all folders) and ``store``. Every step may be repeated after a crash or a lost answer without changing
what MLflow shows; a folder whose files did not change since all of it was sent costs one look at its directory.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from scaling.config.strict import build
from scaling.config.tree import RunConfig
from scaling.errors import RecordError, StoreError
from scaling.identity import EXCLUDED
from scaling.record import ATTEMPTS, CONFIG, END, Attempt, EndRecord, Point, RunFolder, now_ms
from scaling.tracking import conventions
from scaling.tracking.conventions import STORE_STATUS, TERMINAL, RunView, Standing
from scaling.tracking.journal import Piece, new_pieces, seal, void_values
from scaling.tracking.metrics import store_name
from scaling.tracking.standing import JobState, standing
from scaling.tracking.state import RunState
from scaling.tracking.store import MAX_METRICS, Sample, Store, StoredRun

logger = logging.getLogger(__name__)

SUSPECT_MS: Final = 15 * 60_000  # how long after an unanswered create_run a second run may still appear
FIGURES: Final = "figures"


def read_config(folder: RunFolder) -> tuple[str | None, str]:
    """Sweep and name as the folder's configuration says them, without building the whole tree."""
    try:
        run = json.loads((folder.path / CONFIG).read_text(encoding="utf-8"))["config"]["run"]
        return run.get("sweep"), str(run.get("name") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise RecordError(f"{folder.path / CONFIG}: damaged; restore it or remove the folder") from None
