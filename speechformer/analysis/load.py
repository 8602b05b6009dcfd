"""Load a trained run from its folder: `speechformer.load`.

Nothing in a folder is executed: checkpoints are read with `weights_only=True`, the rest is JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speechformer import console
from speechformer.analysis import continuation, leave_one_out, translation
from speechformer.analysis.attention_maps import AttentionMap, maps_of
from speechformer.analysis.heads import HeadScores, attention_layers, head_scores
from speechformer.config import as_plain, compose
from speechformer.corpora.load import load_tokenizer
from speechformer.corpora.pretrained import PretrainedTokenizer
from speechformer.errors import UserError, require
from speechformer.layers.mechanisms import changed_options
from speechformer.models.pretrained import (
    WEIGHTS,
    check_tensors,
    class_names,
    is_pretrained,
    load_weights,
    read_architecture,
)
from speechformer.models.stack import SOFTMAX
from speechformer.paths import path_of
from speechformer.process import standard_state
from speechformer.runs import folder as runs
from speechformer.runs.find import find_checkpoint
from speechformer.runs.naming import model_name
from speechformer.tasks.base import Task
from speechformer.tasks.registry import TASKS, load_task
from speechformer.tasks.text import TextInputs

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class TrainedRun:
    """A trained run; `predict`, `generate` and `translate` need the task of that purpose.

    Attributes:
        directory: the run's folder.
        task: the LightningModule in evaluation mode, on a GPU if there is one (`task.cpu()` moves it).
        tokenizer: converts between text and ids.
        checkpoint: the file that the weights come from.
        result: content of `result.json`, or None.
        is_pretrained: whether it is a model from elsewhere, which has no result.
    """

    directory: Path
    task: Task = field(repr=False)
    tokenizer: Any = field(repr=False)
    checkpoint: str
    result: dict[str, Any] | None = field(repr=False)
    is_pretrained: bool = False

    @property
    def model(self) -> nn.Module:
        """The network: an `EncoderClassifier`, a `Decoder` or a `Translator`."""
        return self.task.model

    @property
    def finished(self) -> bool:
        """Whether training has ended."""
        return self.is_pretrained or (self.result is not None and self.result["status"] == "finished")

    @property
    def label(self) -> str:
        """The model with its options and, unless attention is full, the pattern: "alibi, scale 2"."""
        groups = [self.task.hparams["architecture"][name] for name in ("model", "pattern")]
        model, pattern = (str(group.get("layers", group["name"])).replace("'", "") for group in groups)
        words = [model]
        for name, value in groups[0].items():
            if name in ("scale", "cell") or value != {"slopes": "geometric", "attention": "luong"}.get(name, value):
                words.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
        name, *changed = changed_options(self.task.hparams["architecture"].get("attention", SOFTMAX))
        words += [name] * (name != "softmax") + changed
        return ", ".join(words if pattern == "full" else [*words, pattern])

    @property
    def title(self) -> str:
        """What pictures call it: task and model of a run, name and family of a model from elsewhere."""
        if self.is_pretrained:
            return f"{model_name(self.directory)}, {read_architecture(self.directory)[0].type}"
        return f"{self.task.name}, model={self.label}"

    @property
    def began_with(self) -> str | None:
        """The name of the model from elsewhere that it is, or that its training began with; None without one."""
        place = (self.result or {"config": {}})["config"].get("init_from")
        folder = self.directory if self.is_pretrained else (place or {}).get("folder")
        return model_name(folder) if folder else None

    @property
    def max_length(self) -> int | None:
        """The maximum number of tokens that the model can read; None: no limit."""
        return self.task.model.max_length

    @property
    def block_size(self) -> int:
        """The number of tokens that the model was trained on at once."""
        return self.task.hparams["architecture"]["block_size"]

    def require(self, ability: str) -> None:
        """Raise a UserError unless the run's task has an ability: "predict", "generate" or "translate"."""
        if ability not in self.task.abilities:
            tasks = " or ".join(f"task={name}" for name, task in TASKS.items() if ability in task.abilities)
            kind = "model" if self.is_pretrained else "run"
            raise UserError(
                f"{self.directory} is a {kind} of task={self.task.name}, which {self.task.purpose}; "
                f"{ability} needs a run of {tasks}."
            )

    @standard_state()
    @torch.no_grad()
    def read(self, text: str, max_tokens: int = continuation.MAX_PROMPT) -> TextInputs:
        """Convert a text to the model's inputs: `ids`, [T] each, `tokens`, and `notes` on what was cut or unknown.

        A translator also reads its own translation of the text.
        """
        if not text.strip():
            raise UserError("The text is empty; give at least one word.")
        return self.task.read(text, self.tokenizer, max_tokens)

    def inputs_of(self, text: str | TextInputs) -> TextInputs:
        """Return what `read` returned for a text, or does; then a line on stderr says whether the text was cut."""
        if isinstance(text, TextInputs):
            return text
        read = self.read(text)
        if read.is_cut:
            console.warn(f"The text is long: {read.notes[0]}.")
        return read

    @standard_state()
    @torch.no_grad()
    def logits(self, *inputs: str | Tensor) -> Tensor:
        """Compute the model's logits for a text, or for ids; with counts of words, those of both.

        Args:
            inputs: one text, or the ids of each input of the model (of a translator source and target), [T], or
                [B, T] padded with 0.

        Returns:
            [classes] of a classifier, [T, vocabulary] of a language model (row t predicts token t + 1) and of a
            translator (row t predicts token t of the translation); with a batch dimension for ids [B, T].
        """
        parts = self.inputs_of(inputs[0]).ids if len(inputs) == 1 and isinstance(inputs[0], str) else inputs
        ids = [part.to(self.task.device) for part in parts if isinstance(part, Tensor)]
        if not len(ids) == len(parts) == len(self.task.inputs):
            names = ", ".join(self.task.inputs)
            raise UserError(f"logits takes one text, or one tensor of ids for each input of the model ({names}).")
        return self.task(*ids) if ids[0].ndim == 2 else self.task(*(part[None] for part in ids))[0]

    @standard_state()
    def attention(self, text: str | TextInputs) -> list[AttentionMap]:
        """Compute the attention weights of every layer and head for a text, or for what `read` returned for it.

        Returns:
            A map for each part, "encoder", "decoder", "cross", with `weights` [L, N, T, S] and `mask` [T, S].

        Raises:
            UserError: the model has no attention.
        """
        inputs = self.inputs_of(text)
        maps = maps_of(self.model, inputs.ids, inputs.tokens)
        if not maps:
            raise UserError(f"{self.directory} is a run of model={self.label}, which has no attention weights.")
        return maps

    @standard_state()
    def heads(self, text: str | TextInputs) -> HeadScores:
        """Score each head of a language model on a text: where it attends, and what the text costs without it.

        Raises:
            UserError: the model has no such scores; the message says why.
        """
        inputs = self.inputs_of(text)
        if "generate" not in self.task.abilities:
            raise UserError(
                f"Heads are scored (previous token, induction, what the text costs without each) in language models; "
                f"{self.directory} is for task={self.task.name}."
            )
        if len(inputs.ids[0]) < 2 or not attention_layers(self.model):
            raise UserError("Heads are scored on a text of two tokens or more, where each has an output of its own.")
        return head_scores(self.model, inputs.ids[0], self.attention(inputs)[0].weights)

    @standard_state()
    def predict(self, text: str) -> leave_one_out.Prediction:
        """Predict the class of a text: the probability of each class, and the importance of each word."""
        self.require("predict")
        return leave_one_out.predict(self, text)

    @standard_state()
    def generate(
        self,
        prompt: str,
        tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """Return a prompt and its continuation; `analysis.continuation.continue_text` explains the arguments."""
        self.require("generate")
        ids = continuation.continue_text(self, prompt, tokens, temperature, top_k, top_p, seed)
        return "".join(self.tokenizer.stream([*self.tokenizer.encode(prompt), *ids]))

    @standard_state()
    def translate(
        self,
        texts: str | Sequence[str],
        beam: int | None = None,
        length_penalty: float | None = None,
        others: Sequence[TrainedRun] = (),
    ) -> list[str]:
        """Return the translation of each text; `analysis.translation.translate_sources` explains the arguments."""
        self.require("translate")
        sources = translation.encode_sources(self, [texts] if isinstance(texts, str) else texts, others)
        translations = translation.translate_sources(self, sources, beam, length_penalty, others)
        return [self.tokenizer.decode(ids) for ids in translations]


def unique_labels(runs: Sequence[TrainedRun]) -> list[str]:
    """Return the label of each run, with its folder's name where several have the same."""
    labels = [run.label for run in runs]
    return [
        f"{label} ({run.directory.resolve().name})" if labels.count(label) > 1 else label
        for label, run in zip(labels, runs)
    ]


@standard_state()
def load(run: str | Path, checkpoint: str | None = None) -> TrainedRun:
    """Load a trained run from its folder, with the weights behind the reported metrics; or do `load_pretrained`.

    These are the average checkpoint if the run computed one, else the best if a validation set chose it, else the
    last. Of an unfinished run it is the last.

    Args:
        run: the run's folder, such as outputs/runs/classify_alibi_seed0_....
        checkpoint: load this one instead: "average.ckpt", "best.ckpt" or "last.ckpt".

    Raises:
        UserError: the folder is not a run's, has no checkpoint yet, a file is damaged, or the run diverged.
    """
    directory = path_of(run)
    name, result = find_checkpoint(directory, checkpoint)
    if is_pretrained(directory):
        return load_pretrained(directory)
    with torch.random.fork_rng(devices=[]):  # building the model draws its initial weights
        task = load_task(directory / name)
    if task.diverged():
        raise UserError(f"{directory / name}: weights are NaN or infinite. Train again with a lower recipe.lr.")
    path = directory / runs.TOKENIZER
    tokenizer = load_tokenizer(path)
    known = (result or runs.read_json(directory / runs.OWNER, "owner") or {}).get("tokenizer_sha256")
    if known not in (None, runs.sha256(path)):  # versions before 0.3 kept none
        raise UserError(f"{path} is damaged, or of another run: its sha256 differs. Restore it, or train again.")
    task.to("cuda" if torch.cuda.is_available() else "cpu")
    return TrainedRun(directory, task, tokenizer, name, result)


@standard_state()
def load_pretrained(folder: str | Path, dtype: torch.dtype | str = torch.float32) -> TrainedRun:
    """Load a model from elsewhere, from a folder as Hugging Face's `save_pretrained` leaves it.

    It has what a run of `task=lm` has, or of `task=classify` for an encoder: attention maps, `generate`, `predict`.
    Only config.json, safetensors and tokenizer.json are read; nothing is downloaded or executed.

    Args:
        folder: with a model of a family in `speechformer.models.families`.
        dtype: of the weights, or its name: "float32", "bfloat16", "float16" or "float64".

    Raises:
        UserError: a file is missing or damaged, or the model has no counterpart here; the key is named.
    """
    directory = path_of(folder)
    weights_type = {str(each).removeprefix("torch."): each for each in DTYPES}.get(str(dtype).removeprefix("torch."))
    require(weights_type is not None, "dtype", "float32, bfloat16, float16 or float64", dtype)
    _, config, architecture = read_architecture(directory)
    architecture |= {"dropout": 0.0}
    name = "classify" if "pool" in architecture else "lm"
    arguments: dict[str, Any] = {"recipe": as_plain(compose([f"task={name}"]))["recipe"]}
    if name == "classify":
        arguments["classes"] = class_names(directory, config)
        architecture |= {"classes": len(arguments["classes"])}
    tokenizer = PretrainedTokenizer.of_folder(directory)
    check_tensors(directory)  # before memory is taken
    with torch.random.fork_rng(devices=[]):
        task = TASKS[name](architecture=architecture, **arguments)  # type: ignore[call-arg]
    load_weights(task.model, directory)
    task.eval().to(weights_type).to("cuda" if torch.cuda.is_available() else "cpu")
    return TrainedRun(directory, task, tokenizer, WEIGHTS, None, is_pretrained=True)
