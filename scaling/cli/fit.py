"""``scaling fit``: laws with certificates and intervals, IsoFLOP profiles, hold-outs, compute-optimal splits."""

from __future__ import annotations

from typing import Annotated

import typer

from scaling.cli.judging import AsJson, Columns, Draws, Level, RandomSeed, Runs, Unfinished, Where, read, show

app = typer.Typer(help="Scaling laws with intervals.", no_args_is_help=True)

Form = Annotated[
    str,
    typer.Option(
        help="chinchilla, chinchilla-tied, chinchilla-gamma, chinchilla-lr, kaplan, power, pure-power, repetition."
    ),
]
Loss = Annotated[str, typer.Option(help="huber, l1 or l2.")]
Delta = Annotated[float, typer.Option(help="Huber delta, in units of the residual.")]
Residual = Annotated[str, typer.Option(help="log or raw.")]

LAW_EPILOG = (
    "Examples:  scaling fit law --runs runs.parquet --form power   |   scaling fit law --runs points.csv "
    '--columns "N=Model Size,C=Training FLOP,D=C/(6*N)" --where "loss<4.9" --interval all --json'
)


@app.command(epilog=LAW_EPILOG)
def law(
    runs: Runs,
    columns: Columns = None,
    where: Where = None,
    form: Form = "chinchilla",
    loss: Loss = "huber",
    delta: Delta = 1e-3,
    residual: Residual = "log",
    by: Annotated[str | None, typer.Option(help="One law a value of this column, e.g. method.")] = None,
    share: Annotated[str, typer.Option(help="With --by: free, E, exponents, E+exponents, test.")] = "free",
    weights: Annotated[str | None, typer.Option(help="Column of row weights.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Column that says which rows are one run (default run_key).")
    ] = None,
    interval: Annotated[
        str, typer.Option(help="cluster, pairs, two-level, parametric, delta, profile, all, none.")
    ] = "cluster",
    level: Level = 0.95,
    draws: Draws = 1000,
    random_seed: RandomSeed = 0,
    keep_unfinished: Unfinished = False,
    as_json: AsJson = False,
) -> None:
    """Fit a law: estimate, certificate of convergence, interval, checklist."""
    from scaling.analysis.fit import fit_law

    result = fit_law(
        read(runs, columns, where), form=form, loss=loss, delta=delta, residual=residual, by=by, share=share,
        weights=weights,
        level=level, interval=interval, cluster=cluster, draws=draws, rng=random_seed, keep_unfinished=keep_unfinished,
    )  # fmt: skip
    show(result, as_json)


ISOFLOP_EPILOG = (
    "Examples:  scaling fit isoflop --runs points.csv --columns N=n,C=flops --noise-sd 0.002 --curve parabola"
)


@app.command(epilog=ISOFLOP_EPILOG)
def isoflop(
    runs: Runs,
    columns: Columns = None,
    where: Where = None,
    curve: Annotated[str, typer.Option(help="akima or parabola.")] = "akima",
    noise_sd: Annotated[float | None, typer.Option(help="SD of one loss; without it there is no interval.")] = None,
    level: Level = 0.95,
    draws: Draws = 1000,
    random_seed: RandomSeed = 0,
    keep_unfinished: Unfinished = False,
    as_json: AsJson = False,
) -> None:
    """Best size at each budget and the power law through them (Approach 2)."""
    from scaling.analysis.isoflop import fit_isoflop

    table = read(runs, columns, where)
    result = fit_isoflop(
        table, curve=curve, noise=noise_sd, level=level, draws=draws, rng=random_seed, keep_unfinished=keep_unfinished
    )
    show(result, as_json)


FRONTIER_EPILOG = "Examples:  scaling fit frontier --runs runs.parquet --budgets 1e21,1e22"


@app.command(epilog=FRONTIER_EPILOG)
def frontier(
    runs: Runs,
    budgets: Annotated[str, typer.Option(help="Training FLOPs, separated by commas.")],
    columns: Columns = None,
    where: Where = None,
    form: Form = "chinchilla",
    loss: Loss = "huber",
    delta: Delta = 1e-3,
    level: Level = 0.95,
    draws: Draws = 1000,
    random_seed: RandomSeed = 0,
    keep_unfinished: Unfinished = False,
    as_json: AsJson = False,
) -> None:
    """Compute-optimal parameters and tokens at each budget, from a law in N and D."""
    from scaling.analysis.frontier import compute_frontier, parse_budgets

    table = read(runs, columns, where)
    result = compute_frontier(
        table,
        budgets=parse_budgets(budgets),
        form=form,
        loss=loss,
        delta=delta,
        level=level,
        draws=draws,
        rng=random_seed,
        keep_unfinished=keep_unfinished,
    )
    show(result, as_json)


BACKTEST_EPILOG = "Examples:  scaling fit backtest --runs runs.parquet --form power --json"


@app.command(epilog=BACKTEST_EPILOG)
def backtest(
    runs: Runs,
    columns: Columns = None,
    where: Where = None,
    form: Form = "chinchilla",
    loss: Loss = "huber",
    delta: Delta = 1e-3,
    residual: Residual = "log",
    level: Annotated[float, typer.Option(help="Quantile of the error reported.")] = 0.9,
    keep_unfinished: Unfinished = False,
    as_json: AsJson = False,
) -> None:
    """Fit the small runs, predict the large: error against how far the law is extrapolated."""
    from scaling.analysis.backtest import backtest as run

    table = read(runs, columns, where)
    show(
        run(table, form=form, loss=loss, delta=delta, residual=residual, level=level, keep_unfinished=keep_unfinished),
        as_json,
    )
