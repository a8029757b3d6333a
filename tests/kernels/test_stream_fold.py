"""Streams of a source, and their transpose, against float64: groups near and far from a document's start, spans, tails.

Memory is poisoned with NaN (conftest).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scaling.kernels import stream_expand, stream_fold
from scaling.kernels.stream_expand import expand
from scaling.kernels.stream_fold import fold
from scaling.kernels.streams import Streams, ages
from scaling.models.residual.convolution import causal_convolution

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # of the largest value


def draw(
    device: torch.device, *, taps: tuple[int, ...], first: tuple[int, ...], batch: int, time: int, width: int,
    starts: tuple[int, ...], dtype: torch.dtype,
) -> tuple[Streams, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Streams with documents that begin at ``starts``; source, its gradient so far, gradients of streams, documents."""
    generator = torch.Generator().manual_seed(time)
    tokens = batch * time
    num_taps = max(start + count for start, count in zip(first, taps, strict=True))
    shapes = (2, num_taps, width), (tokens, width), (tokens, width), (len(taps), tokens, width)
    drawn = [torch.randn(*shape, generator=generator).to(device) for shape in shapes]
    tap_QKD, source_TD, result_TD, gradient_MTD = drawn
    document_BT = torch.zeros(batch, time, dtype=torch.int64)
    for start in starts:
        document_BT[:, start:] += 1
    document_BT = document_BT.to(device)
    made = Streams(tap_QKD=tap_QKD, taps=taps, first=first, age_T=ages(document_BT, batch, time, device), eps=1e-6)
    return made, source_TD.to(dtype), result_TD, gradient_MTD.to(dtype), document_BT


@pytest.mark.parametrize(
    ("taps", "first", "shape", "starts", "spans", "dtype"),
    [
        ((1, 2, 4), (0, 1, 3), (1, 43, 16), (15, 17, 18, 36), 1, torch.float32),
        ((1, 2, 4), (0, 1, 3), (2, 13, 48), (11,), 2, torch.float32),
        ((1, 1, 3), (0, 0, 1), (1, 31, 16), (), 3, torch.float16),
        ((1, 3), (0, 1), (1, 31, 16), (21,), 3, torch.bfloat16),
        ((1, 1), (0, 0), (1, 14, 16), (3,), 2, torch.float32),
        ((10,), (0,), (1, 29, 16), (), 7, torch.float32),
    ],
    ids=str,
)
def test_against_float64(
    taps: tuple[int, ...], first: tuple[int, ...], shape: tuple[int, int, int], starts: tuple[int, ...], spans: int,
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Streams, the source's gradient (written, and added to), the taps' gradients; twice the same to the bit."""
    batch, time, width = shape
    made, source_TD, result_TD, gradient_MTD, document_BT = draw(
        device, taps=taps, first=first, batch=batch, time=time, width=width, starts=starts, dtype=dtype
    )
    for module in (stream_expand, stream_fold):
        monkeypatch.setattr(module, "num_spans", lambda *_: spans)
    monkeypatch.setitem(stream_expand._EXPAND, "TOGETHER", 4)
    monkeypatch.setitem(stream_fold._FOLD, "TOGETHER", 4)
    monkeypatch.setitem(stream_fold._FOLD, "AHEAD", 2)
    source = source_TD.double().requires_grad_()
    tap_KD = made.tap_QKD[1].double().requires_grad_()
    truth_MTD = torch.stack(
        [
            causal_convolution(source.view(batch, time, width), tap_KD[start : start + count], document_BT).flatten(
                0, 1
            )
            for start, count in zip(first, taps, strict=True)
        ]
    )
    truth_MTD.backward(gradient_MTD.double())
    assert source.grad is not None and tap_KD.grad is not None
    stream_MTD = torch.empty_like(gradient_MTD)
    expand(made, source_TD, stream_MTD, owner=1)
    close(stream_MTD, truth_MTD.detach(), TOLERANCE[dtype])
    update_TD = source_TD.flip(0)
    sum_TD, sum_stream_MTD, plain_MTD = torch.empty_like(source_TD), torch.empty_like(stream_MTD), stream_MTD.clone()
    expand(made, source_TD, sum_stream_MTD, owner=1, update_TD=update_TD, sum_TD=sum_TD)
    expand(made, source_TD + update_TD, plain_MTD, owner=1)
    assert torch.equal(sum_TD, source_TD + update_TD) and torch.equal(sum_stream_MTD, plain_MTD)
    runs = []
    for _ in range(2):
        written_TD, added_TD = torch.empty_like(source_TD), result_TD.clone()
        tap_gradient_GKD = fold(made, source_TD, gradient_MTD, owner=1, result_TD=written_TD)
        fold(made, source_TD, gradient_MTD, owner=1, result_TD=added_TD, before_TD=added_TD)
        both_TD = torch.empty_like(source_TD)
        fold(made, source_TD, gradient_MTD, owner=1, result_TD=both_TD, before_TD=update_TD)
        runs.append((written_TD, added_TD, both_TD, tap_gradient_GKD))
    assert all(torch.equal(one, again) for one, again in zip(*runs, strict=True))
    close(written_TD, source.grad, TOLERANCE[dtype])
    close(added_TD, source.grad + result_TD.double(), 3e-6)
    close(both_TD, source.grad + update_TD.double(), TOLERANCE[dtype])
    close(tap_gradient_GKD.double().sum(0), tap_KD.grad, 3e-6)


def close(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    """The maximal error is within the tolerance, relative to the largest value."""
    assert float((ours.double() - exact).abs().max() / exact.abs().max()) <= tolerance
