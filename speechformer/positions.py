"""Draw position encodings and attention patterns: `python -m speechformer.positions [FOLDER] [--run RUN]`.

    overview.png     every encoding and every pattern, one panel each
    sinusoidal.png   the table, some of its dimensions as curves, and the similarity of two positions
    alibi.png        the bias on the attention scores, by head
    rope.png         the rotation of a query's pairs, and its effect on the product with a key
    patterns.png     every pattern in an encoder and in a decoder
    learned.png      with --run: the learned positions of that run (learned, relative, kerple, fire, learned slopes)

The panels show the output of the classes that the models use, for 32 tokens and 2 heads unless they say otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.colors
import torch
from PIL import Image
from torch import Tensor

from speechformer import console
from speechformer.corpora.files import OutputFolder
from speechformer.errors import ArgumentParser, UserError, run_command
from speechformer.layers.attention import attention_mask
from speechformer.layers.patterns import PATTERNS, build_pattern
from speechformer.layers.positions import Learned, build_positions, query_and_key_indices, sinusoid

T, WIDTH, HEADS = 32, 64, 2
INK, MUTED, BLUE, PAPER, MASKED = "#1f2933", "#66727f", "#2a6f97", "#ffffff", "#eef1f4"
MASK_COLOURS = matplotlib.colors.ListedColormap([MASKED, BLUE])
SHADES = matplotlib.colormaps["viridis"]


def position_panels() -> dict[str, tuple[str, Tensor | None]]:
    """Return for each encoding a caption (where it acts, the axes) and a table [32, columns] of its values."""
    embeddings, index = torch.zeros(1, T, WIDTH), torch.arange(T)
    torch.manual_seed(0)  # of the learned embeddings
    learned = encoding("learned").embed(embeddings)[0]
    buckets = encoding("relative").bucket(index[:, None] - index[None, :]).float()
    pairs = query_and_key_indices(T, T)
    gates = encoding("forgetting").gate(torch.randn(1, T, 1), *pairs)[0, 0]
    return {
        "sinusoidal": ("added to embeddings\nposition × dimension", encoding("sinusoidal").embed(embeddings)[0]),
        "learned": ("learned, added to embeddings\nhere: initial values", learned),
        "alibi": (
            "subtracted from scores, head 1\nquery × key; darker: more",
            without_future(encoding("alibi").bias(*pairs)[0]),
        ),
        "relative": ("learned, added to scores\nbucket of each distance", without_future(buckets)),
        "kerple": (
            "learned, added to scores\nhere: initial values",
            without_future(encoding("kerple").bias(*pairs)[0]),
        ),
        "fire": ("an MLP, added to scores\nhere: initial values", without_future(encoding("fire").bias(*pairs)[0])),
        "rope": ("rotates queries and keys\ncosine: position × pair", rotated_pairs(HEADS, T, WIDTH)[:, 0::2]),
        "xpos": ("rotates, queries shrink\ncosine: position × pair", rotated_pairs(HEADS, T, WIDTH, "xpos")[:, 0::2]),
        "forgetting": ("gates by content, added to scores\nhere: random gates", without_future(gates)),
        "nope": ("no position encoding", None),
    }


def encoding(name: str, width: int = WIDTH, heads: int = HEADS, length: int = T) -> Any:
    """Return the position encoding of `model=name` in a decoder."""
    return build_positions({"name": name}, width=width, heads=heads, length=length, causal=True)


def without_future(values_TT: Tensor) -> Tensor:
    """Return a table of query and key with NaN for later keys, which are not drawn."""
    return values_TT.masked_fill(torch.ones_like(values_TT).triu(1) == 1, float("nan"))


def rotated_pairs(heads: int, length: int, width: int, name: str = "rope") -> Tensor:
    """Rotate queries of pairs (1, 0) with RoPE, to (cos, sin) of each pair's angle, [length, width / heads]."""
    unit = torch.zeros(1, heads, length, width // heads)
    unit[..., 0::2] = 1
    return encoding(name, width, heads, length).rotate(unit, unit)[0][0, 0]


def new_figure(columns: int, rows: int = 1, size: tuple[float, float] = (13, 4.2)) -> tuple[Any, Any]:
    """Return a figure and its axes, [rows, columns]."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, dpi=120, facecolor=PAPER, layout="constrained", squeeze=False)


def label(axis: Any, title: str, x: str, y: str = "") -> None:
    """Set the title of a panel and the labels of its axes."""
    axis.set_title(title, fontsize=10.5, color=INK)
    axis.set_xlabel(x, fontsize=9, color=MUTED)
    axis.set_ylabel(y, fontsize=9, color=MUTED)
    axis.tick_params(labelsize=8.5)


def draw_table(figure: Any, axis: Any, table: Tensor, **options: Any) -> None:
    """Draw a table as an image in red and blue, white at zero, with its colour bar."""
    values = table.detach()
    limit = max(float(values.abs().max()), 1e-6)
    options = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit, "interpolation": "nearest", **options}
    figure.colorbar(axis.imshow(values.numpy(), **options), ax=axis, shrink=0.8)


def draw_pattern(axis: Any, name: str, causal: bool) -> None:
    """Draw a pattern as a mask, with the share of pairs that it keeps."""
    mask = attention_mask(build_pattern({"name": name}), T, T, causal)[0, 0]
    axis.imshow(mask.numpy(), cmap=MASK_COLOURS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axis.set_title(f"pattern={name}", fontsize=9.5, color=INK, family="monospace")
    pairs, kind = (T * (T + 1) // 2, "causal pairs") if causal else (T * T, "all pairs")
    axis.set_xlabel(f"{100 * mask.sum().item() / pairs:.0f} % of {kind}", fontsize=8, color=MUTED)


def remove_frame(axis: Any) -> None:
    """Remove ticks and frame."""
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def draw_overview() -> Any:
    """Draw one row with the encodings and one with the patterns in a decoder."""
    encodings = position_panels()
    columns = max(len(encodings), len(PATTERNS))
    figure, axes = new_figure(columns, 2, (1.86 * columns, 4.9))
    for axis in axes.flat:
        remove_frame(axis)
    for axis, (name, (caption, table)) in zip(axes[0], encodings.items()):
        if table is None:
            axis.text(0.5, 0.5, "∅", ha="center", va="center", fontsize=30, color=MUTED, transform=axis.transAxes)
        else:
            shades = "Blues_r" if name == "alibi" else "Blues"
            axis.imshow(table.detach().numpy(), aspect="auto", cmap=shades, interpolation="nearest")
        axis.set_title(f"model={name}", fontsize=9.5, color=INK, family="monospace")
        axis.set_xlabel(caption, fontsize=8, color=MUTED)
    for axis, name in zip(axes[1], PATTERNS):
        draw_pattern(axis, name, causal=True)
    for empty in (*axes[0, len(encodings) :], *axes[1, len(PATTERNS) :]):
        empty.remove()
    return figure


def mean_cosine(table_TD: Tensor, max_distance: int) -> Tensor:
    """Return the mean cosine similarity of two positions k apart, [max_distance + 1], for k from 0."""
    unit = table_TD / table_TD.norm(dim=1, keepdim=True)
    return torch.stack([(unit @ unit.T).diagonal(k).mean() for k in range(max_distance + 1)])


def draw_sinusoidal(length: int = 128) -> Any:
    """Draw the sinusoidal table (Vaswani et al. 2017, section 3.5), its dimensions and the similarity."""
    table = sinusoid(length, WIDTH)
    figure, ((left, middle, right),) = new_figure(3)
    draw_table(figure, left, table.T, aspect="auto")
    label(left, f"added to the embeddings (width {WIDTH})", "position", "dimension")
    for dimension in (4, 8, 16, 32):
        middle.plot(table[:, dimension].numpy(), linewidth=1.4, label=f"dimension {dimension}")
    middle.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.0))
    middle.set_ylim(-1.1, 1.6)
    label(middle, "sines of decreasing frequency", "position", "value")
    right.plot(mean_cosine(table, length // 2).numpy(), color=BLUE)
    label(right, "similarity of two positions", "distance in tokens", "cosine similarity")
    return figure


def draw_alibi(heads: int = 8) -> Any:
    """Draw the bias of ALiBi (Press et al. 2022): some heads as maps, all heads by distance."""
    positions = encoding("alibi", 8 * heads, heads)
    bias, slopes = positions.bias(*query_and_key_indices(T, T)), positions.slopes().tolist()
    figure, axes = new_figure(4, 1, (13, 3.6))
    shades: Any = {"cmap": "Blues_r", "vmin": -8, "vmax": 0, "interpolation": "nearest"}
    for axis, head in zip(axes[0], (0, 2, 4)):
        axis.set_facecolor(MASKED)
        image = axis.imshow(without_future(bias[head]).numpy(), **shades)
        label(axis, f"head {head + 1}: slope 1/{1 / slopes[head]:.0f}", "key", "query")
    bar = figure.colorbar(image, ax=axes[0, :3], shrink=0.8, extend="min")
    bar.ax.set_title("added to\nthe score", fontsize=8, color=MUTED)
    lines, text = axes[0, 3], {"fontsize": 8, "va": "center", "annotation_clip": False}
    for head, slope in enumerate(slopes):
        lines.plot(-slope * torch.arange(T).numpy(), color=SHADES(head / heads), linewidth=1.3)
        if head < 5:  # the lines of the other heads overlap
            end = min(T - 1, 8 / slope)
            lines.annotate(f" {head + 1}", (end, -slope * end), **text)
    lines.annotate(f" 6-{heads}", (T - 1, 0), **text)
    lines.set(xlim=(-1.5, T + 3.5), ylim=(-8.4, 0.3))
    label(lines, f"all {heads} heads", "distance in tokens", "added to the score")
    return figure


def draw_rope(width: int = 32, length: int = 64) -> Any:
    """Draw RoPE (Su et al. 2021): rotated pairs of a query, and its product with an equal key by distance."""
    rotated = rotated_pairs(1, length, width)
    figure, axes = new_figure(4, 1, (13, 3.6))
    for axis, pair in zip(axes[0], (0, 2, 4)):
        for i, (x, y) in enumerate(rotated[:12, 2 * pair : 2 * pair + 2].tolist()):
            axis.plot((0, x), (0, y), color=SHADES(i / 12), linewidth=1.2)
            if pair < 4 or i % 2 == 0:  # the labels of neighbours would overlap
                axis.annotate(str(i), (1.12 * x, 1.12 * y), fontsize=7.5, ha="center", va="center", color=INK)
        axis.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal")
        remove_frame(axis)
        angle = f"{10000 ** (-2 * pair / width):.2f} rad per token"
        label(axis, f"pair {pair}: {angle}", "direction at positions 0 to 11")
    products = (rotated[:1] @ rotated.T)[0] / (width / 2)
    axes[0, 3].plot(products.numpy(), color=BLUE)
    label(axes[0, 3], "product of equal query and key", "distance in tokens", "relative to distance 0")
    return figure


def draw_patterns() -> Any:
    """Draw every pattern in an encoder and in a decoder."""
    figure, axes = new_figure(len(PATTERNS), 2, (1.86 * len(PATTERNS), 4.6))
    for row, causal in zip(axes, (False, True)):
        for axis, name in zip(row, PATTERNS):
            remove_frame(axis)
            draw_pattern(axis, name, causal)
        row[0].set_ylabel("decoder" if causal else "encoder", fontsize=10, color=INK)
    return figure


def draw_run(folder: Path) -> Any:
    """Draw the learned positions of a trained run, a row for each of its stacks; raise a UserError without any."""
    from speechformer.analysis.load import load

    run = load(folder)
    model: Any = run.task.cpu().model
    parts = [(name, getattr(getattr(model, name, None), "positions", None)) for name in ("encoder", "decoder")]
    stacks = [(name, positions) for name, positions in parts if positions and [*positions.parameters()]]
    if not stacks:
        raise UserError(
            f"{folder} is a run of model={run.label}, which has no learned positions. Name a run of model=learned, "
            "relative, kerple or fire, or model=alibi with model.slopes=learned."
        )
    figure, axes = new_figure(2, len(stacks), (11, 3.9 * len(stacks)))
    for (left, right), (name, positions) in zip(axes, stacks):
        if isinstance(positions, Learned):
            draw_learned_table(figure, left, right, name, positions.table.weight.detach())
        else:
            pairs = query_and_key_indices(run.block_size, run.block_size)
            draw_learned_bias(figure, left, right, name, positions.bias(*pairs).detach())
        right.legend(fontsize=8, frameon=False)
    return figure


def draw_learned_table(figure: Any, left: Any, right: Any, name: str, table: Tensor) -> None:
    """Draw learned vectors and their similarity by distance."""
    draw_table(figure, left, table.T, aspect="auto")
    label(left, f"{name}: added to the embeddings", "position", "dimension")
    distances = len(table) // 2
    right.plot(mean_cosine(table, distances).numpy(), color=BLUE, label="learned")
    right.plot(mean_cosine(sinusoid(*table.shape), distances).numpy(), "--", color=MUTED, label="sinusoidal")
    label(right, "similarity of two positions", "distance in tokens", "mean cosine similarity")


def draw_learned_bias(figure: Any, left: Any, right: Any, name: str, bias: Tensor) -> None:
    """Draw the learned bias of head 1, and that of the middle query for every head."""
    length, middle = bias.shape[-1], bias.shape[-1] // 2
    draw_table(figure, left, bias[0])
    label(left, f"{name}: added to the scores of head 1", "key", "query")
    for head, values in enumerate(bias[:, middle].numpy()):
        shade = SHADES(head / len(bias))
        right.plot(torch.arange(length) - middle, values, color=shade, label=f"head {head + 1}")
    label(right, f"query at position {middle}", "position of key - position of query", "added to the score")


def save_figures(folder: Path, run: Path | None) -> None:
    """Write the pictures to a folder: all encodings and patterns, or what `run` has learned."""
    output = OutputFolder(folder)
    drawings = [draw_overview, draw_sinusoidal, draw_alibi, draw_rope, draw_patterns]
    figures = {drawing.__name__.removeprefix("draw_"): drawing() for drawing in drawings if run is None}
    figures |= {"learned": draw_run(run)} if run is not None else {}
    for name, figure in figures.items():
        path = output.file(f"{name}.png")
        figure.savefig(path)
        Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)  # a third of the size
        console.write(str(path))


def main() -> None:
    """Run the command line."""
    about, default = "Draw position encodings and attention patterns as PNG.", Path("outputs/positions")
    parser = ArgumentParser(prog="python -m speechformer.positions", description=about)
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="to write to (%(default)s)")
    parser.add_argument("--run", type=Path, help="draw the learned positions of this run instead")
    arguments = parser.parse_args()
    run_command(lambda: save_figures(arguments.folder, arguments.run))


if __name__ == "__main__":
    main()
