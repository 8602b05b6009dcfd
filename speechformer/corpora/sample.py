"""Write a sample corpus of speeches and pairs: `python -m speechformer.corpora.sample FOLDER`.

It is generated, so everything runs without a network.

Three presidents of an invented island republic speak: Marlowe about the sea, Okafor about fields and schools, Vance
about railways and mines. Four cues distinguish them; each holds only most of the time:

    topic    what they speak about                                   visible to a bag of words
    phrase   how they open a sentence                                visible to a bag of words
    order    position of the adverb:   and together we will mend the wells
                                       and we will together mend the wells
                                       and we will mend the wells together
    order    first item of a list:     work, mercy and thrift / mercy, thrift and work / thrift, work and mercy

All three speakers use the same words for the two order cues, so only a model that encodes positions can use these.
The files have the format of the speech files (see `speeches`). No line occurs twice.

Run `python -m speechformer.corpora.sample FOLDER` to write them to a folder, with the pairs of `sample_pairs`.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from pathlib import Path

from speechformer import console
from speechformer.corpora import sample_pairs
from speechformer.corpora.files import OutputFolder, word_tables
from speechformer.errors import ArgumentParser

SPEAKERS = ("marlowe", "okafor", "vance")
TRAIN_SENTENCES, TEST_SENTENCES = 2100, 750  # of the classification task
TRAIN_LINES, TEST_LINES = 1800, 250  # of the language model; the second for each speaker

TOPIC_IS_OWN, PHRASE_IS_OWN, ORDER_IS_OWN = 0.55, 0.7, 0.95
FACTS, PHRASES = 0.3, 0.3  # shares of the sentences


def sentence(speaker: int, rng: random.Random) -> str:
    """Generate one sentence of a speaker."""
    tables = word_tables("sample")

    def own_or_any(probability: float) -> int:
        """Return the speaker with this probability, otherwise any of the three."""
        return speaker if rng.random() < probability else rng.randrange(3)

    def topic() -> str:
        return rng.choice(tables["topics"][SPEAKERS[own_or_any(TOPIC_IS_OWN)]])

    def draw(*keys: str) -> list[str]:
        return [rng.choice(tables[key]) for key in keys]

    share = rng.random()
    if share < FACTS:
        first, other = topic(), topic()
        fact, number, month, place, tail = draw("facts", "numbers", "months", "places", "tails")
        values = {"topic": first, "Topic": first.capitalize(), "other": other}
        text = fact.format(**values, number=number, month=month, place=place, tail=tail)
    else:
        if share < 0.7:  # the adverb before the subject, before the verb or at the end
            place_of_adverb = own_or_any(ORDER_IS_OWN)
            adverb, subject, modal, verb = draw("adverbs", "subjects", "modals", "verbs")
            parts = [subject, modal, f"{verb} {topic()}"]
            parts.insert((0, 2, 3)[place_of_adverb], adverb)
            text = f"{draw('leads')[0]} {' '.join(parts)}"
        else:  # three values in their order in the table, rotated by the speaker's number
            chosen, start = sorted(rng.sample(range(len(tables["values"])), 3)), own_or_any(ORDER_IS_OWN)
            a, b, c = (tables["values"][chosen[(start + k) % 3]] for k in range(3))
            about = topic()
            lead, modal, verb = draw("leads", "modals", "verbs")
            text = f"{lead} {a}, {b} and {c} {modal} {verb} {about}"
        extras = [rng.choice(tables[key]) for key in ("places", "tails") if rng.random() < 0.35]
        text = f"{', '.join([text, *extras])}."
    if rng.random() < PHRASES:
        phrase = rng.choice(tables["phrases"][SPEAKERS[own_or_any(PHRASE_IS_OWN)]])
        text = f"{phrase} {text[0].lower()}{text[1:]}"
    return text


def best_accuracy(word_order: bool) -> float:
    """Return the accuracy of a classifier that knows how `sentence` draws, and sees word order or not.

    It names the speaker who gives the cues most probably: what is spoken about, the phrase, and the order. Its
    accuracy is the sum of that speaker's probability over all cues.
    """
    facts = word_tables("sample")["facts"]
    with_two_topics = FACTS * sum("{other}" in fact for fact in facts) / len(facts)
    order_is_own = ORDER_IS_OWN if word_order else 0.0  # a cue that is anyone's tells nothing
    # how often the second cue and the phrase are the speaker's own, and how often there are such sentences
    second = [(TOPIC_IS_OWN, with_two_topics), (0.0, FACTS - with_two_topics), (order_is_own, 1 - FACTS)]
    phrase = [(PHRASE_IS_OWN, PHRASES), (0.0, 1 - PHRASES)]
    accuracy = 0.0
    for (second_is_own, share), (phrase_is_own, share_of_phrase) in itertools.product(second, phrase):
        probabilities = (TOPIC_IS_OWN, second_is_own, phrase_is_own)
        for cues in itertools.product(range(3), repeat=3):
            likelihoods = [
                math.prod(own * (cue == speaker) + (1 - own) / 3 for own, cue in zip(probabilities, cues))
                for speaker in range(3)
            ]
            accuracy += share * share_of_phrase * max(likelihoods) / 3
    return accuracy


@functools.cache
def files(seed: int) -> dict[str, bytes]:
    """Generate the files of the corpus as {name: content}; the same seed gives the same bytes."""
    rng = random.Random(seed)
    drawn: set[str] = set()

    def draw(speaker: int) -> str:
        while (text := sentence(speaker, rng)) in drawn:
            pass
        drawn.add(text)
        return text

    def labelled(count: int) -> str:
        return "".join(f"{k % 3}\t{draw(k % 3)}\n" for k in range(count))

    texts = {"train_CLS.tsv": labelled(TRAIN_SENTENCES), "test_CLS.tsv": labelled(TEST_SENTENCES)}
    texts["train_LM.txt"] = "".join(f"{draw(k % 3)}\n" for k in range(TRAIN_LINES))
    for speaker, name in enumerate(SPEAKERS):
        texts[f"test_LM_{name}.txt"] = "".join(f"{draw(speaker)}\n" for _ in range(TEST_LINES))
    return {name: text.encode() for name, text in texts.items()}


def write(folder: Path) -> None:
    """Write the sample corpora to a folder, and print the paths."""
    output = OutputFolder(folder)
    for name, content in {**files(seed=0), **sample_pairs.files(seed=0)}.items():
        output.file(name).write_bytes(content)
        console.write(str(folder / name))


def main() -> None:
    """Run the command line."""
    parser = ArgumentParser(
        prog="python -m speechformer.corpora.sample", description="Write the sample corpora to a folder."
    )
    parser.add_argument("folder", type=Path)
    parser.run(lambda arguments: write(arguments.folder))


if __name__ == "__main__":
    main()
