"""The live page: its forward pass and tokenizers against Python's, and the page in a browser."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY, compose, group, opened, run_in
from torch import nn

from speechformer.analysis.load import load
from speechformer.analysis.play_page import (
    FOLDER,
    KNOWN_PATTERNS,
    KNOWN_POSITIONS,
    Snapshot,
    choose_precision,
    describe_model,
    describe_tokenizer,
    evenly_spaced,
    export_runs,
    list_checkpoints,
    load_checkpoints,
    name_of_chosen,
    render_page,
)
from speechformer.corpora import sample
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.errors import UserError
from speechformer.generation.sampling import sampling_probabilities
from speechformer.models.classifier import EncoderClassifier
from speechformer.models.decoder import Decoder
from speechformer.models.encoder_decoder import EncoderDecoder
from speechformer.play import main, page_name
from speechformer.tasks.registry import load_task, read_checkpoint
from speechformer.training.run import execute

VOCABULARY, BLOCK = 23, 14
ENGINE = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in ("words.js", "engine.js"))
Evaluate = Callable[[str, Any], Any]


@pytest.fixture(scope="module")
def evaluate(request: pytest.FixtureRequest) -> Iterator[Evaluate]:
    """Evaluate a JavaScript function of one argument beside the engine: in Chromium, or else in node."""
    try:
        browser = request.getfixturevalue("browser")
    except pytest.skip.Exception:
        if shutil.which("node") is None:
            pytest.skip("neither Chromium nor node on this machine")
        yield in_node
        return
    page = browser.new_page()
    page.add_script_tag(content=ENGINE)
    yield page.evaluate
    page.close()


def in_node(function: str, argument: Any) -> Any:
    """Evaluate a JavaScript function of one argument beside the engine, in node."""
    program = f"{ENGINE}\nconst own = JSON.parse(require('fs').readFileSync(0, 'utf8'));\n"
    program += f"process.stdout.write(JSON.stringify(({function})(own)));"
    done = subprocess.run(["node", "-e", program], input=json.dumps(argument), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Forward pass

RUN_ALL = """cases => cases.map(({ model, weights, inputs, change }) => {
  const own = makeModel(model, decodeSafetensors(weights));
  const { states, parts } = forward(own, inputs, { ...UNCHANGED, ...change });
  const listed = Object.entries(parts).map(([part, layers]) => [part, layers.map(layer => [...layer.weights])]);
  return { logits: [...logitsOf(own, states)], maps: Object.fromEntries(listed) };
})"""
MIXED = {
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
        return MIXED[kind]
    small = {"block": 4, "stride": 3, "window": 3, "dilation": 2, "tokens": 1, "links": 1}
    return {key: small.get(key, value) for key, value in group(kind, name).items()}


def build(kind: str, seed: int, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Build a small random model and its architecture. Weights of norms and biases are random, too."""
    torch.manual_seed(seed)
    model_class, own = KINDS[kind]
    sizes = {"width": 8, "heads": 2, "layers": 3, "ff": 10, "dropout": 0.1, "vocab_size": VOCABULARY}
    usual = {"norm": "pre", "final_norm": True, "qkv_bias": True, "bias": True, "activation": "relu"}
    usual |= {"scale_embedding": False, "model": choice("model", "nope"), "pattern": choice("pattern", "full")}
    architecture = {"block_size": BLOCK, **own, **sizes, **usual, **options}
    model = model_class(**architecture).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
    return model, architecture


@torch.no_grad()
def case_of(
    kind: str,
    seed: int,
    change: dict[str, Any] | None = None,
    *,
    tokens: int | None = None,
    computed_by: Any = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, Any]:
    """Return a model as the page gets it, inputs, and what torch computes of them.

    Args:
        tokens: of the inputs; None: by the seed.
        computed_by: the model behind the expected values; None: the same.
    """
    model, architecture = build(kind, seed, **options)
    lengths = [tokens or 1 + seed % BLOCK, tokens or 1 + (seed * 7) % BLOCK][: 2 if kind == "translate" else 1]
    inputs = [torch.randint(1, VOCABULARY, (length,)) for length in lengths]
    weights = Snapshot("best.ckpt", 1, SimpleNamespace(model=model)).encode(dtype)  # type: ignore[arg-type]
    oracle, batch = computed_by or model, [own[None] for own in inputs]
    maps = {part: [own[0].flatten() for own in layers] for part, layers in oracle.attention(*batch).items()}
    case = {"model": describe_model(model, architecture), "weights": weights, "change": change or {}}
    expected = {"logits": oracle(*batch).flatten(), "maps": maps}
    return {**case, "inputs": [own.tolist() for own in inputs], "expected": expected}


def check(evaluate: Evaluate, cases: dict[str, dict[str, Any]]) -> None:
    """Compare the engine's logits and weights with torch's."""
    sent = [{key: value for key, value in case.items() if key != "expected"} for case in cases.values()]
    results = evaluate(RUN_ALL, sent)
    wrong = []
    for (name, case), result in zip(cases.items(), results):
        expected = case["expected"]
        pairs = [(expected["logits"], result["logits"], 1e-4)]
        for part, layers in expected["maps"].items():
            pairs += [(own, other, 1e-5) for own, other in zip(layers, result["maps"][part], strict=True)]
        for own, other, tolerance in pairs:
            if len(own) != len(other) or not (own - torch.tensor(other)).abs().max() <= tolerance:
                wrong.append(name)
    assert not wrong, sorted(set(wrong))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_weights_are_torchs(kind: str, evaluate: Evaluate) -> None:
    """Oracle: torch, for every position, pattern and norm that the page supports; texts of 1 to 14 tokens."""
    cases = {}
    positions, patterns = (sorted(names | {"by_layer"}) for names in (KNOWN_POSITIONS, KNOWN_PATTERNS))
    for seed, (model, pattern, norm) in enumerate(itertools.product(positions, patterns, ("pre", "post"))):
        options = {"model": choice("model", model), "pattern": choice("pattern", pattern), "norm": norm}
        cases[f"{model} {pattern} {norm}"] = case_of(kind, seed, **options)
    check(evaluate, cases)


