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
import random
from pathlib import Path
from typing import Any

from speechformer import console
from speechformer.corpora import sample_pairs
from speechformer.corpora.files import OutputFolder, read_yaml
from speechformer.errors import ArgumentParser

SPEAKERS = ("marlowe", "okafor", "vance")
TRAIN_SENTENCES, TEST_SENTENCES = 2100, 750  # of the classification task
TRAIN_LINES, TEST_LINES = 1800, 250  # of the language model; the second for each speaker

TOPIC_IS_OWN, PHRASE_IS_OWN, ORDER_IS_OWN = 0.55, 0.7, 0.95


@functools.cache
def words() -> dict[str, Any]:
    """Load the word tables."""
    return read_yaml(Path(__file__).with_suffix(".yaml"))


def own_or_any(speaker: int, probability: float, rng: random.Random) -> int:
    """Return `speaker` with the given probability, otherwise any of the three."""
    return speaker if rng.random() < probability else rng.randrange(3)


def pick_topic(speaker: int, rng: random.Random) -> str:
    """Draw a topic, mostly one of the speaker's own."""
    return rng.choice(words()["topics"][SPEAKERS[own_or_any(speaker, TOPIC_IS_OWN, rng)]])


def adverb_sentence(speaker: int, rng: random.Random) -> str:
    """Generate a sentence with the adverb before the subject, before the verb or at the end."""
    place = own_or_any(speaker, ORDER_IS_OWN, rng)
    adverb, subject, modal, verb = (rng.choice(words()[key]) for key in ("adverbs", "subjects", "modals", "verbs"))
    parts = [subject, modal, f"{verb} {pick_topic(speaker, rng)}"]
    parts.insert((0, 2, 3)[place], adverb)
    return f"{rng.choice(words()['leads'])} {' '.join(parts)}"


def list_sentence(speaker: int, rng: random.Random) -> str:
    """Generate a sentence with three values in their order in the table, rotated by the speaker's number."""
    chosen = sorted(rng.sample(range(len(words()["values"])), 3))
    first = own_or_any(speaker, ORDER_IS_OWN, rng)
    a, b, c = (words()["values"][chosen[(first + k) % 3]] for k in range(3))
    topic = pick_topic(speaker, rng)
    lead, modal, verb = (rng.choice(words()[key]) for key in ("leads", "modals", "verbs"))
    return f"{lead} {a}, {b} and {c} {modal} {verb} {topic}"


def fact_sentence(speaker: int, rng: random.Random) -> str:
    """Generate a statement about the speaker's topics."""
    topic, other = pick_topic(speaker, rng), pick_topic(speaker, rng)
    drawn = {key: rng.choice(words()[f"{key}s"]) for key in ("fact", "number", "month", "place", "tail")}
    return drawn["fact"].format(topic=topic, Topic=topic.capitalize(), other=other, **drawn)


def sentence(speaker: int, rng: random.Random) -> str:
    """Generate one sentence of a speaker."""
    share = rng.random()
    if share < 0.3:
        text = fact_sentence(speaker, rng)
    else:
        text = (adverb_sentence if share < 0.7 else list_sentence)(speaker, rng)
        extras = [rng.choice(words()[key]) for key in ("places", "tails") if rng.random() < 0.35]
        text = f"{', '.join([text, *extras])}."
    if rng.random() < 0.3:
        phrase = rng.choice(words()["phrases"][SPEAKERS[own_or_any(speaker, PHRASE_IS_OWN, rng)]])
        text = f"{phrase} {text[0].lower()}{text[1:]}"
    return text


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
    contents = {**files(seed=0), **sample_pairs.files(seed=0)}
    paths = {name: output.file(name) for name in contents}  # before the first is written
    for name, path in paths.items():
        path.write_bytes(contents[name])
        console.write(str(path))


def main() -> None:
    """Run the command line."""
    parser = ArgumentParser(
        prog="python -m speechformer.corpora.sample", description="Write the sample corpora to a folder."
    )
    parser.add_argument("folder", type=Path)
    parser.run(lambda arguments: write(arguments.folder))


if __name__ == "__main__":
    main()
