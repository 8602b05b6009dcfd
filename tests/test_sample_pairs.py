"""The sample's French is correct: agreement, elision, order and negation. Oracle: examples of a grammar book."""

from __future__ import annotations

import random
import re

import pytest
from conftest import group

from speechformer.corpora import sample_pairs as module
from speechformer.corpora.pairs import Pairs, load_pairs
from speechformer.corpora.sample_pairs import determined, elide, of, with_adjectives, words


@pytest.fixture(scope="module")
def corpus() -> Pairs:
    return load_pairs(group("corpus", "sample"))


def test_its_size_and_that_no_sentence_repeats(corpus: Pairs) -> None:
    assert (len(corpus.train), len(corpus.dev), len(corpus.test)) == (10_000, 500, 500)
    assert not set(corpus.cleaned.values()) - {0}
    for sentences in zip(*corpus.train, *corpus.dev, *corpus.test):
        assert len(set(sentences)) == len(sentences) == 11_000


def test_the_bytes_depend_on_the_seed_alone() -> None:
    again = module.files.__wrapped__(0)
    assert again == module.files(0) and module.files(1) != again


@pytest.mark.parametrize(
    ("phrase", "french"),
    [
        ("elide le ami", "l'ami"),
        ("elide le chat", "le chat"),
        ("elide la école", "l'école"),
        ("elide le homme", "l'homme"),
        ("elide je aime", "j'aime"),
        ("elide ne est", "n'est"),
        ("elide que il", "qu'il"),
        ("elide est-ce que elle", "est-ce qu'elle"),
        ("of le roi", "du roi"),
        ("of les rois", "des rois"),
        ("of la reine", "de la reine"),
        ("of l'ami", "de l'ami"),
        ("of un roi", "d'un roi"),
        ("of des enfants", "d'enfants"),
        ("of de petits chats", "de petits chats"),
    ],
)
def test_short_words_join_the_next(phrase: str, french: str) -> None:
    kind, *rest = phrase.split(" ")
    if kind == "of":
        assert of(" ".join(rest)) == french
    else:
        assert elide(" ".join(rest[:-1]), rest[-1]) == french


@pytest.mark.parametrize(
    ("adjectives", "noun", "plural", "kind", "english", "french"),
    [
        ("white", "house", False, "definite", "the white house", "la maison blanche"),
        ("white", "wall", True, "definite", "the white walls", "les murs blancs"),
        ("little grey", "cat", False, "indefinite", "a little grey cat", "un petit chat gris"),
        ("old", "man", False, "this", "this old man", "ce vieil homme"),
        ("old", "horse", False, "this", "this old horse", "ce vieux cheval"),
        ("beautiful", "bird", False, "definite", "the beautiful bird", "le bel oiseau"),
        ("beautiful", "birds", True, "definite", "the beautiful birds", "les beaux oiseaux"),
        ("new", "idea", False, "this", "this new idea", "cette nouvelle idée"),
        ("", "child", False, "this", "this child", "cet enfant"),
        ("happy", "queen", True, "definite", "the happy queens", "les reines heureuses"),
        ("heavy", "newspaper", True, "definite", "the heavy newspapers", "les journaux lourds"),
        ("", "apple", False, "indefinite", "an apple", "une pomme"),
    ],
)
def test_agreement_and_position_of_adjectives(
    adjectives: str, noun: str, plural: bool, kind: str, english: str, french: str
) -> None:
    word = next(word for word in words()["nouns"] if noun in (word.en, word.en_plural))
    chosen = [next(a for a in words()["adjectives"] if a.en == name) for name in adjectives.split()]
    en, fr = with_adjectives(word, plural, chosen)
    assert determined(kind, en, fr, word.feminine, plural, random.Random(0)) == (english, french)


def test_no_sentence_breaks_the_grammar(corpus: Pairs) -> None:
    """A vowel after an unelided word, "de les", a missing half of the negation, a plain space before "?"."""
    for english, french in corpus.train:
        assert not re.search(r"\b(le|la|je|ne|que|de|parce que) [aeiouéèêàâîô]", french.lower()), french
        assert not re.search(r"\b(de le|de les|de des|de de) ", french), french
        assert len(re.findall(r"\bn(e |')", french.lower())) == len(re.findall(r"\bpas\b", french)), french
        assert not french.endswith(" ?") and french.endswith("?") == english.endswith("?"), french
        assert not re.search(r"\bpas( (?!près)\w+[éuis]e?s?)? (des|un|une) ", french), french
        assert len(re.findall(r"\b(not|no)\b", english)) == len(re.findall(r"\bpas\b", french)), english


def test_pronouns_precede_the_verb_and_participles_agree_with_them(corpus: Pairs) -> None:
    past = [(en, fr) for en, fr in corpus.train if re.search(r"\b(les ai|les a|les avons|les avez|les ont)\b", fr)]
    assert len(past) > 50
    for english, french in past:
        assert re.search(r"\bthem\b", english), english
        assert re.search(r"les (ai|a|avons|avez|ont)( pas)? \w+s\b", french), french
