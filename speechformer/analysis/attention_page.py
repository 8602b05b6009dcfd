"""One self-contained HTML page with the attention maps of one text, for one run or several."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechformer.analysis.attention_maps import CAPTIONS, AttentionMap
from speechformer.analysis.self_contained import fill_page

TEMPLATE = Path(__file__).with_name("attention.html")
STYLE = Path(__file__).with_name("play") / "page.css"  # that of the live page


def encode_weights(weights: Tensor) -> str:
    """Encode weights as 16-bit integers, where 65535 is 1, in base64."""
    integers = (weights * 65535).round().to(torch.int32).numpy().astype("<u2")
    return base64.b64encode(integers.tobytes()).decode()


def map_as_json(part: AttentionMap) -> dict[str, Any]:
    """Return a map as plain data for the page; entropy and distance are rounded."""
    distance = part.distance()
    return {
        "name": part.name,
        "caption": CAPTIONS[part.name],
        "queries": part.queries,
        "keys": part.keys,
        "layers": part.weights.shape[0],
        "heads": part.weights.shape[1],
        "weights": encode_weights(part.weights),
        "mask": None if part.mask.all() else part.mask.int().flatten().tolist(),
        "entropy": rounded(part.entropy()),
        "distance": None if distance is None else rounded(distance),
    }


def rounded(values: Tensor) -> list[list[float]]:
    """Return a table as lists, with four decimals."""
    return [[round(value, 4) for value in row] for row in values.tolist()]


def render_page(text: str, runs: Sequence[tuple[str, Sequence[AttentionMap], Sequence[str]]]) -> str:
    """Return the page as HTML, for a text and the label, maps and notes of each run."""
    plain = [{"label": label, "maps": [*map(map_as_json, maps)], "notes": list(notes)} for label, maps, notes in runs]
    scale = max(float(part.weights.max()) for _, maps, _ in runs for part in maps)
    template = TEMPLATE.read_text(encoding="utf-8")
    script = template.rpartition("<script>")[2].partition("</script>")[0]
    return fill_page(
        template, script, STYLE.read_text(encoding="utf-8"), {"text": text, "scale": scale, "runs": plain}
    )
