"""Models of Hugging Face's are ours with other names. Oracle: `transformers`, on tiny random models.

Nothing is downloaded. Logits and weights of attention are compared to 1e-5, which the order of sums explains.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call
from conftest import compose
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

import speechformer
from speechformer import train
from speechformer.analysis.continuation import continue_text
from speechformer.analysis.exports import export_all
from speechformer.analysis.heads import without_heads
from speechformer.analysis.play_page import describe_model
from speechformer.attention import main as attention_main
from speechformer.config import as_plain
from speechformer.corpora.load import load as load_corpus
from speechformer.corpora.load import load_tokenizer
from speechformer.corpora.pretrained import PretrainedTokenizer
from speechformer.errors import UserError
from speechformer.export import main as export_main
from speechformer.models.classifier import EncoderClassifier
from speechformer.models.decoder import Decoder
from speechformer.models.families import FAMILIES, family_of
from speechformer.models.pretrained import load_weights, opened, read_architecture, to_family
from speechformer.runs.naming import model_name
from speechformer.tasks.registry import build_data
from speechformer.training import run as training
from speechformer.training.evaluation import evaluate, with_corpus

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

T = 13  # tokens, an odd number, more than three windows of 4
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 12}
SIZES |= {"vocab_size": 31, "max_position_embeddings": 32}
SHARED = {**SIZES, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE = {"rope_theta": 500.0, "original_max_position_embeddings": 16}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_layer": 2, "n_embd": 16, "n_head": 4, "vocab_size": 31, "n_positions": 32}),
    "gpt2, relu, inner": (
        "gpt2",
        {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_inner": 20, "vocab_size": 31, "n_positions": 32}
        | {"activation_function": "relu", "tie_word_embeddings": False},
    ),
    "gpt_neox": ("gpt_neox", {**SIZES, "rotary_pct": 0.5}),
    "gpt_neox, one after another": ("gpt_neox", {**SIZES, "num_attention_heads": 2, "use_parallel_residual": False}),
    "llama": ("llama", SHARED),
    "llama, tied, head_dim": ("llama", {**SHARED, "tie_word_embeddings": True, "head_dim": 6, "hidden_act": "gelu"}),
    "llama 3": ("llama", {**SHARED, "rope_parameters": {**ROPE, **LLAMA3}}),
    "llama, linear": ("llama", {**SHARED, "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 2.0}}),
    "mistral": ("mistral", {**SHARED, "sliding_window": 4}),
    "mistral, full": ("mistral", {**SHARED, "sliding_window": None}),
    "qwen3": ("qwen3", {**SHARED, "head_dim": 6}),
    "qwen3, windows, yarn": (
        "qwen3",
        {**SHARED, "head_dim": 6, "sliding_window": 4, "use_sliding_window": True}
        | {"layer_types": ["sliding_attention", "full_attention"]}
        | {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0}},
    ),
    "gemma2": (
        "gemma2",
        {**SHARED, "head_dim": 6, "sliding_window": 4, "query_pre_attn_scalar": 9}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0},
    ),
    "gpt_oss": (
        "gpt_oss",
        {**SHARED, "head_dim": 6, "sliding_window": 4, "intermediate_size": 16}
        | {"num_local_experts": 1, "num_experts_per_tok": 1},
    ),
    "bert": ("bert", {**SIZES, "num_labels": 3}),
}
SCALED = ["llama 3", "llama, linear", "qwen3, windows, yarn", "gpt_oss"]  # their angles are not those of a base


def theirs(name: str, **changes: Any) -> Any:
    """Return a random model of the library, whose norms and biases are random, too."""
    kind, settings = CONFIGS[name]
    config = transformers.AutoConfig.for_model(kind, **{**settings, **changes}, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[kind].head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def ours(folder: Path) -> Decoder | EncoderClassifier:
    """Return our model of a folder."""
    family, config, architecture = read_architecture(folder)
    classes = {"classes": len(config["id2label"])} if family.type == "bert" else {}
    model_class: Any = EncoderClassifier if family.type == "bert" else Decoder
    model = model_class(**architecture, **classes, dropout=0.0).eval()
    load_weights(model, folder)
    return model


def saved(name: str, folder: Path, **changes: Any) -> Any:
    """Save a model of the library into a folder, and return it."""
    model = theirs(name, **changes)
    model.save_pretrained(folder)
    return model


def ids_of(rows: int = 2, tokens: int = T) -> Tensor:
    return torch.randint(1, 31, (rows, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_and_attention_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    reference, ids = saved(name, tmp_path), ids_of()
    model = ours(tmp_path)
    expected = reference(ids, output_attentions=True)
    torch.testing.assert_close(model(ids), expected.logits, atol=1e-5, rtol=1e-5)
    (weights,) = model.attention(ids).values()
    for own, other in zip(weights, expected.attentions, strict=True):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=0)


@torch.no_grad()
def test_padding_is_hidden_as_in_the_library(tmp_path: Path) -> None:
    reference, ids = saved("bert", tmp_path), ids_of()
    ids[1, 9:] = 0
    expected = reference(ids, attention_mask=(ids != 0).long()).logits
    torch.testing.assert_close(ours(tmp_path)(ids), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "bert"])
@torch.no_grad()
def test_greedy_generation_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    """With a cache, token by token, beyond the window."""
    reference, ids = saved(name, tmp_path), ids_of(1, 5)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, 5:].tolist()
    model = ours(tmp_path)
    assert isinstance(model, Decoder)
    from speechformer.generation.sampling import sample

    drawn = sample(model, ids[0].tolist(), temperature=0, padding=None)
    assert [next(drawn) for _ in expected] == expected


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_half_precision_is_close_to_single(name: str, tmp_path: Path) -> None:
    """Both libraries in bfloat16 are as far from single precision as its rounding."""
    reference, ids, model = saved(name, tmp_path), ids_of(), ours(tmp_path)
    exact = model(ids)
    error = (model.bfloat16()(ids).float() - exact).abs().mean()
    theirs_error = (reference.bfloat16()(ids).logits.float() - exact).abs().mean()
    assert error <= 2 * theirs_error + 1e-3


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_round_trip_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """Our weights, written for the library, which loads and computes them, are ours again."""
    saved(name, tmp_path / "first")
    model, ids = ours(tmp_path / "first"), ids_of()
    _, config, architecture = read_architecture(tmp_path / "first")
    written, tensors = to_family(architecture, model.state_dict(), config)
    folder = tmp_path / "second"
    folder.mkdir()
    labels = {key: config[key] for key in ("id2label", "label2id") if key in config}
    (folder / "config.json").write_text(json.dumps(written | labels))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    reference = getattr(transformers, written["architectures"][0]).from_pretrained(folder).eval()
    torch.testing.assert_close(reference(ids).logits, model(ids), atol=1e-5, rtol=1e-5)
    again = ours(folder).state_dict()
    if name == "gemma2":  # its library keeps the gains less 1, and less the factor of the scores
        torch.testing.assert_close(again, model.state_dict(), atol=1e-6, rtol=1e-6)
    else:
        assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_rotation_needs_the_config_that_it_comes_from(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    _, _, architecture = read_architecture(tmp_path)
    with pytest.raises(UserError, match=r"closest, .*, has other ones: model: rope, base .*frequencies"):
        family_of(architecture)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def with_index(folder: Path, content: Any) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


Q = "model.layers.1.self_attn.q_proj.weight"
HALF = {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.5}
SPOILED: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda f: change_config(f, rope_parameters=HALF),
        "partial_rotary_factor=0.5 .* as only 1 would",
    ),
    (lambda f: change_weights(f, lambda w: w.pop(Q)), f"lacks the tensor {Q}, which a llama"),
    (lambda f: change_weights(f, lambda w: w.update(more=torch.ones(1))), "has the tensor more, which a llama"),
    (
        lambda f: change_weights(f, lambda w: w.update({Q: torch.ones(3, 16)})),
        rf"{Q} \[3, 16\] .*does not fit the sizes",
    ),
    *(  # shapes that could be broadcast, or whose parts have as many rows together
        (lambda f, t=tensors: change_weights(f, lambda w: w.update(t)), "does not fit the sizes in config.json")
        for tensors in (
            {"model.norm.weight": torch.ones(1)},
            {"model.embed_tokens.weight": torch.ones(1, 16)},
            {Q: torch.ones(8, 16), Q.replace("q_proj", "k_proj"): torch.ones(16, 16)},
        )
    ),
    (truncate, "model.safetensors is damaged"),
    (only_pickle, r"has no model.safetensors \(pytorch_model.bin is a pickle, which could run code; save it again"),
    (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
    (lambda f: (f / "config.json").write_text("{}"), "config.json has no model_type"),
    (
        lambda f: change_config(f, model_type="llama4"),
        "model_type='llama4' has no counterpart here; the families that can be read are gpt2, .* bert.$",
    ),
    (
        lambda f: change_config(f, tie_word_embeddings=True),
        "lm_head.weight is not the embedding, as tie_word_embeddings",
    ),
    (lambda f: change_config(f, tie_word_embeddings="no"), "tie_word_embeddings='no' .* true or false would"),
    (lambda f: change_config(f, rms_norm_eps="1e-6"), "rms_norm_eps='1e-6' .* numbers would"),
    (lambda f: with_index(f, [1]), "model.safetensors.index.json holds no JSON object"),
    (lambda f: with_index(f, {"weight_map": [1]}), "index.json has no weight_map"),
    (lambda f: change_weights(f, lambda w: w.update({Q: w[Q].to(torch.int8)})), rf"{Q} is quantised \(I8\)"),
    (lambda f: change_weights(f, lambda w: w[Q].view(-1)[:1].fill_(math.inf)), f"{Q} .* has NaN or infinite values"),
    (
        lambda f: change_config(f, hidden_act="tanh"),
        "config.json: hidden_act='tanh' has no counterpart here, as silu, gelu",
    ),
    (
        lambda f: change_config(f, quantization_config={"bits": 4}),
        "quantization_config: quantised weights cannot be read",
    ),
    (
        lambda f: change_config(f, rope_parameters={"rope_type": "longrope", "rope_theta": 5.0}),
        "rope_parameters=.*longrope",
    ),
    (
        lambda f: change_config(f, hidden_size="16"),
        "hidden_size='16' has no counterpart here, as whole numbers above 0 would",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_a_spoiled_folder_is_one_sentence(spoil: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=message):
        ours(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt_oss", {"num_local_experts": 2}, "num_local_experts=2 has no counterpart here, as only 1 would"),
        (
            "qwen3",
            {"layer_types": ["a", "full_attention"]},
            r"layer_types=\['a', .*full_attention or sliding_attention",
        ),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types=.* for each layer would"),
        ("gemma2", {"query_pre_attn_scalar": "9"}, "config.json has a value that a gemma2 cannot have"),
        ("gpt2", {"n_head": 3}, "n_head=3 has no counterpart here, as divisors of 16 would"),
    ],
)
def test_a_config_without_counterpart_is_one_sentence(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(name, tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        read_architecture(tmp_path)


def early_names(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if "LayerNorm" in name]:
        early = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
        weights[early] = weights.pop(name)


def without(*words: str, **more: Tensor) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if any(word in name for word in words)]:
            del weights[name]
        weights.update({name.replace("__", "."): tensor for name, tensor in more.items()})

    return change


@torch.no_grad()
def test_early_names_of_norms_are_read_as_in_the_library(tmp_path: Path) -> None:
    saved("bert", tmp_path)
    change_weights(tmp_path, early_names)
    reference = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(ours(tmp_path)(ids_of()), reference(ids_of()).logits, atol=1e-5, rtol=1e-5)


HEADLESS = without("pooler", "classifier", qa_outputs__weight=torch.ones(2, 16), cls__bias=torch.ones(2))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without(), ["classifier"]),
        (without("classifier"), ["classifier"]),
        (HEADLESS, ["bert.pooler.dense", "classifier"]),
    ],
)
def test_a_new_classifier_keeps_the_pooler(
    change: Callable[[dict[str, Tensor]], None], expected: list[str], tmp_path: Path
) -> None:
    """Oracle: the tensors of the folder, of which those of other heads are passed over."""
    saved("bert", tmp_path)
    change_weights(tmp_path, change)
    _, _, architecture = read_architecture(tmp_path)
    model = EncoderClassifier(**architecture, classes=5, dropout=0.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert load_weights(model, tmp_path, new_classifier=True) == expected
    assert torch.equal(model.state_dict()["head.2.weight"], before["head.2.weight"])
    with opened(tmp_path) as tensors:
        pooler = tensors["bert.pooler.dense.weight"][:] if len(expected) == 1 else before["head.0.weight"]
    assert torch.equal(model.state_dict()["head.0.weight"], pooler)


# With a tokenizer

TEXTS = ["We will mend the old bridge. Hello there!", "My fellow citizens, the work goes on; it must.", "Ça va? 😀"]


def byte_level() -> Any:
    """Return a tokenizer as GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options: Any = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, **options))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def word_pieces() -> Any:
    """Return a tokenizer as BERT's."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=90, special_tokens=special))
    around = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def sentence_pieces() -> Any:
    """Return a tokenizer as Llama's, which puts a space and <s> in front of a text."""
    tokenizer, special = Tokenizer(models.BPE(unk_token="<unk>")), ["<unk>", "<s>", "</s>"]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    options: Any = {"special_tokens": special, "show_progress": False}
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=90, **options))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = dict(zip(("unk_token", "bos_token", "eos_token"), special))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


