"""Which module makes which residual method: the one place to register a new one.

After ``residual.*`` in the flow; ``transformer`` asks it. The names and options are in ``scaling.config.residual``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from scaling.config import residual as options
from scaling.config.model import ModelConfig
from scaling.models.residual.attnres import make_attnres
from scaling.models.residual.attnres_mhc import AttnResMhc
from scaling.models.residual.baseline import Baseline
from scaling.models.residual.delta import Delta
from scaling.models.residual.denseformer import DenseFormer
from scaling.models.residual.hc import HyperConnections
from scaling.models.residual.method import Residual
from scaling.models.residual.mhar import make_mhar
from scaling.models.residual.mhc import Mhc
from scaling.models.residual.msar import Msar
from scaling.models.residual.muddformer import MuddFormer
from scaling.models.residual.realformer import make_realformer
from scaling.models.residual.rescaled import DeepNet, ReZero

_MAKERS: Final[dict[type[options.ResidualConfig], Callable[[ModelConfig, Any], Residual]]] = {
    options.Baseline: lambda config, _: Baseline(config),
    options.HyperConnections: HyperConnections,
    options.Mhc: Mhc,
    options.AttnRes: make_attnres,
    options.Mhar: make_mhar,
    options.Delta: Delta,
    options.Msar: Msar,
    options.AttnResMhc: AttnResMhc,
    options.DenseFormer: DenseFormer,
    options.MuddFormer: MuddFormer,
    options.ReZero: ReZero,
    options.DeepNet: DeepNet,
    options.RealFormer: make_realformer,
}


def make_residual(config: ModelConfig) -> Residual:
    """The residual method that ``config.residual`` asks for."""
    return _MAKERS[type(config.residual)](config, config.residual)
