"""Options of each residual method: one frozen dataclass a method, chosen by ``model.residual.method``.

Part of the configuration tree (``scaling.config.tree``); the methods themselves are in ``scaling.models.residual``. A
new method adds its dataclass to one of the modules here and its name to ``METHODS``. ``stream`` has the methods that
keep one or several running streams, ``depth`` those that attend over earlier outputs, ``dense`` those that add earlier
outputs with learned weights.
"""

from scaling.config.residual.base import Blocked, ResidualConfig
from scaling.config.residual.dense import DenseFormer, MuddFormer
from scaling.config.residual.depth import AttnRes, Delta, Mhar, Msar
from scaling.config.residual.stream import AttnResMhc, Baseline, DeepNet, HyperConnections, Mhc, RealFormer, ReZero

METHODS: dict[str, type[ResidualConfig]] = {
    cls.method: cls
    for cls in (
        Baseline,
        HyperConnections,
        Mhc,
        AttnRes,
        Mhar,
        Delta,
        Msar,
        AttnResMhc,
        DenseFormer,
        MuddFormer,
        ReZero,
        DeepNet,
        RealFormer,
    )
}

__all__ = [
    "METHODS",
    "AttnRes",
    "AttnResMhc",
    "Baseline",
    "Blocked",
    "DeepNet",
    "Delta",
    "DenseFormer",
    "HyperConnections",
    "Mhar",
    "Mhc",
    "Msar",
    "MuddFormer",
    "ReZero",
    "RealFormer",
    "ResidualConfig",
]
