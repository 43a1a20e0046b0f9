"""The pictures of the HTML report, drawn by matplotlib from what the checks measured, as SVG that stands in the page itself.

Colours are the page's own: what is drawn in one of the marks below is written as `currentColor` or as one of the page's variables, so
that a picture is right on a light page and on a dark one. The same figures give the same bytes.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter, NullFormatter

from pytest_specdecode.report.text import shown

if TYPE_CHECKING:
    from pytest_specdecode.report.model import DraftReport

TEXT, ACCENT, SECOND, LINE, PANEL = "#010203", "#010204", "#010205", "#010206", "#010207"
_MARKS = {
    TEXT: "currentColor",
    ACCENT: "var(--accent)",
    SECOND: "var(--second)",
    LINE: "var(--line)",
    PANEL: "var(--panel)",
}
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    # Names from a checkpoint are text, whatever dollar signs they hold.
    "text.parse_math": False,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
}
#: Inches; 360 pixels of a phone show it without a change of scale.
_WIDTH = 4.0
_MOST_ROWS = 64
_MOST_LINES = 4


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One drawing.

    Attributes:
        title: what it shows.
        caption: how to read it.
        svg: an `<svg>` element.
    """

    title: str
    caption: str
    svg: str


def pictures(draft: DraftReport) -> list[Picture]:
    """The pictures that the draft's results have figures for."""
    found: list[Picture] = []
    drawers: tuple[Callable[[DraftReport], Picture | None], ...] = (
        shape,
        fused_error,
        weights,
        acceptance,
        rope,
    )
    for draw in drawers:
        with (
            warnings.catch_warnings(),
            matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": ascii((draw.__name__, draft.path))}),
        ):
            # Letters that the font lacks are shown by the reader's own.
            warnings.simplefilter("ignore")
            try:
                picture = draw(draft)
            except Exception as error:
                # A drawing that fails is a fault of ours, and no reason to lose the report.
                said = shown(f"{type(error).__name__}: {error}")
                picture = Picture(
                    title=f"The picture {draw.__name__!r}", caption=f"It could not be drawn: {said}", svg=""
                )
        if picture is not None:
            found.append(picture)
    return found


# --- the draft's shape ---------------------------------------------------------------------------------------------------


def shape(draft: DraftReport) -> Picture | None:
    """What the draft is made of, from the taps to the head, with sizes."""
    if draft.spec is None:
        return None
    boxes = list(_boxes(draft.spec.to_dict()))
    figure = Figure(figsize=(_WIDTH, 0.75 * len(boxes)))
    axes = figure.add_subplot()
    axes.axis("off")
    axes.set_xlim(0, 10)
    axes.set_ylim(-len(boxes) * 10, 0)
    for number, (title, size) in enumerate(boxes):
        top = -number * 10
        axes.add_patch(
            FancyBboxPatch(
                (0.4, top - 7.5),
                9.2,
                6.5,
                boxstyle="round,pad=0.1,rounding_size=0.3",
                facecolor=PANEL,
                edgecolor=ACCENT,
            )
        )
        axes.text(5, top - 3.1, title, ha="center", va="center", weight="bold")
        axes.text(5, top - 5.9, size, ha="center", va="center", size=8)
        if number:
            axes.annotate("", (5, top - 0.9), (5, top + 2.4), arrowprops={"arrowstyle": "->", "color": TEXT})
    return _picture(
        figure, "Shape of the draft", "Sizes are those of the configuration; ? is one that it does not state."
    )


