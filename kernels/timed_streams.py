"""The calls of multi-stream routing (msar) that ``scaling bench kernels`` times, with the bytes each must move.

Part of :mod:`scaling.kernels.timed`, at the last full block of eight. Bytes count every tensor once: what a kernel
reads again for each tap, or in a second pass over a token, is not counted, wherever it comes from.

Shape legend: as in :mod:`scaling.kernels.streams`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton

from scaling.kernels.decoder import Shape
from scaling.kernels.stream_expand import expand, score
from scaling.kernels.stream_fold import fold
from scaling.kernels.stream_gather import MAX_SITES, gather
from scaling.kernels.stream_keys import keys
from scaling.kernels.stream_ledger import num_splits
from scaling.kernels.stream_mix import blend, mix
from scaling.kernels.stream_turn import turn
from scaling.kernels.streams import Phase, Streams, ages, chunk

_TAPS = (1, 4, 8, 12)  # msar's default
_ROWS = 8  # finished sources at the last of eight blocks

Case = tuple[str, str, int, Callable[[], Any]]


def stream_cases(shape: Shape, device: str) -> Iterator[Case]:
    """(operation, pass, bytes that must move, call) of every kernel."""
    D, T, M, F = shape.width, shape.batch * shape.time, len(_TAPS), _ROWS
    L = max(1, 2 * shape.layers // 8)
    L = triton.cdiv(L, triton.cdiv(L, MAX_SITES))  # of a phase
    U = T * D * 2
    wide: dict[str, Any] = {"device": device}
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    first = tuple(sum(_TAPS[:j]) for j in range(M))
    tap_QKD = torch.randn(F, sum(_TAPS), D, **wide)
    age_T = ages(None, shape.batch, shape.time, torch.device(device))
    streams = Streams(tap_QKD=tap_QKD, taps=_TAPS, first=first, age_T=age_T, eps=1e-6)
    source_TD, result_TD = torch.randn(T, D, **kind), torch.zeros(T, D, **wide)
    stream_FMTD, mix_LMTD = torch.randn(F, M, T, D, **kind), torch.randn(L, M, T, D, **kind)
    newest_MTD, gradient_TD = torch.randn(M, T, D, **kind), torch.randn(T, D, **kind)
    key_SMD, phi_KV = torch.randn(L, M, D, **wide) * 0.05, torch.randn(M, M * D, **kind) * 0.02
    base_S = torch.arange(0, (F + 1) * L, F + 1, dtype=torch.int32, **wide)
    score_TPM = torch.randn(T, (F + 1) * L, M, **wide)
    lse_TSM = score_TPM.view(T, L, F + 1, M).logsumexp(2)
    kept, scalar_LWT = torch.rand(T, M + 1, **wide), torch.randn(L, 2 * M, T, **wide)
    phase = Phase(sites=range(L), num_rows=F, first_base=0, first_pairs=F + 1)
    coefficient = torch.randn(F, M, 2, L, T, **wide)
    buffer = torch.empty(_ROWS, M, T, D, **kind)
    logits: dict[str, Any] = {"score_TPM": score_TPM, "lse_TSM": lse_TSM}
    site: dict[str, Any] = {
        "site": 0, "pair": F, "key_MD": key_SMD[0], "phi_KV": phi_KV, "scale": kept[0, :1],
        "bias_M": kept[0, :M].contiguous(), "kept": kept, "eps": 1e-6, **logits,
    }  # fmt: skip
    splits = num_splits(T, D // chunk(D, 64) * M)
    pairs = T * M * 4  # of one site and source

    yield "streams expand", "forward", (1 + M) * U, partial(expand, streams, source_TD, newest_MTD, owner=1)
    call: Callable[[], Any] = partial(
        score, newest_MTD, key_SMD=key_SMD, base_S=base_S, score_TPM=score_TPM, source_row=1, sites=range(L), eps=1e-6
    )  # fmt: skip
    yield f"streams score for {L} sites", "forward", M * U + L * pairs, call
    call = partial(mix, stream_FMTD, phase, mix_LMTD=mix_LMTD, final=False, **logits)
    yield f"streams mix {F} for {L} sites", "forward", (F + L) * M * U + F * L * pairs, call
    call = partial(blend, mix_LMTD[0], newest_MTD, output_TD=torch.empty_like(source_TD), **site)
    yield "streams blend", "forward", (2 * M + 1) * U, call
    call = partial(
        turn, mix_LMTD[0], newest_MTD, gradient_TD, stream_gradient_MTD=torch.empty_like(newest_MTD),
        logit_gradient=torch.empty(T, M, **wide), scalar_WT=scalar_LWT[0], coefficient_M2T=torch.empty(M, 2, T, **wide),
        **site,
    )  # fmt: skip
    yield "streams turn", "backward", (4 * M + 1) * U, call
    call = partial(fold, streams, source_TD, newest_MTD, owner=1, result_TD=result_TD, before_TD=result_TD)
    yield "streams fold", "backward", (M + 5) * U, call
    call = partial(
        gather, mix_LMTD, stream_FMTD, phase, rows=range(_ROWS), key_SMD=key_SMD.bfloat16(), scalar_LWT=scalar_LWT,
        stream_gradient=buffer, coefficient_FM2LT=coefficient, eps=1e-6, **logits,
    )  # fmt: skip
    yield f"streams gather {_ROWS} from {L} sites", "backward", (2 * _ROWS + L) * M * U, call
    for rows, sites in ((1, 1), (F, L)):
        part = coefficient[:rows, :, :, :sites].contiguous()
        call = partial(keys, stream_FMTD, part, scalar_LWT[:sites], num_rows=rows, splits=splits, gated=True)
        yield f"streams keys of {sites} sites from {rows}", "backward", rows * M * U + part.nbytes, call
