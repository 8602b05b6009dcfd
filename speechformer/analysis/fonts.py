"""Fonts of the pictures: DejaVu, which matplotlib ships, or an installed font for characters that it lacks."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import ImageFont

WIDE = (  # families with Chinese, Japanese or Korean characters, on Linux, macOS and Windows
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans JP", "Source Han Sans", "IPAGothic", "IPAexGothic"),
    *(
        "TakaoGothic",
        "WenQuanYi Zen Hei",
        "WenQuanYi Micro Hei",
        "Droid Sans Fallback",
        "Hiragino Sans",
        "PingFang SC",
    ),
    *("Apple SD Gothic Neo", "Yu Gothic", "Meiryo", "MS Gothic", "Microsoft YaHei"),
    *("SimHei", "Malgun Gothic", "Arial Unicode MS", "Unifont"),
)


@functools.cache
def default_path() -> str:
    """Return the file of the font that matplotlib ships."""
    spec = importlib.util.find_spec("matplotlib")
    folder = Path((spec.submodule_search_locations or [""])[0] if spec else "")
    return str(folder / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf")


@functools.cache
def installed() -> list[str]:
    """Return the files of the installed fonts of `WIDE`, in that order."""
    from matplotlib.font_manager import fontManager  # slow to import

    files = {entry.name: entry.fname for entry in reversed(fontManager.ttflist)}
    return [files[name] for name in WIDE if name in files]


@functools.cache
def characters(path: str) -> frozenset[int]:
    """Return the code points that a font draws."""
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(path).get_charmap())


def missing(text: str, path: str) -> set[str]:
    """Return the characters of a text that a font does not draw."""
    return {letter for letter in text if ord(letter) > 0x24F and ord(letter) not in characters(path)}


@functools.lru_cache(maxsize=4096)
def path_for(text: str) -> str:
    """Return the file of the font that draws the most of a text; the default font if others draw no more."""
    if not missing(text, default_path()):
        return default_path()
    return min([default_path(), *installed()], key=lambda path: len(missing(text, path)))


load_font = functools.cache(ImageFont.truetype)


def font(size: int, text: str = "") -> Any:
    """Return a font of a size in pixels that draws a text."""
    return load_font(path_for(text), size)


def not_drawn(texts: Iterable[str]) -> str:
    """Return the characters that no font here draws, in the order of the texts."""
    return "".join(
        dict.fromkeys(letter for text in texts for letter in text if letter in missing(text, path_for(text)))
    )
