"""MLflow tracking that never costs a run: training writes its run folder, one syncer turns folders into MLflow.

After ``record`` in the flow and before ``train``; nothing here is imported by a training step. ``metrics`` (names and
units), ``conventions`` (how a folder looks in MLflow), ``journal`` (new lines), ``standing`` (how a run stands),
``store`` with ``sql`` and ``rest`` (where to), ``state``, ``folder``, ``runs``, ``parent``, ``syncer`` (the work).
Importing it imports no MLflow.
"""

from scaling.tracking.metrics import METRICS
from scaling.tracking.syncer import SyncReport, sync

__all__ = ["METRICS", "SyncReport", "sync"]
