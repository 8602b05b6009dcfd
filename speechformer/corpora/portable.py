"""Our tokenizers in the format of the library `tokenizers`, which needs neither this package nor NLTK.

Each rule for words is one that `nltk.word_tokenize` applies (NLTK's `punkt.py` and `destructive.py`), in its order.
A replacement cannot repeat what it replaces, so most rules only insert spaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speechformer.corpora.special_tokens import UNKNOWN
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import ABBREVIATIONS

DOT = "\ue000"  # a period that ends no sentence
NEXT = r"[?!*@:(\[{]"  # signs that begin a sentence directly after a period
ALONE = r"[;@#$%&\u2012-\u2015?!*\[\](){}<>]"  # signs that are words


def rules() -> list[tuple[str, str]]:
    """Return the rules as pairs of a regular expression and its replacement."""
    words = "|".join(word.replace(".", r"\.") for word in sorted(ABBREVIATIONS, key=len, reverse=True))
    return [
        (r"\s+", " "),
        # Punkt: periods inside a sentence
        (rf"(?i)(?<![\w'.])(?:{words})\K\.(?= \S)", DOT),
        (r"(?<![\w'.])[^\W\d]\K\.(?= [^\W\d_])", DOT),
        (r"(?<![\w'.,])\d[\d,.-]*\K\.(?= [[:lower:]])", DOT),
        # quotes that begin
        ("(?=[«“‘„])|(?<=[«“‘„])|(?<!`)(?=`)|(?<=`)(?!`)", " "),
        (r"\A\"|``", " `` "),
        (r"(?<=[ (\[{<])(?:\"|'')", " `` "),
        (r"(?i)(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)", "' "),
        # punctuation
        (rf"(?<=[^.])\.(?=[\])}}>\"'»”’]*(?: |\z)|{NEXT})", " . "),
        (r":(?!\d)", " : "),
        (r",(?!\d)", " , "),
        (r"(?<!\.)(?=\.\.)|(?<=\.\.)(?!\.)", " "),
        (f"(?={ALONE})|(?<={ALONE})", " "),
        ("--", " -- "),
        # quotes that end
        ("(?=[»”’])|(?<=[»”’])", " "),
        ("''|\"", " '' "),
        (" +", " "),
        (r"(?<=[^' ])(?='[sSmMdD]?(?: |\z))", " "),
        (r"(?<=[^' ])(?=(?:'ll|'LL|'re|'RE|'ve|'VE|n't|N'T)(?: |\z))", " "),
        # contractions
        (r"(?i)(?<=\bcan)(?=not\b)|(?<=\bd)(?='ye\b)|(?<=\bgim)(?=me\b)|(?<=\bgon)(?=na\b)", " "),
        (r"(?i)(?<=\bgot)(?=ta\b)|(?<=\blem)(?=me\b)|(?<=\bmore)(?='n\b)|(?<=\bwan)(?=na(?: |\z))", " "),
        (r"(?i)(?<= 't|\A't)(?=is\b|was\b)", " "),
        (DOT, "."),
    ]


def portable_words(vocabulary: Sequence[str], length: int | None = None) -> Any:
    """Return a `tokenizers.Tokenizer` with these words, which truncates texts to `length` words."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    words = {word: index for index, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=vocabulary[UNKNOWN]))
    replacements = [normalizers.Replace(Regex(pattern), content) for pattern, content in rules()]
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip(), *replacements])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if length is not None:
        tokenizer.enable_truncation(length)
    return tokenizer


def portable_subwords(subwords: Subwords) -> Any:
    """Return a `tokenizers.Tokenizer` that encodes a text as `subwords` does, with the space before it."""
    from tokenizers import Tokenizer, normalizers

    tokenizer = Tokenizer.from_str(subwords.tokenizer.to_str())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend(" ")])
    return tokenizer
