"""Draws the pictures of the documents from the committed records: `python -m perf.pictures [--out docs/pictures]`.

Each is two SVG files, for light and for dark pages, and the same bytes wherever it is drawn with the matplotlib that
pyproject.toml pins: text as paths of DejaVu Sans, fixed ids, no date. A picture without a record is not drawn.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from perf.bench import OURS
from perf.rows import CURVE_HEADS
from perf.tables import GPUS, PEERS, RESULTS, Record, Row, find, rows

PICTURES = Path(__file__).parents[1] / "docs/pictures"
WIDTH = 8.3  # inches; some 800 pixels where SVG is shown at its own size
PANEL = 2.15  # height of a row of panels
Points = list[tuple[float, float]]


class Theme(NamedTuple):
    """Colours of text, of lines behind the data, and of candidates."""

    text: str
    grid: str
    colours: tuple[str, ...]

    @property
    def lines(self) -> dict[str, str]:
        return dict(zip((*MARKERS, "ceiling"), self.colours, strict=True))


THEMES = {
    "light": Theme("#1f2328", "#d1d9e0", ("#c2410c", "#2563a8", "#4d7c0f", "#7c3aad", "#6e7781")),
    "dark": Theme("#e6edf3", "#3d444d", ("#ff8a4c", "#6cb6ff", "#a5d65a", "#cf9bff", "#9198a1")),
}
MARKERS = {OURS: "o", "FA4": "s", "cuDNN": "^", "FlashInfer": "D"}


@contextmanager
def style(theme: Theme) -> Iterator[Any]:
    """Yields pyplot with the settings that make files equal bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: dict[str, Any] = {
        "svg.fonttype": "path",
        "svg.hashsalt": "cute_attn",
        "font.family": "DejaVu Sans",
        "font.size": 8.5,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), theme.text),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), theme.grid),
        **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
        "grid.linewidth": 0.6,
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "lines.markersize": 4.5,
    }
    complete: Any = {**matplotlib.rcParamsDefault, **settings, "backend": "Agg"}
    with matplotlib.rc_context(complete):
        yield pyplot


def family(name: str) -> str:
    """Returns the library that a candidate, or a condition as "FlashInfer, warm", belongs to."""
    return OURS if name.startswith(OURS) else PEERS.get(name.partition(",")[0], "FlashInfer")


def grid_of(rows: int, columns: int, height: float) -> tuple[Any, Any]:
    """Returns a figure and its panels."""
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(WIDTH, height), squeeze=False, layout="constrained")


# ---- speed over length and over batch size


def lines_of(chosen: Sequence[Row], x: Callable[[Mapping[str, Any]], float]) -> dict[str, Points]:
    """Returns for each library its points: of ours what "auto" ran, of others the fastest kernel in every row. Where a
    kernel of a library was not built for the run it has none: that may be its fastest.
    """
    found: dict[str, Points] = {}
    for row in sorted(chosen, key=lambda row: x(row["workload"])):
        speeds: dict[str, float] = {}
        for name, entry in row["candidates"].items():
            if "speed" in entry and (name == OURS or not name.startswith(OURS)):
                speeds[family(name)] = max(speeds.get(family(name), 0.0), entry["speed"])
        unbuilt = {family(name) for name, entry in row["candidates"].items() if "not built" in entry.get("reason", "")}
        for name in speeds.keys() - unbuilt:
            found.setdefault(name, []).append((x(row["workload"]), speeds[name]))
    return found


class Curves(NamedTuple):
    """A row of panels per GPU. `section`: of the curves of a column, in whose absence `wanted` rows of the `anchors`
    stand in for them. `ceiling`: drawn as a dashed line.
    """

    section: str
    anchors: str
    wanted: Callable[[Mapping[str, Any], Any], bool]
    titles: Mapping[Any, str]  # by column
    x: Callable[[Mapping[str, Any]], float]
    labels: tuple[str, str]
    ceiling: str | None = None

    def found(self, gpu: str, column: Any, results: Path) -> tuple[Record, list[Row]] | None:
        """Returns the record and the rows of a panel."""
        if (own := rows(gpu, self.section.format(column), results)) or not (own := rows(gpu, self.anchors, results)):
            return own
        return own[0], [row for row in own[1] if self.wanted(row["workload"], column)]

    def lines(self, gpu: str, column: Any, results: Path) -> dict[str, Points]:
        """Returns the lines of a panel."""
        own = self.found(gpu, column, results)
        return lines_of(own[1], self.x) if own else {}


