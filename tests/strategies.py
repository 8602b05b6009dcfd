"""Hypothesis strategies: files and folders as no one expects them, JSON, checkpoints and settings."""

from __future__ import annotations

import io
import json
import math
import os
import random
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

# Line ends to some programs and spaces to others, NUL, the byte order mark, and what turns text around
ODD = st.sampled_from("\0\t\n\v\f\r\x1c\x1d\x1e\x1f \x7f\x85\xa0\u1680\u200b\u2028\u2029\u202e\u3000\ufeff<0٣")
TEXT = st.text(st.sampled_from("abc ") | ODD | st.characters(codec="utf-8"), max_size=12)
WORD = st.sampled_from(["we", "will", "mend", "<doc>", "1", "é", "a\u2028b", "\x85x"])
WORDS = st.lists(WORD, min_size=1, max_size=6).map(" ".join)
BYTES = st.binary(min_size=1, max_size=6).filter(lambda name: not {0, ord("/")} & {*name}).map(os.fsdecode)
UNICODE = st.text(ODD | st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20)
NAMES = (UNICODE.map(lambda name: name.replace("\0", "0")) | BYTES).filter(lambda name: name not in (".", ".."))
Entry = bytes | str  # a file's content, or "folder", "broken link", "link", "pipe"
ENTRIES = st.sampled_from(["folder", "broken link", "link", "pipe"])
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.integers()
    | st.floats()
    | st.sampled_from([10**30, -(10**30), 2**63, 2**53 + 1, 1e308, -0.0, 5e-324, math.nan, math.inf])
    | TEXT
)
JSON = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)


class Described(bytes):
    """Bytes that show a description instead of their content."""

    def __new__(cls, content: bytes, description: str) -> Described:
        self = super().__new__(cls, content)
        self.description = description
        return self

    def __repr__(self) -> str:
        return f"<{len(self)} bytes: {self.description}>"


@st.composite
def damaged(draw: Callable, content: bytes) -> bytes:
    """The content, or that with bytes flipped, replaced, inserted or deleted, or cut off."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    start, length = chance.randrange(len(content) + 1), chance.choice([1, 2, 16, 500])
    kind = draw(st.sampled_from(["none", "flip", "replace", "insert", "delete", "cut", "before", "after"]))
    if kind == "flip" and content:
        at = min(start, len(content) - 1)
        return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]
    if kind in ("before", "after"):
        more = chance.randbytes(length)
        return more + content if kind == "before" else content + more
    middle = {"replace": chance.randbytes(length), "insert": chance.randbytes(length), "delete": b"", "cut": b""}
    if kind not in middle:
        return content
    end = {"insert": start, "cut": len(content)}.get(kind, start + length)
    return content[:start] + middle[kind] + content[end:]


@st.composite
def text_files(draw: Callable, lines: st.SearchStrategy[str], least: int = 1, most: int = 6) -> bytes:
    """A file of lines, in any encoding, with any line ends, perhaps damaged."""
    rows = draw(st.lists(lines, min_size=least, max_size=most))
    is_odd = draw(st.integers(0, 19)) == 7
    end = draw(st.sampled_from(["\n", "\n", "\r\n", "\r"]))
    ends = [draw(st.sampled_from(["\n", "\r\n", "\r"])) if is_odd else end for _ in rows]
    if draw(st.booleans()):
        ends[-1] = ""
    encodings = ["utf-8", "utf-16", "utf-32-le", "latin-1"] if is_odd else ["utf-8", "utf-8", "utf-8-sig"]
    content = "".join(map("".join, zip(rows, ends))).encode(draw(st.sampled_from(encodings)), "replace")
    return draw(damaged(content)) if draw(st.integers(0, 29)) == 7 else content


def labelled() -> st.SearchStrategy[str]:
    """Lines of label TAB text, most of them valid."""
    labels = st.sampled_from(["0", " 1", "2 ", "3", "", "٢", "\ufeff0", "-1", "1.0"])
    valid = st.tuples(st.sampled_from("012"), WORDS).map("\t".join)
    return rarely(st.tuples(labels, TEXT | WORDS).map("\t".join) | TEXT, valid)


def rarely(odd: st.SearchStrategy[Any], common: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw from the first strategy once in sixteen times."""
    return st.integers(0, 15).flatmap(lambda number: odd if number == 7 else common)  # ends are drawn often


