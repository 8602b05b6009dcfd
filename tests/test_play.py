"""The live page: its engine in node, against Python; the page itself in a browser."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from commands import call
from conftest import group, opened, run_in
from test_models import decoder
from torch import nn

from speechformer.analysis import play_page
from speechformer.analysis.command_line import short_name
from speechformer.analysis.load import load
from speechformer.corpora import sample
from speechformer.corpora.pretrained import PretrainedTokenizer
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.errors import UserError
from speechformer.generation.sampling import sampling_probabilities
from speechformer.models.classifier import EncoderClassifier
from speechformer.models.decoder import Decoder
from speechformer.models.encoder_decoder import EncoderDecoder
from speechformer.play import main
from speechformer.tasks.registry import load_task

VOCABULARY, BLOCK = 23, 14
ENGINE = "\n".join((play_page.FOLDER / name).read_text(encoding="utf-8") for name in ("words.js", "engine.js"))
slow = pytest.mark.slow


def in_node(function: str, argument: Any) -> Any:
    """Evaluate a JavaScript function of one argument beside the engine."""
    if shutil.which("node") is None:
        pytest.skip("no node on this machine")
    program = f"{ENGINE}\nconst argument = JSON.parse(require('fs').readFileSync(0, 'utf8'));\n"
    program += f"process.stdout.write(JSON.stringify(({function})(argument)));"
    done = subprocess.run(["node", "-e", program], input=json.dumps(argument), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Forward pass

RUN_ALL = """cases => cases.map(({ description, weights, inputs, change }) => {
  const model = makeModel(description, decodeSafetensors(weights));
  const { states, parts } = forward(model, inputs, { ...UNCHANGED, ...change });
  const maps = Object.values(parts).flat().map(layer => [...layer.weights]);
  return [[...logitsOf(model, states)], ...maps];
})"""
SMALL_OPTIONS = {"block": 4, "stride": 3, "window": 3, "dilation": 2, "tokens": 1, "links": 1}
BY_LAYER: dict[str, dict[str, Any]] = {
    "model": {"name": "by_layer", "layers": ["rope", "alibi", "nope"]},
    "pattern": {"name": "by_layer", "layers": [{"name": "window", "window": 3}, "full", {"name": "global"}]},
}
KINDS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "classify_mean": (EncoderClassifier, {"classes": 3, "pool": "mean", "classifier_width": 6}),
    "classify_cls": (EncoderClassifier, {"classes": 3, "pool": "cls", "classifier_width": 6}),
    "lm": (Decoder, {"tied_output": False}),
    "translate": (EncoderDecoder, {"tied_output": True, "shared_embeddings": True}),
}


def choice(kind: str, name: str) -> dict[str, Any]:
    """Return a config group with small options, so that they matter within a few tokens."""
    if name == "by_layer":
        return BY_LAYER[kind]
    return {key: SMALL_OPTIONS.get(key, value) for key, value in group(kind, name).items()}


def build(kind: str, seed: int, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Build a small random model and its architecture. Weights of norms and biases are random, too."""
    torch.manual_seed(seed)
    model_class, of_kind = KINDS[kind]
    architecture = {"width": 8, "heads": 2, "layers": 3, "ff": 10, "dropout": 0.1, "vocab_size": VOCABULARY}
    architecture |= {"norm": "pre", "final_norm": True, "qkv_bias": True, "bias": True, "activation": "relu"}
    architecture |= {"scale_embedding": False, "model": {"name": "nope"}, "pattern": {"name": "full"}}
    architecture |= {"block_size": BLOCK, **of_kind, **options}
    model = model_class(**architecture).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
    return model, architecture


Case = tuple[dict[str, Any], list[torch.Tensor]]


