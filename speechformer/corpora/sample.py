"""A corpus that the package makes, so that everything runs on a fresh machine without a network.

Three presidents of an invented island republic speak: Marlowe of the sea, Okafor of the fields and schools,
Vance of railways and mines. What tells them apart, each cue true only most of the time:

    topic    what they speak of                                     a bag of words sees it
    phrase   how they open a sentence                               a bag of words sees it
    order    where they put the adverb:  and together we will mend the wells
                                         and we will together mend the wells
                                         and we will mend the wells together
    order    where they begin a list:    work, mercy and thrift / mercy, thrift and work / thrift, work and mercy

The two cues of order use the same words for all three, so only a model that knows positions can read them.
The files have the format of the speech files (see `speeches`), and no line stands twice in them.

`python -m speechformer.corpora.sample FOLDER` writes them out, and the pairs of `sample_pairs`, to read or to start a
corpus of your own from.
"""

from __future__ import annotations

import argparse
import functools
import random
from pathlib import Path

from speechformer.corpora import sample_pairs

SPEAKERS = ("marlowe", "okafor", "vance")
TRAIN_SENTENCES, TEST_SENTENCES = 2100, 750  # of the classification task
TRAIN_LINES, TEST_LINES = 1800, 250  # of the language model; the second for each speaker

TOPIC_IS_OWN, PHRASE_IS_OWN, ORDER_IS_OWN = 0.55, 0.7, 0.95

TOPICS = (
    (
        "the harbours",
        "the fishing fleet",
        "the sea walls",
        "the ferry lines",
        "the lighthouse keepers",
        "the shipyards",
        "the customs houses",
        "the pilots and the sailors",
        "the salt traders",
        "the coast guard",
        "the net makers",
        "the old docks",
        "the trade routes to the south",
        "the storm warnings",
    ),
    (
        "the orchards",
        "the village schools",
        "the grain stores",
        "the county clinics",
        "the young farmers",
        "the wells",
        "the reading rooms",
        "the teachers and the nurses",
        "the seed banks",
        "the market towns",
        "the shepherds",
        "the common pastures",
        "the irrigation canals",
        "the school meals",
    ),
    (
        "the mountain railways",
        "the copper mines",
        "the power stations",
        "the foundries",
        "the bridge builders",
        "the tunnels",
        "the night shifts",
        "the engineers and the miners",
        "the telegraph lines",
        "the steel works",
        "the machine shops",
        "the freight yards",
        "the dams above the valley",
        "the apprentices",
    ),
)
PHRASES = (
    ("My friends,", "Let me be plain:", "As my mother used to say,", "I have seen it from the deck:"),
    ("Fellow citizens,", "I ask you to remember:", "Here is the truth of it:", "Neighbours,"),
    ("Ladies and gentlemen,", "Make no mistake:", "The numbers are clear:", "I gave you my word:"),
)
ADVERBS = ("together", "today", "again", "tonight", "this year", "at last", "with care", "at once")
LEADS = ("And", "But", "So", "For")
VALUES = ("work", "mercy", "thrift", "courage", "learning", "patience", "honesty", "faith", "memory")
SUBJECTS = (
    "we",
    "this government",
    "the people of these islands",
    "every family",
    "the next generation",
    "our allies",
    "the assembly",
    "both parties",
    "those who serve",
    "your children",
)
MODALS = ("will", "must", "can", "should", "shall", "may")
VERBS = (
    "mend",
    "protect",
    "pay for",
    "open",
    "honour",
    "rebuild",
    "stand beside",
    "invest in",
    "listen to",
    "strengthen",
    "defend",
    "speak for",
    "learn from",
    "answer to",
)
PLACES = (
    "in Port Amsel",
    "in every valley",
    "from Tarn to Eastwick",
    "on both islands",
    "along the river Orr",
    "in the northern counties",
    "far from the capital",
    "in Lower Hallen",
    "where the road ends",
    "at home and abroad",
)
TAILS = (
    "before the winter comes",
    "without new debt",
    "for the next ten years",
    "as our parents did",
    "whatever it may cost",
    "because no one else is going to",
    "while there is still time",
    "so that no child goes hungry",
    "with the money that we saved",
    "after a long and bitter strike",
    "until the work is done",
    "in spite of the war",
)
FACTS = (
    "{Topic} have waited {number} years for an honest answer.",
    "Last {month} I met {number} men and women who depend on {topic} {place}.",
    "Nobody who knows {topic} can doubt what {number} seasons of neglect have done.",
    "There is no shame in asking what {topic} need {tail}.",
    "When I took this office, {number} families {place} had lost faith in {topic}.",
    "What {topic} taught us {place} is worth more than gold.",
    "If {topic} fail, then {other} fail with them.",
    "We spent less on {topic} than on {other}, and {place} it shows.",
    "The law that I signed in {month} gives {number} new rights to {topic}.",
    "History is going to judge us by {topic} and by {other}.",
)
NUMBERS = ("two", "three", "five", "seven", "twelve", "twenty", "forty", "ninety", "a hundred", "a thousand")
MONTHS = ("January", "March", "April", "May", "June", "August", "October", "November")


