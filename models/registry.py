"""Which module makes which residual method: the one place to register a new one.

After ``residual.*`` in the flow; ``transformer`` asks it. The names and options are in ``scaling.config.residual``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from scaling.config import residual as options
from scaling.config.model import ModelConfig
from scaling.models.residual.baseline import Baseline
from scaling.models.residual.method import Residual
from scaling.models.residual.mhar import make_attnres, make_mhar

_MAKERS: Final[dict[type[options.ResidualConfig], Callable[[ModelConfig, Any], Residual]]] = {
    options.Baseline: lambda config, _: Baseline(config),
    options.AttnRes: make_attnres,
    options.Mhar: make_mhar,
}


def make_residual(config: ModelConfig) -> Residual:
    """The residual method that ``config.residual`` asks for."""
    return _MAKERS[type(config.residual)](config, config.residual)
