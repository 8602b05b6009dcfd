"""What the benchmarks time: steps of our models and of peers, steps of a larger decoder, and kernels of attention."""

import functools
import importlib.util
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import Loss, Peer
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from speechformer.analysis.load import load_pretrained
from speechformer.config import as_plain, compose
from speechformer.corpora.load import load
from speechformer.corpora.special_tokens import IGNORE
from speechformer.kernels.dispatch import SDPA, SPARSE_COST, choose_kernel
from speechformer.kernels.flex import FlexAttention, cached_block_mask, compiled_function, partial_tiles
from speechformer.kernels.loss import next_token_loss
from speechformer.kernels.sparse import SparseBlocks, layout_of
from speechformer.layers.attention import Attention, Pairs
from speechformer.layers.dropout import Dropout
from speechformer.layers.patterns import all_pairs, build_pattern
from speechformer.layers.positions import build_positions
from speechformer.models.decoder import Decoder
from speechformer.models.pretrained import read_architecture, to_family
from speechformer.models.stack import compile_blocks, initialise
from speechformer.tasks.registry import TASKS, build_data
from speechformer.training.runtime import tune_memory

Batches = Sequence[tuple[Tensor, Tensor]]  # ids [B, T]; targets [B, T] (lm) or [B] (classify)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORDS, DROPOUT, TRAINING_BATCHES = 5760, 0.1, 10


def build_task(name: str, sizes: Mapping[str, int]) -> tuple[Any, Any]:
    """Build the LightningModule of the task "lm" or "classify", on the device, and its LightningDataModule."""
    tune_memory()  # as every run does
    overrides = [f"{key}={value}" for key, value in {**sizes, "vocab_size": WORDS}.items()]
    config = as_plain(compose([f"task={name}", f"dropout={DROPOUT}", *overrides]))
    data = build_data(config, load(config))
    torch.manual_seed(0)
    return TASKS[name].from_config(config, data).to(DEVICE), data


def draw_batches(task: str, sizes: Mapping[str, int], data: Any, training: bool) -> Batches:
    """Return the first training batches of a corpus or those of its test; without data, one of random words.

    The rows of a language model's test that have unscored targets are left out.
    """
    pairs = []
    if data is None:
        shape, generator = (sizes["batch_size"], sizes["block_size"] + 1), torch.Generator().manual_seed(0)
        words = torch.randint(2, WORDS, shape, generator=generator)
        pairs.append((words[:, :-1], words[:, 1:] if task == "lm" else words[:, -1] % 3))
    elif training:
        for batch in itertools.islice(data.train_dataloader(), TRAINING_BATCHES):
            ids = batch["ids"]
            pairs.append((ids, batch["labels"]) if task == "classify" else (ids[:, :-1], ids[:, 1:]))
    else:
        for batch in (batch for batch in data.test_dataloader() if batch["part"][0] == "test"):
            ids, targets = batch["ids"], batch["labels" if task == "classify" else "targets"]
            scored = slice(None) if task == "classify" else (targets != IGNORE).all(dim=1)
            pairs.append((ids[scored], targets[scored]))
    return [(ids.to(DEVICE), targets.to(DEVICE)) for ids, targets in pairs if len(ids)]


def find_losses(model: Any, training: bool) -> dict[str, Loss]:
    """Return the mean loss of a model, ours or a peer, under each of its settings."""
    if isinstance(model, Peer):
        return model.losses(training)

    def our_loss(ids: Tensor, targets: Tensor) -> Tensor:
        if targets.dim() == 1:
            return F.cross_entropy(model(ids), targets)
        hidden = model.hidden(ids).flatten(0, 1)
        return next_token_loss(model.output.weight, model.output.bias, hidden, targets.flatten())

    return {"default": our_loss}


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all sides."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def run_batches(model: nn.Module, batches: Batches, loss: Loss, optimizer: torch.optim.Optimizer | None) -> None:
    """Take a training step with each batch, or without an optimizer evaluate each."""
    model.train(optimizer is not None)
    with torch.set_grad_enabled(optimizer is not None):
        for ids, targets in batches:
            value = loss(ids, targets)
            if optimizer is not None:
                value.backward()
                optimizer.step()
                optimizer.zero_grad()