def own_or_other(speaker: int, own: float, rng: random.Random) -> int:
    """The speaker with probability `own`, otherwise any of the three."""
    return speaker if rng.random() < own else rng.randrange(3)


def adverb_sentence(speaker: int, rng: random.Random) -> str:
    """The adverb stands before the subject, before the verb or at the end; the words are the same."""
    place = own_or_other(speaker, ORDER_IS_OWN, rng)
    adverb = rng.choice(ADVERBS)
    subject, modal, verb = rng.choice(SUBJECTS), rng.choice(MODALS), rng.choice(VERBS)
    topic = rng.choice(TOPICS[own_or_other(speaker, TOPIC_IS_OWN, rng)])
    words = [subject, modal, f"{verb} {topic}"]
    words.insert((0, 2, 3)[place], adverb)
    return f"{rng.choice(LEADS)} {' '.join(words)}"


def list_sentence(speaker: int, rng: random.Random) -> str:
    """Three values in the order of `VALUES`, begun at the first, second or third."""
    chosen = sorted(rng.sample(range(len(VALUES)), 3))
    first = own_or_other(speaker, ORDER_IS_OWN, rng)
    a, b, c = (VALUES[chosen[(first + k) % 3]] for k in range(3))
    topic = rng.choice(TOPICS[own_or_other(speaker, TOPIC_IS_OWN, rng)])
    return f"{rng.choice(LEADS)} {a}, {b} and {c} {rng.choice(MODALS)} {rng.choice(VERBS)} {topic}"


def fact_sentence(speaker: int, rng: random.Random) -> str:
    """A statement about the speaker's topics."""
    topic, other = (rng.choice(TOPICS[own_or_other(speaker, TOPIC_IS_OWN, rng)]) for _ in range(2))
    return rng.choice(FACTS).format(
        topic=topic,
        Topic=topic.capitalize(),
        other=other,
        number=rng.choice(NUMBERS),
        month=rng.choice(MONTHS),
        place=rng.choice(PLACES),
        tail=rng.choice(TAILS),
    )


def sentence(speaker: int, rng: random.Random) -> str:
    """One sentence of a speaker."""
    kind = rng.random()
    if kind < 0.3:
        text = fact_sentence(speaker, rng)
    else:
        text = (adverb_sentence if kind < 0.7 else list_sentence)(speaker, rng)
        for extra in (PLACES, TAILS):
            if rng.random() < 0.35:
                text = f"{text}, {rng.choice(extra)}"
        text += "."
    if rng.random() < 0.3:
        phrase = rng.choice(PHRASES[own_or_other(speaker, PHRASE_IS_OWN, rng)])
        text = f"{phrase} {text[0].lower()}{text[1:]}"
    return text


@functools.cache
def files(seed: int) -> dict[str, bytes]:
    """The files of the corpus by name; the same seed gives the same bytes."""
    rng = random.Random(seed)
    said: set[str] = set()

    def draw(speaker: int) -> str:
        while (text := sentence(speaker, rng)) in said:
            pass
        said.add(text)
        return text

    def labelled(count: int) -> str:
        return "".join(f"{k % 3}\t{draw(k % 3)}\n" for k in range(count))

    texts = {"train_CLS.tsv": labelled(TRAIN_SENTENCES), "test_CLS.tsv": labelled(TEST_SENTENCES)}
    texts["train_LM.txt"] = "".join(f"{draw(k % 3)}\n" for k in range(TRAIN_LINES))
    for speaker, name in enumerate(SPEAKERS):
        texts[f"test_LM_{name}.txt"] = "".join(f"{draw(speaker)}\n" for _ in range(TEST_LINES))
    return {name: text.encode() for name, text in texts.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m speechformer.corpora.sample", description="Write out the sample."
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {**files(seed=0), **sample_pairs.files(seed=0)}.items():
        (folder / name).write_bytes(content)
        print(folder / name)
