"""English-French pairs that the package makes, with a small grammar of both languages.

A sentence is built as a meaning (who does what to whom, when, asserted or denied) and said twice. What is hard about
it is what is hard about the real thing; a model that translates word by word gets none of it right:

    agreement     the white house, the white walls      la maison blanche, les murs blancs
    order         a little grey cat                     un petit chat gris
    negation      she does not see the horses           elle ne voit pas les chevaux
                  she sees no horse                     elle ne voit pas de cheval
    pronouns      we did not find them                  nous ne les avons pas trouvés
    elision       I love the friend of the old man      j'aime l'ami du vieil homme
    tense         they will finish the letter           ils finiront la lettre
    questions     does he know the answer?              est-ce qu'il connaît la réponse ?

French has its no-break space before a question mark. No sentence of dev and test stands in train.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

TRAIN, DEV, TEST = 10_000, 500, 500
VOWELS = "aeiouhéèêàâîôœy"
NO_BREAK_SPACE = "\u00a0"


@dataclass(frozen=True)
class Noun:
    en: str
    en_plural: str
    fr: str
    fr_plural: str
    feminine: bool = False
    person: bool = False


@dataclass(frozen=True)
class Adjective:
    en: str
    forms: tuple[str, str, str, str]  # masculine, feminine; their plurals
    before: bool = False  # the noun, in French
    liaison: str = ""  # masculine before a vowel


@dataclass(frozen=True)
class Verb:
    """`fr` holds the present: je, tu, il, nous, vous, ils."""

    en: str
    en_third: str
    en_past: str
    fr: tuple[str, str, str, str, str, str]
    future: str  # the stem
    participle: str


@dataclass(frozen=True)
class Phrase:
    """A noun phrase in both languages; `person` 0 to 5 is I, you (singular), he, we, you (plural), they."""

    en: str
    fr: str
    person: int
    feminine: bool


def noun(en: str, fr: str, gender: str, en_plural: str = "", fr_plural: str = "") -> Noun:
    """A noun with regular plurals where none are given; a capital gender is that of a person."""
    return Noun(en, en_plural or f"{en}s", fr, fr_plural or f"{fr}s", gender in "fF", gender.isupper())


NOUNS = (
    noun("man", "homme", "M", "men"),
    noun("woman", "femme", "F", "women"),
    noun("child", "enfant", "M", "children"),
    noun("teacher", "professeur", "M"),
    noun("farmer", "fermier", "M"),
    noun("singer", "chanteuse", "F"),
    noun("neighbour", "voisine", "F"),
    noun("friend", "ami", "M"),
    noun("king", "roi", "M"),
    noun("queen", "reine", "F"),
    noun("sailor", "marin", "M"),
    noun("student", "étudiante", "F"),
    noun("doctor", "médecin", "M"),
    noun("artist", "artiste", "M"),
    noun("cat", "chat", "m"),
    noun("dog", "chien", "m"),
    noun("horse", "cheval", "m", "", "chevaux"),
    noun("bird", "oiseau", "m", "", "oiseaux"),
    noun("house", "maison", "f"),
    noun("wall", "mur", "m"),
    noun("letter", "lettre", "f"),
    noun("book", "livre", "m"),
    noun("answer", "réponse", "f"),
    noun("story", "histoire", "f", "stories"),
    noun("song", "chanson", "f"),
    noun("tree", "arbre", "m"),
    noun("apple", "pomme", "f"),
    noun("boat", "bateau", "m", "", "bateaux"),
    noun("road", "route", "f"),
    noun("island", "île", "f"),
    noun("picture", "image", "f"),
    noun("idea", "idée", "f"),
    noun("church", "église", "f", "churches"),
    noun("train", "train", "m"),
    noun("garden", "jardin", "m"),
    noun("window", "fenêtre", "f"),
    noun("clock", "horloge", "f"),
    noun("river", "rivière", "f"),
    noun("school", "école", "f"),
    noun("newspaper", "journal", "m", "", "journaux"),
)


def adjective(en: str, masculine: str, feminine: str, plural: str = "") -> Adjective:
    """An adjective after its noun, with regular plurals where none is given."""
    return Adjective(en, (masculine, feminine, plural or f"{masculine}s", f"{feminine}s"))


ADJECTIVES = (
    adjective("white", "blanc", "blanche"),
    adjective("green", "vert", "verte"),
    adjective("grey", "gris", "grise", "gris"),
    adjective("black", "noir", "noire"),
    adjective("red", "rouge", "rouge"),
    adjective("strange", "étrange", "étrange"),
    adjective("famous", "célèbre", "célèbre"),
    adjective("happy", "heureux", "heureuse", "heureux"),
    adjective("dangerous", "dangereux", "dangereuse", "dangereux"),
    adjective("French", "français", "française", "français"),
    adjective("quiet", "tranquille", "tranquille"),
    adjective("heavy", "lourd", "lourde"),
    Adjective("little", ("petit", "petite", "petits", "petites"), True),
    Adjective("big", ("grand", "grande", "grands", "grandes"), True),
    Adjective("pretty", ("joli", "jolie", "jolis", "jolies"), True),
    Adjective("old", ("vieux", "vieille", "vieux", "vieilles"), True, "vieil"),
    Adjective("new", ("nouveau", "nouvelle", "nouveaux", "nouvelles"), True, "nouvel"),
    Adjective("beautiful", ("beau", "belle", "beaux", "belles"), True, "bel"),
    Adjective("good", ("bon", "bonne", "bons", "bonnes"), True),
    Adjective("young", ("jeune", "jeune", "jeunes", "jeunes"), True),
)


def verb_er(en: str, en_past: str, stem: str, en_third: str = "") -> Verb:
    """A French verb in -er, which is regular."""
    fr = (f"{stem}e", f"{stem}es", f"{stem}e", f"{stem}ons", f"{stem}ez", f"{stem}ent")
    return Verb(en, en_third or f"{en}s", en_past, fr, f"{stem}er", f"{stem}é")


VERBS = (
    verb_er("love", "loved", "aim"),
    verb_er("find", "found", "trouv"),
    verb_er("look for", "looked for", "cherch", "looks for"),
    verb_er("listen to", "listened to", "écout", "listens to"),
    verb_er("watch", "watched", "regard", "watches"),
    verb_er("draw", "drew", "dessin"),
    verb_er("forget", "forgot", "oubli"),
    verb_er("visit", "visited", "visit"),
    verb_er("help", "helped", "aid"),
    verb_er("admire", "admired", "admir"),
    Verb("see", "sees", "saw", ("vois", "vois", "voit", "voyons", "voyez", "voient"), "verr", "vu"),
    Verb(
        "finish",
        "finishes",
        "finished",
        ("finis", "finis", "finit", "finissons", "finissez", "finissent"),
        "finir",
        "fini",
    ),
    Verb(
        "choose",
        "chooses",
        "chose",
        ("choisis", "choisis", "choisit", "choisissons", "choisissez", "choisissent"),
        "choisir",
        "choisi",
    ),
    Verb("sell", "sells", "sold", ("vends", "vends", "vend", "vendons", "vendez", "vendent"), "vendr", "vendu"),
    Verb(
        "wait for",
        "waits for",
        "waited for",
        ("attends", "attends", "attend", "attendons", "attendez", "attendent"),
        "attendr",
        "attendu",
    ),
    Verb(
        "know",
        "knows",
        "knew",
        ("connais", "connais", "connaît", "connaissons", "connaissez", "connaissent"),
        "connaîtr",
        "connu",
    ),
)
AVOIR = ("ai", "as", "a", "avons", "avez", "ont")
FUTURE = ("ai", "as", "a", "ons", "ez", "ont")

SUBJECTS = (  # person, feminine, English, French; object forms
    (0, False, "I", "je"),
    (2, False, "he", "il"),
    (2, True, "she", "elle"),
    (3, False, "we", "nous"),
    (4, False, "you", "vous"),
    (5, False, "they", "ils"),
)
OBJECTS = (  # English, French, feminine, plural
    ("him", "le", False, False),
    ("her", "la", True, False),
    ("them", "les", False, True),
)
POSSESSIVES = (
    ("my", ("mon", "ma", "mes")),
    ("our", ("notre", "notre", "nos")),
    ("your", ("votre", "votre", "vos")),
    ("their", ("leur", "leur", "leurs")),
)
NUMBERS = (("two", "deux"), ("three", "trois"), ("four", "quatre"), ("ten", "dix"))
TIMES = {
    "present": (("today", "aujourd'hui"), ("every morning", "chaque matin"), ("now", "maintenant")),
    "past": (("yesterday", "hier"), ("last year", "l'année dernière"), ("this morning", "ce matin")),
    "future": (("tomorrow", "demain"), ("next week", "la semaine prochaine"), ("tonight", "ce soir")),
}
PLACES = (
    ("near", "près", True),
    ("behind", "derrière", False),
    ("in front of", "devant", False),
    ("far from", "loin", True),
)
SPEECH = (
    ("say", "says", ("dis", "dis", "dit", "disons", "dites", "disent")),
    ("think", "thinks", ("pense", "penses", "pense", "pensons", "pensez", "pensent")),
)


def begins_with_vowel(word: str) -> bool:
    """Whether a French word makes the one before it elide."""
    return word[0].lower() in VOWELS


def elide(short: str, word: str) -> str:
    """le, la, de, ne, je, que ... and the word after it, as French joins them: l'ami, de Paris."""
    return f"{short[:-1]}'{word}" if begins_with_vowel(word) else f"{short} {word}"