def _boxes(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    hidden, target = _size(spec["hidden_size"]), _size(spec["target_hidden_size"])
    taps, block, vocabulary = spec["taps"], spec["block"], spec["vocabulary"]
    if taps["required"] and taps["count"]:
        ids = taps["ids"] or []
        named = f"layers {', '.join(map(str, ids[:8]))}{', …' if len(ids) > 8 else ''}" if ids else "layers not stated"
        yield f"{taps['count']} taps of the target", f"{shown(named, 60)}: {taps['count']} x {target}"
        yield "fc", f"{taps['count']} x {target} → {hidden}"
    else:
        yield "hidden state of the target", target
    if block is not None:
        yield "block", f"{_size(block['block_size'])} rows, mask token {_size(block['mask_token_id'])}"
    for first, last, text in _runs([_layer(layer) for layer in spec["layers"]]):
        yield (f"layer {first}" if first == last else f"layers {first} to {last}"), text
    rows = vocabulary["vocab_size"] if vocabulary["draft_vocab_size"] is None else vocabulary["draft_vocab_size"]
    whole = vocabulary["vocab_size"]
    yield "head", f"{hidden} → {_size(rows)}" + ("" if rows == whole else f" of the target's {_size(whole)} tokens")


def _layer(layer: Mapping[str, Any]) -> str:
    attention, moe = layer["attention"], layer["moe"]
    parts = []
    if attention is not None and "kv_lora_rank" in attention:
        parts.append(f"{_size(attention['num_heads'])} heads, latent {_size(attention['kv_lora_rank'])}")
    elif attention is not None:
        parts.append(
            f"{_size(attention['num_heads'])} heads, {_size(attention['num_kv_heads'])} KV heads x {_size(attention['head_dim'])}"
        )
        if attention["sliding_window"]:
            parts.append(f"window {_size(attention['sliding_window'])}")
    if moe is not None:
        parts.append(f"{_size(moe['num_experts'])} experts x {_size(moe['intermediate_size'])}")
    elif layer["intermediate_size"]:
        parts.append(f"MLP {_size(layer['intermediate_size'])}")
    return "; ".join(parts) or "no attention"


def _runs(texts: Sequence[str], most: int = 8) -> Iterator[tuple[int, int, str]]:
    """Layers that are alike taken together: first, last, text; the last of too many runs stands for the rest."""
    runs: list[tuple[int, int, str]] = []
    for index, text in enumerate(texts):
        if runs and runs[-1][2] == text:
            runs[-1] = (runs[-1][0], index, text)
        else:
            runs.append((index, index, text))
    yield from runs[:most]
    if len(runs) > most:
        yield runs[most][0], runs[-1][1], "of several kinds"


def _size(value: object) -> str:
    if not isinstance(value, int):
        return "?"
    return f"{value:,}" if abs(value) < 10**12 else "more than 10^12"


# --- the fused path against float64 --------------------------------------------------------------------------------------


def fused_error(draft: DraftReport) -> Picture | None:
    """The fused path's error against float64, per layer and KV head, over eager's."""
    figures = draft.figures("fused-kv.matches-reference")
    tables = [
        (name, _matrix(figures.get(f"{name.lower()}_error")), _matrix(figures.get(f"{name.lower()}_eager")))
        for name in "KV"
    ]
    panels = [(name, error, eager) for name, error, eager in tables if error and eager]
    if not panels:
        return None
    rows = len(panels[0][1])
    figure = Figure(figsize=(_WIDTH, 1.0 + len(panels) * max(0.9, 0.32 * min(rows, _MOST_ROWS))))
    for number, (name, error, eager) in enumerate(panels, start=1):
        axes = figure.add_subplot(len(panels), 1, number)
        _heat(axes, error[:_MOST_ROWS])
        worst, due = max(map(max, error)), max(map(max, eager))
        axes.set_title(f"{name}: at most {worst:.1e}, eager's {due:.1e}", size=9)
        axes.set_ylabel("layer")
    figure.axes[-1].set_xlabel("KV head")
    return _picture(
        figure,
        "Error of the fused path against float64",
        "Root mean square of the error over that of the values, per layer and KV head: the stronger the colour of a cell, the larger. "
        "What eager code in the same dtype gives is the cost of the dtype.",
    )


def _heat(axes: Axes, table: list[list[float]]) -> None:
    high = max(map(max, table)) or 1.0
    columns = len(table[0])
    cells = [(row, column, value) for row, values in enumerate(table) for column, value in enumerate(values)]
    axes.add_collection(
        PolyCollection(
            [
                [(column + x, row + y) for x, y in ((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5))]
                for row, column, _ in cells
            ],
            facecolors=[to_rgba(ACCENT, 0.05 + 0.45 * value / high) for _, _, value in cells],
            linewidths=0,
        )
    )
    for row, column, value in cells if columns <= 8 and len(table) <= 16 else ():
        axes.text(column, row, f"{value:.1e}", ha="center", va="center", size=7)
    axes.grid(False)
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.set_xticks(_ticks(columns))
    axes.set_yticks(_ticks(len(table)))


def _ticks(number: int) -> list[int]:
    return list(range(0, number, max(1, math.ceil(number / 8))))


def _matrix(value: object) -> list[list[float]] | None:
    if not isinstance(value, list) or not value or not all(isinstance(row, list) and row for row in value):
        return None
    if not all(_is_number(item) for row in value for item in row):
        return None
    return [[float(item) for item in row] for row in value]


# --- weights -------------------------------------------------------------------------------------------------------------


def weights(draft: DraftReport) -> Picture | None:
    """The magnitudes of each tensor's elements, with the largest ones."""
    tensors = draft.figures("weights.finite").get("tensors")
    if not isinstance(tensors, Mapping):
        return None
    rows = [
        (name, item) for name, item in tensors.items() if isinstance(item, Mapping) and _is_number(item.get("largest"))
    ]
    rows = [(name, item) for name, item in rows if item["largest"] > 0]
    if not rows:
        return None
    left = len(rows) - _MOST_ROWS
    rows = rows[:_MOST_ROWS]
    figure = Figure(figsize=(_WIDTH, 1.0 + 0.19 * len(rows)))
    axes = figure.add_subplot()
    axes.set_xscale("log")
    _plain_labels(axes.xaxis)
    places = range(len(rows))
    marks = {
        key: [_mark(item, key) for _, item in rows] for key in ("p05", "p25", "p50", "p75", "p95", "p999", "largest")
    }
    axes.hlines(places, marks["p05"], marks["p95"], color=ACCENT, linewidth=1)
    axes.hlines(places, marks["p25"], marks["p75"], color=ACCENT, linewidth=4)
    axes.plot(marks["p50"], places, marker="|", markersize=6, linestyle="", color=TEXT)
    axes.plot(marks["p999"], places, marker=".", markersize=4, linestyle="", color=ACCENT)
    for mark, is_far in ((".", False), ("x", True)):
        rare = [row for row in places if (marks["largest"][row] > 10 * marks["p999"][row]) is is_far]
        axes.plot([marks["largest"][row] for row in rare], rare, marker=mark, markersize=4, linestyle="", color=SECOND)
    axes.set_yticks(range(len(rows)), [_tail(name) for name, _ in rows], size=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("magnitude")
    axes.grid(axis="y", visible=False)
    more = f" {left} more tensors are not shown." if left > 0 else ""
    return _picture(
        figure,
        "Weights per tensor",
        "Magnitudes: 5 to 95 % (thin), 25 to 75 % (thick), the median, 99.9 % (dot) and the largest element, a cross where that is more "
        f"than ten times the 99.9 %. Quantiles are those of up to 65,536 elements of a tensor, the largest is exact.{more}",
    )


def _mark(item: Mapping[str, Any], key: str) -> float:
    """A magnitude for a logarithmic axis, which has no zero: one that is a millionth of the largest or less stands at that."""
    value = item.get(key)
    floor = float(item["largest"]) * 1e-6
    return floor if value is None or not _is_number(value) else max(float(value), floor)


def _tail(name: object, most: int = 34) -> str:
    """A tensor's name by its end, which tells it from the others."""
    text = shown(str(name)[-2 * most :], 2 * most)
    return text if len(text) <= most else "…" + text[1 - most :]


# --- acceptance ----------------------------------------------------------------------------------------------------------


def acceptance(draft: DraftReport) -> Picture | None:
    """The rate at which each drafted position is accepted, with Wilson's intervals."""
    figures = draft.figures("acceptance.length")
    figure = Figure(figsize=(_WIDTH, 2.6))
    axes = figure.add_subplot()
    drawn = False
    for key, label, color, shift in (
        ("served", "as served", ACCENT, -0.08),
        ("every", "from every position", SECOND, 0.08),
    ):
        score = figures.get(key)
        positions = score.get("positions") if isinstance(score, Mapping) else None
        points = [item for item in positions or [] if isinstance(item, Mapping)]
        points = [
            item for item in points if all(_is_number(item.get(name)) for name in ("position", "rate", "low", "high"))
        ]
        if not points:
            continue
        drawn = True
        rates = [item["rate"] for item in points]
        axes.errorbar(
            [item["position"] + shift for item in points],
            rates,
            yerr=[
                [max(0.0, item["rate"] - item["low"]) for item in points],
                [max(0.0, item["high"] - item["rate"]) for item in points],
            ],
            marker="o",
            markersize=4,
            capsize=3,
            color=color,
            label=label,
        )
        axes.set_xticks(_places(int(max(item["position"] for item in points))))
    if not drawn:
        return None
    axes.set_ylim(0, 1)
    axes.set_xlabel("drafted position")
    axes.set_ylabel("accepted")
    axes.legend()
    length, label = figures.get("accepted_length"), shown(figures.get("label") or "accepted length", 60)
    said = f"{label.capitalize()} {length:.2f}. " if isinstance(length, (int, float)) else ""
    return _picture(
        figure,
        "Acceptance per drafted position",
        f"{said}The share of rounds that keep the token at a position and all before it; bars are 95 % Wilson intervals.",
    )


def _places(last: int) -> list[int]:
    return list(range(1, last + 1, max(1, math.ceil(last / 16))))


# --- RoPE ----------------------------------------------------------------------------------------------------------------


def rope(draft: DraftReport) -> Picture | None:
    """The rotary frequencies of the draft's layers against the target's."""
    figures = draft.figures("target.rope")
    figure = Figure(figsize=(_WIDTH, 2.8))
    axes = figure.add_subplot()
    axes.set_yscale("log")
    _plain_labels(axes.yaxis)
    sides = {side: figures.get(side) for side in ("draft", "target")}
    for side, curves in sides.items():
        found = [item for item in curves or [] if isinstance(item, Mapping)] if isinstance(curves, list) else []
        for item in found[:_MOST_LINES]:
            values = item.get("frequencies")
            if (
                not isinstance(values, list)
                or not values
                or not all(_is_number(value) and value > 0 for value in values)
            ):
                continue
            axes.plot(
                range(len(values)),
                values,
                color=ACCENT if side == "draft" else SECOND,
                linestyle="-" if side == "draft" else "--",
                linewidth=2 if side == "draft" else 1.5,
                label=shown(f"{side}: {item.get('label')}", 50),
            )
    if not axes.lines:
        return None
    axes.set_xlabel("pair of lanes")
    axes.set_ylabel("radians per position")
    axes.legend()
    return _picture(
        figure,
        "RoPE frequencies, draft against target",
        "Curves that lie on one another rotate alike. A draft may have another head width than its target, and then other pairs.",
    )


# --- SVG -----------------------------------------------------------------------------------------------------------------


def _picture(figure: Figure, title: str, caption: str) -> Picture:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return Picture(title=title, caption=caption, svg=_inline(stream.getvalue()))


def _inline(svg: str) -> str:
    """The `<svg>` element alone, in the page's colours and as wide as its place."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    # Names of groups are the same in every drawing; only what is referred to needs one.
    rest = re.sub(r'<g id="[^"]*"', "<g", rest)
    svg = f"<svg {box[0] if box else ''}>{rest}".replace("xlink:href", "href")
    for mark, color in _MARKS.items():
        svg = svg.replace(mark, color)
    return svg.strip()


def _plain_labels(axis: Axis) -> None:
    """Labels of a logarithmic scale as plain numbers, for formulas are not drawn."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