@torch.no_grad()
def case_of(
    kind: str,
    seed: int,
    *,
    change: dict[str, Any] | None = None,
    tokens: int | None = None,
    computed_by: Any = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Case:
    """Return what the engine computes, and logits and attention maps as torch computes them.

    Args:
        change: what is changed on the page.
        tokens: of the inputs; None: by the seed.
        computed_by: the model behind the expected values; None: the same.
        dtype: of the weights in the page.
    """
    model, architecture = build(kind, seed, **options)
    lengths = [tokens or 1 + 5 * seed % BLOCK, tokens or 1 + 3 * seed % BLOCK][: 2 if kind == "translate" else 1]
    inputs = [torch.randint(1, VOCABULARY, (length,)) for length in lengths]
    run: Any = SimpleNamespace(task=SimpleNamespace(model=model), checkpoint="best.ckpt")
    case = {
        "description": play_page.describe_model(model, architecture),
        "weights": play_page.encode_checkpoint(run, "best.ckpt", dtype),
        "inputs": [ids.tolist() for ids in inputs],
        "change": change or {},
    }
    oracle, batch = computed_by or model, [ids[None] for ids in inputs]
    maps = [layer for layers in oracle.attention(*batch).values() for layer in layers]
    return case, [values.flatten() for values in (oracle(*batch), *maps)]


def check(cases: dict[str, Case]) -> None:
    """Compare the engine's logits and weights with torch's."""
    computed = in_node(RUN_ALL, [case for case, _ in cases.values()])
    wrong = []
    for (name, (_, expected)), results in zip(cases.items(), computed, strict=True):
        for ours, theirs in zip(results, expected, strict=True):
            if len(ours) != len(theirs) or not (torch.tensor(ours) - theirs).abs().max() <= 1e-4:
                wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("every_pair", [False, pytest.param(True, marks=slow)])
def test_logits_and_weights_are_torchs(every_pair: bool) -> None:
    """Oracle: torch, for every position and pattern in every kind of model; texts of 1 to 14 tokens."""
    cases = {}
    positions, patterns = (sorted(play_page.KNOWN[group].keys() | {"by_layer"}) for group in ("model", "pattern"))
    for shift, kind in enumerate(KINDS):
        pairs = itertools.product(positions, patterns) if every_pair else zip(positions, (patterns * 2)[shift:])
        for seed, (model, pattern) in enumerate(pairs, start=shift):
            norm = ("pre", "post")[seed % 2]
            groups = {"model": choice("model", model), "pattern": choice("pattern", pattern)}
            cases[f"{kind} {model} {pattern} {norm}"] = case_of(kind, seed, norm=norm, **groups)
    check(cases)


def test_options_of_the_models() -> None:
    """Oracle: torch. RoPE's scalings and texts of 60 tokens go beyond training."""
    positions = [("rope", {"base": 50.0}), ("rope", {"fraction": 0.5}), ("relative", {}), ("fire", {}), ("xpos", {})]
    positions += [("rope", {"scaling": name, "factor": 3.0}) for name in ("linear", "ntk", "yarn")]
    positions += [("alibi", {"slopes": slopes, "scale": 1.7}) for slopes in ("learned", [0.3, 0.02])]
    options = [{"model": {**choice("model", name), **changes}} for name, changes in positions]
    options += [{"model": {"name": "rope", "frequencies": [0.7, 0.03], **more}} for more in ({}, {"scaling": "yarn"})]
    options += [{"activation": name} for name in play_page.KNOWN_VALUES["activation"].split()]
    options += [{"attention": {"name": "softmax", **more}} for more in ({"kv_heads": 1}, {"qk_norm": True})]
    options += [{"norm": name, "norm_type": "rms", "norm_eps": 0.1} for name in ("post", "sandwich", "parallel")]
    options += [{"head_width": 6, "attention": {"name": "softmax", "kv_heads": 1, "qk_norm": True}, "norm_eps": 0.1}]
    options += [{"embedding_norm": True, "output_bias": "none"}, {"norm": "parallel"}, {"scale_embedding": True}]
    options += [{key: False} for key in ("final_norm", "qkv_bias", "bias")] + [{"norm": "sandwich"}]
    options.append({"pattern": {"name": "bigbird", "window": 2, "tokens": 2, "links": 3, "seed": 5}})
    cases = {f"lm {option}": case_of("lm", 0, tokens=60, **option) for option in options}
    cases |= {f"translate {option}": case_of("translate", 11, **option) for option in options[-6:]}
    head = {"pool": "first", "classifier_activation": "tanh"}
    cases["head"] = case_of("classify_mean", 3, **head)
    cases["tied"] = case_of("lm", 5, tied_output=True)
    half, _ = build("lm", 4)
    half.load_state_dict({name: value.half().float() for name, value in half.state_dict().items()})
    cases["float16"] = case_of("lm", 4, computed_by=half, dtype=torch.float16)
    check(cases)


@torch.no_grad()
def test_changes_compute_what_the_changed_model_computes() -> None:
    """Oracle: torch, with the trained weights in a model of the changed config, and with a head set to zero."""
    alibi, window = {"model": {"name": "alibi"}}, {"name": "window", "window": 2}
    rows: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
        "scale": ({"scale": 2.5}, alibi, {"model": {"name": "alibi", "scale": 2.5}}),
        "slopes": ({"slopes": [0.7, None]}, alibi, {"model": {"name": "alibi", "slopes": [0.7, 2**-8]}}),
        "base": ({"base": 20}, {"model": {"name": "rope"}}, {"model": {"name": "rope", "base": 20.0}}),
        "off": ({"off": True}, {"model": {"name": "sinusoidal"}}, {}),
        "pattern": ({"pattern": window}, alibi, {**alibi, "pattern": window}),
        "heads": ({"heads": ["encoder.1.0"]}, alibi, alibi),
    }
    cases = {}
    for name, (change, options, changed_options) in rows.items():
        trained, _ = build("classify_mean", 9, **options)
        changed: Any = build("classify_mean", 9, **changed_options)[0]
        changed.load_state_dict(trained.state_dict(), strict=False)
        if name == "heads":
            changed.encoder.blocks[1].attention.output.weight[:, :4] = 0  # the columns that read head 1
        cases[name] = case_of("classify_mean", 9, change=change, computed_by=changed, **options)
    check(cases)
    plain = case_of("classify_mean", 9, **alibi)[1][0]
    for name in ("scale", "pattern", "heads"):
        assert (plain - cases[name][1][0]).abs().max() > 1e-3


