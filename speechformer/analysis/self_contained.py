"""What makes a file self-contained: weights as safetensors, an HTML page with its data, style and script."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor


def to_safetensors(state: Mapping[str, Tensor], dtype: torch.dtype | None = None, **metadata: str) -> bytes:
    """Serialise weights, of one type unless it is None.

    A table with several names is stored once, under the first. `shared` in the header maps its other names to that.
    """
    first = dict[int, str]()
    names = {name: first.setdefault(value.data_ptr(), name) for name, value in state.items()}
    weights = {name: state[name].detach().to("cpu", dtype).contiguous() for name in first.values()}
    shared = {name: stored for name, stored in names.items() if stored != name}
    return save(weights, metadata={**metadata, "shared": json.dumps(shared)})


def fill_page(page: str, script: str, style: str, content: Mapping[str, Any]) -> str:
    """Put script, style and data into an HTML page, in place of its marks.

    All data is one JSON object, escaped so that no character can end its element. The policy of the page allows its
    script alone, by the hash. The script must insert words as text only, never as HTML.
    """
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    for mark, part in (("__SHA256__", digest), ("__STYLE__", style), ("__SCRIPT__", script), ("__CONTENT__", data)):
        page = page.replace(mark, part, 1)
    return page
