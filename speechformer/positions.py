"""Draw what `model=` and `pattern=` change: `python -m speechformer.positions [FILE.png]`.

Every panel is computed by the classes that the models use, at the size of the reports (32 tokens, 2 heads).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import matplotlib.colors
import torch
from torch import Tensor

from speechformer.layers.attention import visible
from speechformer.layers.patterns import PATTERNS, build_pattern
from speechformer.layers.positions import Positions, Relative, build_positions

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


def draw(path: Path) -> None:
    """Write the picture: one row for the encodings, one for the patterns as a decoder sees them."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    encodings, patterns = position_panels(), dict.fromkeys(PATTERNS)
    columns = max(len(encodings), len(patterns))
    figure, axes = plt.subplots(2, columns, figsize=(13, 4.9), dpi=120, facecolor=PAPER)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_visible(False)
    for axis, (name, (caption, table)) in zip(axes[0], encodings.items()):
        if table is None:
            axis.text(0.5, 0.5, "∅", ha="center", va="center", fontsize=30, color=MUTED, transform=axis.transAxes)
        else:
            axis.imshow(
                table.detach().numpy(),
                aspect="auto",
                cmap="Blues_r" if name == "alibi" else "Blues",
                interpolation="nearest",
            )
        axis.set_title(f"model={name}", fontsize=9.5, color=INK, family="monospace")
        axis.set_xlabel(caption, fontsize=8, color=MUTED)
    for axis, name in zip(axes[1], patterns):
        mask = visible(build_pattern({"name": name}), T, T, causal=True)[0, 0]
        axis.imshow(mask.numpy(), cmap=SEEN, aspect="auto", interpolation="nearest")
        axis.set_title(f"pattern={name}", fontsize=9.5, color=INK, family="monospace")
        share = mask.sum().item() / (T * (T + 1) / 2)
        axis.set_xlabel(f"{100 * share:.0f} % of the past", fontsize=8, color=MUTED)
    for empty in (*axes[0, len(encodings) :], *axes[1, len(patterns) :]):
        empty.remove()
    figure.tight_layout(h_pad=1.6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m speechformer.positions", description="Draw the encodings and patterns."
    )
    parser.add_argument("file", nargs="?", type=Path, default=Path("outputs/positions.png"), help="FILE.png")
    target = parser.parse_args().file
    if target.suffix != ".png":
        parser.error(f"{target}: the picture is a .png")
    draw(target)
    print(target)
