"""Draw what `model=` and `pattern=` change: `python -m speechformer.positions [FOLDER] [--run RUN]`.

    overview.png     every encoding and every pattern, a panel each
    sinusoidal.png   the table, some of its columns as curves, and how alike two positions are
    alibi.png        what is taken from the scores, by head
    rope.png         how the pairs of a query turn, and what that does to its product with a key
    patterns.png     every pattern as an encoder and as a decoder sees it
    learned.png      with --run: what that run has learned of position (learned, relative, ALiBi's learned slopes)

Every panel is computed by the classes that the models use, at the size of the reports (32 tokens, 2 heads) where
nothing else is said.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.colors
import torch
from PIL import Image
from torch import Tensor

from speechformer.errors import UserError, run_command
from speechformer.layers.attention import attention_mask
from speechformer.layers.patterns import PATTERNS, build_pattern
from speechformer.layers.positions import ALiBi, Learned, Positions, Relative, RoPE, build_positions, sinusoid

T, WIDTH, HEADS = 32, 64, 2
INK, MUTED, PAPER = "#1f2933", "#66727f", "#ffffff"
SEEN = matplotlib.colors.ListedColormap(["#eef1f4", "#2a6f97"])


def position_panels() -> dict[str, tuple[str, Tensor | None]]:
    """For each encoding: where it acts and on what axes, and a table [32, columns] of what it does there."""

    def make(name: str) -> Positions:
        return build_positions({"name": name}, width=WIDTH, heads=HEADS, length=T, causal=True)

    nothing = torch.zeros(1, T, WIDTH)
    sinusoidal = make("sinusoidal").embed(nothing)[0]
    torch.manual_seed(0)
    learned = make("learned").embed(nothing)[0]
    future = torch.ones(T, T).tril() == 0
    bias = make("alibi").bias(T, T)
    relative = make("relative")
    assert bias is not None and isinstance(relative, Relative)
    alibi = bias[0].masked_fill(future, float("nan"))
    index = torch.arange(T)
    buckets = relative.bucket(index[:, None] - index[None, :]).float().masked_fill(future, float("nan"))
    unit = torch.zeros(1, HEADS, T, WIDTH // HEADS)
    unit[..., 0::2] = 1  # each pair points along its first axis, so its first entry becomes the cosine of its angle
    rope = make("rope").rotate(unit, unit)[0][0, 0, :, 0::2]
    return {
        "sinusoidal": ("added to embeddings\nposition × dimension", sinusoidal),
        "learned": ("added to embeddings, trained\nhere before training", learned),
        "alibi": ("taken from scores, head 1\nquery × key, darker: more", alibi),
        "relative": ("added to scores, trained\nbucket of each distance", buckets),
        "rope": ("turns queries and keys\ncosine: position × pair", rope),
        "nope": ("nothing", None),
    }


def new_figure(columns: int, rows: int = 1, size: tuple[float, float] = (13, 4.2)) -> tuple[Any, Any]:
    """A figure and its axes, [rows, columns]."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, dpi=120, facecolor=PAPER, layout="constrained", squeeze=False)


def label(axis: Any, title: str, x: str, y: str = "") -> None:
    """Name a panel and its axes."""
    axis.set_title(title, fontsize=10.5, color=INK)
    axis.set_xlabel(x, fontsize=9, color=MUTED)
    axis.set_ylabel(y, fontsize=9, color=MUTED)
    axis.tick_params(labelsize=8.5)