@st.composite
def speech_folders(draw: Callable) -> dict[str, Entry]:
    """The entries of a folder of speeches."""
    lines = rarely(TEXT, WORDS)
    files: dict[str, Entry] = {}
    if draw(st.booleans()):
        files |= {name: draw(text_files(labelled())) for name in ("train_CLS.tsv", "test_CLS.tsv")}
    if draw(st.booleans()):
        files["train_LM.txt"] = draw(text_files(lines))
    names = st.just("a") | st.just("b") | NAMES
    files |= draw(st.dictionaries(names.map("test_LM_{}.txt".format), text_files(lines), max_size=2))
    files |= draw(st.dictionaries(NAMES, ENTRIES | st.binary(max_size=9), max_size=1))  # which are ignored
    if draw(st.integers(0, 4)) == 3 and files:
        files[draw(st.sampled_from(sorted(files)))] = draw(ENTRIES)
    return files


@st.composite
def pair_folders(draw: Callable) -> dict[str, Entry]:
    """The entries of a folder of pairs, with endings en and fr."""
    files: dict[str, Entry] = {}
    for part in ("train", "dev", "test"):
        count = draw(st.integers(1, 5))
        lines = rarely(TEXT, WORDS)
        for language in ("en", "fr"):
            most = count + (draw(st.integers(0, 20)) == 7)
            files[f"{part}.{language}"] = draw(text_files(lines, count, most))
    files |= draw(st.dictionaries(NAMES.filter(lambda name: name not in files), ENTRIES, max_size=1))
    if draw(st.integers(0, 4)) == 3:
        name = draw(st.sampled_from(sorted(files)))
        files[name] = draw(ENTRIES)
        if draw(st.booleans()):
            del files[name]
    return files


def create(folder: Path, entries: dict[str, Entry]) -> None:
    """Put entries into a folder. A link leads to a file beside the folder."""
    outside = folder.with_name("outside")
    outside.write_bytes(b"precious")
    for name, entry in entries.items():
        path = folder / name
        if os.path.lexists(path) or not all(above.is_dir() for above in path.parents if os.path.lexists(above)):
            continue  # of another entry, such as a/b for a
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, bytes):
            path.write_bytes(entry)
        elif entry == "folder":
            path.mkdir()
            (path / "mine").write_bytes(b"precious")
        elif entry == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(outside if entry == "link" else folder / "nowhere")


@st.composite
def mutated(draw: Callable, document: Any) -> Any:
    """Plain data with some of its values replaced, or keys removed, renamed or added."""
    content = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(0, 2))):
        node = content
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = draw(st.sampled_from(keys)) if keys else None
            if key is None or not isinstance(node[key], dict | list) or not node[key] or draw(st.integers(0, 2)) == 0:
                break
            node = node[key]
        kind = draw(st.sampled_from(["replace", "replace", "remove", "rename", "add"]))
        if kind == "replace" and key is not None:
            node[key] = draw(JSON)
        elif kind in ("remove", "rename") and key is not None:
            value = node.pop(key)
            if kind == "rename" and isinstance(node, dict):
                node[draw(TEXT)] = value
        elif isinstance(node, dict):
            node[draw(TEXT)] = draw(JSON)
        else:
            node.append(draw(JSON))
    return content