PREFILL = Curves(
    "curve-d{}",
    "prefill",
    lambda w, d: w["head_dim"] == d and w["causal"] and (w["num_qo_heads"], w["num_kv_heads"]) == CURVE_HEADS[d],
    {d: f"head dim {d}" for d in CURVE_HEADS},
    lambda w: float(max(w["kv_lens"])),
    ("sequence length, causal prefill", "TFLOP/s"),
)
DECODE = Curves(
    "curve-decode-{}",
    "decode",
    lambda w, kv_dtype: w["kv_dtype"] == kv_dtype and w["page_size"] == 16 and max(w["kv_lens"]) == 8192,
    {"bfloat16": "bf16 cache", "e4m3": "fp8 (e4m3) cache"},
    lambda w: float(len(w["kv_lens"])),
    ("requests in the batch, decode", "GB/s"),
    "read",
)


def draw_curves(kind: Curves, theme: Theme, results: Path) -> Any | None:
    """Draws a row of panels per GPU that has lines."""
    lines = {(gpu, column): kind.lines(gpu, column, results) for gpu in GPUS for column in kind.titles}
    first = {gpu: kind.found(gpu, next(iter(kind.titles)), results) for gpu in GPUS if kind.ceiling}
    ceilings = {gpu: own[0]["ceilings"][kind.ceiling] for gpu, own in first.items() if own}
    gpus = [gpu for gpu in GPUS if any(lines[gpu, column] for column in kind.titles)]
    if not gpus:
        return None
    figure, grid = grid_of(len(gpus), len(kind.titles), PANEL * len(gpus) + 0.55)
    shown: dict[str, Any] = {}
    for gpu, line_of_panels in zip(gpus, grid, strict=True):
        top = max(speed for column in kind.titles for points in lines[gpu, column].values() for _, speed in points)
        for (column, title), axes in zip(kind.titles.items(), line_of_panels, strict=True):
            for name in (n for n in MARKERS if n in lines[gpu, column]):
                form = {"color": theme.lines[name], "marker": MARKERS[name], "zorder": 3 if name == OURS else 2}
                (shown[name],) = axes.plot(*zip(*lines[gpu, column][name], strict=True), **form)
            if gpu in ceilings:
                colour = theme.lines["ceiling"]
                shown["read ceiling"] = axes.axhline(ceilings[gpu], color=colour, linestyle="--", linewidth=1)
            axes.set_title(f"{GPUS[gpu]}, {title}")
            axes.set_ylim(0, max(top, ceilings.get(gpu, 0.0)) * 1.05)
            powers = sorted({x for points in lines[gpu, column].values() for x, _ in points})  # of two: 512, 1k, 16k
            axes.set_xscale("log", base=2)
            axes.set_xticks(powers, [f"{x / 1024:.0f}k" if x >= 1024 else f"{x:.0f}" for x in powers])
            axes.minorticks_off()
            if gpu == gpus[-1]:
                axes.set_xlabel(kind.labels[0])
        line_of_panels[0].set_ylabel(kind.labels[1])
    figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=len(shown))
    return figure


def roofline(theme: Theme, results: Path) -> Any | None:
    """Draws ours and the best peer's share of the ceilings: prefill of the bf16 GEMM, decode of the read bandwidth."""
    columns = {"prefill": "share of the bf16 GEMM", "decode": "share of the read bandwidth"}
    chosen = {(gpu, kind): shares(gpu, kind, results) for gpu in GPUS for kind in columns}
    gpus = [gpu for gpu in GPUS if all(chosen[gpu, kind] for kind in columns)]
    if not gpus:
        return None
    count = max(len(chosen[gpu, kind]) for gpu in gpus for kind in columns)
    figure, grid = grid_of(len(gpus), len(columns), 0.155 * count * len(gpus) + 0.75 * len(gpus) + 0.3)
    for gpu, line_of_panels in zip(gpus, grid, strict=True):
        for (kind, title), axes in zip(columns.items(), line_of_panels, strict=True):
            names, own, peer = zip(*chosen[gpu, kind], strict=True)
            places = range(len(names), 0, -1)
            axes.hlines(places, 0, own, color=theme.lines[OURS], linewidth=1, alpha=0.5)
            mine = axes.scatter(own, places, color=theme.lines[OURS], s=16, zorder=3)
            pairs = [(share, place) for share, place in zip(peer, places, strict=True) if share is not None]
            other = axes.scatter(*zip(*pairs, strict=True), color=theme.lines["FA4"], marker="|", s=44, zorder=4)
            axes.set_yticks(places, names, fontsize=7)
            axes.set_ylim(0.2, len(names) + 0.8)
            axes.set_xlim(0, 1.2)  # the largest share is 1.15
            axes.grid(axis="y", visible=False)
            axes.set_title(f"{GPUS[gpu]}, {kind}")
            axes.set_xlabel(title)
    figure.legend([mine, other], [OURS, "best peer"], loc="outside upper center", ncols=2)
    return figure


def shares(gpu: str, kind: str, results: Path) -> list[tuple[str, float, float | None]]:
    """Returns (label, our share of the ceiling, the best peer's) of the anchors of prefill or decode."""
    _, found = rows(gpu, kind, results) or (None, [])
    triples = []
    for row in found:
        own, peer = (row["candidates"].get(name, {}).get("share") for name in (OURS, row["best_peer"]))
        if own is not None:
            triples.append((short_label(row), own, peer))
    return triples


