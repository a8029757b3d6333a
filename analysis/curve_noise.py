"""Noise that is not seed noise: within a curve, and of the evaluation set.

Beside ``noise``: reads curves (run, step, loss) and per-document losses instead of final results. What fluctuates at
the end of a curve is a few percent of the spread over seeds, because a run keeps its offset from the other seeds from
one evaluation to the next; averaging the tail does not lower seed noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from scaling.analysis.cells import ROUNDING
from scaling.analysis.noise import noise_floor
from scaling.analysis.options import check_level
from scaling.analysis.result import Caution, Interval, Result
from scaling.analysis.screen import Screened, numbers, screen
from scaling.analysis.spread import chi_square_limits
from scaling.errors import FitError, TableError, UsageError, nearest

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

KINDS = ("seed", "tail", "evaluation")
TAIL = 6
NOT_SEED_NOISE = (
    "fluctuation at the end of a curve is not seed noise: deviations of a run from the other seeds "
    "persist, so the mean of the "
    "tail is as uncertain as its last point"
)
EQUAL_CURVES = Caution(
    code="identical-losses",
    message="runs of a group have equal curves: no spread could be measured, so there is no SD and no interval; likely "
    "one run or seed repeated under several names; check the runs' seeds, then train with others",
)


def measure_floor(
    table: pd.DataFrame, *, kind: str, by: list[str] | None, min_runs: int, level: float, keep_unfinished: bool = False
) -> Result:
    """The floor of one kind: ``seed`` (final losses), ``tail`` (curves) or ``evaluation`` (documents)."""
    check_level(level)
    if kind not in KINDS:
        raise UsageError(f"kind {kind!r} is unknown; {nearest(kind, KINDS)}")
    if kind == "tail":
        return tail_noise(table, by=by[0] if by else None, level=level)
    if kind == "evaluation":
        return evaluation_noise(table, level=level)
    return noise_floor(table, by=by, level=level, min_runs=min_runs, keep_unfinished=keep_unfinished)


def effective_number(x: Floats) -> float:
    """``n / (1 + 2 sum rho_k)`` with the autocorrelations up to the first that is not positive.

    References
    ----------
    Geyer (1992), Practical Markov chain Monte Carlo (initial positive sequence).
    """
    n = len(x)
    d = x - x.mean()
    total = float(np.sum(d**2))
    if n < 3 or total == 0:
        return float(n)
    sum_rho = 0.0
    for lag in range(1, n):
        rho = float(np.sum(d[lag:] * d[:-lag])) / total
        if rho <= 0:
            break
        sum_rho += rho
    return n / (1 + 2 * sum_rho)


def tail_noise(curves: pd.DataFrame, *, by: str | None = None, tail: int = TAIL, level: float = 0.95) -> Result:
    """Fluctuation of the last evaluations about the ensemble's path, beside the spread over seeds.

    Parameters
    ----------
    curves
        One row an evaluation: ``run``, ``step``, ``loss``; runs of one group (column ``by``) share their steps.
    tail
        Number of last evaluations.

    Returns
    -------
    Result
        ``estimate``: ``tail_sd`` (within a run, about its mean offset), ``seed_sd`` (of offsets), their ``ratio``, and
        ``persistence`` (correlation of a run's deviation with its previous evaluation's); empty, with ``status``
        ``undetermined``, where all runs of a group have equal curves.

    Raises
    ------
    TableError, FitError
        When columns are missing, or no group has two runs with ``tail`` common steps.
    """
    check_level(level)
    labels = ["run", *([by] if by else [])]
    screened = _screen(curves, ["run", "step", "loss", *([by] if by else [])], "tail noise", labels)
    curves = screened.frame
    inner, offsets, runs, pairs, effective = 0.0, 0.0, [], [], []
    inner_df = offset_df = 0
    for _, part in curves.groupby(by, sort=False) if by else [("all", curves)]:
        wide = part.pivot_table(index="run", columns="step", values="loss").dropna(axis=1)
        wide = wide[sorted(wide.columns)]
        if len(wide) < 2 or wide.shape[1] < tail:
            continue
        last = wide.to_numpy(dtype=np.float64)[:, -tail:]
        deviation = last - last.mean(axis=0)
        mean = deviation.mean(axis=1, keepdims=True)
        inner += float(np.sum((deviation - mean) ** 2))
        inner_df += (len(last) - 1) * (tail - 1)
        offsets += float(np.sum(mean**2))
        offset_df += len(last) - 1
        runs.append(len(last))
        pairs.append((deviation[:, -1], deviation[:, -2]))
        effective += [effective_number(row) for row in deviation]
    if not runs:
        raise FitError(f"tail noise: no group has two runs with {tail} common steps")
    tail_sd, seed_sd = float(np.sqrt(inner / inner_df)), float(np.sqrt(offsets / offset_df))
    x, y = np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])
    persistence = float(np.corrcoef(x, y)[0, 1]) if np.ptp(x) > 0 and np.ptp(y) > 0 else float("nan")
    equal = seed_sd <= ROUNDING * abs(float(np.mean(curves["loss"])))
    low, high = chi_square_limits(seed_sd, offset_df, level)
    limits = Interval(level=level, method="chi-square", low={"seed_sd": low}, high={"seed_sd": high})
    found = {"tail_sd": tail_sd, "seed_sd": seed_sd, "ratio": tail_sd / seed_sd, "persistence": persistence}
    last_word = EQUAL_CURVES if equal else Caution(code="tail-is-not-seed-noise", message=NOT_SEED_NOISE)
    return Result(
        kind="noise floor",
        estimate={} if equal else found,
        interval=None if equal else limits,
        status="undetermined" if equal else "converged",
        n=sum(runs),
        df=float(offset_df),
        conventions={"tail": f"last {tail} evaluations, about the mean of the group at each step"},
        warnings=(*screened.cautions, last_word),
        dropped=screened.dropped,
        details={"groups": len(runs), "effective_evaluations": float(np.median(effective)), "tail": tail},
    )


def evaluation_noise(documents: pd.DataFrame, *, level: float = 0.95) -> Result:
    """Sampling error of a mean loss over an evaluation set, by documents.

    Parameters
    ----------
    documents
        One row a document (or sequence): ``loss`` (mean over its tokens), ``tokens``; optionally ``run`` and
        ``document``. With two runs or more the noise of the difference of the first two is added: what the set has in
        common cancels.

    Returns
    -------
    Result
        ``estimate``: ``evaluation_se`` (documents are clusters of tokens), ``token_se`` (what independent tokens with
        the documents' spread would give) and ``paired_se``.

    Raises
    ------
    TableError, FitError
        When columns are missing, a document occurs twice, or fewer than two are usable or shared.
    """
    check_level(level)
    labels = [c for c in ("run", "document") if c in documents.columns]
    screened = _screen(documents, ["loss", "tokens", *labels], "evaluation noise", labels)
    documents = screened.frame
    names = list(dict.fromkeys(documents["run"])) if "run" in labels else []
    first = documents[documents["run"] == names[0]] if names else documents
    loss, tokens = numbers(first, "loss"), numbers(first, "tokens")
    if len(loss) < 2:
        raise FitError("evaluation noise: one document has no sampling error; keep per-document losses")
    mean, se = _ratio(loss, tokens)
    variance = float(np.sum(tokens * (loss - mean) ** 2) / np.sum(tokens))
    estimate = {"mean_loss": mean, "evaluation_se": se, "token_se": float(np.sqrt(variance / np.sum(tokens)))}
    if len(names) > 1:
        second = documents[documents["run"] == names[1]]
        estimate["paired_se"] = _ratio(*_paired_losses(first, second))[1]
    half = float(stats.t.ppf((1 + level) / 2, len(loss) - 1)) * se
    return Result(
        kind="noise floor",
        estimate=estimate,
        standard_error={"mean_loss": se},
        interval=Interval(
            level=level,
            method="t, documents as clusters",
            low={"mean_loss": mean - half},
            high={"mean_loss": mean + half},
        ),
        n=len(loss),
        df=float(len(loss) - 1),
        conventions={"cluster": "document", "weights": "tokens"},
        warnings=screened.cautions,
        dropped=screened.dropped,
        details={"tokens": float(np.sum(tokens))},
    )


def _screen(table: pd.DataFrame, needs: list[str], analysis: str, labels: list[str]) -> Screened:
    """The usable rows of those columns alone: others (a curve's hash, its run's status) tell runs apart, not rows."""
    there = table[[c for c in needs if c in table.columns]]
    return screen(there, needs=needs, analysis=analysis, keep_unfinished=True, labels=labels)


def _paired_losses(first: pd.DataFrame, second: pd.DataFrame) -> tuple[Floats, Floats]:
    """Differences of loss and tokens of the documents of both runs: by ``document``, else in the order given."""
    if "document" in first.columns:
        for part in (first, second):
            if part["document"].duplicated().any():
                twice = part.loc[part["document"].duplicated(), "document"].iloc[0]
                raise TableError(f"evaluation noise: document {twice} of run {part['run'].iloc[0]!r} occurs twice")
        both = first.merge(second, on="document", suffixes=("", "_second"))
        if len(both) < 2:
            raise TableError("evaluation noise: the first two runs share fewer than two documents")
        return numbers(both, "loss") - numbers(both, "loss_second"), numbers(both, "tokens")
    if len(second) != len(first):
        raise TableError(
            f"evaluation noise: the runs were evaluated on {len(first)} and {len(second)} documents; a column "
            "'document' tells which are the same"
        )
    return numbers(first, "loss") - numbers(second, "loss"), numbers(first, "tokens")


def _ratio(loss: Floats, tokens: Floats) -> tuple[float, float]:
    """Token-weighted mean and its linearised standard error with documents as clusters."""
    mean = float(np.sum(tokens * loss) / np.sum(tokens))
    n = len(loss)
    residual = tokens * (loss - mean)
    return mean, float(np.sqrt(n / (n - 1) * np.sum(residual**2)) / np.sum(tokens))
