"""The groups `corpus` and `protocol` of the config; `conf/` explains each key."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from speechformer.corpora.speeches import normal
from speechformer.options import Count, Few, Named, Options, Positive, Rate, Whole


def distinct(names: list[str]) -> list[str]:
    """Require that no two names are equal, in whatever form of Unicode."""
    if len({*map(normal, names)}) < len(names):
        raise ValueError("a list of different names, one for each label from 0 on")
    return names


Classes = Annotated[list[str], AfterValidator(distinct)]


class Protocol(Named):
    """What is held out, and whether test sentences are removed from train."""

    remove_test_sentences: bool
    validation: Rate
    fold: Whole | Literal["seed"]
    vocabulary: Literal["corpus", "task"]


class Clean(Options):
    """The rules that remove pairs from train."""

    markup: bool
    words: Positive | None
    ratio: Positive | None
    duplicates: bool


class SpeechOptions(Named):
    """`corpus=speeches`."""

    root: str | None
    classes: Classes


class PairOptions(Named):
    """The keys of all corpora of pairs."""

    source: str
    target: str


class TedOptions(PairOptions):
    """`corpus=ted`."""

    root: str | None
    clean: Clean


class SampleOptions(PairOptions):
    """`corpus=sample`."""

    seed: Whole
    classes: Classes
    clean: Clean


class AutoOptions(PairOptions):
    """`corpus=auto`."""

    root: str | None
    speeches: SpeechOptions
    ted: TedOptions
    sample: SampleOptions


class DigitOptions(PairOptions):
    """`corpus=digits`."""

    seed: Whole
    max_length: Few
    clean: Clean


class TextOptions(Named):
    """`corpus=text`."""

    root: str | None
    separator: str | None


class StoryOptions(Named):
    """`corpus=stories`."""

    seed: Whole
    documents: Count
    words: Count
    separator: str | None


CORPUS_OPTIONS: dict[str, type[Named]] = {
    "auto": AutoOptions,
    "speeches": SpeechOptions,
    "ted": TedOptions,
    "sample": SampleOptions,
    "digits": DigitOptions,
    "text": TextOptions,
    "stories": StoryOptions,
}