TOKENIZERS = {"gpt2": byte_level, "llama": sentence_pieces, "bert": word_pieces}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a GPT-2, a Llama and a BERT with their tokenizers."""
    made = {}
    for name, make_tokenizer in TOKENIZERS.items():
        tokenizer, made[name] = make_tokenizer(), tmp_path_factory.mktemp("pretrained") / name
        ends = {
            "eos_token_id": tokenizer.eos_token_id,
            "id2label": {0: "a", 1: "b", 2: "c"},
            "label2id": {"a": 0, "b": 1, "c": 2},
        }
        saved(name, made[name], vocab_size=len(tokenizer), **ends)
        tokenizer.save_pretrained(made[name])
    return made


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@torch.no_grad()
def test_a_loaded_model_reads_text_as_the_library_does(name: str, folders: dict[str, Path]) -> None:
    run, tokenizer = (
        speechformer.load_pretrained(folders[name]),
        transformers.AutoTokenizer.from_pretrained(folders[name]),
    )
    for text in TEXTS:
        assert run.tokenizer.encode(text) == tokenizer(text).input_ids
        assert len(run.tokenizer.split(text)) == len(tokenizer(text).input_ids)
    reference = getattr(transformers, FAMILIES[name].head).from_pretrained(folders[name]).eval()
    expected = reference(**tokenizer(TEXTS[0], return_tensors="pt")).logits[0]
    torch.testing.assert_close(run.logits(TEXTS[0]), expected, atol=1e-5, rtol=1e-5)
    assert run.finished and run.attention(TEXTS[0])[0].weights.shape[:2] == (2, 4)


def test_a_loaded_model_generates_and_predicts(folders: dict[str, Path]) -> None:
    run, tokenizer = speechformer.load(folders["llama"]), transformers.AutoTokenizer.from_pretrained(folders["llama"])
    reference = transformers.LlamaForCausalLM.from_pretrained(folders["llama"])
    inputs = tokenizer("We will", return_tensors="pt")
    ids = reference.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert run.generate("We will", tokens=8, temperature=0) == expected
    prediction = speechformer.load(folders["bert"]).predict("We will mend.")
    assert [*prediction.probabilities] == ["a", "b", "c"] and prediction.words[0] == "[CLS]"


@pytest.mark.parametrize(
    ("config_ends", "ends", "end"),
    [(2, None, 2), ([9, 2], None, 9), ([], None, None), (2, 4, 2), (2, [9, 4], 2), (2, [], 2), (None, 4, 4)],
)
def test_generation_ends_where_that_of_the_library_does(
    config_ends: Any, ends: Any, end: int | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    """2 and 4 stand for tokens of the free continuation, 9 for another; `ends` is in generation_config.json."""
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("We will", return_tensors="pt")
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    free = model.generate(**inputs, **options, eos_token_id=None)[0, inputs.input_ids.shape[1] :].tolist()
    tokens = {2: free[2], 4: free[4], 9: min({*range(90)} - {*free})}

    def ids(value: Any) -> Any:
        return [ids(k) for k in value] if isinstance(value, list) else tokens.get(value)

    change_config(folder, eos_token_id=ids(config_ends))
    (folder / "generation_config.json").unlink()
    if ends is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids(ends)}))
    reference = transformers.LlamaForCausalLM.from_pretrained(folder).generate(**inputs, **options)[0].tolist()
    run = speechformer.load_pretrained(folder)
    run.tokenizer.save(tmp_path / "tokenizer.json")
    run.tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    drawn = [*continue_text(run, "We will", tokens=8, temperature=0)]
    assert drawn == [index for index in reference[inputs.input_ids.shape[1] :] if index not in run.tokenizer.ends]
    assert run.tokenizer.end == ids(end)


def one_id_too_many(folder: Path) -> None:
    change_config(folder, vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"] - 1)


LOADED: list[tuple[str, Callable[[Path], object], str]] = [
    (
        "bert",
        lambda f: change_config(f, id2label={"0": "a", "2": "b"}),
        "as names of two or more classes by 0, 1",
    ),
    ("bert", lambda f: change_config(f, problem_type="regression"), "as only single_label_classification would"),
    ("llama", lambda f: change_config(f, vocab_size=10**9), r"sizes in .*config.json, which ask for \[10"),
    (
        "llama",
        lambda f: change_config(f, num_key_value_heads=3),
        "config.json, as settings of ours: attention.kv_heads",
    ),
    ("llama", one_id_too_many, "tokenizer.json has a token of id .*, but .*config.json has vocab_size="),
    ("llama", lambda f: change_config(f, eos_token_id=[10**6]), r"or a list, not \[1000000\]"),
    ("llama", lambda f: shutil.rmtree(f), "has no config.json, so it is no folder of a model"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), LOADED)
def test_what_a_text_needs_is_checked(
    name: str, spoil: Callable[[Path], object], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders[name], tmp_path / "model"))
    spoil(folder)
    with pytest.raises(UserError, match=message):
        speechformer.load_pretrained(folder)


RUN = ["corpus=sample", "threads=1", "trainer.accelerator=cpu", "logger=csv", "batch_size=8", "recipe.warmup_steps=1"]


@pytest.mark.parametrize(("name", "task"), [("llama", "lm"), ("gpt2", "lm"), ("bert", "classify")])
@torch.no_grad()
def test_training_goes_on_from_a_model(
    name: str, task: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """With a learning rate of 0 the run is the model itself."""
    words = [
        f"task={task}",
        f"init_from={folders[name]}",
        "recipe.lr=0",
        "trainer.max_steps=2",
        *(["block_size=24"] if task == "lm" else []),
        *RUN,
    ]
    run, loaded = speechformer.fit(*words, directory=tmp_path / "run"), speechformer.load_pretrained(folders[name])
    said = capsys.readouterr().out
    assert f"Weights: {folders[name]}{'; initialised at random: classifier' * (task == 'classify')}\n" in said
    unset = "The default of block_size is for small models from scratch; set, for example, block_size=128.\n"
    assert (unset in said) == (task == "classify") and "recipe.lr is" not in said
    ids = torch.randint(1, 60, (2, 24), generator=torch.Generator().manual_seed(1))
    if task == "lm":
        torch.testing.assert_close(run.model(ids), loaded.model(ids))
    else:  # which has a head of its own
        for own, other in zip(run.attention(TEXTS[0])[0].weights, loaded.attention(TEXTS[0])[0].weights):
            torch.testing.assert_close(own, other)
    assert run.result is not None and run.result["config"]["model"]["name"] == loaded.label.split(",")[0]


TOKENIZER_CONFIG = {
    **{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    **{"pad_token": "Ġthe", "model_max_length": 20},
}
TEMPLATE = "{% for message in messages %}{{ message.content }}\n\n{% endfor %}\n"


@pytest.mark.parametrize(("name", "pattern"), [("qwen3, windows, yarn", "full"), ("llama 3", "window")])
@torch.no_grad()
def test_an_export_keeps_what_training_does_not_change(name: str, pattern: str, little: Path, tmp_path: Path) -> None:
    """Oracle: the folder that training began with, which has gone; with a learning rate of 0 also its weights."""
    folder, tokens = tmp_path / "my-model", {"bos_token_id": 0, "eos_token_id": [0, 5], "pad_token_id": 7}
    tokenizer = byte_level()
    reference = saved(name, folder, vocab_size=len(tokenizer), **tokens)
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5, 6], "top_k": 3}))
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    words = ["task=lm", f"init_from={folder}", f"pattern={pattern}", "recipe.lr=0", "trainer.max_steps=2"]
    corpus = ["corpus=speeches", f"corpus.root={little}", "corpus.classes=[ann,bob,cy]", "block_size=24"]
    speechformer.fit(*words, *corpus, *RUN[1:], directory=tmp_path / "run")
    shutil.rmtree(folder)
    call(export_main, tmp_path / "run", "--format", "huggingface")

    exported = tmp_path / "run" / "export" / "huggingface"
    written = json.loads((exported / "config.json").read_text())
    kept = [*tokens, "max_position_embeddings", "rope_parameters"]
    assert {key: written[key] for key in kept} == {key: config[key] for key in kept}
    assert written["model_type"] == ("mistral" if pattern == "window" else config["model_type"])
    assert (exported / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((exported / "tokenizer_config.json").read_text()) == TOKENIZER_CONFIG
    assert transformers.GenerationConfig.from_pretrained(exported).eos_token_id == [0, 5, 6]
    again = load_file(exported / "model.safetensors")
    assert again.keys() == weights.keys()
    for key, value in weights.items():
        assert torch.equal(again[key], value), key
    assert 'base_model: "my-model"\n' in (exported / "README.md").read_text()
    if pattern == "full":
        model, ids = getattr(transformers, FAMILIES[CONFIGS[name][0]].head).from_pretrained(exported), ids_of()
        torch.testing.assert_close(model.eval()(ids).logits, reference(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_model_from_elsewhere_is_written_beside_outputs_and_named(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `export`, which leaves its folder as it is, and in the title of its pictures."""
    monkeypatch.chdir(tmp_path)
    before = sorted(folders["gpt2"].iterdir())
    call(export_main, folders["gpt2"], "--format", "huggingface")
    call(attention_main, folders["gpt2"], "We will", "--format", "svg")
    assert sorted(folders["gpt2"].iterdir()) == before
    assert "The model gpt2, which continues a text" in Path("outputs/export/gpt2/huggingface/README.md").read_text()
    assert "gpt2, gpt2" in next(Path("outputs/attention/gpt2").rglob("*.svg")).read_text()


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama 3", "mistral", "qwen3, windows, yarn"])
def test_the_live_page_knows_all_settings_of_a_family(name: str, tmp_path: Path) -> None:
    """`test_play.py` compares what it computes with torch, setting by setting."""
    saved(name, tmp_path)
    assert describe_model(ours(tmp_path), read_architecture(tmp_path)[2])["parts"]