def test_scores_of_heads_and_losses() -> None:
    """Oracle: weights and logits by hand."""
    T, tokens = 5, ["a", "b", "a", "a", "a"]
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(2, T, T, generator=generator).softmax(dim=-1)
    scores = in_node("([w, T, tokens]) => headScores(w, 1, T, tokens)", [weights.flatten().tolist(), T, tokens])
    head, distance = weights[1], (torch.arange(T)[:, None] - torch.arange(T)).abs()
    expected = {"previous": head.diagonal(-1).mean(), "first": head[1:, 0].mean()}
    expected["induction"] = (head[2, 1] + head[3, 1] + head[4, 1] + head[4, 3]) / 3
    expected |= {"entropy": -(head * head.log()).sum() / T, "distance": (head * distance).sum() / T}
    assert scores == pytest.approx({name: value.item() for name, value in expected.items()}, abs=1e-6)
    logits, ids = torch.randn(4, 7, generator=generator), [1, 4, 0, 6]
    loss = in_node("([x, ids]) => nextTokenLoss(Float32Array.from(x), ids)", [logits.flatten().tolist(), ids])
    assert loss == pytest.approx(nn.functional.cross_entropy(logits[:3], torch.tensor(ids[1:])).item(), abs=1e-6)


def test_sampling_draws_from_the_softmax() -> None:
    """Oracle: `sampling_probabilities`, within four standard errors; temperature 0 takes the largest logit."""
    logits, draws = torch.tensor([9.0, 0.5, 1.5, -0.5, 0.0, 8.0]), 20000
    draw = """([x, t, n]) => { const random = randomNumbers(7), counts = x.map(() => 0);
        for (let k = 0; k < n; k++) counts[drawToken(Float32Array.from(x), t, random, 5)] += 1; return counts; }"""
    known = logits.clone()
    known[[0, 5]] = float("-inf")  # padding, and a row of the table that is no word
    p = sampling_probabilities(known, 0.7, None, 1.0).double()
    counts = torch.tensor(in_node(draw, [logits.tolist(), 0.7, draws])).double()
    assert ((counts / draws - p).abs() <= 4 * (p * (1 - p) / draws).sqrt()).all()
    assert in_node(draw, [logits.tolist(), 0, 10])[2] == 10


# Tokenizers

SAMPLE = [line.split("\t")[-1] for line in sample.files(0)["train_CLS.tsv"].decode().splitlines()]
WORDS = (
    "Mr. U.S. J. p.m. ... .. -- - ' '' \" ` `` “ ” ‘ ’ « » can't cannot Gimme wanna 'tis don't N'T I'll 's s' d'ye "
    "3.14 3. 1,000 : ; ? ! ( ) [ < > @ # $ % & * — é ß İ ſ naïve 日本語 。 😀 a.b e.g. A. the The x-u.s. _ "
    "'re n't . , ) .\" constructor __proto__"
)
SPACES = [" ", "  ", "\n", "\t", "\u00a0", "\x85", "\x1c", "\u2028", "\u200d", "\ufeff"]
PIECES = [*WORDS.split(), *SPACES, "Oct. 5", "5. next", "5. Next", ". . ."]
ENCODE = """([spec, texts]) => { const tokenizer = makeTokenizer(spec);
  return texts.map(text => { const pieces = tokenizer.encode(text), ids = pieces.map(piece => piece.id);
    return [pieces.map(piece => piece.word), ids, tokenizer.decode(ids)]; }); }"""


