"""Make a corpus of stories, as long and as many as you like: `corpus=stories`.

A story introduces its people: trade, town, and what each of them has. After that, each paragraph is about two of
them, and half of its sentences repeat what the introduction said. So a model that remembers the beginning predicts
those words, and one with a short context cannot. The longer the story, the more people it has.

    There was Hana the miller from Tarn, with the green kettle and the goose.  ...  (hundreds of words later)
    At dusk, Emre met Hana the miller from Tarn, with the green kettle and the goose.

The files have the format of `documents`. They are in the user's cache folder, made by the first run that needs them,
and anew if one is damaged.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from speechformer.corpora.files import cache_directory, make_once, on_any_machine, word_tables, write_file

WORDS_PER_PERSON = 120  # of a story
SENTENCES = 8  # of a paragraph
TESTED, MOST_TESTED = 0.05, 100  # stories of the test text: this share of train, but no more than that
OWN = ("trade", "town", "colour", "thing", "pet")  # what each of the people has
DRAWN = (*OWN, "time", "act", "place", "mood")  # what a sentence is about
VERSION = 1  # of what a seed generates


def story(rng: random.Random, words: int) -> str:
    """Generate a story of at least this many words: lines of sentences, the first one the introduction."""
    tables = word_tables("stories")
    names = rng.sample(tables["names"], min(len(tables["names"]), max(2, words // WORDS_PER_PERSON)))
    people = [{"name": name, **{f"own_{key}": rng.choice(tables[f"{key}s"]) for key in OWN}} for name in names]
    for person in people:
        person["whole"] = tables["whole"].format(**person)
    lines = [" ".join(tables["introduction"].format(**person) for person in people)]
    length = len(lines[0].split())
    while length < words:
        pair, sentences = rng.sample(people, 2), []
        for _ in range(SENTENCES):
            person, other = rng.sample(pair, 2)
            drawn = {key: rng.choice(tables[f"{key}s"]) for key in DRAWN}
            template = rng.choice(tables["facts" if rng.random() < 0.5 else "scenes"])
            sentences.append(template.format(other=other["name"], **person, **drawn))
        lines.append(" ".join(sentences))
        length += len(lines[-1].split())
    return "\n".join(lines)


def folder_of(config: Mapping[str, Any]) -> tuple[Path, str]:
    """Return the folder with the stories of a `corpus` config, and a description; make them if they are not there.

    Args:
        config: `seed`, `documents`, the number of stories of train, and `words`, the least length of a story.
    """
    seed, count, words = config["seed"], config["documents"], config["words"]
    folder = cache_directory() / "stories" / f"{count}-of-{words}-words-seed-{seed}-v{VERSION}"
    tested = min(max(1, round(count * TESTED)), MOST_TESTED)
    numbers = {"train_LM.txt": count, "test_LM_stories.txt": tested}

    def make() -> Iterable[str]:
        for file, number in numbers.items():
            rng = random.Random(f"{seed} {file}")
            write_file(folder / file, "\n\n".join(story(rng, words) for _ in range(number)).encode())
        return numbers

    make_once(folder, make)
    return folder, f"made by the package, seed {seed}, in {on_any_machine(str(folder))}"
