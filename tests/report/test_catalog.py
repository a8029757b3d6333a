"""Every named table and figure builds, or says what it needs; published facts are those of the papers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from scaling.analysis import catalog, svg
from scaling.analysis.figures import costs, curves, grids, losses, routing, style
from scaling.analysis.grids import gather
from scaling.analysis.inquiry import inquire
from scaling.analysis.published import FACTS, TOPICS, facts
from scaling.analysis.tables import beside, overhead, render
from scaling.errors import TableError, UsageError


def grid(planted: ModuleType) -> pd.DataFrame:
    """A sweep with something for every table and figure that runs alone can fill."""
    base: pd.DataFrame = planted.table(sizes=5, seeds=2)
    parts = [base]
    routed = base[(base["method"] == "mhar") & base["size"].isin(base["size"].unique()[:2])]
    for place, (heads, kv, rate) in enumerate(((2, 4, 1e-3), (2, 2, 1e-3), (8, 2, 1e-3), (8, 4, 2e-3))):
        parts.append(routed.assign(heads=heads, kv=kv, lr=rate, run_key=routed["run_key"] + f"{place}"))
    runs = pd.concat(parts, ignore_index=True)
    return runs.assign(curve_hash=runs["run_key"])  # else copies of one curve, which analyses leave out


def histories(planted: ModuleType, runs: pd.DataFrame) -> pd.DataFrame:
    extra = [
        pd.DataFrame(
            {"run_key": key, "metric": metric, "step": range(10), "time_ms": 0, "value": 1000.0 + 100 * (m == "mhar")}
        )
        for key, m in zip(runs["run_key"], runs["method"], strict=True)
        for metric in ("perf/tokens_per_s", "mem/peak_gib")
    ]
    curves: pd.DataFrame = planted.histories(runs, points=6)
    return pd.concat([curves, *extra], ignore_index=True)


@pytest.mark.slow
def test_a_full_sweep_fills_every_table_and_figure(planted: ModuleType) -> None:
    runs = grid(planted)
    found = inquire(runs, histories(planted, runs), dropped=[("x", "diverged")])
    given = {
        "variants",
        "tasks",
        "items",
        "disagreement",
        "steps",
        "kernels",
    }  # needs files or options: test_supplements
    empty = {name for name, entry in catalog.TABLES.items() if entry.build(found) is None}
    assert empty == given
    undrawn = {name for name, entry in catalog.FIGURES.items() if entry.build(found) is None}
    assert undrawn == {"isoflop", "steps", "kernels", "routing-weights", "disagreement"}
    for name in catalog.TABLES.keys() - empty:
        for fmt in render.FORMATS:
            assert render.write(catalog.table(found, name), fmt)
    for picture in catalog.pictures(found):
        for width in (style.WIDE_IN, style.NARROW_IN):
            with style.context():
                inside(picture.draw(width))


def inside(figure: Figure) -> None:
    """No text of a figure lies outside it, no two tick labels of an axis overlap, and no two texts written on one."""
    figure.draw_without_rendering()
    renderer: RendererBase = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    whole = figure.bbox
    for axis in figure.axes:
        written = [(text.get_text(), text.get_window_extent(renderer)) for text in axis.texts if text.get_text()]
        for text, box in written:
            assert box.x0 >= whole.x0 - 1 and box.x1 <= whole.x1 + 1, text
            assert box.y0 >= whole.y0 - 1 and box.y1 <= whole.y1 + 1, text
        for (text, box), (covered, under) in itertools.combinations(written, 2):
            assert not box.overlaps(under), f"{text!r} lies on {covered!r}"
        for spine in (axis.xaxis, axis.yaxis):
            low, high = sorted(spine.get_view_interval())
            boxes = []
            for place, label in zip(spine.get_majorticklocs(), spine.get_majorticklabels(), strict=False):
                if label.get_text() and low <= place <= high:
                    boxes.append(label.get_window_extent(renderer))
            for box in boxes:
                assert box.x0 >= whole.x0 - 1 and box.x1 <= whole.x1 + 1, figure
                assert box.y0 >= whole.y0 - 1 and box.y1 <= whole.y1 + 1, figure
            for one, other in zip(boxes, boxes[1:], strict=False):
                assert not one.overlaps(other), (
                    f"tick labels overlap: {[t.get_text() for t in spine.get_majorticklabels()]}"
                )


@pytest.mark.parametrize("name", ["heads", "heads-kv", "lr", "throughput"])
def test_what_runs_cannot_fill_is_refused_with_what_it_needs(planted: ModuleType, name: str) -> None:
    found = planted.findings(planted.table())
    for get in (catalog.table, catalog.picture):
        with pytest.raises(TableError, match=f"'{name}': these runs have nothing for it; it needs "):
            get(found, name)


def test_unknown_names_get_the_nearest(planted: ModuleType) -> None:
    found = planted.findings(planted.table())
    with pytest.raises(UsageError, match=r"table 'speedup' is unknown; did you mean 'speedups'\?"):
        catalog.table(found, "speedup")
    with pytest.raises(UsageError, match=r"figure 'scaling_curves' is unknown; did you mean 'scaling-curves'\?"):
        catalog.picture(found, "scaling_curves")


def test_published_values_are_the_papers() -> None:
    def value(topic: str, method: str, size: str, **more: str) -> float:
        found = [
            f
            for f in facts(topic)
            if (f.method, f.size) == (method, size) and all(getattr(f, k) == v for k, v in more.items())
        ]
        assert len(found) == 1, found
        return found[0].value

    assert [value("main", "mhar", size) for size in ("100m", "350m", "1b")] == [-0.061, -0.149, -0.140]
    assert [value("seeds", "mhar", size) for size in ("100m", "350m", "1b")] == [-0.045, -0.090, -0.071]
    assert [value("speedup", m, "four scales") for m in ("msar", "attnres", "mhc")] == [1.58, 1.35, 1.30]
    assert value("tasks", "msar", "28b", setting="average of 12") == 52.4
    assert value("streams", "msar", "10b", setting="m=4") == 1.847
    assert all(fact.where and fact.paper in ("MHAR", "MSAR") for fact in FACTS)
    assert len({(f.topic, f.method, f.size, f.setting, f.quantity, f.where) for f in FACTS}) == len(FACTS)
    with pytest.raises(UsageError, match="topic 'mains' is unknown; did you mean 'main'"):
        facts("mains")


def test_published_and_own_values_stand_in_columns_of_their_own(planted: ModuleType) -> None:
    found = planted.findings(planted.table())
    main = catalog.table(found, "published-main")
    assert "note" not in {column.key for column in main.columns} and "Note: one seed; validation" in main.caption
    assert "note" in {column.key for column in catalog.table(found, "published-throughput").columns}
    for topic in TOPICS:
        table = beside.published(topic, found)
        assert list(table.frame["published"]) == [fact.value for fact in facts(topic)]
    table = beside.published("main", found)
    by = dict(zip(zip(table.frame["method"], table.frame["size"], strict=True), table.frame["own_where"], strict=True))
    assert pd.isna(by["attnres", "100m"]) and by["mhar", "100m"] == "1.58m"  # the largest of these runs
    assert "not to be subtracted" in table.caption


def test_overheads_are_the_papers() -> None:
    frame = overhead.overhead(sizes=("1b",), methods=("baseline", "attnres", "mhar")).frame
    base, attnres, mhar = frame.to_dict(orient="records")
    assert round(mhar["parameters_added"], 2) == 0.02  # MHAR, section 3
    assert mhar["parameters"] == attnres["parameters"] and mhar["flops"] == attnres["flops"]
    assert base["flops_added"] == 0


def test_traffic_counts_agree_with_the_published_ones() -> None:
    table = overhead.traffic().frame
    by = dict(zip(table["how"], table["sublayer"], strict=True))
    assert by["read stream and output, write stream"] == 3
    assert by["4 streams, unfused: 8m + 2"] == 34  # AttnRes, Table 1
    assert by["every source read at every site"] == pytest.approx((73 * 74 / 2 + 73) / 73)
    assert by["every source read at every site"] > by["blocks of 9 sublayers"] > by["blocks of 9, two phases"]


@pytest.mark.slow
@pytest.mark.parametrize(("methods", "sizes"), [(1, 1), (2, 8), (12, 8)])
def test_core_figures_keep_their_text_inside(planted: ModuleType, methods: int, sizes: int) -> None:
    names = ("baseline", *(f"a method with a long name {i}" for i in range(1, methods)))
    runs = planted.table(sizes=sizes, methods=names)
    found = planted.findings(runs, planted.histories(runs, points=5))
    for name in ("scaling-curves", "seed-deltas", "noise-floor", "loss-curves", "speedup-by-scale"):
        picture = catalog.FIGURES[name].build(found)
        if picture is not None:
            with style.context():
                inside(picture.draw(style.NARROW_IN))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_figures_survive_huge_and_tiny_losses(planted: ModuleType, scale: float) -> None:
    runs = planted.table(loss_scale=scale)
    found = inquire(runs, planted.histories(runs))
    for name in ("scaling-curves", "loss-curves"):
        with style.context():
            inside(catalog.picture(found, name).draw(style.WIDE_IN))


def test_factors_beside_arrows_lie_on_nothing(planted: ModuleType) -> None:
    """Three methods of nearly one loss at the largest scale, whose arrows end at the right edge of the axes."""
    runs = planted.table(sizes=3, methods=("baseline", "attnres", "hc", "mhar"))
    found = planted.findings(runs)
    most, last = float(runs["flops"].max()), found.curves["baseline"].loss[-1]
    near = [
        replace(
            speedup,
            scales=tuple(
                replace(p, compute=most, loss=last, speedup=0.95, baseline_compute=0.95 * most, extrapolated=False)
                for p in speedup.scales
            ),
        )
        for speedup in found.speedups
    ]
    for width in (style.WIDE_IN, style.NARROW_IN):
        with style.context():
            figure = curves.scaling_curves(found.compared, found.curves, near, width_in=width)
            inside(figure)
        texts = [text.get_text() for text in figure.axes[0].texts if text.get_text()]
        assert sum("\u00d7 at " in text for text in texts) == 3


def test_alike_names_stay_apart_when_shortened(planted: ModuleType) -> None:
    names = ("baseline", "20260611_tailema_2720_submission", "20260611_tailema_2730_submission")
    short = style.short_names(names, 18)
    assert len(set(short.values())) == 3 and all(len(text) <= 18 for text in short.values())
    found = planted.findings(planted.table(methods=names))
    with style.context():
        for name in ("scaling-curves", "speedup-by-scale", "seed-deltas", "noise-floor", "loss-curves"):
            picture = catalog.FIGURES[name].build(found)
            if picture is None:
                continue
            figure = picture.draw(style.WIDE_IN)
            told = {text.get_text() for axis in figure.axes for text in (*axis.texts, *axis.get_yticklabels())}
            told |= {text.get_text() for legend in figure.legends for text in legend.get_texts()}
            for part in ("272", "273"):
                assert any(part in text for text in told), (name, told)


def test_a_dollar_in_a_cut_name_is_still_a_dollar() -> None:
    for limit in range(12, 30):
        text = style.shorten("Adam $x$ with a long tail $y$ of dollars $", limit)
        assert text.count("$") == text.count(r"\$") and len(text.replace(r"\$", "$")) <= limit


def test_letters_without_a_glyph_are_told_once_a_figure(
    planted: ModuleType, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    found = planted.findings(planted.table(methods=("baseline", "\u4f18\u5316")))
    with style.context():
        svg.encode(catalog.picture(found, "scaling-curves").draw(style.WIDE_IN), ("png", "svg"))
    told = [record.message for record in caplog.records]
    assert told == ["the font of figures lacks 2 letters of these names; boxes stand in their place"]
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_one_kind_of_noise_alone_is_no_figure(planted: ModuleType) -> None:
    found = planted.findings(planted.table())
    assert catalog.FIGURES["noise-floor"].build(replace(found, noises=found.noises[-1:], deltas=())) is None
    assert catalog.TABLES["noise"].build(replace(found, noises=found.noises[-1:], deltas=())) is not None


def test_many_effects_have_a_row_a_method(planted: ModuleType) -> None:
    runs = planted.table(sizes=6, methods=("baseline", *(f"m{i}" for i in range(9))), sigma=0.02)
    found = inquire(runs)
    assert len(found.deltas) == 9 * 7
    picture = catalog.picture(found, "noise-floor")
    told = picture.data["what"].tolist()
    assert [text for text in told if text.startswith("m")] == [f"m{i} at all sizes" for i in range(9)]
    assert picture.caption.endswith("Of 63 differences, one a method.")
    with style.context():
        assert picture.draw(style.WIDE_IN).get_figheight() < 6


def test_a_tail_is_shaded_only_where_all_runs_end_together(planted: ModuleType) -> None:
    runs = planted.table(sizes=1)
    lines = planted.histories(runs)
    longer = lines["run_key"] == runs["run_key"].iloc[0]
    apart = lines.assign(step=lines["step"].where(~longer, lines["step"] * 3))

    def shaded(histories: pd.DataFrame) -> int:
        with style.context():
            return len(losses.loss_curves(runs, histories).axes[0].patches)

    assert (shaded(lines), shaded(apart)) == (1, 0)


def test_equal_losses_of_two_methods_do_not_hide_one_another(planted: ModuleType) -> None:
    runs = planted.table(sizes=1, methods=("mhar", "delta"), seeds=1)
    rows = [
        runs.assign(heads=h, val_loss=3.0, lr=rate, run_key=runs["run_key"] + str(h))
        for h, rate in ((1, 1e-3), (4, 2e-3))
    ]
    table = pd.concat(rows, ignore_index=True)
    for axis_of, draw in (("heads", grids.head_counts), ("lr", grids.learning_rates)):
        cells = gather(table, ["size", "method", axis_of], within=["size", "method"])
        with style.context():
            axis = draw(cells, sizes=list(table["size"].unique())).axes[0]
        lines = [x for line in axis.lines if len(x := tuple(np.asarray(line.get_xdata(), dtype=float))) == 2]
        assert len(lines) == 2 and not set(lines[0]) & set(lines[1])


def test_routing_figures_show_only_sources_a_site_can_see() -> None:
    weights = np.full((5, 6, 2), 0.5)
    site, source = np.indices((5, 6))
    weights[source > site + 1] = np.nan  # the first probed site is the first with two sources
    with style.context():
        figure = routing.routing_weights(weights, sites=range(1, 6))
        inside(figure)
        shown = figure.axes[0].images[0].get_array()
    assert shown is not None and np.ma.count(shown) == 20
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["1", "2", "3", "4", "5"]
    with pytest.raises(AssertionError, match="expected \\(sites, sources, heads\\)"):
        routing.routing_weights(np.zeros((3, 3)))


def test_costs_draw_ceilings() -> None:
    frame = pd.DataFrame(
        {"size": ["a", "a"], "method": ["baseline", "mhar"], "tokens_per_s": [10.0, 8.0], "peak_gib": [1, 2]}
    )
    with style.context():
        figure = costs.costs(frame, ceilings={"peak_gib": 80.0})
        assert figure.axes[1].get_ylim()[1] >= 80
        encoded = svg.encode(figure, ("pdf", "svg"))
    assert b"/FontFile2" in encoded["pdf"]  # fonts are embedded, as TrueType
    assert b"<text" not in encoded["svg"]  # letters are outlines
