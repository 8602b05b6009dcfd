"""Translate texts with a trained encoder-decoder, and align a translation with its source.

torch is imported when there is something to translate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speechformer.corpora.special_tokens import BEGIN, END
from speechformer.errors import UserError, require
from speechformer.runs import folder as runs

if TYPE_CHECKING:
    from speechformer.analysis.attention_maps import AttentionMap
    from speechformer.analysis.load import TrainedRun


def encode_sources(run: TrainedRun, texts: Sequence[str], others: Sequence[TrainedRun] = ()) -> list[list[int]]:
    """Return the ids of each text with <eos>, cut at the least `max_length`; an empty list for an empty text."""
    longest = min((own.max_length for own in (run, *others) if own.max_length is not None), default=None)
    encoded = run.tokenizer.encode_all([text.strip() for text in texts])
    return [[*ids, END][:longest] if text.strip() else [] for text, ids in zip(texts, encoded)]


def check_options(beam: int | None, length_penalty: float | None) -> None:
    """Require valid arguments of `translate_sources`."""
    require(beam is None or 1 <= beam <= 100, "beam", "between 1 and 100", beam)
    valid = length_penalty is None or 0 <= length_penalty <= 10
    require(valid, "length_penalty", "between 0 and 10", length_penalty)


def translate_sources(
    run: TrainedRun,
    sources: Sequence[Sequence[int]],
    beam: int | None = None,
    length_penalty: float | None = None,
    others: Sequence[TrainedRun] = (),
) -> list[list[int]]:
    """Translate sources by beam search.

    Args:
        run: the translator.
        sources: ids of each text, see `encode_sources`.
        beam: number of hypotheses; 1 is greedy; None: as in the run's test.
        length_penalty: alpha of Wu et al. 2016, equation 14; None: as in the run's test.
        others: runs that decide with this one, as an ensemble: the mean of their probabilities counts.

    Returns:
        The ids of each translation without <eos>; `[]` for an empty source.

    Raises:
        UserError: another run has another vocabulary.
    """
    from speechformer.generation.beam_search import translate_ids

    check_options(beam, length_penalty)
    for other in others:
        other.require("translate")
        if runs.sha256(other.directory / runs.TOKENIZER) != runs.sha256(run.directory / runs.TOKENIZER):
            raise UserError(
                f"{other.directory} has another vocabulary than {run.directory}; an ensemble needs runs of the same "
                "corpus, protocol and task.vocab_size."
            )
    models: list[Any] = [own.model for own in (run, *others)]
    decoding = run.task.hparams["decoding"]
    beam = decoding["beam"] if beam is None else beam
    alpha = decoding["length_penalty"] if length_penalty is None else length_penalty
    texts = [source for source in sources if source]
    longest = min((model.max_length for model in models if model.max_length is not None), default=None)
    translations = iter(translate_ids(models, texts, beam=beam, alpha=alpha, max_length=longest))
    return [next(translations) if source else [] for source in sources]


def align(run: TrainedRun, source: Sequence[int], translation: Sequence[int]) -> AttentionMap:
    """Align a translation with its source: the cross-attention of the last decoder layer, averaged over its heads.

    Args:
        run: a run of task=translate.
        source: ids with <eos>.
        translation: ids without <eos>.

    Returns:
        A "cross" map with weights [1, 1, T, S]; its queries are the tokens of the translation and <eos>.

    Raises:
        UserError: the model has no attention.
    """
    import torch

    from speechformer.analysis.attention_maps import maps_of

    target = [BEGIN, *translation]
    tokens = [run.tokenizer.tokens(ids) for ids in (source, target, [*translation, END])]
    maps = maps_of(run.model, [torch.tensor(source), torch.tensor(target)], tokens)
    cross = next((part for part in maps if part.name == "cross"), None)
    if cross is None:
        raise UserError(f"{run.directory} is a run of model={run.label}, which has no attention weights to draw.")
    weights = cross.weights[-1:].mean(dim=1, keepdim=True)
    return replace(cross, weights=weights, heading="last layer, mean over heads")
