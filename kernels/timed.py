"""The calls that ``scaling bench kernels`` times, at the geometry of a benchmark shape, with the bytes each must move.

Between the kernels and :mod:`scaling.kernels.benchmark`; :mod:`scaling.kernels.timed_streams` has those of msar. Bytes
count every tensor once.

Shape legend: N rows, S sites, T tokens, D width, H heads, K sources of a group, M streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from scaling.kernels.decoder import Shape
from scaling.kernels.gather import gather
from scaling.kernels.gather_group import gather_group
from scaling.kernels.hyper import Rule
from scaling.kernels.hyper_backward import step_gradients
from scaling.kernels.hyper_coefficients import coefficients
from scaling.kernels.hyper_forward import step
from scaling.kernels.hyper_logits import SUMS, TOKENS, logit_gradients
from scaling.kernels.hyper_phi import phi_gradient, project, split
from scaling.kernels.hyper_spread import spread as spread_hyper
from scaling.kernels.hyper_tokens import read, weigh, write
from scaling.kernels.pull import pull
from scaling.kernels.pull_group import pull_group
from scaling.kernels.query_gradient import query_gradient
from scaling.kernels.receive import receive
from scaling.kernels.timed_streams import stream_cases

# first words of the kernels' names, which ``scaling bench kernels --operation`` takes
OPERATIONS = (
    "pull", "pull_group", "receive", "gather", "gather_group", "query_gradient", "streams", "hc", "mhc",
)  # fmt: skip

_HEADS = 8
_GROUP = 8
_STREAMS = 4

Case = tuple[str, str, int, Callable[[], Any]]


def cases(shape: Shape, device: str = "cuda") -> Iterator[Case]:
    """(operation, pass, bytes that must move, call) of every kernel."""
    yield from _routing(shape, device)
    yield from stream_cases(shape, device)
    yield from _hyper(shape, device)


def _routing(shape: Shape, device: str) -> Iterator[Case]:
    """Single-stream routing; calls walk through the bank to defeat the L2."""
    D, T, N = shape.width, shape.batch * shape.time, 2 * shape.layers + 1
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    bank_NTD = torch.randn(N + 1, T, D, **kind)
    query_SD = (torch.randn(N, D, device=device) * 0.1).bfloat16()
    factor_NT = torch.rand(N + 1, T, device=device) + 0.5
    lse_STH = torch.randn(N, T, _HEADS, device=device) + 3
    delta_STH = torch.randn(N, T, _HEADS, device=device)
    source_TD, output_TD, normed_TD = torch.randn(T, D, **kind), torch.empty(T, D, **kind), torch.empty(T, D, **kind)
    gain_D, scale_T = torch.rand(D, **kind), torch.rand(T, device=device)
    partial_KTD, radial_KTH = torch.randn(_GROUP, T, D, **kind), torch.randn(_GROUP, T, _HEADS, device=device)
    row, turn = T * D * 2, 0

    def first(length: int) -> int:
        nonlocal turn
        turn += 1
        return turn * length % (N - length)

    def run_pull(rows: int) -> None:
        start = first(rows)
        pull(
            source_TD=source_TD, bank_NTD=bank_NTD, factor_NT=factor_NT, query_SD=query_SD, lse_STH=lse_STH,
            output_TD=output_TD, gain_D=gain_D, normed_TD=normed_TD, output_factor_T=scale_T,
            partial_TD=partial_KTD[0], partial_lse_TH=lse_STH[1], rows=range(start, start + rows), write_row=N,
            site=3, eps=1e-6, output_eps=1e-6,
        )  # fmt: skip

    def run_gather(sites: int) -> None:
        start = first(sites)
        gather(
            value_TD=source_TD, value_factor_T=factor_NT[0], gradient_MTD=bank_NTD[start : start + sites],
            query_SD=query_SD, lse_STH=lse_STH, delta_STH=delta_STH, partial_TD=partial_KTD[0],
            partial_radial_TH=radial_KTH[0], coefficient_MTH=coefficient_MTH[:sites], result_TD=output_TD,
            sites=range(start, start + sites), eps=1e-6,
        )  # fmt: skip

    def run_receive() -> None:
        receive(
            incoming_TD=source_TD, output_TD=bank_NTD[first(1)], output_factor_T=scale_T, gradient_TD=bank_NTD[N],
            delta_TH=delta_STH[0], gain_D=gain_D,
        )  # fmt: skip

    coefficient_MTH = torch.empty(_GROUP, T, _HEADS, **kind)
    for rows in (0, 4, N // 2):
        yield f"pull over {rows} rows", "forward", (rows + 5) * row, partial(run_pull, rows)
    for rows in (_GROUP, (N - 1) // _GROUP * _GROUP - _GROUP):
        call = partial(
            pull_group, bank_NTD=bank_NTD, factor_NT=factor_NT, query_SD=query_SD, partial_QTD=partial_KTD,
            lse_QTH=lse_STH[:_GROUP], num_rows=rows, sites=range(_GROUP, 2 * _GROUP), group=_GROUP,
        )  # fmt: skip
        yield f"pull_group of {_GROUP} over {rows} rows", "forward", (rows + _GROUP) * row, call
    yield "receive", "backward", 3 * row, run_receive
    for sites in (1, 4):
        yield f"gather of {sites} sites", "backward", (sites + 3) * row, partial(run_gather, sites)
    for sites in (_GROUP, N - _GROUP - 1):
        coefficient_THMK = torch.empty(T, _HEADS, sites, _GROUP, **kind)
        call = partial(
            gather_group, value_KTD=bank_NTD[:_GROUP], factor_KT=factor_NT[:_GROUP],
            gradient_MTD=bank_NTD[N - sites : N], query_SD=query_SD, lse_STH=lse_STH, delta_STH=delta_STH,
            result_KTD=partial_KTD, radial_KTH=radial_KTH, coefficient_THMK=coefficient_THMK,
            sites=range(N - sites, N), add=False,
        )  # fmt: skip
        moved = (sites + 2 * _GROUP) * row + coefficient_THMK.nbytes
        yield f"gather_group of {_GROUP} from {sites} sites", "backward", moved, call
        call = partial(
            query_gradient, coefficient=coefficient_THMK, steps=coefficient_THMK.stride(),
            value_KTD=bank_NTD[:_GROUP], result_PSD=torch.zeros(66, N, D, device=device), sites=range(N - sites, N),
            heads=_HEADS,
        )  # fmt: skip
        yield f"query_gradient of {sites} sites", "backward", _GROUP * row + coefficient_THMK.nbytes, call


def _hyper(shape: Shape, device: str) -> Iterator[Case]:
    """One step of mHC and of dynamic hyper-connections, whole and kernel by kernel."""
    D, T, M = shape.width, shape.batch * shape.time, _STREAMS
    row, K = T * D * 2, M * (M + 2)
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    wide: dict[str, Any] = {"device": device}
    stream, out, out_gradient, result = (torch.randn(T, M, D, **kind) for _ in range(4))
    update, read_TD, read_gradient, update_gradient = (torch.randn(T, D, **kind) for _ in range(4))
    post, mix = torch.rand(T, M, **wide), torch.rand(T, M, M, **wide) / M
    new_post, new_mix, pre = torch.empty_like(post), torch.empty_like(mix), torch.rand(T, M, **wide)
    projected, outer = torch.randn(T, K, **wide), torch.randn(T, K, **wide) * 1e-3
    scale, bias, sums = torch.rand(K, **wide), torch.rand(K, **wide), torch.empty(-(-T // TOKENS), SUMS, K, **wide)
    for name, rule in (("mhc", Rule(kind="mhc", iterations=20)), ("hc", Rule(kind="hc", tanh=True, centred=True))):
        fields = M + 2 if name == "hc" else K
        phi = torch.randn(D if name == "hc" else M * D, fields, **wide) * 0.02
        zeros, factor = torch.zeros(fields, **wide), torch.rand(2, T, rule.factors(M), **wide)
        weights = {"shift_F": zeros, "offset_F": zeros, "scale_K": scale, "bias_K": bias, "projected_TK": projected}
        old = {"stream_TMD": stream, "update_TD": update, "post_TM": post, "mix_TMM": mix, "out_TMD": out}
        new = {"new_post_TM": new_post, "new_mix_TMM": new_mix}
        incoming = {"new_post_gradient_TM": post, "new_mix_gradient_TMM": mix}
        gradients = {
            "out_gradient_TMD": out_gradient, "read_gradient_TD": read_gradient, "stream_gradient_TMD": result,
            "update_gradient_TD": update_gradient, "post_gradient_TM": new_post, "mix_gradient_TMM": new_mix,
        }  # fmt: skip
        part = split(rule, phi=phi, streams=M, dtype=torch.bfloat16)
        partial_STK = project(rule, stream_TMD=out, part=part, exact=False)
        numbers = projected.nbytes + factor.nbytes + post.nbytes + mix.nbytes + pre.nbytes
        call: Callable[[], Any] = partial(
            step, rule, phi=phi, read_TD=read_TD, factor=factor, **old, **new, **weights
        )  # fmt: skip
        yield f"{name} step", "forward", (4 * M + 2) * row + 2 * partial_STK.nbytes, call
        yield f"{name} write", "forward", (2 * M + 1) * row + factor.nbytes, partial(write, rule, factor=factor, **old)
        call = partial(split, rule, phi=phi, streams=M, dtype=torch.bfloat16)
        yield f"{name} split", "forward", phi.nbytes + part.nbytes, call
        call = partial(project, rule, stream_TMD=out, part=part, exact=False)
        yield f"{name} project", "forward", M * row + part.nbytes + partial_STK.nbytes, call
        call = partial(coefficients, rule, partial=partial_STK, factor=factor, pre_TM=pre, **new, **weights)
        yield f"{name} coefficients", "forward", partial_STK.nbytes + numbers, call
        yield f"{name} read", "forward", (M + 1) * row, partial(read, stream_TMD=out, pre_TM=pre, read_TD=read_TD)
        call = partial(
            step_gradients, rule, phi=phi, factor=factor, outer_TK=outer, sums_PSK=sums, **old, **incoming,
            **gradients, **weights,
        )  # fmt: skip
        yield f"{name} step", "backward", (5 * M + 4) * row, call
        call = partial(weigh, stream_TMD=out, gradient_TD=read_gradient, weight_TM=pre)
        yield f"{name} weigh", "backward", (M + 1) * row, call
        slope, level = factor[0].clone(), torch.zeros_like(factor[0])
        call = partial(
            logit_gradients, rule, width=D, factor=factor, weight_TM=post, pre_TM=pre, outer_TK=outer, slope=slope,
            level=level, sums_PSK=sums, **incoming, **weights,
        )  # fmt: skip
        moved = numbers + 3 * projected.nbytes + factor.nbytes + 2 * rule.steps * post.nbytes
        yield f"{name} logits", "backward", moved, call
        call = partial(
            spread_hyper, rule, part=part, pre_TM=pre, outer_TK=outer, slope=slope, level=level, **old, **gradients
        )  # fmt: skip
        yield f"{name} spread", "backward", (4 * M + 3) * row, call
        call = partial(phi_gradient, rule, out_TMD=out, outer_TK=outer, fields=fields, exact=False)
        yield f"{name} projections", "backward", M * row + outer.nbytes, call
