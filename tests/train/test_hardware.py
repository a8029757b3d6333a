"""Peaks by name, and the refusal to guess."""

from __future__ import annotations

import pytest

from scaling.distributed import World
from scaling.errors import ScalingError
from scaling.hardware import PEAK_FLOPS_PER_S, peak_flops_per_s, utilisation
from scaling.meter import Meter, Rates


def test_h200_is_not_taken_for_another() -> None:
    assert peak_flops_per_s("NVIDIA H200", "bf16") == 989.5e12
    assert peak_flops_per_s("NVIDIA H200", "fp32") == 67e12


@pytest.mark.parametrize("name", ["cpu", "NVIDIA H200 MIG 3g.71gb", "NVIDIA Z1000", ""])
def test_unknown_devices_have_no_peak(name: str) -> None:
    assert peak_flops_per_s(name, "bf16") is None


def test_matrix_units_are_faster_than_fp32() -> None:
    assert all(bf16 > fp32 for bf16, fp32 in PEAK_FLOPS_PER_S.values())


def test_more_than_the_peak_is_an_error() -> None:
    assert utilisation(4e14, 8e14) == 0.5
    with pytest.raises(ScalingError, match=r"MFU=133.0% exceeds 100 %.*the FLOP count or the peak in"):
        utilisation(1.33e15, 1e15)


def test_a_cpu_reports_no_mfu() -> None:
    import torch

    meter = Meter(World(), Rates(tokens_per_step=10, flops_per_token=1.0), arithmetic="fp32", skipping=False)
    meter.start()
    meter.take(torch.tensor(1.0), torch.tensor(1.0))
    meter.fetch(1)
    metrics = meter.line(waited_s=0.0)
    assert "perf/mfu" not in metrics and metrics["perf/tokens_per_s"] > 0