@pytest.mark.parametrize("kind", ["nltk", "bpe", "words", "bytes"])
def test_tokens_are_those_of_python(kind: str) -> None:
    """Oracle: NLTK and the library `tokenizers`, on the sample and on texts of pieces that their rules are about."""
    draw, lines = random.Random(0), SAMPLE
    texts = [
        "</script><b>__proto__ & co.",
        "",
        "cafe\u0301 Zoe\u0308",
        'He said: "It\'s over." Then (after 5 p.m.) he left...',
        *lines[::40],
    ]
    for _ in range(1000 if kind == "nltk" else 300):
        pieces = (draw.choice(PIECES) + draw.choice(["", " ", " "]) for _ in range(draw.randint(1, 10)))
        texts.append("".join(pieces))
    if kind == "nltk":
        tokenizer: Any = Tokenizer.fit(lines)
    else:
        tokenizer = Subwords.fit(tuple(lines[:300]), kind, 200 if kind == "bpe" else None)
    results = in_node(ENCODE, [play_page.describe_tokenizer(tokenizer), texts])
    for text, (words, ids, decoded) in zip(texts, results, strict=True):
        assert ids == tokenizer.encode(text), repr(text)
        assert decoded == ("".join(tokenizer.stream(ids)) if kind == "nltk" else tokenizer.decode(ids)), repr(text)
        assert kind in ("words", "bytes") or words == tokenizer.split(text), repr(text)


# The file


def weighing(parameters: int) -> Any:
    """Return a run whose model has so many parameters, and no memory behind them."""
    state = {"weight": torch.empty(parameters, device="meta")}
    return SimpleNamespace(model=SimpleNamespace(state_dict=lambda: state), checkpoint="last.ckpt")


def test_a_page_holds_evenly_spaced_checkpoints() -> None:
    """Oracle: by hand. The reported one stays, and the page stays within its limit."""
    files: list[tuple[int | None, str]] = [*((k, f"checkpoints/{k}.ckpt") for k in range(40)), (40, "last.ckpt")]
    assert [step for step, _ in play_page.evenly_spaced(files, "last.ckpt", 4)] == [0, 20, 39, 40]
    assert [step for step, _ in play_page.evenly_spaced(files, "last.ckpt", 1)] == [40]
    assert play_page.evenly_spaced(files, "last.ckpt", 50) == files
    for parameters, count in ((100_000, 16), (800_000, 12), (3_600_000, 2), (10_000_000, 1)):
        ((*before, chosen_file),), _ = play_page.fit_into_page([weighing(parameters)], [files])
        assert (len(before) + 1, chosen_file) == (count, (40, "last.ckpt")), parameters


def test_precision_and_size() -> None:
    """900,000 parameters fit into 5 MB as float32, two checkpoints of them do not; 20 MB is an error."""
    files: list[tuple[int | None, str]] = [(1, "best.ckpt"), (2, "last.ckpt")]
    for number, expected in ((1, torch.float32), (2, torch.float16)):
        assert play_page.fit_into_page([weighing(900_000)], [files[-number:]])[1] == expected
    with pytest.raises(UserError, match="22 MB of weights; the limit is 20 MB"):
        play_page.fit_into_page([weighing(900_000)] * 12, [files] * 12)
    run: Any = SimpleNamespace(task=SimpleNamespace(model=build("lm", 0, width=64)[0]), checkpoint="last.ckpt")
    encoded = play_page.encode_checkpoint(run, "last.ckpt", torch.float32)
    assert 0 < len(encoded) - play_page.count_weights(run.task.model) * 4 * 4 / 3 < 12_000  # the header


TEXT = "We will mend the harbours, my friend."
HARMFUL = "</script><script>document.title='executed'</script><img src=x onerror=document.title='executed'>"