def test_an_export_that_differs_leaves_no_model(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = speechformer.load(folders["llama"])
    monkeypatch.setattr("speechformer.analysis.exports.compare", lambda *_: 1.0)
    with pytest.raises(UserError, match="The export is wrong: a logit differs by 1.0e.00"):
        export_all(run, "huggingface", tmp_path / "export")
    assert [path.name for path in (tmp_path / "export").iterdir()] == [".speechformer.json"]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/models/my-model/", "my-model"),
        ("/home/me/.cache/hub/models--meta-llama--Llama-3.2--x/snapshots/4f2c", "meta-llama/Llama-3.2--x"),
    ],
)
def test_a_model_has_the_name_of_its_folder_or_of_the_hub(folder: str, name: str) -> None:
    assert model_name(folder) == name


@pytest.mark.parametrize("tokens", ["bpe", "words"])
def test_our_own_model_is_exported_with_its_tokenizer(tokens: str, little: Path, tmp_path: Path) -> None:
    """Oracle: the run's tokenizer, for which a special token in a text is text."""
    task = ["task=lm", "task.tokens=bpe", "task.vocab_size=60", "architecture.tied_output=true"]
    if tokens == "words":
        task = ["task=classify", "architecture.norm=post", "architecture.final_norm=false", "architecture.pool=first"]
        task += ["architecture.embedding_norm=true", "architecture.classifier_activation=tanh"]
        task += ["architecture.classifier_width=8", "architecture.activation=gelu"]
    words = [*task, "model=learned", "trainer.max_steps=2", "width=8", "heads=2", "layers=1", "ff=8", "block_size=24"]
    corpus = ["corpus=speeches", f"corpus.root={little}", "corpus.classes=[ann,bob,cy]"]
    run = speechformer.fit(*words, *corpus, *RUN[1:], directory=tmp_path / "run")
    export_all(run, "huggingface", tmp_path / "export")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    for text in (*TEXTS, "We <eos> will <unk> mend<pad>.", "``` We ```` will", 'We " will""'):
        assert tokenizer(text).input_ids == run.tokenizer.encode(text)
    assert tokenizer.model_max_length == 24


