"""Collection for all of pytest: a module that needs an optional extra is left out where the extra is not installed.

Its doctests would import it. With CI=true nothing is left out: there every extra must be.
"""

from __future__ import annotations

import importlib.util
import os

_NEEDS = {"scaling/downstream.py": "lm_eval"}  # module -> what its extra brings

collect_ignore: list[str] = []
if os.environ.get("CI") != "true":
    collect_ignore += [path for path, needed in _NEEDS.items() if importlib.util.find_spec(needed) is None]