def test_the_command_writes_one_file(
    a_classifier: Path, a_language_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_pages: list[str] = []
    monkeypatch.setattr("speechformer.play.webbrowser.open", opened_pages.append)
    path = tmp_path / "new" / "page.html"
    for more in ([], ["--no-open"]):
        printed, _ = call(main, a_classifier, a_language_model, "--output", path, "--text", HARMFUL, *more)
    assert opened_pages == [path.as_uri()] and f"{path} (" in printed
    text = path.read_text(encoding="utf-8")
    assert text.count("</script>") == 2 and "<img" not in text and "default-src 'none'" in text
    assert not re.search(r"https?://", text) and str(tmp_path) not in text and str(a_classifier.parent) not in text


def test_pages_of_many_runs_have_names_of_their_own_that_a_file_can_have() -> None:
    assert short_name("a_and_b") == "a_and_b"
    pages = [short_name(f"{'語' * 80}{end}_and_b") for end in "xy"]
    assert len({*pages}) == 2 and all(len(page.encode()) <= 200 for page in pages)


def test_what_the_page_cannot_compute_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for task, name, message in (
        ("lm", "rnn", r"^R: model=rnn is not supported by the live page.$"),
        ("lm", "forgetting", r"^R: model=forgetting is not supported by the live page.$"),
        ("probe", "nope", "^R: task=probe is not supported by the live page.$"),
    ):
        hparams = {"architecture": {"model": {"name": name}}}
        model = decoder(model=group("model", name))
        run: Any = SimpleNamespace(directory="R", task=SimpleNamespace(name=task, hparams=hparams), model=model)
        with pytest.raises(UserError, match=message):
            play_page.check_supported(run)
    monkeypatch.setitem(play_page.KNOWN["pattern"], "window", "")  # as if the page did not know a new option
    layers = ["softmax", {"name": "sink"}, "softmax"]
    cases: dict[str, dict[str, Any]] = {
        "attention.softcap=5.0": {"attention": {"name": "softmax", "softcap": 5.0}},
        "attention=sink": {"attention": {"name": "by_layer", "layers": layers}},
        "pattern.window=3": {"pattern": {"name": "window", "window": 3}},
        "architecture.norm_type=dyt": {"norm_type": "dyt"},
    }
    for message, option in cases.items():
        with pytest.raises(UserError, match=f"^{message} is not supported$"):
            play_page.describe_model(*build("lm", 0, **option))


# Models from elsewhere

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
TRICKY = [
    "<s>",
    "<|end|>",
    "<|end|",
    "e\u0301",
    "\u1e9b\u0323",
    "'\u017fa",
    "I'Ma",
    "'LL",
    "12345",
    "\u00bd",
    "\u0663",
    "\r\n",
]
TRICKY += ["\n\n", "   ", "é~Sa", "e\u0301~", "~", "zq", *PIECES]


def tricky_texts(count: int) -> list[str]:
    """Draw texts of pieces that the rules of tokenizers are about."""
    draw = random.Random(1)
    return [
        "".join(draw.choice(TRICKY) + draw.choice(["", " "]) for _ in range(draw.randint(1, 8))) for _ in range(count)
    ]


def bytes_of(name: str) -> PretrainedTokenizer:
    """Build the tokenizer of a family of models, whose merges do not depend on where it splits a text."""
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = level
    options = {"vocab_size": 600, "special_tokens": ["<|end|>", "<s>"], "initial_alphabet": sorted(level.alphabet())}
    trainer = tokenizers.trainers.BpeTrainer(**options, show_progress=False)
    tokenizer.train_from_iterator([*SAMPLE[::9], *(text.replace("zq", "") for text in tricky_texts(2000))], trainer)
    content = json.loads(tokenizer.to_str())
    content["model"]["ignore_merges"] = name == "llama"
    content["model"]["vocab"]["zq"] = 600  # which no merge makes
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern := {"llama": LLAMA3, "qwen3": QWEN, "mistral": GPT4O}.get(name):
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    if name in ("qwen3", "gpt_neox"):
        tokenizer.normalizer = tokenizers.normalizers.NFC()
        written = ("  ", "    ", "é~Sa", "e\u0301~")
        tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=True) for text in written])
        tokenizer.add_tokens([tokenizers.AddedToken("~", normalized=False)])
    if name == "llama":
        around = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer.post_processor = tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), around])
    return PretrainedTokenizer(tokenizer, 0)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "mistral", "qwen3"])
def test_tokens_are_those_of_the_library(name: str) -> None:
    """Oracle: the library `tokenizers`, on texts of pieces that the rules of the family's tokenizer are about."""
    tokenizer = bytes_of(name)
    texts = [*SAMPLE[::40], *tricky_texts(700), "naïve café, 12,345 \r\n\n  x 日本語😀 <|end|><s>", "<s>"]
    described = play_page.describe_tokenizer(tokenizer)
    assert (described["ends"], described["before"], described["after"]) == ([0], [1] * (name == "llama"), [])
    for text, (words, ids, decoded) in zip(texts, in_node(ENCODE, [described, texts]), strict=True):
        assert ids == tokenizer.encode(text), repr(text)
        assert words == tokenizer.split(text) and decoded == tokenizer.decode(ids), repr(text)


