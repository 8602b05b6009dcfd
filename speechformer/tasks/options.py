"""The groups `task` and `recipe` of the config; `conf/` explains each key. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from speechformer.options import Amount, Count, Few, Named, Options, Rate, Share, Size, Whole


class Recipe(Options):
    """Optimizer, schedule, initialisation and label smoothing."""

    optimizer: Literal["adam", "adamw", "sgd", "muon"]
    lr: Amount
    matrix_lr: Amount | None
    weight_decay: Amount
    betas: Annotated[list[Rate], Field(min_length=2, max_length=2)]
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "vaswani"]
    warmup_steps: Whole
    label_smoothing: Rate
    init: Literal["torch", "normal", "xavier"]
    init_std: Amount


class TextOptions(Named):
    """The keys of all tasks that read text."""

    tokens: Literal["words", "bpe", "bytes", "pretrained"]
    vocab_size: Size | None


class WordOptions(TextOptions):
    """The keys of `classify` and `lm`."""

    min_count: Count
    unknown_rate: Share
    evaluation_tokens: Count


class ClassifyOptions(WordOptions):
    """`task=classify`."""

    data: Literal["speeches"]
    balanced: bool
    naive_bayes: Amount


class LanguageModelOptions(WordOptions):
    """`task=lm`."""

    data: Literal["texts"]
    documents: Literal["joined", "separate"]
    extra_text: bool
    ngram: Annotated[int, Field(ge=2, le=10)]
    ngram_targets: Share
    ngram_mixture: Literal["none", "fixed", "context"]
    stride: Size | None
    lengths: list[Size]


class TranslateOptions(TextOptions):
    """`task=translate`."""

    data: Literal["pairs"]
    bpe_dropout: Rate
    batch_tokens: Size | None
    beam: Few
    length_penalty: Amount
    average_checkpoints: Few


class ProbeOptions(Named):
    """`task=probe`."""

    data: Literal["probe"]
    test_rows: Size
    longer: Annotated[float, Field(ge=1, le=1000)]


TASK_OPTIONS: dict[str, type[Named]] = {
    "classify": ClassifyOptions,
    "lm": LanguageModelOptions,
    "translate": TranslateOptions,
    "probe": ProbeOptions,
}
