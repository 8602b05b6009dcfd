// From a text to tokens and ids, as `corpora/tokenizer.py` (words), `corpora/subwords.py` and `corpora/pretrained.py`
// do it in Python.
//
// Words are those of `nltk.word_tokenize`: Punkt splits a text into sentences (Kiss and Strunk 2006, with a list of
// abbreviations and nothing else), and regular expressions split each sentence into Penn Treebank words. Character
// classes are written out, because \s, \w and \b mean other characters in Python.

const SPACE = "\\t-\\r\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"; // Python's `regex`
const STRIPPED = SPACE + "\\x1c-\\x1f"; // str.split, str.strip and `re`
const WORD = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}"; // \w of `regex`
const LETTER = "\\p{L}\\p{N}_"; // \w of `re`
const CLOSING = "\\u2018\\u2019\\u201c\\u201d\\xab\\xbb";

const pattern = (text, flags = "gu") => new RegExp(text.replaceAll("~S", SPACE).replaceAll("~W", WORD)
  .replaceAll("~L", LETTER).replaceAll("~Q", CLOSING), flags);
const trimEnd = (text) => text.replace(pattern(`[${STRIPPED}]+$`), "");

// Punkt: which of the marks . ? ! end a sentence

const NON_WORD = "[)\";}\\]*:@'({\\[~Q?!]";
const MULTI = `(?:-{2,}|\\.{2,}|(?:\\.[~S]){2,}\\.)`;
const MARK = pattern(`[.?!](?=(${NON_WORD}|[~S]+([^~S]+)))`);
const PIECE = pattern("(?:" + MULTI + "|(?=[^(\"`{\\[:;&#*@)}\\]\\-,])[^~S]+?(?=[~S]|$|" + NON_WORD + "|" + MULTI +
  "|,(?=$|[~S]|" + NON_WORD + "|" + MULTI + "))|[^~S])");
const REALIGN = pattern("^[\"')\\]}~Q]+?(?:[~S]+|(?=--)|(?=\\n)|$)", "u");
const NUMBER = pattern("^-?[.,]?\\p{Nd}[\\p{Nd},.-]*\\.?$", "u");
const INITIAL = pattern("^[\\p{Alphabetic}\\p{M}\\p{Pc}\\p{Join_Control}]\\.$", "u");

// A piece of the words around a mark, with what the first pass of Punkt says of it.
function annotated(piece, abbreviations) {
  const before = piece.slice(0, -1).toLowerCase(), ends = piece.endsWith(".");
  const token = { text: piece, ends, breaks: false, abbreviation: false, ellipsis: false };
  if (piece === "." || piece === "?" || piece === "!") token.breaks = true;
  else if (/^\.\.+$/.test(piece)) token.ellipsis = true;
  else if (ends && !piece.endsWith("..")) {
    if (abbreviations.has(before) || abbreviations.has(before.split("-").at(-1))) token.abbreviation = true;
    else token.breaks = true;
  }
  return token;
}

// Whether the words around a mark hold the end of a sentence.
function endsSentence(context, abbreviations) {
  const pieces = context.split("\n").flatMap((line) => line.match(PIECE) ?? []);
  const tokens = pieces.map((piece) => annotated(piece, abbreviations));
  for (let k = 0; k + 1 < tokens.length; k++) {
    const [token, next] = [tokens[k], tokens[k + 1]];
    const initial = token.ends && INITIAL.test(token.text);
    const number = token.ends && NUMBER.test(token.text.toLowerCase());
    if (initial || number) {
      const first = String.fromCodePoint(next.text.codePointAt(0));
      const goesOn = /^[;:,.!?]$/.test(next.text) || /\p{Lowercase}/u.test(first);
      if (goesOn || (initial && /\p{Uppercase}/u.test(first))) token.breaks = false;
    }
    if (token.breaks) return true;
  }
  return false;
}

// The sentences of a text.
function sentencesOf(text, abbreviations) {
  const slices = [], contexts = [];
  let last = 0, previous = null, [start, stop] = [0, 0];
  for (const match of text.matchAll(MARK)) {
    const before = text.slice(stop, match.index), space = Math.max(0, before.search(/[ \t\n\r\v\f][^ \t\n\r\v\f]*$/));
    const from = space ? space + stop + 1 : start;
    if (previous && stop <= from) contexts.push([previous, text.slice(start, stop) + previous[0] + previous[1]]);
    [previous, start, stop] = [match, from, match.index];
  }
  if (previous) contexts.push([previous, text.slice(start, stop) + previous[0] + previous[1]]);
  for (const [match, context] of contexts) {
    if (!endsSentence(context, abbreviations)) continue;
    const end = match.index + 1;
    slices.push([last, end]);
    last = match[2] ? end + match[1].length - match[2].length : end;
  }
  slices.push([last, trimEnd(text).length]);
  const sentences = []; // closing quotes and brackets belong to the sentence before them
  let moved = 0;
  for (const [k, [from, to]] of slices.entries()) {
    const begin = from + moved, next = slices[k + 1];
    const closing = next && text.slice(...next).match(REALIGN);
    if (closing) sentences.push(text.slice(begin, next[0] + trimEnd(closing[0]).length));
    else if (to > begin) sentences.push(text.slice(begin, to));
    moved = closing ? closing[0].length : 0;
  }
  return sentences;
}

