"""The README.md beside an exported model: how to use the model without this package, its data, figures and limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import speechformer
from speechformer.analysis.load import TrainedRun
from speechformer.corpora.special_tokens import BEGIN, END
from speechformer.corpora.subwords import Subwords
from speechformer.escape import escape_markdown

LOAD = """\
import torch
from tokenizers import Tokenizer

model = torch.export.load("model.pt2").module()
tokenizer = Tokenizer.from_file("tokenizers.json")
"""
WORDS, SUBWORDS = (
    '" ".join(tokenizer.id_to_token(index) or "<unk>" for index in ids)',
    "tokenizer.decode(ids).strip()",
)
EXAMPLES = {  # by an ability of the task; LENGTH: the most tokens; TEXT: that of ids
    "predict": f"""import json
{LOAD}classes = json.load(open("export.json", encoding="utf-8"))["classes"]
ids = tokenizer.encode("Together we will mend the harbours.").ids
probabilities = model(torch.tensor([ids])).softmax(dim=-1)[0].tolist()
for name, probability in zip(classes, probabilities):
    print(f"{{name}}: {{probability:.6f}}")
""",
    "generate": f"""{LOAD}ids = tokenizer.encode("We will").ids
while len(ids) < LENGTH:
    ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
print(TEXT)
""",
    "translate": f"""{LOAD}source = [*tokenizer.encode("The old woman does not see the horses.").ids, {END}][:LENGTH]
target = [{BEGIN}]
while target[-1] != {END} and len(target) < LENGTH:
    target.append(int(model(torch.tensor([source]), torch.tensor([target]))[0, -1].argmax()))
print(tokenizer.decode(target).strip())
""",
}
WEIGHTS = """\
from safetensors.torch import load_file
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("tokenizers.json")
print(tokenizer.encode("Together we will mend the harbours.").ids)
for name, weight in load_file("model.safetensors").items():
    print(name, tuple(weight.shape))
"""
LIMITS = {
    "predict": "It knows only the classes and the vocabulary of its training set, and reads other words as `<unk>`. "
    "Do not use it to find out who wrote a text: it gives a class for every text.",
    "generate": "It knows only the vocabulary of its training set. What it writes sounds like that text, and is not "
    "true. It can repeat sentences of it.",
    "translate": "It translates sentences like those of its training set. For others its text is fluent, and wrong.",
}


def card(run: TrainedRun, formats: Sequence[str]) -> str:
    """Return the README.md of an export in some formats."""
    (ability,) = run.task.abilities
    parts = [
        f"# {run.task.name}: {escape_markdown(run.label)}",
        f"A small model that {run.task.purpose}, trained with speechformer {speechformer.__version__}.",
        "## Use",
        *use(ability, formats, min(run.max_length or 50, 50), isinstance(run.tokenizer, Subwords)),
        "## Data",
        data(run.result),
        "## Figures",
        *figures(run),
        "## Limits",
        LIMITS[ability],
        "The model is for experiments with attention. Its weights may hold sentences of its training set, and their "
        "license, if there is one.",
        *(
            ["The files hold the training text itself, whose words were counted."]
            if run.task.counts is not None
            else []
        ),
    ]
    return "\n\n".join(parts) + "\n"


def use(ability: str, formats: Sequence[str], length: int, subwords: bool) -> list[str]:
    """Return an example that does without this package, and what each file is."""
    computes = "torch.export" in formats
    libraries = "torch and tokenizers" if computes else "torch, safetensors and tokenizers"
    example = EXAMPLES[ability].replace("LENGTH", str(length)) if computes else WEIGHTS
    example = example.replace("TEXT", SUBWORDS if subwords else WORDS)
    notes = ["- `export.json` describes inputs, output and hyperparameters. `tokenizer.json` is the run's own file."]
    if "safetensors" in formats:
        notes.append(
            "- `speechformer.analysis.exports.load_safetensors` rebuilds the model from `model.safetensors` alone."
        )
    if not subwords:
        notes.append("- `tokenizers.json` splits words as NLTK does, but in rare cases of quotes after a period.")
    return [f"In this folder, with {libraries} installed:", f"```python\n{example}```", "\n".join(notes)]


def data(result: dict[str, Any] | None) -> str:
    """Return what the model was trained and tested on."""
    if result is None:
        return "Not known: the run has no result."
    corpus, counts, protocol = result["corpus"], result["corpus"]["counts"], result["config"]["protocol"]["name"]
    shown = {name.replace("_", " "): value for name, value in counts.items() if type(value) is int}
    return "\n".join(
        [
            f"- corpus: {escape_markdown(corpus['name'])}, sha256 `{corpus['sha256']}`",
            f"- protocol: {escape_markdown(protocol)}",
            *(f"- {name}: {value:,}" for name, value in shown.items()),
        ]
    )


def figures(run: TrainedRun) -> list[str]:
    """Return the run's table of results, and how to read it."""
    result = run.result
    if result is None or not result.get("summary"):
        return ["None: the run has not come to its end."]
    rows = [[escape_markdown(cell.strip()) for cell in row] for row in result["summary"]]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, f"|{'---|' * len(rows[0])}")
    intervals = "95 % intervals are over the test sentences" if "95 % interval" in result["summary"][0] else ""
    best, seed = result["best"], result["config"]["seed"]
    notes = [
        f"The model has {result['parameters']['total']:,} parameters, and the weights of `{run.checkpoint}`.",
        f"{intervals or 'There are no intervals within a run'}; this is the run of seed {seed}, and others differ.",
    ]
    if run.task.hparams.get("naive_bayes") is not None:
        notes.append("The figures are of the network with naive Bayes; exports compute both.")
    if run.task.hparams.get("mixture") is not None:
        notes.append(
            "The column *with counts* is of the mixture with a Kneser-Ney model; exports compute the mixture."
        )
    if best["chosen_on"] == "test":
        notes.append("`best.ckpt` was chosen on the test set, and its figures are optimistic.")
    return ["\n".join(lines), " ".join(notes)]
