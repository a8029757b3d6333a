"""``scaling compare``: iso-loss speedups, paired seeds, items answered right or wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scaling.cli.judging import (
    AsJson,
    Columns,
    Draws,
    Level,
    RandomSeed,
    Runs,
    Unfinished,
    Where,
    read,
    show_many,
)

app = typer.Typer(help="Methods against a baseline.", no_args_is_help=True)

Baseline = Annotated[str, typer.Option(help="The method all others are compared with.")]
Method = Annotated[str | None, typer.Option(help="One method only.")]
NoiseSd = Annotated[float | None, typer.Option(help="Seed SD of one run's loss, known from elsewhere.")]

SPEEDUP_EPILOG = (
    "Examples:  scaling compare speedup --runs runs.parquet --baseline baseline   |   "
    "scaling compare speedup --runs mlruns.csv --columns C=flops,loss=final --baseline std --currency gpu_hours --json"
)


@app.command(epilog=SPEEDUP_EPILOG)
def speedup(
    runs: Runs,
    baseline: Baseline,
    method: Method = None,
    columns: Columns = None,
    where: Where = None,
    currency: Annotated[str, typer.Option(help="flops, tokens, seconds or gpu_hours.")] = "flops",
    asymptote: Annotated[str, typer.Option(help="auto, free, shared, or a loss.")] = "auto",
    noise_sd: NoiseSd = None,
    inversion: Annotated[str, typer.Option(help="law, or chord (biased; for comparison).")] = "law",
    level: Level = 0.95,
    draws: Draws = 1000,
    random_seed: RandomSeed = 0,
    keep_unfinished: Unfinished = False,
    as_json: AsJson = False,
) -> None:
    """How much less a method costs at equal loss, with its interval, trend and noise floor."""
    from scaling.analysis.arms import told_apart
    from scaling.analysis.inversion import parse_asymptote
    from scaling.analysis.speedup import compare_speedup

    table = told_apart(read(runs, columns, where), best_rate=True)
    results = compare_speedup(
        table, baseline=baseline, method=method, currency=currency, level=level,
        asymptote=parse_asymptote(asymptote), noise_sd=noise_sd, inversion=inversion, draws=draws, rng=random_seed,
        keep_unfinished=keep_unfinished,
    )  # fmt: skip
    show_many(results, as_json)


SEEDS_EPILOG = "Examples:  scaling compare seeds --runs runs.parquet --baseline baseline --method mhar"


@app.command(epilog=SEEDS_EPILOG)
def seeds(
    runs: Runs,
    baseline: Baseline,
    method: Method = None,
    columns: Columns = None,
    where: Where = None,
    pairing: Annotated[str, typer.Option(help="auto, paired or unpaired.")] = "auto",
    noise_sd: NoiseSd = None,
    level: Level = 0.95,
    keep_unfinished: Unfinished = False,
    as_json: AsJson = False,
) -> None:
    """Difference of loss over the same seeds, per scale and over scales, corrected for the number of methods."""
    from scaling.analysis.arms import told_apart
    from scaling.analysis.seeds import compare_seeds

    table = told_apart(read(runs, columns, where))
    results = compare_seeds(
        table, baseline=baseline, method=method, pairing=pairing, noise_sd=noise_sd, level=level,
        keep_unfinished=keep_unfinished,
    )  # fmt: skip
    show_many(results, as_json)


ITEMS_EPILOG = (
    "Examples:  scaling compare items --gains 123 --losses 81 --items 1172   |   "
    "scaling compare items --runs items.csv --baseline std (columns item, method, correct; optional task, cluster)"
    "   |   scaling compare items --runs runs --baseline baseline --where seed==0 (after scaling eval)"
)


@app.command(epilog=ITEMS_EPILOG)
def items(
    runs: Annotated[
        str | None,
        typer.Option("--runs", metavar="FILE|FOLDER", help="One row an item and method; or evaluated runs' folder."),
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="The method all others are compared with.")] = None,
    method: Method = None,
    columns: Columns = None,
    where: Where = None,
    gains: Annotated[int | None, typer.Option(help="Items only the method has right (instead of --runs).")] = None,
    losses: Annotated[int | None, typer.Option(help="Items only the baseline has right.")] = None,
    items: Annotated[int | None, typer.Option(help="Items in all (with --gains and --losses).")] = None,
    level: Level = 0.95,
    as_json: AsJson = False,
) -> None:
    """McNemar's tests, odds ratio, clusters of items, Holm over tasks."""
    from scaling.analysis.columns import filter_rows, map_columns
    from scaling.analysis.items import compare_items, read_items

    table = None
    if runs:
        folder = Path(runs)
        table = (
            filter_rows(map_columns(read_items(folder), columns), where)
            if folder.is_dir()
            else read(runs, columns, where)
        )
    results = compare_items(
        table, baseline=baseline, method=method, gains=gains, losses=losses, items=items, level=level
    )
    show_many(results, as_json)
