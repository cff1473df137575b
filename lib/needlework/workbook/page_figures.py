"""Figures and the explorer of the page notebook: where a page's bytes lie, what is in them, and which pages arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from needlework.pages import Dump, Layout
from needlework.pages.findings import marks
from needlework.pages.formats import FORMATS
from needlework.workbook import figures, tables
from needlework.workbook.explorers import Markup, Slider

SHADES = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#dddddd")
STATES = {"arrived": "#56B4E9", "missing": "#D55E00", "other content": "#E69F00", "not used": "#f2f2f2"}
SIGNS = {"arrived": "", "missing": "×", "other content": "?", "not used": ""}


def page_plan(layout: Layout, page_tokens: int = 64, *, slot: int = 5, width: int = 128) -> Figure:
    """A page drawn byte by byte, `width` bytes a row, coloured by field, with the bytes of one slot outlined."""
    size = layout.page_bytes(page_tokens)
    owner = np.full(-(-size // width) * width, np.nan)
    for number, item in enumerate(layout.fields):
        owner[item.address(page_tokens).flatten().numpy()] = number
    owner[:size] = np.where(np.isnan(owner[:size]), len(layout.fields), owner[:size])
    fig, ax = figures.new(7.2, 4.6)
    ax.imshow(owner.reshape(-1, width), cmap=ListedColormap(SHADES), vmin=0, vmax=len(SHADES) - 1, aspect="auto",
              interpolation="nearest")  # fmt: skip
    ax.grid(False)
    handles = []
    for number, item in enumerate(layout.fields):
        for first, last in _stretches(item.address(page_tokens)[slot].tolist()):
            row, column = divmod(first, width)
            while row * width <= last:
                end = min(last, row * width + width - 1)
                ax.add_patch(Rectangle((column - 0.5, row - 0.5), end - row * width - column + 1, 1, fill=False, lw=2))
                row, column = row + 1, 0
        label = f"{item.name}: {item.count} x {item.format} an entry"
        handles.append(Patch(facecolor=SHADES[number], edgecolor="#555555", label=label))
    if size > page_tokens * layout.token_bytes:
        handles.append(Patch(facecolor=SHADES[len(layout.fields)], edgecolor="#555555", label="padding"))
    handles.append(Patch(facecolor="none", edgecolor="black", lw=2, label=f"slot {slot}"))
    ax.set(
        xlabel=f"byte within a row of {width}",
        ylabel=f"row of {width} bytes",
        title=f"{layout.name}: {size:,} bytes, {page_tokens} entries",
    )
    fig.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)), frameon=False, fontsize=9)
    return fig


def _stretches(addresses: Sequence[int]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for address in addresses:
        if out and address == out[-1][1] + 1:
            out[-1] = (out[-1][0], address)
        else:
            out.append((address, address))
    return out


def page_view(raw: torch.Tensor, layout: Layout, page_tokens: int = 64, *, slot: int = 0, title: str = "") -> Figure:
    """One page uint8 [1, page bytes]: its entries' bytes and its scales (log2), one row an entry, one slot outlined."""
    found = marks(raw, layout, page_tokens)
    content = layout.entry_bytes(raw, page_tokens)[0].numpy()
    scale = torch.where(found.scale[0] > 0, found.scale[0], torch.nan).log2().numpy()
    scale = np.where(found.zero[0].numpy() | found.empty[0].numpy()[:, None], np.nan, scale)
    fig, (left, right) = figures.new(7.2, 3.6, columns=2)
    left.get_gridspec().set_width_ratios([3, 1 if scale.shape[1] == 1 else 2])
    left.imshow(content, cmap=figures.ORDER_MAP, vmin=0, vmax=255, aspect="auto", interpolation="nearest")
    left.set(xlabel="byte of the entry", ylabel="slot", title="bytes, 0 dark to 255 light")
    image = right.imshow(scale, cmap=figures.ORDER_MAP, aspect="auto", interpolation="nearest")
    right.set(xlabel="scale group", title="scales")
    right.set_facecolor("#ffffff")
    right.set_xticks(range(scale.shape[1]) if scale.shape[1] <= 8 else range(0, scale.shape[1], 8))
    if np.isnan(scale).any():
        right.annotate("white: no scale", (0.98, 0.02), xycoords="axes fraction", ha="right", color="#D55E00")
    if np.isfinite(scale).any():
        fig.colorbar(image, ax=right, label="log2 of the scale")
    for ax, width in ((left, content.shape[1]), (right, scale.shape[1])):
        ax.grid(False)
        ax.add_patch(Rectangle((-0.5, slot - 0.5), width, 1, fill=False, ec="#D55E00", lw=1.6))
    fig.suptitle(figures.label(title, 90), x=0.01, ha="left", fontsize=11)
    return fig


