"""``scaling noise``: how much losses differ for no reason, and what an experiment could show."""

from __future__ import annotations

from typing import Annotated

import typer

from scaling.cli.judging import AsJson, Columns, Level, Runs, Unfinished, Where, read, show

app = typer.Typer(help="Noise floor by kind; detectable effects.", no_args_is_help=True)

FLOOR_EPILOG = (
    "Examples:  scaling noise floor --runs runs.parquet   |   "
    "scaling noise floor --runs runs_final.csv --columns loss=final_val_loss --by group,last_step --min-runs 8"
)


@app.command(epilog=FLOOR_EPILOG)
def floor(
    runs: Runs,
    columns: Columns = None,
    where: Where = None,
    by: Annotated[str | None, typer.Option(help="Columns that define a configuration, separated by commas.")] = None,
    min_runs: Annotated[int, typer.Option(help="Fewest runs of a configuration.")] = 2,
    kind: Annotated[
        str,
        typer.Option(
            help="seed (final losses), tail (curves: run, step, loss) or evaluation (documents: loss, tokens)."
        ),
    ] = "seed",
    level: Level = 0.95,
    keep_unfinished: Unfinished = False,
    as_json: AsJson = False,
) -> None:
    """Standard deviation over seeds with its interval; of curve tails; of the evaluation set."""
    from scaling.analysis.curve_noise import measure_floor

    names = [b.strip() for b in by.split(",")] if by else None
    table = read(runs, columns, where)
    result = measure_floor(table, kind=kind, by=names, min_runs=min_runs, level=level, keep_unfinished=keep_unfinished)
    show(result, as_json)


POWER_EPILOG = (
    "Examples:  scaling noise power --sd 0.00115 --difference 0.002 --seeds 3,5,10 --scales 1,4   |   "
    "scaling noise power --sd 0.002 --log-speedup-per-loss 5.6 --log-speedup-half-width 0.02"
)


@app.command(epilog=POWER_EPILOG)
def power(
    sd: Annotated[float, typer.Option(help="Seed SD of one run (scaling noise floor).")],
    difference: Annotated[float | None, typer.Option(help="A difference of loss to find.")] = None,
    half_width: Annotated[
        float | None, typer.Option(help="A wanted half-width of the interval of the difference.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds an arm, separated by commas.")] = "2,3,5,8,10,20",
    scales: Annotated[str, typer.Option(help="Scales, separated by commas.")] = "1,4,5",
    rho: Annotated[float, typer.Option(help="Correlation of runs that share a seed.")] = 0.0,
    known_sd: Annotated[bool, typer.Option("--known-sd", help="The noise is known: z instead of t.")] = False,
    log_speedup_per_loss: Annotated[
        float | None, typer.Option(help="d log speedup / d loss (in a speedup's noise_floor): adds speedups.")
    ] = None,
    log_speedup: Annotated[float | None, typer.Option(help="A log speedup to find, instead of --difference.")] = None,
    log_speedup_half_width: Annotated[
        float | None, typer.Option(help="Its wanted half-width (0.02: 2%), instead of --half-width.")
    ] = None,
    level: Level = 0.95,
    power: Annotated[float, typer.Option(help="Wanted power.")] = 0.8,
    as_json: AsJson = False,
) -> None:
    """What designs can show, by formula and simulation."""
    from scaling.analysis.designs import noise_power, parse_counts

    result = noise_power(
        sd=sd, difference=difference, half_width=half_width, seeds=parse_counts("--seeds", seeds),
        scales=parse_counts("--scales", scales), rho=rho, known_sd=known_sd, log_speedup_per_loss=log_speedup_per_loss,
        log_speedup=log_speedup, log_speedup_half_width=log_speedup_half_width, level=level, power=power,
    )  # fmt: skip
    show(result, as_json)