def of(fr: str) -> str:
    """ "de" before a noun phrase: du roi, des rois, d'un roi, de la reine."""
    for article, joined in (("le ", "du "), ("les ", "des ")):
        if fr.startswith(article):
            return joined + fr.removeprefix(article)
    if fr.startswith("des "):
        return elide("de", fr.removeprefix("des "))
    if fr.startswith(("de ", "d'")):  # de petits chats
        return fr
    return elide("de", fr)


def an(en: str) -> str:
    """a or an before an English phrase."""
    return f"an {en}" if en[0] in "aeiou" else f"a {en}"


def with_adjectives(word: Noun, plural: bool, adjectives: list[Adjective]) -> tuple[str, str]:
    """A noun with its adjectives: the English in the order given, the French before and after it."""
    en = " ".join([*(a.en for a in adjectives), word.en_plural if plural else word.en])
    fr = word.fr_plural if plural else word.fr
    for a in reversed(adjectives):
        form = a.forms[2 * plural + word.feminine]
        if a.before:
            if a.liaison and not plural and not word.feminine and begins_with_vowel(fr):
                form = a.liaison
            fr = f"{form} {fr}"
        else:
            fr = f"{fr} {form}"
    return en, fr


def determined(kind: str, en: str, fr: str, feminine: bool, plural: bool, rng: random.Random) -> tuple[str, str]:
    """A noun with its determiner in both languages."""
    vowel = begins_with_vowel(fr)
    if kind == "definite":
        return f"the {en}", f"les {fr}" if plural else elide("la" if feminine else "le", fr)
    if kind == "indefinite":
        if plural:
            return f"some {en}", f"des {fr}"
        return an(en), f"{'une' if feminine else 'un'} {fr}"
    if kind == "this":
        singular = "cette" if feminine else "cet" if vowel else "ce"
        return f"{'these' if plural else 'this'} {en}", f"{'ces' if plural else singular} {fr}"
    if kind == "number":
        number = rng.choice(NUMBERS)
        return f"{number[0]} {en}", f"{number[1]} {fr}"
    whose, forms = rng.choice(POSSESSIVES)
    return f"{whose} {en}", f"{forms[2 if plural else int(feminine and not vowel)]} {fr}"


