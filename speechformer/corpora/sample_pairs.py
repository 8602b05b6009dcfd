"""Generate English-French pairs with a small grammar of both languages.

A sentence is generated as a meaning (who does what to whom, when, affirmed or negated) and expressed in both
languages. It has the difficulties of real translation, so a word-by-word translation gets all of these wrong:

    agreement     the white house, the white walls      la maison blanche, les murs blancs
    order         a little grey cat                     un petit chat gris
    negation      she does not see the horses           elle ne voit pas les chevaux
                  she sees no horse                     elle ne voit pas de cheval
    pronouns      we did not find them                  nous ne les avons pas trouvés
    elision       I love the friend of the old man      j'aime l'ami du vieil homme
    tense         they will finish the letter           ils finiront la lettre
    questions     does he know the answer?              est-ce qu'il connaît la réponse ?

French has a no-break space before a question mark. No sentence of dev or test occurs in train.
"""

from __future__ import annotations

import functools
import random
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from speechformer.corpora.files import word_tables

TRAIN, DEV, TEST = 10_000, 500, 500
VOWELS = "aeiouhéèêàâîôœy"
NO_BREAK_SPACE = "\u00a0"

Noun = namedtuple("Noun", "en en_plural fr fr_plural feminine person")
# forms: masculine, feminine, their plurals; before: the French noun; liaison: masculine before a vowel, or ""
Adjective = namedtuple("Adjective", "en forms before liaison")
# fr: the present tense of je, tu, il, nous, vous, ils; future: its stem
Verb = namedtuple("Verb", "en en_third en_past fr future participle")
# A noun phrase in both languages; person: 0 to 5 for I, you (singular), he, we, you (plural), they
Phrase = namedtuple("Phrase", "en fr person feminine")


@functools.cache
def words() -> dict[str, Any]:
    """Load the word tables; nouns, adjectives and verbs are the tuples above."""
    tables = word_tables("sample_pairs")
    for key, row_type in (("nouns", Noun), ("adjectives", Adjective), ("verbs", Verb), ("subjects", Phrase)):
        tables[key] = [row_type(*row) for row in tables[key]]
    tables["persons"] = [noun for noun in tables["nouns"] if noun.person]
    return tables


def begins_with_vowel(word: str) -> bool:
    """Return whether a French word makes the one before it elide."""
    return word[0].lower() in VOWELS


def elide(short: str, word: str) -> str:
    """Join le, la, de, ne, je, que, ... to the word after it: l'ami, de Paris."""
    return f"{short[:-1]}'{word}" if begins_with_vowel(word) else f"{short} {word}"


def of(fr: str) -> str:
    """Put "de" before a noun phrase: du roi, des rois, d'un roi, de petits chats."""
    for article, joined in {"le ": "du ", "les ": "des ", "de ": "de ", "d'": "d'"}.items():
        if fr.startswith(article):
            return joined + fr.removeprefix(article)
    return elide("de", fr.removeprefix("des "))


def with_adjectives(word: Noun, plural: bool, adjectives: Sequence[Adjective]) -> tuple[str, str]:
    """Combine a noun with its adjectives: in English in the order given, in French before and after the noun."""
    en = " ".join([*(a.en for a in adjectives), word.en_plural if plural else word.en])
    fr = word.fr_plural if plural else word.fr
    for a in reversed(adjectives):
        form = a.forms[2 * plural + word.feminine]
        if a.liaison and not plural and not word.feminine and begins_with_vowel(fr):
            form = a.liaison
        fr = f"{form} {fr}" if a.before else f"{fr} {form}"
    return en, fr


def noun_phrase(rng: random.Random, person: bool = False, deep: bool = True, negated: bool = False) -> Phrase:
    """Generate a determiner, adjectives, a noun and sometimes an owner after "of".

    A negated object is never indefinite, because un and des would become de.
    """
    word = rng.choice(words()["persons" if person else "nouns"])
    article = "definite" if negated else "indefinite"
    kind = rng.choice(("definite", "definite", article, "this", "possessive", "number"))
    plural = kind == "number" or rng.random() < 0.4
    adjectives: list[Adjective] = []
    if rng.random() < 0.5:
        adjectives.append(rng.choice(words()["adjectives"]))
        if rng.random() < 0.3:  # a second on the other side of the French noun
            adjectives.append(rng.choice([a for a in words()["adjectives"] if a.before != adjectives[0].before]))
            adjectives.sort(key=lambda a: not a.before)
    en, fr = with_adjectives(word, plural, adjectives)
    determiners = words()["determiners"][kind]
    en_forms, fr_forms = determiners[0] if len(determiners) == 1 else rng.choice(determiners)
    if kind == "indefinite" and plural and any(a.before for a in adjectives):
        fr = elide("de", fr)  # de petits chats
    else:
        fr = fr_forms[2 if plural else word.feminine + 3 * begins_with_vowel(fr)] + fr
    en = f"{en_forms[1 if plural else 2 * (en[0] in 'aeiou')]} {en}"
    if deep and rng.random() < 0.15:
        owner = noun_phrase(rng, person=True, deep=False)
        en, fr = f"{en} of {owner.en}", f"{fr} {of(owner.fr)}"
    return Phrase(en, fr, 5 if plural else 2, word.feminine)