def build_decoder_step(
    sizes: Mapping[str, int],
    overrides: Sequence[str],
    batch: int = 1,
    bfloat16: bool = False,
    compiled: bool = False,
    compiled_loss: bool = False,
) -> tuple[Callable[[], None], int]:
    """Return a training step of a decoder on random words as a function, and its number of parameters.

    The decoder has RoPE and tied embeddings, no biases and no dropout. Its weights are drawn from normal(0, 0.02).
    With torch's embeddings, of variance 1, tied logits differ by so much that probabilities become denormal numbers
    within a few steps. CPUs multiply these many times slower.
    """
    tune_memory()
    torch.manual_seed(0)
    config = as_plain(compose(["task=lm", "model=rope", *overrides]))
    unused = ("pool", "classifier_width", "classifier_activation", "shared_embeddings")
    options = {key: value for key, value in config["architecture"].items() if key not in unused}
    options |= {"tied_output": True, "bias": False, "qkv_bias": False, "dropout": 0.0}
    options |= {key: config[key] for key in ("model", "pattern", "attention")}
    model = Decoder(**sizes, **options)  # type: ignore[arg-type]
    initialise(model, "normal", 0.02)
    model.to(DEVICE)
    if compiled:
        compile_blocks(model, "default", DEVICE)
    optimizer = build_optimizer(model)
    ids = torch.randint(sizes["vocab_size"], (batch, sizes["block_size"] + 1), device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=bfloat16):
            hidden = model.hidden(ids[:, :-1]).flatten(0, 1)
            targets = ids[:, 1:].flatten()
            loss = next_token_loss(model.output.weight, model.output.bias, hidden, targets, compiled=compiled_loss)
        loss.backward()
        optimizer.step()

    return step, sum(parameter.numel() for parameter in model.parameters())