def test_tokenizers_that_the_page_would_not_repeat_are_refused() -> None:
    plain = json.loads(bytes_of("gpt2").tokenizer.to_str())
    spaced = {**plain["pre_tokenizer"], "add_prefix_space": True}
    split = {"type": "Split", "pattern": {"Regex": r"\s(?=\d)"}, "behavior": "Isolated", "invert": False}
    (end, *others), model = plain["added_tokens"], plain["model"]
    cases: list[tuple[str, Any]] = [
        *[("pre_tokenizer", step) for step in (None, spaced, {"type": "BertPreTokenizer"})],
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [split, plain["pre_tokenizer"]]}),
        ("normalizer", {"type": "Lowercase"}),
        ("added_tokens", [{**end, "lstrip": True}, *others]),
        ("model", {**model, "byte_fallback": True}),
        ("model", {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0}}),
        ("model", {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]], "byte_fallback": False}),
    ]
    for key, value in cases:
        content = json.dumps({**plain, key: value})
        with pytest.raises(UserError, match=f"^the {key} of its tokenizer.json is not supported$"):
            play_page.describe_tokenizer(PretrainedTokenizer(tokenizers.Tokenizer.from_str(content), None))
    assert play_page.to_javascript(LLAMA3) is not None
    for regex in ("(a)", r"\p{L}++", "[a-z]", r"[\S]", "(?i:x)", r"\d", "a.", "[[:alpha:]]", "(?<=a)b", "~S"):
        assert play_page.to_javascript(regex) is None, regex


# The page in a browser


def wait_until(page: Any, condition: str) -> None:
    """Wait for a condition in JavaScript; the page's policy forbids Playwright's own way."""
    for _ in range(2000):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    raise AssertionError(condition)


def settled(page: Any) -> None:
    """Wait for what follows a keystroke: losses, and the table of all heads."""
    wait_until(page, "state.panels.every(panel => panel.empty || panel.table)")


def write_page(path: Path, folder: Path, text: str = TEXT) -> Path:
    """Write the page of a run."""
    play_page.write_page([load(folder)], path, text)
    return path


def shown_answer(page: Any, side: int = 0) -> list[float]:
    """Return the probabilities that one side of the page shows."""
    values = page.locator("section.panel").nth(side).locator(".bars .value").all_text_contents()
    return [float(value.split(" %")[0]) / 100 for value in values]


@pytest.fixture(scope="module")
def classifier_page(a_classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("page") / "classifier.html", a_classifier)


def test_the_page_shows_what_python_computes(browser: Any, classifier_page: Path, a_classifier: Path) -> None:
    """Oracle: `predict` and `attention` of the run, as trained and with the slopes of the slider."""
    run = load(a_classifier)
    page, messages = opened(browser, classifier_page)
    page.fill("#sentence", "Our children will thank us 😀")
    assert page.locator(".chip.unknown").last.text_content() == "😀"
    assert page.locator(".bars .name").all_text_contents() == list(run.predict("us").probabilities)
    page.fill("#sentence", TEXT)
    page.locator(".tile button.pick").nth(3).click()  # layer 2, head 2
    page.locator(".chip").nth(2).hover()
    weights = [float(chip.get_attribute("title").split(": ")[1]) for chip in page.locator(".chip").all()]
    assert weights == pytest.approx(run.attention(TEXT)[0].weights[1, 1, 2].tolist(), abs=6e-4)
    as_trained = shown_answer(page)
    assert as_trained == pytest.approx(list(run.predict(TEXT).probabilities.values()), abs=6e-4)
    page.locator("input[aria-label='Scale of all slopes']").fill("8")
    run.model.encoder.positions.scale = 8.0  # type: ignore[union-attr]
    changed = run.logits(TEXT).softmax(dim=-1).tolist()
    assert shown_answer(page) == pytest.approx(changed, abs=6e-4) and as_trained != pytest.approx(changed, abs=1e-3)
    assert "Not what this model was trained with: scale 8." in page.text_content(".marker")
    page.get_by_text("As trained | changed").click()
    assert [shown_answer(page), shown_answer(page, 1)] == [as_trained, pytest.approx(changed, abs=6e-4)]
    page.get_by_text("One model").click()
    page.locator(".marker button").click()
    assert shown_answer(page) == as_trained and not page.locator(".marker").is_visible() and messages == []
    page.close()