def subject(rng: random.Random) -> Phrase:
    """Generate a subject: a pronoun or a person."""
    return rng.choice(words()["subjects"]) if rng.random() < 0.5 else noun_phrase(rng, person=True)


def clause(rng: random.Random, question: bool = False) -> tuple[str, str]:
    """Generate a clause of subject, verb and object in one of three tenses, perhaps negated, with place or time."""
    who, verb = subject(rng), rng.choice(words()["verbs"])
    tense, negated = rng.choice(("present", "present", "past", "future")), rng.random() < 0.35
    pronoun, participle, none = "", verb.participle, negated and rng.random() < 0.35
    if none:  # sees no horse: ne voit pas de cheval
        word, plural = rng.choice(words()["nouns"]), rng.random() < 0.5
        en_object, fr_object = with_adjectives(word, plural, rng.sample(words()["adjectives"], rng.random() < 0.3))
        en_object, fr_object = f"no {en_object}", elide("de", fr_object)
    elif rng.random() < 0.25:
        en_object, pronoun, ending = rng.choice(words()["objects"])
        fr_object, participle = "", participle + ending  # it agrees with an object before it
    else:
        en_object, fr_object, *_ = noun_phrase(rng, negated=negated)

    third = who.person == 2
    if tense == "future" or question or (negated and not none):
        auxiliary = {"present": "does" if third else "do", "past": "did", "future": "will"}[tense]
        en = f"{auxiliary} {who.en}" if question else f"{who.en} {auxiliary}"
        en += f"{' not' * (negated and not none)} {verb.en} {en_object}"
    else:
        en = f"{who.en} {verb.en_past if tense == 'past' else verb.en_third if third else verb.en} {en_object}"

    # an object pronoun precedes the verb, "ne ... pas" encloses both
    fr = (words()["avoir"] if tense == "past" else verb.fr)[who.person]
    if tense == "future":
        fr = verb.future + words()["future_endings"][who.person]
    if pronoun:
        fr = f"les {fr}" if pronoun == "les" else elide(pronoun, fr)
    if negated:
        fr = f"{elide('ne', fr)} pas"
    fr = elide("je", fr) if who.fr == "je" else f"{who.fr} {fr}"
    fr = " ".join(filter(None, (fr, participle if tense == "past" else "", fr_object)))

    if rng.random() < 0.3:
        en_place, fr_place, with_of = rng.choice(words()["places"])
        where = noun_phrase(rng, deep=False)
        en, fr = f"{en} {en_place} {where.en}", f"{fr} {fr_place} {of(where.fr) if with_of else where.fr}"
    if rng.random() < 0.3:
        en_time, fr_time = rng.choice(words()["times"][tense])
        en, fr = f"{en} {en_time}", f"{fr} {fr_time}"
    return en, fr


def pair(rng: random.Random) -> tuple[str, str]:
    """Generate one sentence in both languages."""
    share = rng.random()
    en, fr = clause(rng, question=share < 0.15)
    if share < 0.15:
        en, fr = f"{en}?", f"{elide('est-ce que', fr)}{NO_BREAK_SPACE}?"
    elif share < 0.3:
        who = subject(rng)
        say, says, forms = rng.choice(words()["speech"])
        en = f"{who.en} {says if who.person == 2 else say} that {en}."
        fr = f"{who.fr} {forms[who.person]} {elide('que', fr)}."
    elif share < 0.5:
        en_second, fr_second = clause(rng)
        because = rng.random() < 0.5
        en += f" because {en_second}." if because else f", and {en_second}."
        fr += f" {elide('parce que', fr_second)}." if because else f", et {fr_second}."
    else:
        en, fr = f"{en}.", f"{fr}."
    return en[0].upper() + en[1:], fr[0].upper() + fr[1:]


@functools.cache
def files(seed: int) -> dict[str, bytes]:
    """Generate train, dev and test as {name: content}; the same seed gives the same bytes. No sentence repeats."""
    rng, contents = random.Random(seed), dict[str, bytes]()
    drawn: set[str] = set()
    for part, count in (("train", TRAIN), ("dev", DEV), ("test", TEST)):
        pairs = list[tuple[str, str]]()
        while len(pairs) < count:
            if drawn.isdisjoint(sentences := pair(rng)):
                drawn.update(sentences)
                pairs.append(sentences)
        for language, side in zip(("en", "fr"), zip(*pairs)):
            contents[f"{part}.{language}"] = "".join(f"{text}\n" for text in side).encode()
    return contents