def short_label(row: Row) -> str:
    """Returns a problem in few words."""
    w = row["workload"]
    heads = f"{w['num_qo_heads']}/{w['num_kv_heads']}"
    lengths = f"{len(w['kv_lens'])} x {max(w['kv_lens'])}"
    if max(w["qo_lens"]) > 1:
        return f"d {w['head_dim']}, {heads}, {lengths} {'causal' if w['causal'] else 'full'}"
    return f"{'fp8' if w['kv_dtype'] == 'e4m3' else 'bf16'}, {heads}, {lengths}"


def cold_start(theme: Theme, results: Path) -> Any | None:
    """Draws seconds from the import to the first prefill, on a logarithmic axis: a panel per GPU."""
    records = {gpu: record for gpu in GPUS if (record := find(gpu, "coldstart", results))}
    chosen = {
        gpu: [(n, e["import_s"] + e["prefill_s"]) for n, e in record["coldstart"].items() if "prefill_s" in e]
        for gpu, record in records.items()
    }
    chosen = {gpu: bars for gpu, bars in chosen.items() if bars}
    if not chosen:
        return None
    from matplotlib.ticker import NullLocator

    figure, grid = grid_of(1, len(chosen), 0.26 * max(map(len, chosen.values())) + 0.9)
    longest = max(seconds for bars_of_gpu in chosen.values() for _, seconds in bars_of_gpu)
    for (gpu, bars_of_gpu), axes in zip(chosen.items(), grid[0], strict=True):
        names, seconds = zip(*bars_of_gpu, strict=True)
        places = range(len(names), 0, -1)
        axes.barh(places, seconds, color=[theme.lines[family(name)] for name in names], height=0.62)
        for place, value in zip(places, seconds, strict=True):
            text = f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"
            axes.annotate(text, (value, place), (3, 0), textcoords="offset points", va="center")
        axes.set_xscale("log")
        axes.set_xlim(0.05, longest * 5)
        ticks = [tick for tick in (0.1, 1, 10, 100) if tick <= longest]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yticks(places, names if axes is grid[0][0] else [""] * len(names))
        axes.grid(axis="y", visible=False)
        axes.set_title(GPUS[gpu])
        axes.set_xlabel("seconds from the import to the first prefill")
    return figure


PICTURES_OF: dict[str, Callable[[Theme, Path], Any | None]] = {
    "prefill": functools.partial(draw_curves, PREFILL),
    "decode": functools.partial(draw_curves, DECODE),
    "roofline": roofline,
    "cold_start": cold_start,
}


def draw(out: Path, results: Path = RESULTS) -> list[Path]:
    """Writes every picture that has a record into `out`, for both themes, and returns the files."""
    files = []
    out.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES_OF.items():
        for title, theme in THEMES.items():
            with style(theme) as pyplot:
                figure = picture(theme, results)
                if figure is None:
                    continue
                path = out / f"{name}_{title}.svg"
                figure.savefig(path, metadata={"Date": None, "Creator": None})
                pyplot.close(figure)
                files.append(path)
    return files


def bars(record: Record, path: Path) -> None:
    """Draws the rows of a run of `python -m cute_attn bench` into a PNG: a group of bars per row."""
    theme = THEMES["light"]
    chosen = [row for row in record["rows"] if any("speed" in entry for entry in row["candidates"].values())]
    names = list(dict.fromkeys(n for row in chosen for n, e in row["candidates"].items() if "speed" in e))
    with style(theme) as pyplot:
        figure, ((axes,),) = grid_of(1, 1, 0.16 * len(chosen) * (len(names) + 1) + 1.0)
        for i, name in enumerate(names):
            places = [-(row * (len(names) + 1) + i) for row in range(len(chosen))]
            shares_of_name = [row["candidates"].get(name, {}).get("share", 0.0) for row in chosen]
            shade = 0.5 + 0.5 / (1 + sum(family(n) == family(name) for n in names[:i]))
            axes.barh(places, shares_of_name, color=theme.lines[family(name)], alpha=shade, label=name)
        middles = [-(row * (len(names) + 1) + (len(names) - 1) / 2) for row in range(len(chosen))]
        axes.set_yticks(middles, [row["name"] for row in chosen], fontsize=7)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("share of the ceiling: bf16 GEMM of prefill, read bandwidth of decode")
        axes.set_title(record["environment"]["gpu"])
        figure.legend(loc="outside upper center", ncols=3)
        figure.savefig(path, dpi=150, facecolor="white")
        pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.pictures", description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder of the files (default docs/pictures)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records (default perf/results)")
    options = parser.parse_args(argv)
    for path in draw(options.out, options.results):
        print(path)


if __name__ == "__main__":
    main()