// Penn Treebank words: each rule is a regular expression and its replacement, in this order.

const RULES = [
  ["([«“‘„]|`+)", " $1 "], ["^\"", "``"], ["``", " `` "], ["([ ([{<])(\"|'{2})", "$1 `` "],
  ["(?<![~W])'(?!(?:re|ve|ll|m|t|s|d|n)(?![~W]))(?=[~W])", "' ", "giu"],
  ["([^.])(\\.)(?=([\\])}>\"'»”’ ]*))\\3[~S]*$", "$1 $2 $3 "],
  ["([:,])([^\\p{Nd}])", " $1 $2"], ["([:,])$", " $1 "],
  ["\\.{2,}", " $& "], ["[;@#$%&]", " $& "], ["[\\u2012-\\u2015]", " $& "],
  ["([^.])(\\.)([\\])}>\"']*)[~S]*$", "$1 $2$3 "],
  ["[?!]", " $& "], ["([^'])' ", "$1 ' "], ["\\*", " * "], ["[\\][(){}<>]", " $& "], ["--", " -- "],
  ["^|$", " "], ["([»”’])", " $1 "], ["''", " '' "], ["\"", " '' "], ["[~S]+", " "],
  ["([^' ])('[sS]|'[mM]|'[dD]|') ", "$1 $2 "], ["([^' ])('ll|'LL|'re|'RE|'ve|'VE|n't|N'T) ", "$1 $2 "],
  ...[["can", "not"], ["d", "'ye"], ["gim", "me"], ["gon", "na"], ["got", "ta"], ["lem", "me"], ["more", "'n"]]
    .map(([one, two]) => [`(?<![~L])(${one})(${two})(?![~L])`, " $1 $2 ", "giu"]),
  ["(?<![~L])(wan)(na)(?=[" + STRIPPED + "])", " $1 $2 ", "giu"],
  [" ('t)(is)(?![~L])", " $1 $2 ", "giu"], [" ('t)(was)(?![~L])", " $1 $2 ", "giu"],
].map(([rule, replacement, flags]) => [pattern(rule, flags), replacement]);

function splitWords(text, abbreviations) {
  return sentencesOf(text, abbreviations).flatMap((sentence) => {
    for (const [rule, replacement] of RULES) sentence = sentence.replace(rule, replacement);
    return sentence.split(pattern(`[${STRIPPED}]+`)).filter(Boolean);
  });
}

const NO_SPACE_BEFORE = new Set([".", ",", ";", ":", "!", "?", ")", "]", "}", "%", "''", "...", "n't", "--"]);
const NO_SPACE_AFTER = new Set(["(", "[", "{", "$", "#", "``"]);

// Words as a text: I do n't , ( ever ) . -> I don't, (ever).
function joinWords(words) {
  return words.map((word, k) => {
    const isClitic = /^'\p{L}+$/u.test(word);
    const joined = k === 0 || NO_SPACE_AFTER.has(words[k - 1]) || NO_SPACE_BEFORE.has(word) || isClitic;
    return (joined ? "" : " ") + (word === "``" || word === "''" ? "\"" : word);
  }).join("");
}

// Subwords: a word, a number or punctuation, with the space before it; then the byte pairs merged in training.

const SUBWORD = pattern(" ?\\p{L}+| ?\\p{N}+| ?[^~S\\p{L}\\p{N}]+|[~S]");
const PRINTED = (byte) => (byte >= 33 && byte < 127) || (byte >= 161 && byte < 173) || byte >= 174;
const SYMBOLS = (() => { // GPT-2's character for each byte
  let others = 0;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(PRINTED(byte) ? byte : 256 + others++));
})();
const BYTES = new Map(SYMBOLS.map((symbol, byte) => [symbol, byte]));