def test_options_of_the_models(evaluate: Evaluate) -> None:
    """Oracle: torch, for options of positions and blocks; RoPE's scalings and long texts go beyond training."""
    rope: list[dict[str, Any]] = [{"base": 50.0}, {"fraction": 0.5}]
    rope += [{"scaling": name, "factor": 3.0} for name in ("linear", "ntk", "yarn")]
    options: dict[str, dict[str, Any]] = {f"rope {own}": {"model": {"name": "rope", **own}} for own in rope}
    options |= {
        f"alibi {slopes}": {"model": {"name": "alibi", "slopes": slopes, "scale": 1.7}}
        for slopes in ("learned", (0.3, 0.02))
    }
    options |= {f"{key} {value}": {key: value} for key, value in (("activation", "gelu"), ("scale_embedding", True))}
    options |= {f"no {key}": {key: False} for key in ("final_norm", "qkv_bias", "bias")}
    options |= {name: {"model": choice("model", name)} for name in ("relative", "fire", "xpos")}
    options["bigbird"] = {"pattern": {"name": "bigbird", "window": 2, "tokens": 2, "links": 3, "seed": 5}}
    cases = {f"lm {name}": case_of("lm", 0, tokens=60, **own) for name, own in options.items()}
    cases |= {f"translate {name}": case_of("translate", 11, **own) for name, own in options.items()}
    cases["tied"] = case_of("lm", 5, tied_output=True)
    check(evaluate, cases)


@torch.no_grad()
def test_changes_compute_what_the_changed_model_computes(evaluate: Evaluate) -> None:
    """Oracle: torch, with the trained weights in a model of the changed config, and with heads set to zero."""
    alibi = {"model": choice("model", "alibi")}
    window = {"name": "window", "window": 2}
    rows = {
        "scale": ({"scale": 2.5}, alibi, {"model": {"name": "alibi", "scale": 2.5}}),
        "slopes": ({"slopes": [0.7, None]}, alibi, {"model": {"name": "alibi", "slopes": [0.7, 2**-8]}}),
        "base": ({"base": 20}, {"model": {"name": "rope"}}, {"model": {"name": "rope", "base": 20.0}}),
        "off": ({"off": True}, {"model": {"name": "sinusoidal"}}, {"model": {"name": "nope"}}),
        "pattern": ({"pattern": window}, alibi, {**alibi, "pattern": window}),
        "heads": ({"heads": ["encoder.1.0"]}, alibi, alibi),
    }
    cases = {}
    for name, (change, own, other) in rows.items():
        trained, _ = build("classify_mean", 9, **own)
        changed, _ = build("classify_mean", 9, **other)
        changed.load_state_dict(trained.state_dict(), strict=False)
        if name == "heads":
            block = changed.encoder.blocks[1].attention  # type: ignore[union-attr]
            block.output.weight[:, :4] = 0  # the columns that read head 1
        cases[name] = case_of("classify_mean", 9, change, computed_by=changed, **own)
    check(evaluate, cases)
    plain = case_of("classify_mean", 9, **alibi)["expected"]["logits"]
    for name in ("scale", "pattern", "heads"):
        assert (plain - cases[name]["expected"]["logits"]).abs().max() > 1e-3


def test_float16_weights(evaluate: Evaluate) -> None:
    """Oracle: torch, with weights that were rounded to float16."""
    model, _ = build("lm", 4)
    rounded = {name: value.half().float() for name, value in model.state_dict().items()}
    model.load_state_dict(rounded)
    check(evaluate, {"half": case_of("lm", 4, computed_by=model, dtype=torch.float16)})


