"""Named model sizes: shapes only, merged under what a configuration says explicitly.

``100m``, ``350m``, ``1b`` are the shapes of the MHAR paper (arXiv 2607.27230, appendix on training details). The small
ladder (about 0.05M to 50M non-embedding parameters in half-decade steps) is ours: laws need cheap points. The three
sizes below it are for trying things out on a CPU.
"""

from __future__ import annotations

from typing import Final

from scaling.errors import ConfigError, nearest

_QWEN3_VOCAB: Final = 151_936  # Qwen3's padded vocabulary, as in the MHAR paper
_SMALL_VOCAB: Final = 32_768


def _shape(layers: int, d: int, heads: int, kv: int, ffn: int, vocab: int) -> dict[str, int]:
    return {
        "num_layers": layers,
        "d_model": d,
        "num_heads": heads,
        "num_kv_heads": kv,
        "d_ffn": ffn,
        "vocab_size": vocab,
    }


SIZES: Final[dict[str, dict[str, int]]] = {
    "6k": _shape(2, 16, 2, 1, 48, _SMALL_VOCAB),
    "12k": _shape(2, 24, 2, 1, 64, _SMALL_VOCAB),
    "25k": _shape(2, 32, 2, 1, 96, _SMALL_VOCAB),
    "50k": _shape(2, 48, 3, 1, 128, _SMALL_VOCAB),
    "160k": _shape(3, 64, 4, 2, 208, _SMALL_VOCAB),
    "500k": _shape(4, 96, 6, 3, 336, _SMALL_VOCAB),
    "1.6m": _shape(8, 128, 8, 4, 400, _SMALL_VOCAB),
    "5m": _shape(10, 192, 6, 3, 672, _SMALL_VOCAB),
    "16m": _shape(12, 320, 10, 5, 1056, _SMALL_VOCAB),
    "50m": _shape(14, 512, 8, 4, 1792, _SMALL_VOCAB),
    "100m": _shape(12, 512, 8, 4, 1536, _QWEN3_VOCAB),
    "350m": _shape(24, 1024, 16, 8, 4096, _QWEN3_VOCAB),
    "1b": _shape(36, 1280, 16, 8, 5120, _QWEN3_VOCAB),
}


def shape(size: str) -> dict[str, int]:
    """Shape fields of a named size, e.g. ``{"num_layers": 12, "d_model": 512, ...}``.

    Raises
    ------
    ConfigError
        If there is no such size; the message lists those there are.
    """
    if size not in SIZES:
        raise ConfigError(f"model.size={size!r} is unknown; {nearest(size, SIZES)}; or give the shape explicitly")
    return dict(SIZES[size])