class PageExplorer(Slider):
    """Walk through a dump: page, slot and field; bytes in hex beside what they are worth, and the page's scales.

    The still shows pages at the starting slot and field. `.value` is the page (the row of the dump).
    """

    def __init__(self, dump: Dump, *, slot: int = 5, field: str = "codes", **options: Any):
        self.dump, self.slot, self.field = dump, slot, field
        options.setdefault("stills", _spread(dump.raw.shape[0], 6))
        name = f"page of {dump.role or 'dump'}, {dump.pool or dump.layout}, layer {dump.layer}"
        super().__init__(name, self._draw, choices=range(dump.raw.shape[0]), **options)

    def numbers(self, page: int, slot: int, field: str, most: int = 8) -> pd.DataFrame:
        """The first numbers of a field of one entry: byte address in the pool, hex, and value."""
        layout, tokens = self.dump.record, self.dump.page_tokens
        item = layout[field]
        address = item.address(tokens)[slot]
        stored = self.dump.raw[page][address]
        decoded = layout.decode(self.dump.raw[page : page + 1], tokens)
        values = {"codes": "values", "scales": "scale_values"}.get(field, field)
        shown = decoded[values][0, slot].float()
        if field == "rope":
            shown = decoded["values"][0, slot, layout["codes"].count :]
        step = max(1, FORMATS[item.format].bits // 8)
        per_byte = 2 if item.format == "e2m1" else 1
        rows = []
        for n in range(min(most, len(stored) // step)):
            chunk = stored[n * step : (n + 1) * step].tolist()
            worth = ", ".join(f"{v:.5g}" for v in shown[n * per_byte : (n + 1) * per_byte].tolist())
            rows.append((page * layout.page_bytes(tokens) + int(address[n * step]), bytes(chunk).hex(" "), worth))
        return pd.DataFrame(rows, columns=["byte in the pool", "hex", "worth"])

    def _draw(self, page: int) -> Markup:
        return self.view(page, self.slot, self.field)

    def view(self, page: int, slot: int, field: str) -> Markup:
        """The picture and the table of one choice."""
        dump = self.dump
        raw = dump.raw[page : page + 1]
        layout, tokens = dump.record, dump.page_tokens
        physical = f", physical page {dump.page_ids[page]}" if dump.page_ids else ""
        title = f"{dump.role or 'dump'}, {dump.pool or layout.name}, page {page}{physical}"
        found = marks(raw, layout, tokens)
        empty = int(found.empty.sum())
        alt = (
            f"Page {page} of {layout.name}: {tokens - empty} of {tokens} entries hold data, "
            f"{empty} are all zero; bytes left, logarithmic scales right, slot {slot} outlined."
        )
        picture = figures.picture(page_view(raw, layout, tokens, slot=slot, title=title), alt)
        table = tables.table(self.numbers(page, slot, field), f"Slot {slot}, {field}: bytes and their worth")
        return Markup(picture.to_img() + tables.to_html(table))

    def live(self) -> Any:
        """Three controls over one view."""
        import ipywidgets

        page = ipywidgets.IntSlider(value=self.value, min=0, max=len(self.choices) - 1, description="page")
        slot = ipywidgets.IntSlider(value=self.slot, min=0, max=self.dump.page_tokens - 1, description="slot")
        names = [item.name for item in self.dump.record.fields]
        field = ipywidgets.Dropdown(options=names, value=self.field, description="field")
        picture = ipywidgets.HTML(value=self.frame(self.value))

        def moved(_: Any) -> None:
            self.value = page.value
            picture.value = self.view(page.value, slot.value, field.value)

        for control in (page, slot, field):
            control.observe(moved, names="value")
        return ipywidgets.VBox([ipywidgets.HBox([page, slot, field]), picture])


def _spread(count: int, most: int) -> list[int]:
    return sorted({round(i * (count - 1) / max(1, most - 1)) for i in range(most)})


def journey(sent: Sequence[Dump], findings: pd.DataFrame, *, title: str = "") -> Figure:
    """Which pages of a request arrived: one row a pool and layer, one square a page, in the order of the tokens."""
    most = max(dump.raw.shape[0] for dump in sent)
    names = list(STATES)
    grid = np.full((len(sent), most), names.index("not used"))
    for row, dump in enumerate(sent):
        grid[row, : dump.raw.shape[0]] = names.index("arrived")
        mine = findings[(findings["pool"] == dump.pool) & (findings["layer"] == dump.layer)]
        for page, name in zip(mine["page"], mine["name"], strict=True):
            columns = slice(None) if page < 0 else page
            grid[row, columns] = names.index("missing" if name in ("missing", "partly-copied") else "other content")
    fig, ax = figures.new(7.2, 1.5 + 0.45 * len(sent))
    ax.imshow(grid, cmap=ListedColormap(list(STATES.values())), vmin=0, vmax=len(names) - 1, aspect="auto")
    ax.grid(False)
    for column in range(1, most):
        ax.axvline(column - 0.5, color="white", lw=1.5)
    for row in range(1, len(sent)):
        ax.axhline(row - 0.5, color="white", lw=1.5)
    for (row, column), state in np.ndenumerate(grid):
        ax.text(column, row, SIGNS[names[state]], ha="center", va="center", fontsize=11)
    ax.set_yticks(range(len(sent)), [figures.label(f"{d.pool}, layer {d.layer}", 30) for d in sent])
    per_page = sent[0].page_tokens * sent[0].tokens_per_entry
    ticks = range(0, most, max(1, most // 8))
    ax.set_xticks([t - 0.5 for t in ticks], [f"{t * per_page:,}" for t in ticks])
    ax.set(xlabel="first token of the page", title=figures.label(title, 90))
    handles = [
        Patch(facecolor=STATES[name], edgecolor="#555555", label=f"{name} {SIGNS[name]}".strip())
        for name in names[:3]
        if (grid == names.index(name)).any()
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return fig