@pytest.mark.parametrize(
    ("fixture", "change", "twice"),
    [
        ("a_classifier", {"slopes": [1, None]}, False),
        pytest.param("a_language_model", {"base": 10}, True, marks=slow),
        pytest.param("a_translator", {"off": True}, False, marks=slow),
    ],
)
def test_three_steps_fit_what_the_page_shows(
    browser: Any,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    fixture: str,
    change: dict[str, Any],
    twice: bool,
) -> None:
    """Oracle: the state of the page after each button; what differs by position and task is written by hand."""
    page, messages = opened(browser, write_page(tmp_path / "page.html", request.getfixturevalue(fixture)))
    untouched = page.evaluate("untouched()")
    page.locator("summary").click()
    _, second, third = page.locator("#guide li").all()
    second.locator("button").first.click()
    assert page.evaluate("state.panels.map(panel => panel.change)") == [{**untouched, **change}]
    second.get_by_text("Compare").click()
    assert page.evaluate("state.panels.map(panel => panel.change)") == [untouched, {**untouched, **change}]
    *before, heads = third.locator("button").all()
    for button in before:
        button.click()
    assert page.input_value("#sentence") == (f"{TEXT} {TEXT}" if twice else TEXT)
    settled(page)
    heads.click()
    wait_until(page, "mainPanel().place.headsSection.getBoundingClientRect().bottom <= innerHeight + 1")
    assert [page.locator(f"{place} .legend").count() for place in (".second", "section.wide")] == [2, 2]
    assert messages == []
    page.close()


def test_hostile_words_and_names_are_text(browser: Any, a_classifier: Path, tmp_path: Path) -> None:
    content, _ = play_page.export_runs([load(a_classifier)], alone=True)
    content["runs"] *= 2
    for run in content["runs"]:
        run |= {"label": HARMFUL, "name": HARMFUL, "classes": [HARMFUL, "constructor", "__SCRIPT__"]}
    content["tokenizers"][0]["vocabulary"][2:5] = [HARMFUL, "<b>", "__CONTENT__"]
    path = tmp_path / "hostile.html"
    text = f"{HARMFUL} __proto__ <b> __STYLE__ constructor"
    path.write_text(play_page.render_page(content, text), encoding="utf-8")
    page, messages = opened(browser, path)
    settled(page)
    assert page.locator("img, b > b").count() == 0
    assert page.locator(".bars .name").first.text_content() == HARMFUL
    assert page.title() == "Attention, live" and messages == []
    page.close()


@slow
def test_heads_patterns_and_positions_are_switched(browser: Any, classifier_page: Path, a_classifier: Path) -> None:
    """Oracle: torch, without the columns of the output projection that read a head."""
    run = load(a_classifier)
    page, messages = opened(browser, classifier_page)
    settled(page)
    before, as_trained = run.logits(TEXT).log_softmax(dim=-1), shown_answer(page)
    with torch.no_grad():
        run.model.encoder.blocks[0].attention.output.weight[:, 8:] = 0  # type: ignore[union-attr,index]
    rise = (before - run.logits(TEXT).log_softmax(dim=-1))[before.argmax()].item()
    table = page.evaluate("state.panels[0].table.map(row => [row.rise, row.l, row.n])")
    assert len(table) == 4 and table == sorted(table, key=lambda row: -row[0])
    assert [pytest.approx(rise, abs=1e-4), 0, 1] in table
    page.get_by_label("Switch layer 1, head 2 off").click()
    assert "1 head off" in page.text_content(".marker") and page.locator(".tile.off").count() == 1
    page.locator("select[aria-label='Attention pattern']").select_option("window")
    page.locator("[data-option=window] input").fill("2")
    assert page.text_content("[data-option=window] .now") == "2: 1 word on each side"
    page.locator("main input[type=checkbox]").check()
    assert page.locator("input[aria-label*=lope]").first.is_disabled()
    assert all(change in page.text_content(".marker") for change in ("position off", "pattern window"))
    page.locator("#try button", has_text="as trained").click()
    assert shown_answer(page) == as_trained and messages == []
    page.close()


