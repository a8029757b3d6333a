"""Peak arithmetic rates of devices by name, and the model FLOP utilisation (MFU) formed with them.

Read by the trainer. A device that is not in the table has no MFU: a guessed peak has given published figures above
100 % more than once. Rates are dense (no structured sparsity).
"""

from __future__ import annotations

from typing import Final, Literal

from scaling.errors import ScalingError

Arithmetic = Literal["bf16", "fp32"]

# Dense FLOP/s by the name that the driver reports: (bf16 matrix units with fp32 accumulation, fp32 without TF32).
# Where a data sheet states sparse rates only, half of it.
PEAK_FLOPS_PER_S: Final[dict[str, tuple[float, float]]] = {
    # NVIDIA A100 data sheet (2021): 312 TFLOP/s bf16, 19.5 fp32, all form factors
    "NVIDIA A100-SXM4-40GB": (312e12, 19.5e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 19.5e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 19.5e12),
    "NVIDIA A100 80GB PCIe": (312e12, 19.5e12),
    # NVIDIA H100 data sheet (2023): SXM 1,979 sparse bf16; PCIe 1,513; NVL 1,671
    "NVIDIA H100 80GB HBM3": (989.5e12, 67e12),
    "NVIDIA H100 PCIe": (756.5e12, 51e12),
    "NVIDIA H100 NVL": (835.5e12, 60e12),
    # NVIDIA H200 data sheet (2024): SXM 1,979 sparse bf16; NVL 1,671
    "NVIDIA H200": (989.5e12, 67e12),
    "NVIDIA H200 NVL": (835.5e12, 60e12),
    # NVIDIA GH200 data sheet (2023): 1,979 sparse bf16
    "NVIDIA GH200 480GB": (989.5e12, 67e12),
    # NVIDIA L40S data sheet (2023): 362 dense bf16, 91.6 fp32; L4 (2023): 242 sparse bf16, 30.3 fp32
    "NVIDIA L40S": (362e12, 91.6e12),
    "NVIDIA L4": (121e12, 30.3e12),
}


def peak_flops_per_s(device_name: str, arithmetic: Arithmetic) -> float | None:
    """Dense peak of a device, or ``None`` where the table does not know it.

    >>> peak_flops_per_s("NVIDIA H200", "bf16")
    989500000000000.0
    >>> peak_flops_per_s("NVIDIA H200 MIG 1g.18gb", "bf16") is None
    True
    """
    rates = PEAK_FLOPS_PER_S.get(device_name)
    return None if rates is None else rates[0 if arithmetic == "bf16" else 1]


def utilisation(flops_per_s: float, peak: float) -> float:
    """Model FLOP utilisation, as a fraction of the peak of all devices together.

    Raises
    ------
    ScalingError
        Above 1: then the FLOP count, the peak or the clock is wrong, and no figure made from them can be trusted.
    """
    mfu = flops_per_s / peak
    if mfu > 1:
        raise ScalingError(
            f"MFU={mfu:.1%} exceeds 100 % ({flops_per_s:.4g} of {peak:.4g} FLOP/s): the FLOP count or the peak in "
            "scaling/hardware.py is wrong; correct it, or remove the device's entry to train without an MFU"
        )
    return mfu