def save_foreign(folder: Path, width: int, heads: int, layers: int, ff: int, block_size: int, rows: int) -> int:
    """Save a random Qwen3 into a folder as Hugging Face does, with a tokenizer; return its number of parameters.

    A third of the heads have keys and values of their own.
    """
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 3)}
    sizes |= {"head_dim": width // heads, "num_hidden_layers": layers, "intermediate_size": ff, "vocab_size": rows}
    config = {"model_type": "qwen3", **sizes, "max_position_embeddings": block_size, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _, _, architecture = read_architecture(folder)
    torch.manual_seed(0)
    model = Decoder(**architecture, dropout=0.0)
    initialise(model, "normal", 0.02)
    save_file(to_family(architecture, model.state_dict())[1], folder / "model.safetensors", {"format": "pt"})
    tokenizer = Tokenizer(WordLevel({f"w{k}": k for k in range(rows)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return sum(parameter.numel() for parameter in model.parameters())


Loaded = tuple[Callable[[], object], Tensor]  # what generates, and the logits after the tokens of the prompt, [T, V]


def load_foreign(folder: Path, dtype: torch.dtype, prompt: int, generated: int) -> Loaded:
    """Load the model of a folder into the GPU."""
    run = load_pretrained(folder, dtype)
    text = " ".join(f"w{k % len(run.tokenizer)}" for k in range(prompt))
    return functools.partial(run.generate, text, generated, temperature=0), run.logits(text).float()


@torch.no_grad()
def load_with_transformers(folder: Path, dtype: torch.dtype, prompt: int, generated: int) -> Loaded:
    """Do the same with `transformers`."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.to(DEVICE).eval()
    ids = torch.arange(prompt, device=DEVICE)[None] % model.config.vocab_size
    options = {"max_new_tokens": generated, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    generate = functools.partial(model.generate, ids, attention_mask=torch.ones_like(ids), **options)
    return generate, model(ids).logits[0].float()


def build_kernel_passes(T: int, heads: int, width: int) -> dict[str, dict[str, Callable[[], None]]]:
    """Return, by mechanism, forward and backward of kernels on a GPU that the mechanisms could have.

    FlexAttention caps scores by c tanh(s / c) with c = 30. The gated delta rule is flash-linear-attention's, if it is
    installed. Inputs are random, of one text in bfloat16.
    """
    if DEVICE.type != "cuda":
        return {}
    q, k, v = torch.randn(3, 1, heads, T, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def capped() -> None:
        mask = cached_block_mask(all_pairs, True, T, DEVICE)
        attend = compiled_function(flex_attention)
        attend(q, k, v, score_mod=lambda s, *_: 30 * torch.tanh(s / 30), block_mask=mask).sum().backward()

    passes = {"softcap": {"FlexAttention alone": capped}}
    if importlib.util.find_spec("fla"):
        chunk_gated_delta_rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        decay, strength = -torch.rand(2, 1, T, heads, device=DEVICE)

        def delta() -> None:
            x = [F.normalize(y.transpose(1, 2).float(), dim=-1).to(y.dtype) for y in (q, k)]
            chunk_gated_delta_rule(*x, v.transpose(1, 2), decay, -strength)[0].sum().backward()

        passes["gated delta"] = {"flash-linear-attention alone": delta}
    return passes


class AttentionPass:
    """Forward and backward of the attention of one causal layer, by any kernel.

    Args:
        overrides: the encoding and the pattern, such as "model=alibi pattern=window pattern.window=64".
        T, heads, width, B, dtype: of queries, keys and values, [B, heads, T, width].

    Attributes: `kernels`, functions of q, k and v by name; `chosen`, the one that a model takes without dropout;
    `partial`, the share of its tiles of which a pattern shows some pairs and not all.
    """

    def __init__(
        self, overrides: str, T: int, heads: int, width: int, B: int = 1, dtype: torch.dtype = torch.float32
    ) -> None:
        config = as_plain(compose(["model=nope", *overrides.split()]))
        shape = {"width": heads * width, "heads": heads, "length": T}
        positions = build_positions(config["model"], **shape, causal=True).to(DEVICE)
        pairs = Pairs.of_text(positions, build_pattern(config["pattern"]), True, T, None, DEVICE)
        self.qkv = [torch.randn(B, heads, T, width, device=DEVICE, dtype=dtype).requires_grad_() for _ in range(3)]
        builders: dict[str, Callable[[], Attention]] = {"dense mask": lambda: SDPA(pairs.bias(*pairs.all), pairs)}
        if layout := layout_of(pairs.pattern, T, True, DEVICE, SPARSE_COST):
            builders["sparse blocks"] = lambda: SparseBlocks(pairs, layout)
        if pairs.is_plain:
            builders["SDPA without mask"] = lambda: SDPA(None, pairs)
        if DEVICE.type == "cuda":
            builders["FlexAttention"] = lambda: FlexAttention(pairs)
        self.kernels = {name: functools.partial(self.attend, build) for name, build in builders.items()}
        chosen = choose_kernel(pairs, B, width, 0.0, with_weights=False, compiled=False, places=None)
        names: dict[type, str] = {SparseBlocks: "sparse blocks", FlexAttention: "FlexAttention"}
        plain = "SDPA without mask" if chosen.bias is None else "dense mask"
        self.chosen = names.get(type(chosen), plain)
        self.partial = partial_tiles(pairs.pattern, 1024 * -(-T // 1024), True)

    def attend(self, build: Callable[[], Attention], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of a kernel; its bias is built as in each pass of a model."""
        return build()(q, k, v, Dropout(0.0))[0]

    def run(self, kernel: Callable[..., Tensor]) -> None:
        """Run forward and backward."""
        kernel(*self.qkv).sum().backward()

    def held_bytes(self, kernel: Callable[..., Tensor]) -> int:
        """Count the bytes held for the backward pass besides q, k and v; on a GPU, the peak of the first pass."""
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.run(kernel)
            return torch.cuda.max_memory_allocated() - before
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # an output itself would keep its graph alive, and that the output

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            kernel(*self.qkv)
        for tensor in self.qkv:
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        return sum(storages.values())
