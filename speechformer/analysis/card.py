"""The README.md beside an exported model: how to use the model without this package, its data, figures and limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

import speechformer
from speechformer.analysis.load import TrainedRun
from speechformer.corpora.special_tokens import BEGIN, END
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.escape import escape_markdown


def card(run: TrainedRun, formats: Sequence[str]) -> str:
    """Return the README.md of an export in some formats."""
    environment = ImmutableSandboxedEnvironment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["plain"] = escape_markdown
    return environment.get_template("card.md").render(
        run=run,
        result=run.result,
        ability=next(iter(run.task.abilities), None),
        formats=formats,
        version=speechformer.__version__,
        length=min(run.max_length or 50, 50),
        has_subwords=not isinstance(run.tokenizer, Tokenizer),
        begin=BEGIN,
        end=END,
    )