def mask_panel(axis: Any, mask: Tensor, name: str, of: int, whole: str) -> None:
    """A pattern as a mask; below it the share of `of` pairs that it keeps."""
    axis.imshow(mask.numpy(), cmap=SEEN, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axis.set_title(f"pattern={name}", fontsize=9.5, color=INK, family="monospace")
    axis.set_xlabel(f"{100 * mask.sum().item() / of:.0f} % of {whole}", fontsize=8, color=MUTED)


def bare(axis: Any) -> None:
    """No ticks and no frame."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)


def draw_overview() -> Any:
    """One row for the encodings, one for the patterns as a decoder sees them."""
    encodings, patterns = position_panels(), list(PATTERNS)
    columns = max(len(encodings), len(patterns))
    figure, axes = new_figure(columns, 2, (13, 4.9))
    for axis in axes.flat:
        bare(axis)
    for axis, (name, (caption, table)) in zip(axes[0], encodings.items()):
        if table is None:
            axis.text(0.5, 0.5, "∅", ha="center", va="center", fontsize=30, color=MUTED, transform=axis.transAxes)
        else:
            shades = "Blues_r" if name == "alibi" else "Blues"
            axis.imshow(table.detach().numpy(), aspect="auto", cmap=shades, interpolation="nearest")
        axis.set_title(f"model={name}", fontsize=9.5, color=INK, family="monospace")
        axis.set_xlabel(caption, fontsize=8, color=MUTED)
    for axis, name in zip(axes[1], patterns):
        mask = attention_mask(build_pattern({"name": name}), T, T, causal=True)[0, 0]
        mask_panel(axis, mask, name, T * (T + 1) // 2, "the past")
    for empty in (*axes[0, len(encodings) :], *axes[1, len(patterns) :]):
        empty.remove()
    return figure


def likeness(table_TD: Tensor, max_length: int) -> Tensor:
    """The mean cosine of the vectors of two positions that lie k apart, [max_length + 1], for k from 0."""
    unit = table_TD / table_TD.norm(dim=1, keepdim=True)
    cosines = unit @ unit.T
    return torch.stack([cosines.diagonal(k).mean() for k in range(max_length + 1)])


def draw_sinusoidal(length: int = 128) -> Any:
    """Vaswani et al. 2017, section 3.5: the table, its columns, and the product of two positions, which depends on
    their distance alone."""
    table = sinusoid(length, WIDTH)
    figure, axes = new_figure(3)
    image = axes[0, 0].imshow(table.T.numpy(), aspect="auto", cmap="RdBu_r", interpolation="nearest")
    figure.colorbar(image, ax=axes[0, 0], shrink=0.8)
    label(axes[0, 0], f"what is added to the embeddings, width {WIDTH}", "position", "dimension")
    for dimension in (4, 8, 16, 32):
        axes[0, 1].plot(table[:, dimension].numpy(), linewidth=1.4, label=f"dimension {dimension}")
    axes[0, 1].legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.0))
    axes[0, 1].set_ylim(-1.1, 1.6)
    label(axes[0, 1], "sines, slower and slower", "position")
    axes[0, 2].plot(likeness(table, length // 2).numpy(), color="#2a6f97")
    label(axes[0, 2], "how alike two positions are", "distance in tokens", "cosine of their vectors")
    return figure


def draw_alibi(heads: int = 8) -> Any:
    """Press et al. 2022: the bias of the first heads as maps, and of all by distance."""
    positions = build_positions({"name": "alibi"}, width=8 * heads, heads=heads, length=T, causal=True)
    assert isinstance(positions, ALiBi)
    bias = positions.bias(T, T)
    future = torch.ones(T, T).tril() == 0
    figure, axes = new_figure(4, 1, (13, 3.6))
    for axis, head in zip(axes[0], (0, 2, 4)):
        axis.set_facecolor("#eef1f4")
        shown = bias[head].masked_fill(future, float("nan"))
        image = axis.imshow(shown.numpy(), cmap="Blues_r", vmin=-8, vmax=0, interpolation="nearest")
        label(axis, f"head {head + 1}: slope 1/{1 / float(positions.slopes()[head]):.0f}", "key", "query")
    bar = figure.colorbar(image, ax=axes[0, :3], shrink=0.8, extend="min")
    bar.ax.set_title("added to\nthe score", fontsize=8, color=MUTED)
    for head in range(heads):
        shade = matplotlib.colormaps["viridis"](head / heads)
        axes[0, 3].plot(-positions.slopes()[head].item() * torch.arange(T).numpy(), color=shade, linewidth=1.3)
        if head < 5:  # the others lie on one another
            end = min(T - 1, 8 / positions.slopes()[head].item())
            place = (end, -positions.slopes()[head].item() * end)
            axes[0, 3].annotate(f" {head + 1}", place, fontsize=8, va="center", annotation_clip=False)
    axes[0, 3].annotate(f" 6-{heads}", (T - 1, 0), fontsize=8, va="center", annotation_clip=False)
    axes[0, 3].set(xlim=(-1.5, T + 3.5), ylim=(-8.4, 0.3))
    label(axes[0, 3], f"all {heads} heads", "distance in tokens", "added to the score")
    return figure


def draw_rope(width: int = 32, length: int = 64) -> Any:
    """Su et al. 2021: the pairs of a query at positions 0 to 11, and its product with a like key by distance."""
    positions = build_positions({"name": "rope"}, width=width, heads=1, length=length, causal=True)
    assert isinstance(positions, RoPE)
    unit = torch.zeros(1, 1, length, width)
    unit[..., 0::2] = 1
    turned = positions.rotate(unit, unit)[0][0, 0]
    figure, axes = new_figure(4, 1, (13, 3.6))
    for axis, pair in zip(axes[0], (0, 2, 4)):
        shade = matplotlib.colormaps["viridis"]
        for i in range(12):
            x, y = turned[i, 2 * pair].item(), turned[i, 2 * pair + 1].item()
            axis.plot((0, x), (0, y), color=shade(i / 12), linewidth=1.2)
            if i % (1 if pair < 4 else 2) == 0:  # where they are close, every second
                axis.annotate(str(i), (1.12 * x, 1.12 * y), fontsize=7.5, ha="center", va="center", color=INK)
        axis.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal")
        bare(axis)
        angle = 10000 ** (-2 * pair / width)
        label(axis, f"pair {pair}: {angle:.2f} rad a token", "where it points at positions 0 to 11")
    products = (turned[:1] @ turned.T)[0] / (width / 2)
    axes[0, 3].plot(products.numpy(), color="#2a6f97")
    label(axes[0, 3], "query times key, both the same vector", "distance in tokens", "part of that at distance 0")
    return figure


def draw_patterns() -> Any:
    """Every pattern, as an encoder sees it and as a decoder does."""
    figure, axes = new_figure(len(PATTERNS), 2, (13, 4.6))
    for row, causal in zip(axes, (False, True)):
        for axis, name in zip(row, PATTERNS):
            bare(axis)
            mask = attention_mask(build_pattern({"name": name}), T, T, causal)[0, 0]
            mask_panel(axis, mask, name, T * (T + 1) // 2 if causal else T * T, "the past" if causal else "all")
        row[0].set_ylabel("decoder" if causal else "encoder", fontsize=10, color=INK)
    return figure


def learned_of(model: Any) -> list[tuple[str, Positions]]:
    """The encodings of a model that have learned something: a name and the module."""
    found = []
    for name in ("encoder", "decoder"):
        positions = getattr(getattr(model, name, None), "positions", None)
        if positions is not None and any(True for _ in positions.parameters()):
            found.append((name, positions))
    return found


def draw_learned(found: Sequence[tuple[str, Positions]], length: int) -> Any:
    """What a run has learned of position, a row for each of its stacks."""
    figure, axes = new_figure(2, len(found), (11, 3.9 * len(found)))
    for (left, right), (name, positions) in zip(axes, found):
        if isinstance(positions, Learned):
            table = positions.table.weight.detach()
            image = left.imshow(table.T.numpy(), aspect="auto", cmap="RdBu_r", interpolation="nearest")
            figure.colorbar(image, ax=left, shrink=0.8)
            label(left, f"{name}: what is added to the embeddings", "position", "dimension")
            right.plot(likeness(table, len(table) // 2).numpy(), color="#2a6f97", label="learned")
            right.plot(
                likeness(sinusoid(*table.shape), len(table) // 2).numpy(), "--", color=MUTED, label="sinusoidal"
            )
            right.legend(fontsize=8, frameon=False)
            label(right, "how alike two positions are", "distance in tokens", "mean cosine of their vectors")
            continue
        bias = positions.bias(length, length)
        assert bias is not None
        bias = bias.detach()
        image = left.imshow(bias[0].numpy(), cmap="RdBu_r", interpolation="nearest", norm=centred(bias[0]))
        figure.colorbar(image, ax=left, shrink=0.8)
        label(left, f"{name}: what is added to the scores of head 1", "key", "query")
        middle = length // 2
        for head in range(len(bias)):
            shade = matplotlib.colormaps["viridis"](head / len(bias))
            right.plot(
                torch.arange(length) - middle, bias[head, middle].numpy(), color=shade, label=f"head {head + 1}"
            )
        right.legend(fontsize=8, frameon=False)
        label(right, f"of a query at position {middle}", "key's position less the query's", "added to the score")
    return figure


def centred(values: Tensor) -> Any:
    """Colours that are white at 0."""
    most = max(float(values.abs().max()), 1e-6)
    return matplotlib.colors.Normalize(-most, most)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m speechformer.positions", description="Draw the encodings and the patterns, as PNGs."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("outputs/positions"), help="%(default)s")
    parser.add_argument("--run", type=Path, help="draw what this run has learned of position instead")
    given = parser.parse_args()

    def command() -> None:
        figures = {}
        if given.run is None:
            figures["overview"], figures["sinusoidal"] = draw_overview(), draw_sinusoidal()
            figures["alibi"], figures["rope"], figures["patterns"] = draw_alibi(), draw_rope(), draw_patterns()
        else:
            from speechformer.analysis.load import load_trained

            run = load_trained(given.run)
            run.task.cpu()
            found = learned_of(run.task.model)
            if not found:
                raise UserError(
                    f"{given.run} is a run of model={run.label}, which learns nothing of position; one of "
                    "model=learned, relative or alibi with model.slopes=learned does."
                )
            figures["learned"] = draw_learned(found, run.block_size)
        if given.folder.is_file():
            raise UserError(f"{given.folder} is a file; name a folder.")
        given.folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            path = given.folder / f"{name}.png"
            figure.savefig(path)
            Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)  # a third of the bytes
            print(path)

    run_command(command)


if __name__ == "__main__":
    main()