def noun_phrase(rng: random.Random, person: bool = False, deep: bool = True, denied: bool = False) -> Phrase:
    """Determiner, adjectives, noun, and now and then another after "of". What is denied is not indefinite, for un and
    des would be de."""
    word = rng.choice([word for word in NOUNS if word.person or not person])
    kind = rng.choice(
        ("definite", "definite", "definite" if denied else "indefinite", "this", "possessive", "number")
    )
    plural = kind == "number" or rng.random() < 0.4
    adjectives: list[Adjective] = []
    if rng.random() < 0.5:
        adjectives.append(rng.choice(ADJECTIVES))
        if rng.random() < 0.3:  # a second on the other side of the French noun
            adjectives.append(rng.choice([a for a in ADJECTIVES if a.before != adjectives[0].before]))
            adjectives.sort(key=lambda a: not a.before)
    en, fr = with_adjectives(word, plural, adjectives)
    if kind == "indefinite" and plural and any(a.before for a in adjectives):
        en, fr = f"some {en}", elide("de", fr)  # de petits chats
    else:
        en, fr = determined(kind, en, fr, word.feminine, plural, rng)
    if deep and rng.random() < 0.15:
        owner = noun_phrase(rng, person=True, deep=False)
        en, fr = f"{en} of {owner.en}", f"{fr} {of(owner.fr)}"
    return Phrase(en, fr, 5 if plural else 2, word.feminine)


def subject(rng: random.Random) -> Phrase:
    """Who does it: a pronoun or a person."""
    if rng.random() < 0.5:
        person, feminine, en, fr = rng.choice(SUBJECTS)
        return Phrase(en, fr, person, feminine)
    return noun_phrase(rng, person=True)


def agreed(participle: str, feminine: bool, plural: bool) -> str:
    """A participle that agrees with the object before it."""
    return participle + "e" * feminine + "s" * plural


