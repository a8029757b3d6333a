"""The site profile: what belongs to a cluster and its user, never to an experiment.

``~/.config/scaling/site.yaml`` (or ``$XDG_CONFIG_HOME``, or the file that ``$SCALING_SITE`` names)::

    partition: gpu                 # as in sbatch
    account: my-project
    qos: normal
    setup: ["source /opt/env.sh"]  # shell lines before the job's command
    modules: [cuda/12.8]           # module load, before the set-up lines
    python: /path/to/python        # default: the Python that submits; may be a container command that runs one
    env: {NCCL_DEBUG: WARN}        # variables for the jobs
    sbatch: {constraint: h100}     # any other option of sbatch
    gpu_option: gpus-per-node      # or gres, for sites that want --gres=gpu:N (gres: gpu:h100 names the type)
    gres: gpu
    gpu: h100                      # device for estimates; mfu and price_per_gpu_hour likewise
    mfu: 0.4
    price_per_gpu_hour: 2.5
    notify: "mail -s 'sweep {sweep}: {event}' me@example.org"   # run when a watched sweep ends or a run fails
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from scaling.config.strict import build, read_yaml
from scaling.errors import ConfigError
from scaling.sweeps.resources import flags

VARIABLE = "SCALING_SITE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A site profile; see the module's text for the keys."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    setup: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    sbatch: Mapping[str, str] = field(default_factory=dict)
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    gres: str = "gpu"
    gpu: str | None = None
    mfu: float | None = None
    price_per_gpu_hour: float | None = None
    notify: str | None = None

    @property
    def python_command(self) -> str:
        """The shell words that run Python in a job."""
        return self.python or shlex.quote(sys.executable)


def site_path() -> Path:
    """Where the profile is looked for."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "scaling" / "site.yaml"


def load_site(path: Path | None = None) -> Site:
    """Read the site profile; without a file everything has its default.

    Raises
    ------
    ConfigError
        If a key is unknown or a value has the wrong type, or a file that was named does not exist.
    """
    file = path or site_path()
    if path is None and not os.environ.get(VARIABLE) and not file.exists():
        return Site()
    tree, lines = read_yaml(file)
    if isinstance(tree.get("sbatch"), Mapping):
        tree["sbatch"] = flags(tree["sbatch"], where=str(file))
    if isinstance(tree.get("env"), Mapping):
        tree["env"] = {str(key): "" if value is None else str(value) for key, value in tree["env"].items()}
    site = build(Site, tree, source=str(file), lines=lines)
    for name, value in site.env.items():
        if not name.isidentifier():
            raise ConfigError(f"{file}: env: {name!r} is no name of a variable (value {value!r})")
    return site
