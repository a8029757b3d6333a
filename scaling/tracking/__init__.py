"""MLflow tracking that never costs a run: training writes its run folder, one syncer turns folders into MLflow.

After ``record`` in the flow and before ``train``. ``metrics`` (names and units), ``conventions`` (how a folder looks in
MLflow), ``journal`` (new lines), ``standing`` (how a run stands), ``store`` with ``sql`` and ``rest`` (where to),
``state``, ``folder``, ``runs``, ``parent``, ``session``, ``syncer`` (the work), ``direct`` and ``follower`` (where it
runs), ``server`` and ``passwords`` (MLflow's own server). Importing it imports no MLflow.
"""

from scaling.tracking.metrics import METRICS
from scaling.tracking.report import SyncReport
from scaling.tracking.syncer import sync

__all__ = ["METRICS", "SyncReport", "sync"]