def no_end(folder: Path) -> None:
    change_config(folder, eos_token_id=None)
    (folder / "generation_config.json").unlink()


SPOIL: dict[str, Callable[[Path], object]] = {
    "no_end": no_end,
    "no_tokenizer": lambda f: (f / "tokenizer.json").unlink(),
    "no_weights": lambda f: (f / "model.safetensors").unlink(),
    "small": one_id_too_many,
}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=classify", "init_from={llama}"], "is a llama, for task=lm, not task=classify"),
        (["task=lm", "init_from={llama}", "model=alibi"], "init_from=.* decides model; remove it"),
        (["task=lm", "init_from={llama}", "architecture.norm=post"], "decides architecture.norm; remove it"),
        (["task=lm", "task.tokens=pretrained"], "task.tokens=pretrained is the tokenizer of a model: set init_from"),
        (["task=lm", "init_from=nowhere"], "^nowhere: no such folder"),
        (["task=lm", "init_from={gpt2}", "block_size=33"], "block_size=33 is above the 32 learned positions"),
        (
            ["task=lm", "init_from={no_end}", "corpus=stories"],
            "eos_token_id, the token that ends a document, is missing",
        ),
        (["task=lm", "init_from={no_tokenizer}"], "has no tokenizer.json"),
        (["task=lm", "init_from={no_weights}"], "has no model.safetensors"),
        (["task=lm", "init_from={small}"], "tokenizer.json has a token of id"),
    ],
)
def test_invalid_runs_are_one_sentence(
    words: list[str], message: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the corpus is read, alone and in an ensemble, and without words of Hydra's on the command line."""
    for name in (name for name in SPOIL if f"{{{name}}}" in " ".join(words)):
        SPOIL[name](Path(shutil.copytree(folders["llama"], tmp_path / name)))
    words = [*RUN, *(word.format(**folders, **{name: tmp_path / name for name in SPOIL}) for word in words)]
    for name in ("load", "own"):
        monkeypatch.delattr(training, name)
    with pytest.raises(UserError, match=message):
        speechformer.fit(*words, directory=tmp_path / "run")
    with pytest.raises(UserError, match=message):
        training.execute_ensemble([(compose(*words, f"seed={k}"), tmp_path / str(k), words) for k in range(2)])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"^Error: .*{message.removeprefix('^')}") as error:
        call(train.main, *words)
    assert "interpolation" not in str(error.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_types_have_names_as_in_the_library(dtype: Any, folders: dict[str, Path]) -> None:
    assert next(speechformer.load_pretrained(folders["gpt2"], dtype).model.parameters()).dtype is torch.bfloat16


def switch_off(folder: Path, layer: int, head: int) -> None:
    with without_heads(speechformer.load(folder).model, [(layer, head)]):
        pass


@pytest.mark.parametrize(
    ("call_it", "message"),
    [
        (lambda f: speechformer.load_pretrained(f["gpt2"], "int8"), "dtype must be float32, .* or float64, not int8"),
        (lambda f: speechformer.load(f["gpt2"], "best.ckpt"), "is a model from elsewhere, which has no best.ckpt"),
        (lambda f: speechformer.load(f["bert"]).heads("We will"), "in language models; .* is for task=classify"),
        (lambda f: speechformer.load(f["bert"]).generate("We"), "is a model of task=classify"),
        (lambda f: switch_off(f["gpt2"], 2, 0), "no head 0 of layer 2 .* layers 0 to 1, heads 0 to 3"),
    ],
)
def test_what_a_model_does_not_have_is_one_sentence(
    call_it: Callable[[dict[str, Path]], object], message: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(UserError, match=message):
        call_it(folders)


def test_a_run_is_identified_by_the_files_of_its_model(folders: dict[str, Path], tmp_path: Path) -> None:
    """Not by the place of their folder, nor by the time of a change."""
    words, copy = ["task=lm", *RUN], tmp_path / "copy"
    shutil.copytree(folders["llama"], copy)
    first, second = (as_plain(compose(*words, f"init_from={place}")) for place in (folders["llama"], copy))
    assert first["init_from"]["sha256"] == second["init_from"]["sha256"] and first["width"] == 16
    before = (copy / "model.safetensors").stat()
    change_weights(copy, lambda weights: weights.update({Q: weights[Q] + 1}))
    os.utime(copy / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))  # of the same size, too
    assert as_plain(compose(*words, f"init_from={copy}"))["init_from"]["sha256"] != first["init_from"]["sha256"]


DOCUMENTS = ["We will\n\tmend.", "the  old bridge"]


def ids_in_library(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the ids that the library gives for whole documents, each with one token at its end."""
    end = tokenizer.eos_token_id
    encoded = [tokenizer(text).input_ids for text in texts]
    return [ids if ids[-1] == end else [*ids, end] for ids in encoded]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_texts(folder: Path, test: list[str]) -> Path:
    """Write a corpus of documents."""
    (folder / "train_LM.txt").write_text("<end>".join(f"{TEXTS[0]} {k}" for k in range(20)))
    (folder / "test_LM_news.txt").write_text("<end>".join(test))
    return folder


def data_of(tokenizer: Any, folder: Path, *words: str) -> Any:
    """Return the data of task=lm with a tokenizer of the library's."""
    own = PretrainedTokenizer(tokenizer.backend_tokenizer, tokenizer.eos_token_id)
    config = as_plain(compose("task=lm", "block_size=8", f"corpus.root={folder}", *words))
    return build_data(config, load_corpus(config), own)


@pytest.mark.parametrize("joining", ["joined", "separate"])
@pytest.mark.parametrize("make_tokenizer", [byte_level, sentence_pieces])
@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>", "</s> $A", "</s> $A </s>"])
def test_documents_have_the_ids_of_the_library(
    template: str, make_tokenizer: Callable[[], Any], joining: str, tmp_path: Path, cache: None
) -> None:
    """Each whole document is as the library encodes it; what ends one also begins the next, if nothing else does."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    end, ids = tokenizer.eos_token_id, tokenizer.get_vocab()
    special = [(word, ids[word]) for word in ("<s>", "</s>")]
    around = processors.TemplateProcessing(single=template, special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = around
    words = ["corpus=text", "corpus.separator='<end>'", "protocol=paper", f"task.documents={joining}"]
    data = data_of(tokenizer, write_texts(tmp_path, DOCUMENTS), *words)
    documents, is_shared = ids_in_library(tokenizer, DOCUMENTS), not template.startswith("<s>")
    if is_shared:
        documents = [ids if ids[0] == end else [end, *ids] for ids in documents]
    stream = [*documents[0], *documents[1][is_shared:]]
    assert data.streams["test", "news"].tolist() == stream
    counts = data.counts["tests"]["news"]
    assert (counts["tokens"], counts["unknown_tokens"]) == (len(stream), stream.count(ids.get("<unk>", -1)))
    segments = [stream] if joining == "joined" else documents
    targets = sum(len(segment) - 1 for segment in segments)
    begins, ends = data.segments(data.streams["test", "news"])
    assert [stream[a:b] for a, b in zip(begins.tolist(), ends.tolist())] == segments
    size = sum(len(text.encode()) for text in DOCUMENTS), sum(len(text.split()) for text in DOCUMENTS)
    assert data.text_sizes["news"] == (targets, *size)


def test_models_that_end_documents_otherwise_share_no_files(tmp_path: Path, cache: None) -> None:
    for end in (0, 5):
        tokenizer = byte_level()
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
        data = data_of(tokenizer, write_texts(tmp_path, DOCUMENTS), "corpus=text", "protocol=paper")
        assert data.streams["test", "news"][-1] == end


@pytest.mark.parametrize("make_tokenizer", [byte_level, sentence_pieces])
def test_lines_of_speeches_are_one_text_of_the_library(make_tokenizer: Callable[[], Any], tmp_path: Path) -> None:
    """Of a model without a token that ends documents, too."""
    tokenizer, lines = make_tokenizer(), [*TEXTS, "Hello there!"]
    for name in ("train_LM.txt", "test_LM_news.txt"):
        (tmp_path / name).write_text("\n".join(lines))
    tokenizer.eos_token = None
    data, text = data_of(tokenizer, tmp_path, "corpus=speeches", "protocol=paper"), " ".join(lines)
    ids = tokenizer(text).input_ids
    assert data.stream.tolist() == ids == data.streams["test", "news"].tolist()
    assert data.text_sizes["news"] == (len(ids) - 1, len(text.encode()), len(text.split()))
    assert data.counts["tests"]["news"]["tokens"] == len(ids)


@torch.no_grad()
def test_training_keeps_documents_apart(folders: dict[str, Path], tmp_path: Path, cache: None) -> None:
    """Oracle: the model on the second of two documents alone."""
    run: Any = speechformer.load(folders["llama"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["llama"])
    run.task.attach(data_of(tokenizer, write_texts(tmp_path, DOCUMENTS), "corpus=text", "protocol=paper"))
    run.task.separate = True
    first, second = (torch.tensor([ids]) for ids in ids_in_library(tokenizer, DOCUMENTS))
    hidden = run.task.hidden(run.model, torch.cat([first, second], dim=1))[:, first.shape[1] :]
    torch.testing.assert_close(hidden, run.model.hidden(second), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_evaluation_on_a_text_gives_the_perplexity_of_the_library(
    name: str, folders: dict[str, Path], tmp_path: Path, cache: None
) -> None:
    """Oracle: the library's logits on its own ids of the documents, one after another, in one block."""
    write_texts(tmp_path, ["\n\n".join(DOCUMENTS)])
    run = with_corpus(speechformer.load_pretrained(folders[name]), tmp_path)
    metrics = evaluate([run])["metrics"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[name])
    reference = getattr(transformers, FAMILIES[name].head).from_pretrained(folders[name])
    opening = [] if name == "llama" else [tokenizer.eos_token_id]  # GPT-2's begins a text, too
    ids = torch.tensor([[*opening, *itertools.chain(*ids_in_library(tokenizer, DOCUMENTS))]])
    assert ids.shape[1] <= run.block_size
    loss = reference(ids, labels=ids).loss.item()
    assert metrics["test_perplexity_news"] == pytest.approx(math.exp(loss), rel=1e-5)
    bits, size = loss * (ids.shape[1] - 1) / math.log(2), sum(len(text.encode()) for text in DOCUMENTS)
    assert metrics["test_bits_per_byte_news"] == pytest.approx(bits / size, rel=1e-5)


LONG = " ".join(TEXTS * 3)


@torch.no_grad()
def test_a_long_sentence_is_cut_as_in_the_library(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """[SEP] stays, and a line says so. Oracle: the library's tokenizer with truncation."""
    run, tokenizer = speechformer.load(folders["bert"]), transformers.AutoTokenizer.from_pretrained(folders["bert"])
    for name in ("train_CLS.tsv", "test_CLS.tsv"):
        (tmp_path / name).write_text("".join(f"{k}\t{text}\n" for k, text in enumerate([LONG, "mend", LONG])))
    words = ["task=classify", "corpus=speeches", f"corpus.root={tmp_path}", "block_size=9", "protocol=paper"]
    config = as_plain(compose(*words))
    data: Any = build_data(config, load_corpus(config), run.tokenizer)
    options = {"truncation": True, "max_length": 9, "padding": "max_length", "return_tensors": "pt"}
    assert torch.equal(data.train["ids"], tokenizer([LONG, "mend", LONG], **options).input_ids)
    assert data.counts["cut_at_block_size"] == 4
    inputs = tokenizer(LONG, truncation=True, max_length=32, return_tensors="pt")
    reference = transformers.BertForSequenceClassification.from_pretrained(folders["bert"]).eval()
    torch.testing.assert_close(run.logits(LONG), reference(**inputs).logits[0], atol=1e-5, rtol=1e-5)
    assert f"The text is long: the first 32 of its {len(run.tokenizer.encode(LONG))} words" in capsys.readouterr().err
    prediction = run.predict(LONG)
    assert prediction.words == run.tokenizer.tokens(inputs.input_ids[0].tolist()) and prediction.words[-1] == "[SEP]"
    assert "the first 32 of its" in prediction.notes[0] and run.tokenizer.encode(LONG) == tokenizer(LONG).input_ids


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=alibi"], "No family of .*closest, .*, has other ones: .*alibi"),
        (["model=learned"], "output_bias: none .here init."),
        (["model=learned", "task.ngram_mixture=fixed", "protocol=clean"], "no counts of words beside the network"),
    ],
)
def test_what_no_family_has_is_named(words: list[str], message: str, tmp_path: Path) -> None:
    sizes = ["task=lm", "width=16", "layers=1", "ff=16", "trainer.max_steps=2"]
    run = speechformer.fit(*sizes, *words, *RUN, directory=tmp_path / "run")
    with pytest.raises(UserError, match=message):
        export_all(run, "huggingface", tmp_path / "export")