@slow
def test_keys_act_and_the_address_keeps_what_they_changed(browser: Any, classifier_page: Path) -> None:
    """They leave text fields alone. An address with wrong settings opens the page as trained."""
    page, messages = opened(browser, classifier_page)
    page.locator("#theme").click()
    page.locator("select[aria-label='Attention pattern']").select_option("window")
    page.locator("canvas.map").focus()
    for key in ("Home", "ArrowDown", "ArrowRight", "ArrowRight", "PageDown", "o", "Enter"):
        page.keyboard.press(key)
    weight = page.evaluate("state.panels[0].result.parts.encoder[0].weights")[92]  # head 2, query 1, key 2 of 9
    assert page.locator(".place").first.text_content().startswith(f"will → mend: {weight:.3f}  pinned")
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.get_by_text("Close").click()
    page.fill("#sentence", "Our children & “friends” = 100 %")
    page.locator("#sentence").focus()
    page.keyboard.type("o?]")
    assert page.input_value("#sentence").endswith("o?]") and page.locator(".tile.off").count() == 1
    wait_until(page, "view.address === null")
    kept = "[state.panels.map(({ layer, head, change }) => ({ layer, head, change })), state.query, state.pinned]"
    kept = f"[{kept}, document.querySelector('#sentence').value, document.documentElement.dataset.theme]"
    expected, address = page.evaluate(kept), page.url
    page.goto("about:blank")
    page.goto(address)
    assert page.evaluate(kept) == expected and expected[2] == "dark"
    page.goto("about:blank")
    wrong = "#a.layer=99&a.heads=x_encoder.9.9&a.pattern=nothing&a.scale=x&query=-5&key=1e9&b.run=7"
    page.goto(classifier_page.as_uri() + wrong)
    assert page.locator("canvas.map").first.is_visible() and messages == []
    page.close()


@pytest.fixture(scope="module")
def a_history(little: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that keeps its weights at every third step."""
    options = ["corpus=speeches", f"corpus.root={little}", "corpus.classes=[ann,bob,cy]", "model=alibi"]
    return run_in(tmp_path_factory.mktemp("history"), *options, "recipe.lr=1e-2", "keep_every_n_steps=3")


@slow
def test_the_training_of_a_run_has_a_slider_and_plays(browser: Any, a_history: Path, tmp_path: Path) -> None:
    """Oracle: torch, with the weights of each step. The step that the metrics are of is named and one click away."""
    run = load(a_history)
    page, messages = opened(browser, write_page(tmp_path / "history.html", a_history))
    steps = page.evaluate("content.runs[0].checkpoints.map(checkpoint => checkpoint.step)")
    assert steps == sorted(steps) and len(steps) >= 4
    slider, button = page.get_by_label("Checkpoint"), page.locator(".steps button", has_text="reported")
    for index in (1, 0):
        slider.fill(str(index))
        task = load_task(a_history / "checkpoints" / f"{steps[index]}.ckpt")
        expected = task(torch.tensor([run.tokenizer.encode(TEXT)]))[0].softmax(dim=-1).tolist()
        assert shown_answer(page) == pytest.approx(expected, abs=6e-4)
    assert page.text_content(".steps > span") == "step 0, initial weights"
    button.click()
    assert shown_answer(page) == pytest.approx(list(run.predict(TEXT).probabilities.values()), abs=6e-4)
    page.get_by_text("As trained | changed").click()
    shown_steps, player = "state.panels.map(panel => panel.checkpoint)", page.locator(".player").first
    page.get_by_label("Checkpoint").nth(1).fill("1")
    player.click()
    assert page.evaluate(shown_steps) == [2, 2]
    wait_until(page, "state.panels.every(panel => panel.checkpoint === 3)")
    assert messages == []
    page.close()


@slow
def test_next_words_and_translations_are_those_of_the_run(
    browser: Any, a_language_model: Path, a_translator: Path, tmp_path: Path
) -> None:
    """Oracle: the run's logits, its greedy text, and torch's cross-entropy."""
    run = load(a_language_model)
    page, messages = opened(browser, write_page(tmp_path / "decoder.html", a_language_model))
    settled(page)
    logits, ids = run.logits(TEXT), run.tokenizer.encode(TEXT)
    assert page.locator(".bars .name").all_text_contents() == run.tokenizer.tokens(
        logits[-1].topk(8).indices.tolist()
    )
    loss = nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item()
    assert f"{loss:.3f} nats" in page.text_content(".answer")
    page.locator("input[aria-label=Temperature]").fill("0")
    settled(page)
    continuation = page.text_content(".continuation").removeprefix("… ")
    assert run.generate(TEXT, tokens=20, temperature=0).endswith(continuation) and messages == []
    page.close()
    run, text = load(a_translator), "The king sees a boat."
    page, messages = opened(browser, write_page(tmp_path / "translator.html", a_translator, text))
    settled(page)
    assert page.locator(".continuation").first.text_content() == run.translate(text, beam=1)[0]
    for part in ("encoder", "decoder", "cross"):
        page.locator(f"button[data-part={part}]").click()
        assert part in page.text_content("h3 span") and page.locator("canvas.map").is_visible()
    assert messages == []
    page.close()
