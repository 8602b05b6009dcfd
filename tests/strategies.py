"""Hypothesis strategies: files and folders as no one expects them, JSON, checkpoints and settings."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

# Line ends to some programs and spaces to others, NUL, the byte order mark, and what turns text around
ODD = st.sampled_from("\0\t\n\v\f\r\x1c\x85\xa0\u200b\u2028\u202e\ufeff<0٣")
TEXT = st.text(st.sampled_from("abc ") | ODD | st.characters(codec="utf-8"), max_size=12)
BYTES = st.binary(min_size=1, max_size=6).map(os.fsdecode)
NAMES = (TEXT | BYTES).map(lambda name: name.replace("\0", "0").replace("/", "")).filter(lambda name: name.strip("."))
Entry = bytes | str  # a file's content, or "folder"
ENTRIES = st.just("folder")
NUMBERS = st.sampled_from([10**30, -(10**30), 2**63, 2**53 + 1, 1e308, -0.0, 5e-324, math.nan, math.inf])
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | NUMBERS | TEXT
JSON = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)


@st.composite
def damaged(draw: Callable, content: bytes) -> bytes:
    """The content with one bit flipped, or bytes replaced, inserted or deleted, or cut off."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    start, length = chance.randrange(max(1, len(content))), chance.choice([1, 2, 16, 500])
    middles = {"replace": chance.randbytes(length), "insert": chance.randbytes(length), "delete": b"", "cut": b""}
    middles["flip"] = bytes(byte ^ (1 << chance.randrange(8)) for byte in content[start : start + 1])
    kind = draw(st.sampled_from(sorted(middles)))
    end = {"insert": start, "flip": start + 1, "cut": len(content)}.get(kind, start + length)
    return content[:start] + middles[kind] + content[end:]


def create(folder: Path, entries: dict[str, Entry]) -> None:
    """Put entries into a folder."""
    for name, entry in entries.items():
        path = folder / name
        if os.path.lexists(path) or not all(above.is_dir() for above in path.parents if os.path.lexists(above)):
            continue  # of another entry, such as a/b for a
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, bytes):
            path.write_bytes(entry)
        else:
            path.mkdir()
            (path / "mine").write_bytes(b"precious")


@st.composite
def mutated(draw: Callable, document: dict[str, Any]) -> Any:
    """Plain data with a value replaced or added in it or in one of its parts, or with a key removed."""
    content = json.loads(json.dumps(document))
    node = content
    while parts := [value for value in node.values() if isinstance(value, dict) and value]:
        if draw(st.booleans()):
            break
        node = draw(st.sampled_from(parts))
    key = draw(st.sampled_from(sorted(node)) | TEXT)
    if draw(st.booleans()):
        node[key] = draw(JSON)
    else:
        node.pop(key, None)
    return content


def json_files(document: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A file that held a document: as it was, changed, damaged, or with anything in it."""
    documents = st.just(document) | mutated(document) | JSON
    texts = documents.map(lambda value: json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    numbers = [b"1e999", b"-0", b"1" * 5000, b"1e-400", b"0x1", b"01"]
    odd = [b'{"attempts": ' + number + b"}" for number in numbers]
    odd += [b"[" * 5000, b'{"a": "\\ud800"}', b'{"a": 1, "a": 2}', b"\xef\xbb\xbf{}"]
    return texts | texts.flatmap(damaged) | st.sampled_from(odd) | st.binary(max_size=20)


OURS = """
result.json run.json run.lock log.txt config.yaml metrics.csv last.ckpt previous.ckpt run.json.89abcdef.partial
weights weights/3.ckpt tensorboard tensorboard/hparams.yaml .replaced .replaced/result.json .replaced.moving
"""
NEARLY = """
result.json~ last.ckpt.partial notes.txt sub/result.json 4.ckpt .replaced.txt
"""


def run_folders() -> st.SearchStrategy[tuple[str, dict[str, Entry], bool]]:
    """What is in a run's folder before it begins: nothing or a run, other entries; and `force`."""
    names = st.sampled_from(OURS.split()) | st.sampled_from(NEARLY.split()) | NAMES
    contents = st.sampled_from([b"x", b"{}", b'{"identity": "x"}']) | ENTRIES
    entries = st.dictionaries(names, contents, max_size=3)
    return st.tuples(st.sampled_from(["empty", "begun", "interrupted", "finished"]), entries, st.booleans())