def test_scores_of_heads_and_losses(evaluate: Evaluate) -> None:
    """Oracle: weights and logits by hand."""
    T, tokens = 5, ["a", "b", "a", "c", "a"]
    weights = torch.rand(2, T, T, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    scores = evaluate("([w, T, tokens]) => headScores(w, 1, T, tokens)", [weights.flatten().tolist(), T, tokens])
    own = weights[1]
    expected = {
        "previous": own.diagonal(-1).mean(),
        "first": own[1:, 0].mean(),
        "induction": (own[2, 1] + own[4, 1] + own[4, 3]) / 2,
        "entropy": torch.special.entr(own).sum(dim=1).mean(),
        "distance": (own * (torch.arange(T)[:, None] - torch.arange(T)).abs()).sum(dim=1).mean(),
    }
    assert scores == pytest.approx({name: value.item() for name, value in expected.items()}, abs=1e-6)
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    ids = [1, 4, 0, 6]
    loss = evaluate("([x, ids]) => nextTokenLoss(Float32Array.from(x), ids)", [logits.flatten().tolist(), ids])
    assert loss == pytest.approx(nn.functional.cross_entropy(logits[:3], torch.tensor([4, 0, 6])).item(), abs=1e-6)


def test_sampling_draws_from_the_softmax(evaluate: Evaluate) -> None:
    """Oracle: `sampling_probabilities`, within four standard errors; temperature 0 takes the largest logit."""
    logits, draws = torch.tensor([9.0, 0.5, 1.5, -0.5, 0.0]), 20000
    draw = """([x, t, n]) => { const random = randomNumbers(7), counts = x.map(() => 0);
        for (let k = 0; k < n; k++) counts[drawToken(Float32Array.from(x), t, random, 5)] += 1; return counts; }"""
    for temperature in (0.7, 1.5):
        known = logits.clone()
        known[0] = float("-inf")
        p = sampling_probabilities(known, temperature, None, 1.0).double()
        counts = torch.tensor(evaluate(draw, [logits.tolist(), temperature, draws])).double()
        assert ((counts / draws - p).abs() <= 4 * (p * (1 - p) / draws).sqrt()).all()
    assert evaluate(draw, [logits.tolist(), 0, 10])[2] == 10


# Tokenizers

WORDS = (
    "Mr. U.S. J. p.m. ... .. -- - ' '' \" ` `` “ ” ‘ ’ « » can't cannot Gimme wanna 'tis don't N'T I'll 's s' d'ye "
    "3.14 3. 1,000 : ; ? ! ( ) [ < > @ # $ % & * — é ß İ ſ naïve 日本語 。 😀 a.b e.g. A. the The x-u.s. _ "
    "'re n't . , ) .\" constructor __proto__"
)
SPACES = [" ", "  ", "\n", "\t", "\u00a0", "\x85", "\x1c", "\u2028", "\u200d", "\ufeff"]
PIECES = [*WORDS.split(), *SPACES, "Oct. 5", "5. next", "5. Next", ". . ."]
SENTENCES = [
    *("We don't, Mr. Bush.", 'He said: "It\'s over." Then (after 5 p.m.) he left...'),
    *("</script><b>__proto__ & co.", ""),
]


def hostile_texts(count: int) -> list[str]:
    """Join pieces that tokenizers treat in special ways, with and without spaces."""
    draw = random.Random(0)
    return [
        "".join(draw.choice(PIECES) + draw.choice(["", " ", " "]) for _ in range(draw.randint(1, 10)))
        for _ in range(count)
    ]


ENCODE = """([spec, texts]) => { const own = makeTokenizer(spec);
  return texts.map(text => { const pieces = own.encode(text), ids = pieces.map(piece => piece.id);
    return [pieces.map(piece => piece.word), ids, own.decode(ids)]; }); }"""


def test_words_are_those_of_python(evaluate: Evaluate) -> None:
    """Oracle: NLTK, on lines of the sample and on texts from pieces that its rules and Punkt's are about."""
    lines = [line.split("\t")[-1] for content in sample.files(0).values() for line in content.decode().splitlines()]
    texts = [*SENTENCES, *lines[::40], *hostile_texts(3000)]
    tokenizer = Tokenizer.fit(lines)
    results = evaluate(ENCODE, [describe_tokenizer(tokenizer), texts])
    for text, (words, ids, decoded) in zip(texts, results, strict=True):
        assert words == tokenizer.split(text) and ids == tokenizer.encode(text), repr(text)
        assert decoded == "".join(tokenizer.stream(ids)), repr(text)


@pytest.mark.parametrize("kind", ["bpe", "words", "bytes"])
def test_subwords_are_those_of_python(kind: str, evaluate: Evaluate) -> None:
    """Oracle: the library `tokenizers`."""
    lines = [line.split("\t")[-1] for line in sample.files(0)["train_CLS.tsv"].decode().splitlines()]
    tokenizer = Subwords.fit(tuple(lines[:300]), kind, 200 if kind == "bpe" else None)
    texts = [*SENTENCES, *lines[:20], *hostile_texts(400)]
    results = evaluate(ENCODE, [describe_tokenizer(tokenizer), texts])
    for text, (words, ids, decoded) in zip(texts, results, strict=True):
        assert ids == tokenizer.encode(text), repr(text)
        assert decoded == tokenizer.decode(ids), repr(text)
        if kind == "bpe":
            assert words == tokenizer.split(text), repr(text)


# The page

TEXT = "We will mend the harbours, my friend."
HARMFUL = "</script><script>document.title='executed'</script><img src=x onerror=document.title='executed'>"


def write_page(path: Path, folders: Sequence[Path], text: str = TEXT) -> Path:
    """Write the page of some runs."""
    content, _ = export_runs([load(folder) for folder in folders], alone=False)
    path.write_text(render_page(content, text), encoding="utf-8")
    return path


def settled(page: Any) -> None:
    """Wait for what follows a keystroke: losses, and the table of all heads."""
    for _ in range(400):
        if page.evaluate("state.panels.every(panel => panel.empty || panel.table)"):
            return
        page.wait_for_timeout(25)
    raise AssertionError("the page is still computing")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def classifier_page(folder: Path, a_classifier: Path) -> Path:
    return write_page(folder / "classifier.html", [a_classifier])


@pytest.fixture(scope="module")
def decoder_page(folder: Path, a_language_model: Path) -> Path:
    return write_page(folder / "decoder.html", [a_language_model])


def test_the_page_shows_what_python_predicts(browser: Any, classifier_page: Path, a_classifier: Path) -> None:
    """Oracle: `predict` and `attention` of the run. Typing changes both at once; unknown words are marked."""
    run = load(a_classifier)
    page, said = opened(browser, classifier_page)
    for text in (TEXT, "Our children will thank us 😀"):
        page.fill("#sentence", text)
        probabilities = run.predict(text).probabilities
        assert page.locator(".bars .name").all_text_contents() == list(probabilities)
        expected = [f"{100 * p:.1f} %" for p in probabilities.values()]
        assert page.locator(".bars .value").all_text_contents() == expected
        (part,) = run.attention(text)
        page.locator(".tile button.pick").nth(3).click()  # layer 2, head 2
        page.locator(".chip").nth(2).hover()
        shown = [float(chip.get_attribute("title").split(": ")[1]) for chip in page.locator(".chip").all()]
        assert shown == pytest.approx(part.weights[1, 1, 2].tolist(), abs=6e-4)
        assert re.fullmatch(r"computed in \d+ ms", page.text_content("#time"))
    assert page.locator(".chip.unknown").last.text_content() == "😀"
    assert page.text_content(".note").lower() == f"{run.read(text).notes[0]}.".lower()
    page.fill("#sentence", "")
    assert page.locator(".strip .soft").text_content() == "Type a word."
    page.locator(".strip button").click()
    assert page.input_value("#sentence") == TEXT and page.locator("canvas.map").is_visible()
    page.fill("#sentence", f"{'a' * 300} friend")
    page.locator(".chip").first.hover()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1300 and said == []
    page.close()


def test_a_decoder_shows_next_words_and_its_loss(browser: Any, decoder_page: Path, a_language_model: Path) -> None:
    """Oracle: the run's logits, and torch's cross-entropy. A masked cell says so; a temperature of 0 is greedy."""
    run = load(a_language_model)
    page, said = opened(browser, decoder_page)
    settled(page)
    logits, ids = run.logits(TEXT), run.tokenizer.encode(TEXT)
    best = logits[-1].topk(8).indices
    assert page.locator(".bars .name").all_text_contents() == run.tokenizer.tokens(best.tolist())
    loss = nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item()
    assert f"{loss:.3f} nats" in page.text_content(".answer")
    page.locator(".chip").nth(1).click()
    box, own = page.locator("canvas.map").bounding_box(), page.evaluate("state.panels[0].place.geometry")
    page.keyboard.press("Escape")
    page.mouse.move(box["x"] + own["left"] + 3.5 * own["cell"], box["y"] + own["top"] + 1.5 * own["cell"])
    assert page.text_content(".place").startswith("will → the: masked")
    page.locator("input[aria-label=Temperature]").fill("0")
    settled(page)
    words = run.generate(TEXT, tokens=20, temperature=0)
    assert words.endswith(page.text_content(".continuation").removeprefix("… ")) and said == []
    page.close()


def test_changes_are_marked_and_reset(browser: Any, classifier_page: Path, a_classifier: Path) -> None:
    """Oracle: torch, with the slopes of the slider in the model. Reset restores the answer as trained."""
    run = load(a_classifier)
    page, said = opened(browser, classifier_page)
    before, marker = page.locator(".bars .value").all_text_contents(), page.locator(".marker")
    map_before = page.evaluate("[...layerOf(state.panels[0]).weights]")
    assert not marker.is_visible()
    height = "[...document.querySelectorAll('.left, .answer, .settings')].map(own => own.offsetHeight)"
    heights = page.evaluate(height)
    place = page.locator("canvas.map").bounding_box()
    page.locator("input[aria-label='Scale of all slopes']").fill("8")
    assert page.evaluate(height) == heights  # before the loss is computed, and after
    settled(page)
    assert page.evaluate(height) == heights and page.locator("canvas.map").bounding_box() == place
    assert "Not what this model was trained with: scale 8." in marker.text_content()
    run.model.encoder.positions.scale = 8.0  # type: ignore[union-attr]
    after = run.logits(TEXT).softmax(dim=-1).tolist()
    shown = [float(value.split(" %")[0]) / 100 for value in page.locator(".bars .value").all_text_contents()]
    assert shown == pytest.approx(after, abs=6e-4)
    assert page.evaluate("[...layerOf(state.panels[0]).weights]") != map_before
    small = page.locator(".control.changed small").first.text_content()
    assert small.startswith("trained 1.00; this change alone: P(") and small.endswith("points")
    page.locator(".marker button").click()
    assert page.locator(".bars .value").all_text_contents() == before and not marker.is_visible()
    for control in ("Slope of head 1, in every layer", "Slope of head 2, in every layer"):
        page.locator(f"input[aria-label='{control}']").fill("1")
    page.locator("select[aria-label='Attention pattern']").select_option("window")
    page.locator("[data-option=window] input").fill("2")
    assert page.text_content("[data-option=window] .now") == "2: 1 word on each side"
    page.locator("main input[type=checkbox]").check()
    assert all(own.is_disabled() for own in page.locator("input[aria-label*=lope]").all())
    assert page.locator(".control small").first.text_content() == "No effect while position is off"
    assert page.evaluate("state.panels[0].change.pattern") == {"name": "window", "window": 2}
    assert "position off, slope of head 1, 2, pattern window" in marker.text_content()
    page.locator("#try button", has_text="as trained").click()
    assert page.locator(".bars .value").all_text_contents() == before
    page.get_by_text("see 2 words on each side").click()
    far = "layerOf(state.panels[0]).mask.map((own, k) => own ? Math.abs(k % 9 - Math.floor(k / 9)) : 0)"
    assert page.evaluate(f"Math.max(...{far})") == 2 and said == []
    page.close()


def test_switching_a_head_off(browser: Any, classifier_page: Path, a_classifier: Path) -> None:
    """Oracle: torch, without the columns of the output projection that read the head."""
    run = load(a_classifier)
    page, said = opened(browser, classifier_page)
    settled(page)
    before = run.logits(TEXT).log_softmax(dim=-1)
    predicted, width = int(before.argmax()), 8
    rises = {}
    for layer, head in itertools.product(range(2), range(2)):
        weight = run.model.encoder.blocks[layer].attention.output.weight
        columns = weight[:, head * width : (head + 1) * width]
        saved = columns.detach().clone()
        with torch.no_grad():
            columns.zero_()
            rises[f"{layer + 1}.{head + 1}"] = (before - run.logits(TEXT).log_softmax(dim=-1))[predicted].item()
            columns.copy_(saved)
    shown = page.evaluate("state.panels[0].table.map(row => [`${row.l + 1}.${row.n + 1}`, row.rise])")
    assert dict(shown) == pytest.approx(rises, abs=1e-4)
    assert [rise for _, rise in shown] == sorted((rise for _, rise in shown), reverse=True)
    button = page.locator(".tile .under button").nth(1)
    assert button.text_content() == "switch off"
    page.get_by_label("Switch layer 1, head 2 off").click()
    assert "1 head off" in page.text_content(".marker") and page.locator(".tile.off").count() == 1
    assert button.text_content() == "switch on"
    page.get_by_label("Switch layer 1, head 2 on").click()
    assert not page.locator(".marker").is_visible() and said == []
    page.close()


def test_pointing_pinning_and_the_keyboard(browser: Any, classifier_page: Path) -> None:
    page, said = opened(browser, classifier_page)
    where = page.locator(".place").first
    page.locator(".chip").nth(0).click()
    page.locator(".chip").nth(3).hover()
    assert where.text_content().startswith("We →") and "pinned" in where.text_content()
    page.keyboard.press("Escape")
    page.locator(".chip").nth(2).hover()
    page.locator(".chip").nth(3).hover()
    assert where.text_content().startswith("the →") and "pinned" not in where.text_content()
    page.locator("canvas.map").focus()
    for key in ("Home", "ArrowDown", "ArrowRight", "ArrowRight", "PageDown", "Enter"):
        page.keyboard.press(key)
    weight = page.evaluate("state.panels[0].result.parts.encoder[0].weights")[92]  # head 2, query 1, key 2 of 9
    assert where.text_content() == f"will → mend: {weight:.3f}  pinned; Escape or another click releases"
    label = page.locator("canvas.map").get_attribute("aria-label")
    assert label == f"Attention map, layer 1, head 2, scale × slope 0.0039: query will, key mend, {weight:.3f}"
    page.keyboard.press("o")
    assert page.locator(".tile.off").count() == 1
    page.locator(".chip[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "mend"
    label = "own.ariaLabel || own.innerText || own.labels?.[0]?.innerText"
    names = page.evaluate(f"[...document.querySelectorAll('button, input, select')].map(own => {label})")
    assert all(names) and said == []
    page.close()


def test_the_address_keeps_sentence_and_settings(browser: Any, classifier_page: Path) -> None:
    page, said = opened(browser, classifier_page)
    page.fill("#sentence", "Our children & “friends” = 100 %")
    page.locator("input[aria-label='Scale of all slopes']").fill("2.5")
    page.locator("input[aria-label='Slope of head 2, in every layer']").fill("-1")
    page.locator("select[aria-label='Attention pattern']").select_option("dilated")
    page.locator(".tile button.pick").nth(2).click()
    page.get_by_label("Switch layer 2, head 2 off").click()
    page.locator(".chip").nth(1).click()
    page.locator("#theme").click()
    page.wait_for_timeout(300)
    other, also_said = opened(browser, classifier_page)
    other.goto("about:blank")  # from the page itself, its writing of the address may end what `goto` awaits
    other.goto(page.url)
    panel = "({ run, checkpoint, layer, head, change }) => ({ run, checkpoint, layer, head, change })"
    kept_state = f"({{ ...state, panels: state.panels.map({panel}) }})"
    assert page.url.count("#") == 1 and other.evaluate(kept_state) == page.evaluate(kept_state)
    assert other.input_value("#sentence") == "Our children & “friends” = 100 %"
    assert other.locator("html").get_attribute("data-theme") == "dark"
    wrong = "#a.layer=99&a.heads=x_encoder.9.9&a.pattern=nothing&a.scale=x&query=-5&key=1e9&b.run=7"
    for fragment in (wrong, "#layer=2&head=2"):
        other.goto("about:blank")
        other.goto(classifier_page.as_uri() + fragment)
        assert other.locator("canvas.map").first.is_visible()
    assert other.evaluate("[state.panels[0].layer, state.panels[0].head]") == [1, 1]
    assert said == [] and also_said == []
    page.close()
    other.close()


def test_runs_side_by_side_and_their_checkpoints(browser: Any, a_classifier: Path, folder: Path) -> None:
    """A run of best and last checkpoint has a slider; oracle: `load` with that checkpoint."""
    again = folder / "again"
    shutil.copytree(a_classifier, again, dirs_exist_ok=True)
    step = read_checkpoint(again / "last.ckpt")
    step["global_step"] -= 1
    step["state_dict"] = {name: value * 0.5 for name, value in step["state_dict"].items()}
    torch.save(step, again / "best.ckpt")
    page, said = opened(browser, write_page(folder / "two.html", [again, a_classifier]))
    assert page.locator("section.panel").count() == 1
    page.get_by_text("Two runs").click()
    assert page.locator("section.panel").count() == 2
    slider = page.get_by_label("Training: checkpoint").first
    slider.fill("0")
    expected = load(again, "best.ckpt").predict(TEXT).probabilities.values()
    shown = page.locator("section.panel").first.locator(".bars .value").all_text_contents()
    assert shown == [f"{100 * p:.1f} %" for p in expected]
    page.locator(".chip").nth(2).hover()
    assert page.locator(".place b:first-child").all_text_contents() == ["mend", "mend"]
    page.evaluate("state.panels[0].change.scale = 8; update()")
    page.locator("select[aria-label=Run]").nth(1).select_option("0")
    assert page.evaluate("state.panels.map(panel => panel.run)") == [0, 0]
    assert page.get_by_text("As trained", exact=True).count() == 0  # the left one is changed
    slider.focus()
    page.evaluate("redraw()")
    assert page.evaluate("document.activeElement === document.querySelector('input[type=range]')")
    page.get_by_text("One model").click()
    assert page.locator("section.panel").count() == 1 and said == []
    page.close()


@pytest.fixture(scope="module")
def a_history(little: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that keeps its weights at every third step."""
    own = ["corpus=speeches", f"corpus.root={little}", "corpus.classes=[ann,bob,cy]", "model=alibi", "recipe.lr=1e-2"]
    return run_in(tmp_path_factory.mktemp("history"), *own, "keep_every_n_steps=3")


def shown_answer(page: Any, side: int = 0) -> list[float]:
    """The probabilities that one side of the page shows."""
    values = page.locator("section.panel").nth(side).locator(".bars .value").all_text_contents()
    return [float(value.split(" %")[0]) / 100 for value in values]


def test_a_slider_over_the_training_of_one_run(browser: Any, a_history: Path, folder: Path) -> None:
    """Oracle: torch, with the weights of each step. The step that the metrics are of is named and one click away."""
    run = load(a_history)
    (a_history / "checkpoints" / "mine.ckpt").write_bytes(b"a file of the user")
    page, said = opened(browser, write_page(folder / "history.html", [a_history]))
    (a_history / "checkpoints" / "mine.ckpt").unlink()
    steps = [int(path.stem) for path in (a_history / "checkpoints").glob("*.ckpt")]
    best, last = (read_checkpoint(a_history / name)["global_step"] for name in ("best.ckpt", "last.ckpt"))
    expected = sorted({*steps, best, last})
    assert page.evaluate("content.runs[0].checkpoints.map(own => own.step)") == expected and len(expected) >= 4
    slider, button = page.get_by_label("Checkpoint"), page.locator(".steps button", has_text="reported")
    for index in (0, 1, expected.index(last)):
        slider.fill(str(index))
        path = a_history / "checkpoints" / f"{expected[index]}.ckpt"
        task = load_task(path if path.exists() else a_history / "last.ckpt")
        ids = torch.tensor([run.tokenizer.encode(TEXT)])
        assert shown_answer(page) == pytest.approx(task(ids)[0].softmax(dim=-1).tolist(), abs=6e-4)
        assert page.text_content(".steps > span").startswith(f"step {expected[index]}")
        assert button.get_attribute("aria-pressed") == str(expected[index] == last).lower()
    assert button.text_content() == f"reported: step {last}"
    slider.fill("0")
    assert page.text_content(".steps > span") == "step 0, initial weights"
    chosen, shown = int(run.logits(TEXT).argmax()), shown_answer(page)
    assert shown.index(max(shown)) != chosen  # the loss stays that of the reported answer
    said_of_loss = f"Loss, −ln P({run.task.hparams['classes'][chosen]}), the answer at step {last}: "
    page.locator(".loss", has_text=said_of_loss).wait_for()
    button.click()
    assert page.evaluate("state.panels[0].checkpoint") == expected.index(last)
    assert said == []
    page.close()


def test_the_training_plays_pauses_and_is_the_same_on_both_sides(browser: Any, a_history: Path, folder: Path) -> None:
    page, said = opened(browser, write_page(folder / "plays.html", [a_history]))
    page.get_by_text("As trained | changed").click()
    steps, player = "state.panels.map(own => own.checkpoint)", page.locator(".player").first
    last = page.evaluate("content.runs[0].checkpoints.length - 1")
    page.get_by_label("Checkpoint").nth(1).fill("1")
    assert page.evaluate(steps) == [1, 1]
    player.click()
    assert player.get_attribute("aria-pressed") == "true" and page.evaluate(steps) == [2, 2]
    assert page.locator(".player").all_text_contents() == ["Pause", "Pause"]
    page.locator(".player").nth(1).click()
    assert page.locator(".player").all_text_contents() == ["Play", "Play"]
    page.wait_for_timeout(900)
    assert page.evaluate(steps) == [2, 2]
    page.get_by_label("Checkpoint").first.fill(str(last))
    player.click()
    assert page.evaluate(steps) == [0, 0]
    page.locator(".steps > span", has_text="step 3").nth(1).wait_for()
    page.get_by_text("One model").click()  # the change was an example, which nobody has touched
    assert page.evaluate("[state.panels[0].checkpoint, isChanged(state.panels[0])]") == [1, False]
    assert page.text_content(".player") == "Play"
    slope = page.locator("input[aria-label='Slope of head 1, in every layer']")
    slope.fill("-13")  # log₂ of the slope; the lowest one is 0
    slope.press("ArrowRight")
    assert float(slope.input_value()) == pytest.approx(-13 + 15 / 25)
    assert page.evaluate("state.panels[0].change.slopes[0]") == pytest.approx(2**-12.4) and said == []
    page.close()


def test_what_the_loaded_checkpoint_is_called() -> None:
    """An unfinished run has reported nothing; `checkpoints/` may have a later step than its last.ckpt."""
    task, other = SimpleNamespace(), SimpleNamespace()
    for finished, name, order, expected in (
        (True, "best.ckpt", [task, other], "reported"),
        (False, "best.ckpt", [task, other], "best so far"),
        (False, "last.ckpt", [other, task], "last"),
        (False, "last.ckpt", [task, other], "last.ckpt"),
    ):
        run: Any = SimpleNamespace(finished=finished, checkpoint=name, task=task)
        own: Any = [Snapshot(name, k, one) for k, one in enumerate(order)]  # type: ignore[arg-type]
        assert name_of_chosen(run, own) == expected


def test_checkpoints_are_listed_in_short() -> None:
    own: Any = [Snapshot("", step, None) for step in (*range(0, 400, 50), 396)]  # type: ignore[arg-type]
    own.append(Snapshot("average.ckpt", None, None))  # type: ignore[arg-type]
    expected = "average.ckpt, steps 0, 50, …, 350, 396"
    assert list_checkpoints(own, 10) == expected
    assert list_checkpoints(own, 41) == f"{expected}; 10 of 41 checkpoints, evenly spaced"
    assert list_checkpoints([Snapshot("last.ckpt", 3, own)], 1) == "last.ckpt (step 3)"


def test_a_page_holds_evenly_spaced_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand. The first and the reported one stay; the page stays within its limits where six fit."""
    by_hand = {40: [0, 10, 20, 30, 40], 33: [0, 10, 20, 33, 40], 12: [0, 12, 20, 30, 40], 0: [0, 10, 20, 30, 40]}
    assert {chosen: evenly_spaced(range(41), chosen, 5) for chosen in by_hand} == by_hand
    assert evenly_spaced(range(41), 38, 5) == [0, 10, 20, 38, 40]
    assert evenly_spaced([0, 1, 2, 3, 100, 200, None], 6, 3) == [0, 4, 6] and evenly_spaced(range(3), 1, 5) == [
        0,
        1,
        2,
    ]
    assert [evenly_spaced(range(41), 7, most) for most in (2, 1)] == [[0, 7], [7]]
    files: list[tuple[int | None, str]] = [(k, f"checkpoints/{k}.ckpt") for k in range(40)]
    monkeypatch.setattr("speechformer.analysis.play_page.load_task", lambda path: SimpleNamespace())
    for width, count in ((1000, 16), (1700, 11), (8000, 6), (36000, 2), (70000, 1)):
        model = SimpleNamespace(state_dict=lambda width=width: {"weight": torch.empty(100 * width, device="meta")})
        run: Any = SimpleNamespace(task=SimpleNamespace(model=model), checkpoint="last.ckpt", directory=Path())
        ((*before, chosen),) = load_checkpoints([run], [[*files, (40, "last.ckpt")]])
        assert (len(before) + 1, chosen.step, chosen.task is run.task) == (count, 40, True), width


def test_as_trained_beside_changed(browser: Any, classifier_page: Path, a_classifier: Path) -> None:
    """Oracle: torch, as trained and with a scale of 8. Heads and keys change the right side alone."""
    run = load(a_classifier)
    page, said = opened(browser, classifier_page)
    assert page.locator("section.panel").count() == 1 and not page.get_by_text("Two runs").is_visible()
    page.get_by_text("As trained | changed").click()
    trained = load(a_classifier).logits(TEXT).softmax(dim=-1).tolist()
    run.model.encoder.positions.scale = 8.0  # type: ignore[union-attr]
    changed = run.logits(TEXT).softmax(dim=-1).tolist()
    assert shown_answer(page) == pytest.approx(trained, abs=6e-4)
    assert shown_answer(page, 1) == pytest.approx(changed, abs=6e-4) and trained != pytest.approx(changed, abs=1e-3)
    assert page.locator(".who b").all_text_contents() == ["As trained", "Changed"]
    assert [own.is_visible() for own in page.locator(".settings").all()] == [False, True]
    page.locator(".tile button.pick").nth(3).click()
    assert page.evaluate("state.panels.map(panel => [panel.layer, panel.head])") == [[1, 1], [1, 1]]
    page.locator("canvas.map").first.focus()
    page.keyboard.press("o")
    assert page.evaluate("state.panels.map(panel => panel.change.heads.length)") == [0, 1]
    page.get_by_text("One model").click()
    assert page.evaluate("[state.panels.length, state.panels[0].change.scale]") == [1, 8] and said == []
    page.close()


def test_keys_work_without_a_click(browser: Any, classifier_page: Path) -> None:
    """They leave text fields alone, and scroll where no map is in view."""
    page, said = opened(browser, classifier_page)
    for key in ("ArrowUp", "ArrowRight", "ArrowRight", "]", "Enter"):
        page.keyboard.press(key)
    queries = page.evaluate("[state.query, state.key, state.pinned, state.panels[0].head]")
    assert queries == [6, 8, True, 1]
    page.keyboard.press("Escape")
    page.keyboard.press("o")
    assert page.evaluate("[state.pinned, state.panels[0].change.heads]") == [False, ["encoder.0.1"]]
    page.keyboard.press("?")
    help_ = page.locator("dialog")
    assert help_.is_visible() and help_.get_by_text("switch the head off or on").is_visible()
    page.get_by_label("Keys act everywhere").uncheck()
    page.get_by_text("Close").click()
    page.keyboard.press("]")
    assert page.evaluate("state.panels[0].head") == 1
    page.locator("canvas.map").focus()
    page.keyboard.press("?")
    page.get_by_label("Keys act everywhere").check()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Escape")
    assert not help_.is_visible() and page.evaluate("state.query") == 6
    page.locator("#ask").click()
    page.get_by_text("Close").click()
    with_altgr = "{ key: '[', ctrlKey: true, altKey: true, bubbles: true }"
    page.evaluate(f"document.body.dispatchEvent(new KeyboardEvent('keydown', {with_altgr}))")
    assert page.evaluate("state.panels[0].head") == 0
    page.keyboard.press("]")
    page.locator("#sentence").focus()
    page.keyboard.type("o?]")
    assert page.input_value("#sentence").endswith("o?]") and not help_.is_visible()
    assert page.evaluate("[state.query, state.panels[0].head, state.panels[0].change.heads.length]") == [None, 1, 1]
    page.evaluate("document.activeElement.blur(); window.scrollTo(0, 1e6)")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("state.query") is None and said == []
    page.close()


def test_many_unknown_words_are_a_warning(browser: Any, classifier_page: Path, a_classifier: Path) -> None:
    """Oracle: the run's tokenizer. A third of the words is many; punctuation does not count."""
    page, said = opened(browser, classifier_page)
    warning = page.locator("#warning")
    assert not warning.is_visible()
    vocabulary = load(a_classifier).tokenizer.vocabulary
    known = [word for word in vocabulary if word.isalpha()][:2]
    assert not {"zorble", "snark"} & set(vocabulary)
    for text, message in (
        ("zorble {0} {1} , , ,", "1 of 3 words are not in the model's vocabulary. It reads each as <unk>"),
        ("zorble {0} {1} {0}", None),
        ("zorble snark zorble {1} 😀", "4 of 5 words"),
    ):
        page.fill("#sentence", text.format(*known))
        page.wait_for_timeout(0 if message else 700)
        if message:
            warning.wait_for(state="visible")
            assert warning.text_content().startswith(message)
        assert warning.is_visible() == (message is not None)
    assert page.text_content(".note") == "Not in the vocabulary, read as <unk>: zorble (2 ×), snark, 😀."
    page.get_by_text("Use the example").click()
    assert page.input_value("#sentence") == page.evaluate("state.text") == TEXT and said == []
    page.close()


def test_the_bias_chart_holds_its_scale(browser: Any, classifier_page: Path) -> None:
    """Oracle: four times slope × distance of the steeper head as trained, at the largest distance of 12 tokens."""
    page, said = opened(browser, classifier_page)
    picture = "document.querySelector('.settings canvas').toDataURL()"
    scales, pictures = [], []
    for scale in ("1", "3", "8"):
        page.locator("input[aria-label='Scale of all slopes']").fill(scale)
        settled(page)
        scales.append(page.evaluate("state.panels[0].place.biasRange"))
        pictures.append(page.evaluate(picture))
    assert scales == [pytest.approx([-4 * 2**-4 * 11, 0], abs=1e-5)] * 3 and len(set(pictures)) == 3 and said == []
    page.close()


def test_columns_of_the_table_are_explained_and_fit(browser: Any, classifier_page: Path) -> None:
    page, said = opened(browser, classifier_page)
    page.set_viewport_size({"width": 1400, "height": 900})
    page.get_by_text("As trained | changed").click()
    settled(page)
    scores = page.locator("section.panel").first.locator("section.wide th").all_text_contents()[-5:]
    assert scores == ["previous", "first", "induction", "entropy", "distance"]
    for side in (0, 1):
        section = page.locator("section.panel").nth(side).locator("section.wide").nth(1)
        assert section.locator(".columns b").all_text_contents() == scores
        assert section.locator(".scroll").evaluate("own => own.scrollWidth <= own.clientWidth")
    assert said == []
    page.close()


def test_a_phone_shows_slider_map_and_answer_at_once(browser: Any, a_history: Path, folder: Path) -> None:
    """While any slider is used; of two sides it shows one, and the other by one touch."""
    page, said = opened(browser, write_page(folder / "phone.html", [a_history]))
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    for name in (
        "Scale of all slopes",
        *(f"Slope of head {n}, in every layer" for n in (1, 2)),
        "Training: checkpoint",
    ):
        slider = page.locator(f"input[aria-label='{name}']")
        slider.evaluate("own => own.scrollIntoView({ block: 'nearest' })")
        before = page.evaluate("[document.querySelector('canvas.map').toDataURL(), ...state.panels[0].now]")
        for part in (slider, page.locator("canvas.map"), page.locator(".bars")):
            box = part.bounding_box()
            assert box["y"] >= 50 and box["y"] + box["height"] <= 844, (name, box)
        top = slider.bounding_box()["y"]
        assert top >= page.locator(".stage").evaluate("own => own.getBoundingClientRect().bottom")
        slider.fill("2")
        page.wait_for_timeout(300)
        after = page.evaluate("[document.querySelector('canvas.map').toDataURL(), ...state.panels[0].now]")
        assert not set(before) & set(after)
    page.get_by_text("As trained | changed").click()
    small = "[...document.querySelectorAll('button, select, input')].filter(own => own.checkVisibility() && "
    assert page.evaluate(small + "own.offsetHeight < 24).map(own => own.outerHTML)") == []
    assert page.text_content("#try").startswith("Try on “Changed”: ")
    page.locator("#sides button", has_text="As trained").click()
    page.locator("#try button").first.click()
    assert page.locator("section.panel").nth(1).is_visible()
    assert page.locator(".place").nth(2).text_content().endswith("tap a cell")
    for side, name in ((0, "As trained"), (1, "Changed")):
        page.locator("#sides button", has_text=name).click()
        assert [panel.is_visible() for panel in page.locator("section.panel").all()] == [side == 0, side == 1]
        assert page.locator("section.panel").nth(side).locator("canvas.map").bounding_box()["width"] >= 220
    assert page.evaluate("document.documentElement.scrollWidth") <= 390 and said == []
    page.close()


def test_a_translation_grows_with_its_alignment(browser: Any, a_translator: Path, folder: Path) -> None:
    """Oracle: the greedy translation of the run, and its attention."""
    run = load(a_translator)
    text = "The king sees a boat."
    page, said = opened(browser, write_page(folder / "translator.html", [a_translator], text))
    settled(page)
    assert page.locator(".continuation").first.text_content() == run.translate(text, beam=1)[0]
    (source,) = run.tokenizer.encode_all([text])
    ids = page.evaluate("[...state.panels[0].written]")
    maps = run.model.attention(torch.tensor([[*source, 3]]), torch.tensor([[2, *ids]]))
    for part, layers in maps.items():
        shown = page.evaluate(f"state.panels[0].result.parts.{part}.map(layer => [...layer.weights])")
        for own, layer in zip(shown, layers, strict=True):
            assert (torch.tensor(own) - layer.flatten()).abs().max() < 1e-4
    for part in ("encoder", "decoder", "cross"):
        page.locator(f"button[data-part={part}]").click()
        assert part in page.text_content("h3 span") and page.locator("canvas.map").is_visible()
    assert said == []
    page.close()


def test_hostile_words_and_names_are_text(browser: Any, a_classifier: Path, folder: Path) -> None:
    content, _ = export_runs([load(a_classifier)], alone=True)
    content["runs"] *= 2
    for run in content["runs"]:
        run |= {"label": HARMFUL, "name": HARMFUL, "classes": [HARMFUL, "constructor", "__SCRIPT__"]}
    for tokenizer in content["tokenizers"]:
        tokenizer["vocabulary"][2:5] = [HARMFUL, "<b>", "__CONTENT__"]
    path = folder / "hostile.html"
    path.write_text(render_page(content, f"{HARMFUL} __proto__ <b> __STYLE__ constructor"), encoding="utf-8")
    assert path.read_text(encoding="utf-8").count("</script>") == 2
    page, said = opened(browser, path)
    settled(page)
    assert page.title() == "Attention, live" and page.locator("img, b > b").count() == 0
    assert page.locator(".bars .name").first.text_content() == HARMFUL
    page.fill("#sentence", HARMFUL)
    settled(page)
    assert page.title() == "Attention, live" and said == []
    assert "connect-src" not in path.read_text() and "default-src 'none'" in path.read_text()
    page.close()


def test_a_phone_shows_maps_of_220_pixels(browser: Any, decoder_page: Path) -> None:
    """The page itself never scrolls sideways; the words stay above the fold of a laptop."""
    page, said = opened(browser, decoder_page)
    for text in (TEXT, " ".join([TEXT] * 3)):
        page.set_viewport_size({"width": 390, "height": 844})
        page.fill("#sentence", text)
        page.wait_for_timeout(120)
        own = page.evaluate("state.panels[0].place.geometry")
        assert own["cell"] * own["S"] >= 220
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1400, "height": 900})
    page.wait_for_timeout(150)
    page.locator("canvas.map").scroll_into_view_if_needed()
    page.locator("section.wide").first.scroll_into_view_if_needed()
    page.locator("canvas.map").hover()
    box = page.locator(".strip").bounding_box()
    assert box["y"] >= 0 and box["y"] + box["height"] <= 900 and said == []
    page.close()


# The command


def test_the_command_writes_one_file(
    a_classifier: Path, a_language_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    opened_pages: list[str] = []
    monkeypatch.setattr("speechformer.play.webbrowser.open", opened_pages.append)
    monkeypatch.setattr("speechformer.play.can_open", lambda: True)
    path = tmp_path / "own" / "page.html"
    arguments = [str(a_classifier), str(a_language_model), "--output", str(path), "--text", TEXT]
    monkeypatch.setattr(sys, "argv", ["play", *arguments])
    main()
    out = capsys.readouterr().out
    assert opened_pages == [path.as_uri()] and f"{path} (" in out
    monkeypatch.setattr(sys, "argv", ["play", *arguments, "--no-open"])
    main()
    assert len(opened_pages) == 1
    text = path.read_text(encoding="utf-8")
    assert str(tmp_path) not in text and not re.search(r"https?://", text) and str(a_classifier.parent) not in text


def test_the_page_of_many_runs_has_a_name_of_its_own_that_a_file_can_have() -> None:
    assert page_name(["a", "b"]) == "a_and_b.html"
    pages = [page_name([f"{'語' * 80}{end}", "b"]) for end in "xy"]
    assert len({*pages}) == 2 and all(len(page.encode()) <= 255 for page in pages)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model=rnn"], r"model=rnn is not supported by the live page.$"),
        (
            ["model=forgetting"],
            "model=forgetting is not supported by the live page. Its maps: python -m speechformer.attention RUN.",
        ),
        (["model=randomised"], "model=randomised is not supported by the live page"),
        (["task=probe", "model=nope"], "is a run of task=probe, which the live page does not support"),
        (["output"], r"--output page.txt: name a file that ends with .html"),
        (["file"], r"README.md is a file. Name a run's folder, such as outputs/runs/\.\.\.\.$"),
    ],
)
def test_errors(overrides: list[str], sentence: str, a_classifier: Path, tmp_path: Path, monkeypatch: Any) -> None:
    arguments = [str(a_classifier), "--output", "page.txt"]
    if overrides == ["file"]:
        (tmp_path / "README.md").touch()
        monkeypatch.chdir(tmp_path)
        arguments = ["README.md"]
    elif overrides != ["output"]:
        corpus = [] if "task=probe" in overrides else ["corpus=sample"]
        short = ["trainer.max_steps=1", "recipe.warmup_steps=0"]
        execute(compose(*TINY[1:], *corpus, *overrides, *short), tmp_path)
        arguments = [str(tmp_path), "--no-open"]
    monkeypatch.setattr(sys, "argv", ["play", *arguments])
    with pytest.raises(SystemExit, match=sentence):
        main()


def test_precision_and_size() -> None:
    """860,000 parameters fit into 5 MB as float32; checkpoints beside them are halved first; 20 MB is an error."""
    sizes = {"width": 64, "heads": 2, "layers": 4, "ff": 100}
    model, _ = build("lm", 0, **sizes, vocab_size=5700)
    task: Any = SimpleNamespace(model=model)
    run: Any = SimpleNamespace(task=task)
    last, best = Snapshot("last.ckpt", 2, task), Snapshot("best.ckpt", 1, copy.copy(task))
    assert sum(p.numel() for p in model.parameters()) > 850_000
    full, half = torch.float32, torch.float16
    assert choose_precision([(run, [last])]) == (full, full)
    assert abs(last.size(full) - len(last.encode(full))) < 12_000 and len(last.encode(full)) < 4_800_000
    assert choose_precision([(run, [best, last])]) == (half, half)
    task.model, _ = build("lm", 0, **sizes, vocab_size=3000)
    best.task.model = task.model
    assert choose_precision([(run, [best, last])]) == (full, half)
    task.model = model
    with pytest.raises(UserError, match="21 MB of weights; the limit is 20 MB"):
        choose_precision([(run, [last] * 9)])