def json_files(document: Any) -> st.SearchStrategy[bytes]:
    """A file that held a document: changed, damaged, or with anything in it."""
    documents = mutated(document) | JSON
    texts = documents.map(lambda value: json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    numbers = st.sampled_from([b"1e999", b"-0", b"1" * 30, b"1" * 5000, b"1e-400", b"0x1", b"01", b"Infinity"])
    more = st.sampled_from([b'{"a": %s}', b'{"attempts": %s}', b'{"status": "finished", "seed": %s}'])
    odd = st.tuples(more, numbers).map(lambda parts: parts[0] % parts[1])
    others = [b"[" * 5000, b'{"a":' * 5000, b'{"a": "\\ud800"}', b'{"a": 1, "a": 2}', b"\xef\xbb\xbf{}"]
    return texts | texts | texts.flatmap(damaged) | odd | st.sampled_from(others) | st.binary(max_size=20)


MEMBERS = ["twice", "add", "remove", "rename", "cut", "TWICE", "twice"]  # what happens to the members of a zip file


@st.composite
def checkpoints(draw: Callable, content: bytes) -> bytes:
    """A checkpoint: damaged, or with parts added, removed, renamed, replaced, twice there or compressed."""
    if draw(st.booleans()):
        return Described(draw(damaged(content)), "damaged bytes")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at, kind = draw(st.integers(0, len(members) - 1)), draw(st.sampled_from(MEMBERS))
    name, data = members[at]
    other = draw(NAMES | st.sampled_from(["data/999", ".data/x", "data.pkl"]))
    if draw(st.booleans()):
        other = f"{name.partition('/')[0]}/{other}"
    place, more = draw(st.sampled_from([0, len(members)])), draw(st.binary(max_size=9))
    if kind == "remove":
        del members[at]
    elif kind == "rename":
        members[at] = (other, data)
    elif kind == "cut":  # with a checksum that fits
        members[at] = (name, data[: draw(st.integers(0, max(0, len(data) - 1)))])
    else:
        known = {"twice": name, "TWICE": name.upper()}
        if kind in known and draw(st.booleans()):
            more = random.Random(0).randbytes(len(data))
        members.insert(place, (known.get(kind, other), more))
    compression = draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", compression) as archive:
        warnings.simplefilter("ignore")  # names that are there twice
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name.encode(errors="replace").decode()), data, compression)
    return Described(file.getvalue(), f"{kind} {name}, {other!r}, {more!r} at {place}")


OURS = ["result.json", "run.json", "run.lock", "log.txt", "config.yaml", "tokenizer.json", "metrics.csv", "last.ckpt"]
OURS += ["best.ckpt", "previous.ckpt", "average.ckpt", "last.ckpt.0123abcd.partial", "run.json.89abcdef.partial"]
OURS += [
    "predictions.tsv",
    "weights/3.ckpt",
    "weights",
    "tensorboard",
    "tensorboard/events.out.tfevents.1",
    "tensorboard/hparams.yaml",
]
NEARLY = [
    "RESULT.json",
    "result.json~",
    "last.ckpt.partial",
    "notes.0123abcd.partial",
    "last.ckpt.0123abcd.partial.txt",
]
NEARLY += ["weights/mine.ckpt", "weights/3.ckpt.txt", "tensorboard/mine.txt", "tensorboard/sub/events.out.tfevents.1"]
NEARLY += [
    "sub/result.json",
    "sub/last.ckpt",
    "best.ckpt\n",
    "run.lock.0123abcd.partial",
    "4.ckpt",
    "events.out.tfevents.1",
]


def run_folders() -> st.SearchStrategy[tuple[str, dict[str, Entry], bool]]:
    """What is in a run's folder before it begins: nothing or a run, other entries; and `force`."""
    names = st.sampled_from(OURS) | st.sampled_from(NEARLY) | NAMES
    contents = (
        st.binary(max_size=9) | st.binary(max_size=9) | ENTRIES | st.just(b'{"identity": "x"}') | st.just(b"{}")
    )
    entries = st.dictionaries(names, contents, max_size=3)
    return st.tuples(st.sampled_from(["empty", "begun", "interrupted", "finished"]), entries, st.booleans())


def overrides(keys: Sequence[str], groups: Sequence[str]) -> st.SearchStrategy[list[str]]:
    """Words of a command line: most of them settings of keys that exist."""
    words = "nan inf -inf 1e400 null true [] {} [1,2] {a:1} 'x' ' \" ${width} ${no} ${oc.env:HOME} ??? 1,2 range(3) ="
    cyclic = st.sampled_from([f"${{{key}}}" for key in keys])
    numbers = (
        st.integers(-2, 70).map(str) | st.floats(0, 1).map(repr) | st.integers().map(str) | st.floats().map(repr)
    )
    values = numbers | numbers | st.sampled_from(words.split()) | cyclic | TEXT
    known = st.sampled_from(keys)
    settings = st.tuples(known | known | st.sampled_from(["", "a.b", "task", "model.x"]), values).map("=".join)
    prefixed = st.tuples(st.sampled_from(["+", "++", "~", "+trainer.", "+corpus."]), settings).map("".join)
    valid = st.sampled_from(["width=16", "seed=3", "dropout=0", "ff=${width}", "study=x", *groups])
    word = valid | valid | settings | rarely(prefixed | TEXT, settings)
    return st.lists(word, min_size=1, max_size=3).map(
        lambda chosen: [word for word in chosen if not word.lstrip("+~").startswith(("-", "hydra"))]
    )