def clause(rng: random.Random, question: bool = False) -> tuple[str, str]:
    """A subject, a verb in one of three tenses, an object; denied or not; perhaps a place and a time.

    In French a pronoun that is the object stands before the verb, and "ne ... pas" goes around both.
    """
    who, what = subject(rng), rng.choice(VERBS)
    tense, denied = rng.choice(("present", "present", "past", "future")), rng.random() < 0.35
    third = who.person == 2
    en_object, fr_object, fr_pronoun, ending = "", "", "", what.participle
    none = denied and rng.random() < 0.35
    if not none and rng.random() < 0.25:
        en_object, fr_pronoun, feminine, plural = rng.choice(OBJECTS)
        ending = agreed(ending, feminine, plural)
    elif none:  # sees no horse: ne voit pas de cheval
        word, plural = rng.choice(NOUNS), rng.random() < 0.5
        en, fr = with_adjectives(word, plural, rng.sample(ADJECTIVES, rng.random() < 0.3))
        en_object, fr_object = f"no {en}", elide("de", fr)
    else:
        thing = noun_phrase(rng, denied=denied)
        en_object, fr_object = thing.en, thing.fr

    negative = denied and not none  # in English
    auxiliary = {
        "present": "does" if third else "do",
        "past": "did",
        "future": "will",
    }[tense]
    if tense != "future" and not negative and not question:
        en_verb = what.en_past if tense == "past" else what.en_third if third else what.en
        en = f"{who.en} {en_verb} {en_object}"
    else:
        words = [auxiliary, who.en] if question else [who.en, auxiliary]
        en = " ".join([*words, *(["not"] if negative else []), what.en, en_object])

    if tense == "past":
        finite, after = AVOIR[who.person], ending
    elif tense == "future":
        finite, after = what.future + FUTURE[who.person], ""
    else:
        finite, after = what.fr[who.person], ""
    if fr_pronoun:
        finite = f"les {finite}" if fr_pronoun == "les" else elide(fr_pronoun, finite)
    if denied:
        finite = f"{elide('ne', finite)} pas"
    fr = elide("je", finite) if who.fr == "je" else f"{who.fr} {finite}"
    fr = " ".join(filter(None, (fr, after, fr_object)))

    if rng.random() < 0.3:
        en_place, fr_place, with_of = rng.choice(PLACES)
        where = noun_phrase(rng, deep=False)
        en, fr = f"{en} {en_place} {where.en}", f"{fr} {fr_place} {of(where.fr) if with_of else where.fr}"
    if rng.random() < 0.3:
        en_time, fr_time = rng.choice(TIMES[tense])
        en, fr = f"{en} {en_time}", f"{fr} {fr_time}"
    return en, fr


def pair(rng: random.Random) -> tuple[str, str]:
    """One sentence in both languages."""
    kind = rng.random()
    if kind < 0.15:
        en, fr = clause(rng, question=True)
        return finished(en, "?"), finished(elide("est-ce que", fr), f"{NO_BREAK_SPACE}?")
    en, fr = clause(rng)
    if kind < 0.3:
        who = subject(rng)
        say, says, forms = rng.choice(SPEECH)
        en = f"{who.en} {says if who.person == 2 else say} that {en}"
        fr = f"{who.fr} {forms[who.person]} {elide('que', fr)}"
    elif kind < 0.5:
        en_second, fr_second = clause(rng)
        if rng.random() < 0.5:
            en, fr = f"{en} because {en_second}", f"{fr} {elide('parce que', fr_second)}"
        else:
            en, fr = f"{en}, and {en_second}", f"{fr}, et {fr_second}"
    return finished(en, "."), finished(fr, ".")


def finished(text: str, end: str) -> str:
    """A sentence with its capital and its end."""
    return f"{text[0].upper()}{text[1:]}{end}"


@functools.cache
def files(seed: int) -> dict[str, bytes]:
    """train, dev and test .en and .fr by name; the same seed gives the same bytes. No sentence stands twice."""
    rng = random.Random(seed)
    said: set[str] = set()

    def draw() -> tuple[str, str]:
        while (found := pair(rng))[0] in said or found[1] in said:
            pass
        said.update(found)
        return found

    contents = {}
    for part, count in (("train", TRAIN), ("dev", DEV), ("test", TEST)):
        pairs = [draw() for _ in range(count)]
        for side, language in enumerate(("en", "fr")):
            contents[f"{part}.{language}"] = "".join(f"{texts[side]}\n" for texts in pairs).encode()
    return contents