// The tokenizer of a run: `encode(text)` returns words and their ids, `text(id)` a token, `decode(ids)` a text.
function makeTokenizer(spec) {
  const ids = new Map(spec.vocabulary.map((word, id) => [word, id])), { unknown, ends, padding } = spec;
  const id = (word) => ids.get(word) ?? unknown;
  if (spec.kind === "nltk") {
    const abbreviations = new Set(spec.abbreviations);
    const encode = (text) => splitWords(text.normalize("NFC"), abbreviations).map((word) => ({ word, id: id(word) }));
    const text = (k) => spec.vocabulary[k] ?? "<unk>";
    return { encode, text, decode: (list) => joinWords(list.map(text)), unknown, ends, padding };
  }
  const bytesOf = (k) => { // a token that is written out in texts can have other symbols
    const symbols = Array.from(spec.vocabulary[k]);
    return symbols.every((symbol) => BYTES.has(symbol)) ? symbols.map((symbol) => BYTES.get(symbol))
      : [...new TextEncoder().encode(spec.vocabulary[k])];
  };
  const decodeBytes = (bytes) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));
  const text = (k) => spec.kind === "words" ? spec.vocabulary[k] : decodeBytes(bytesOf(k));
  const ranks = new Map((spec.merges ?? []).map((pair, rank) => [pair, rank]));
  const merge = (piece) => {
    const parts = Array.from(new TextEncoder().encode(piece), (byte) => SYMBOLS[byte]);
    if (spec.wholeWords && ids.has(parts.join(""))) return [parts.join("")];
    for (;;) {
      let best = Infinity, at = -1;
      for (let k = 0; k + 1 < parts.length; k++) {
        const rank = ranks.get(parts[k] + " " + parts[k + 1]) ?? Infinity;
        if (rank < best) [best, at] = [rank, k];
      }
      if (at < 0) return parts;
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  };
  const pieces = (piece) => spec.kind === "words" ? [{ word: piece, id: id(piece) }]
    : merge(piece).map((part) => ({ word: text(id(part)), id: id(part) }));
  if (spec.kind === "pretrained") {
    const token = (k) => ({ word: text(k), id: k }), split = pretrainedSplitter(spec);
    const body = (words) => split(words).flatMap((piece) => typeof piece === "number" ? [token(piece)] : pieces(piece));
    const encode = (words) => words ? [...spec.before.map(token), ...body(words), ...spec.after.map(token)] : [];
    const decode = (list) => decodeBytes(list.filter((k) => !spec.special.includes(k)).flatMap(bytesOf));
    return { encode, text, decode, unknown, ends, padding };
  }
  const decode = (list) => {
    const at = list.findIndex((k) => ends.includes(k)), before = at < 0 ? list : list.slice(0, at);
    const body = before.filter((k) => k === unknown || (k > 3 && k < spec.vocabulary.length));
    if (spec.kind === "words") return body.map((k) => k === unknown ? " <unk>" : text(k)).join("").replace(/^ /, "");
    const bytes = body.flatMap((k) => k === unknown ? [...new TextEncoder().encode(" <unk>")] : bytesOf(k));
    return decodeBytes(bytes).replace(/^ /, "");
  };
  const encode = (words) => (` ${words.normalize("NFC")}`.match(SUBWORD) ?? []).flatMap(pieces);
  return { encode, text, decode, unknown, ends, padding };
}

// Of a model from elsewhere: the pieces of a text, as text or, where a token is written out, as its id.
function pretrainedSplitter({ written, nfc, splits }) {
  const normal = (text) => nfc ? text.normalize("NFC") : text;
  const inText = (f) => (pieces) => pieces.flatMap((piece) => typeof piece === "number" ? [piece] : f(piece));
  const cut = (rule, id = (part) => part) => inText((text) => // every second part is a match
    text.split(rule).map((part, k) => k % 2 ? id(part) : part).filter((part) => part !== ""));
  const cutTokens = (tokens) => { // the longest first
    if (!tokens.length) return (pieces) => pieces;
    const known = new Map(tokens), names = [...known.keys()].sort((a, b) => b.length - a.length);
    const escaped = names.map((name) => name.replace(/[\\^$.*+?()[\]{}|\/]/g, "\\$&"));
    return cut(new RegExp(`(${escaped.join("|")})`, "u"), (part) => known.get(part));
  };
  const steps = [
    cutTokens(written.filter(({ normalized }) => !normalized).map(({ content, id }) => [content, id])),
    inText((text) => [normal(text)]),
    cutTokens(written.filter(({ normalized }) => normalized).map(({ content, id }) => [normal(content), id])),
    ...splits.map((split) => cut(pattern(`(${split})`, "u"))),
  ];
  return (text) => steps.reduce((pieces, step) => step(pieces), [text]);
}
