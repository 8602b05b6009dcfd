"""Where does it look? `python -m speechformer.attention RUN "sentence"`: every layer and head, as pictures (PNG) and
as one page (HTML) that needs no network; and the sanity check of the weights, printed as pass or fail.

For a translation the sentence is the source, and the run's own translation of it the target. `--beside RUN ...` puts
the same sentence of other runs next to it: ALiBi's scale 0.5 beside 1 and 2.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechformer import console
from speechformer.analysis.attention_maps import WHAT, Check, Map, checks, draw, maps_of
from speechformer.analysis.load import Trained, given_sentences, load_trained, note_unknown, say_if_unfinished
from speechformer.corpora.special_tokens import BEGIN, END
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import UNKNOWN_TOKEN
from speechformer.errors import UserError, run_command
from speechformer.generation.beam_search import translate_ids
from speechformer.tasks.translate import Translate

MOST = 128  # tokens on a side: of more nothing is seen in a picture
PAGE = Path(__file__).with_name("attention.html")


def inputs(run: Trained, text: str) -> tuple[list[Tensor], list[list[str]], list[str]]:
    """What the model reads of a text, and its tokens, as `maps_of` takes them; and what there is to say of it."""
    task, notes = run.task, []
    most = min(MOST, max_length) if (max_length := task.model.max_length) else MOST
    if isinstance(task, Translate):
        assert isinstance(run.tokenizer, Subwords)
        (ids,) = run.tokenizer.encode_all([text.strip()])
        source = [*ids, END]
        if len(source) > most:
            notes.append(f"read are the first {most - 1} of its {len(ids)} tokens")
            source = [*ids[: most - 1], END]
        options = {"beam": task.decoding["beam"], "alpha": task.decoding["length_penalty"]}
        (found,) = translate_ids(task.model, [source], max_length=task.model.max_length, **options)
        if len(found) + 1 > most:
            notes.append(f"of the translation's {len(found)} tokens the first {most - 1} are shown")
        found = found[: most - 1]
        notes.append(f"translated: {run.tokenizer.decode(found)}")
        read, written = [BEGIN, *found], [*found, END]
        words = [run.tokenizer.tokens(part) for part in (source, read, written)]
        return [torch.tensor(source), torch.tensor(read)], words, notes
    words_of, ids = run.words(text)
    if task.name == "classify":
        most = min(most, run.block_size)
    if len(ids) > most:
        why = ", as in training" if most == run.block_size and task.name == "classify" else ""
        notes.append(f"read are the first {most} of its {len(ids)} words{why}")
    words_of, ids = words_of[:most], ids[:most]
    if task.name == "lm" and len(ids) > run.block_size:
        notes.append(f"it was trained on {run.block_size} words at once")
    if note := note_unknown(words_of, ids):
        notes.append(note)
    labels = [word if index != 1 else f"{word} {UNKNOWN_TOKEN}" for word, index in zip(words_of, ids)]
    return [torch.tensor(ids)], [labels], notes


def look(run: Trained, text: str) -> tuple[list[Map], list[Check], list[str]]:
    """The maps of a run for a text, whether they are sane, and what there is to say of the text.

    Raises:
        UserError: the model does not attend.
    """
    ids, words, notes = inputs(run, text)
    maps = maps_of(run.task.model, ids, words)
    if not maps:
        raise UserError(f"{run.directory} is a run of model={run.label}, which attends to nothing: there is no map.")
    return maps, checks(run.task.model, ids, maps), notes


def encode_weights(weights: Tensor) -> str:
    """Weights as 16-bit whole numbers, 65535 for 1, in base64."""
    whole = (weights * 65535).round().to(torch.int32).numpy().astype("<u2")
    return base64.b64encode(whole.tobytes()).decode()


def page(text: str, runs: Sequence[tuple[str, list[Map], list[str]]]) -> str:
    """The page: a text, and of each run its label, its maps, and what there is to say of it.

    All that comes from outside is one JSON object in it, in which no character can end the element that holds it, and
    the page's code puts words on the screen as text alone.
    """
    content: dict[str, Any] = {"text": text, "runs": []}
    content["scale"] = max(float(part.weights.max()) for _, maps, _ in runs for part in maps)
    for label, maps, notes in runs:
        shown = []
        for part in maps:
            distance = part.distance()
            shown.append(
                {
                    "name": part.name,
                    "what": WHAT[part.name],
                    "queries": part.queries,
                    "keys": part.keys,
                    "layers": part.weights.shape[0],
                    "heads": part.weights.shape[1],
                    "weights": encode_weights(part.weights),
                    "in_train": None if part.mask.all() else part.mask.int().flatten().tolist(),
                    "entropy": [[round(value, 4) for value in row] for row in part.entropy().tolist()],
                    "distance": None
                    if distance is None
                    else [[round(value, 4) for value in row] for row in distance.tolist()],
                }
            )
        content["runs"].append({"label": label, "maps": shown, "notes": notes})
    data = json.dumps(content, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return PAGE.read_text(encoding="utf-8").replace("__CONTENT__", data)


def said(found: Sequence[Check]) -> str:
    """The sanity check for the terminal."""
    rows = [("", "", "worst", "allowed")]
    for check in found:
        if check.worst is None:
            rows.append(("-", check.what, "nothing to look at", ""))
        else:
            verdict = "pass" if check.passed else "FAIL"
            rows.append((verdict, check.what, f"{check.worst:.1e}", f"{check.allowed:.0e}"))
    widths = [max(len(row[k]) for row in rows) for k in range(4)]
    return "\n".join(
        "  ".join((row[0].ljust(4), row[1].ljust(widths[1]), row[2].rjust(widths[2]), row[3].rjust(widths[3])))
        for row in rows
    )


def of_heads(maps: Sequence[Map]) -> str:
    """What each head does, for the terminal: the token that gets most, in the mean over those that may look at it."""
    rows: list[tuple[str, ...]] = [("", "entropy", "distance", "looks most at")]
    for part in maps:
        entropy, distance = part.entropy(), part.distance()
        lookers = part.mask.sum(dim=0).clamp(min=1)
        for layer, weights_NTS in enumerate(part.weights):
            for n, weights in enumerate(weights_NTS):
                mean, key = (weights.sum(dim=0) / lookers).max(dim=0)
                rows.append(
                    (
                        f"{part.name}, layer {layer + 1}, head {n + 1}",
                        f"{entropy[layer, n]:.2f}",
                        "-" if distance is None else f"{distance[layer, n]:.1f}",
                        f"{part.keys[int(key)]} ({mean:.2f})",
                    )
                )
    return console.table(rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m speechformer.attention",
        description="Draw where every head looks, as PNG and as one HTML page, and check the weights.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("text", nargs="*", help="one sentence; none: a line from standard input")
    parser.add_argument("--beside", type=Path, nargs="+", default=[], metavar="RUN", help="runs to compare it with")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="outputs/attention/ and the name of the run's folder"
    )
    parser.add_argument("--checkpoint", help="best.ckpt, last.ckpt; else the one that the run's figures are of")
    given = parser.parse_intermixed_args()

    def command() -> None:
        for folder in given.beside:
            if not folder.is_dir() and not given.text:
                raise UserError(f"--beside {folder}: there is no such folder; the sentence goes before --beside.")
        runs = [load_trained(folder, checkpoint=given.checkpoint) for folder in (given.run, *given.beside)]
        if len({run.task.name for run in runs}) > 1:
            raise UserError(
                f"The runs are of task={', task='.join(run.task.name for run in runs)}; compare like ones."
            )
        texts = given_sentences(given.text)
        labels = [run.label for run in runs]
        labels = [
            f"{label} ({run.directory.resolve().name})" if labels.count(label) > 1 else label
            for label, run in zip(labels, runs)
        ]
        if len(texts) != 1:
            raise UserError(f"A map is of one sentence, and there are {len(texts)}; put it in quotes.")
        shown, failed, pictures = [], False, []
        for number, (run, label) in enumerate(zip(runs, labels), start=1):
            say_if_unfinished(run)
            try:
                maps, found, notes = look(run, texts[0])
            except UserError as error:
                if number == 1:
                    raise
                maps, found, notes = [], [], [str(error)]
            console.say("; ".join([f"{run.directory.name} ({run.label})", *notes]))
            if found:
                console.say(said(found))
                console.say(of_heads(maps))
            failed |= not all(check.passed for check in found)
            if not run.finished:
                notes = [f"not finished; weights of {run.checkpoint}", *notes]
            shown.append((label, maps, notes))
            prefix = f"{number}_" if len(runs) > 1 else ""
            pictures += [(f"{prefix}{part.name}.png", part, label) for part in maps]
        darkest = max(float(part.weights.max()) for _, part, _ in pictures)
        output = given.output or Path("outputs/attention") / runs[0].directory.resolve().name
        output.mkdir(parents=True, exist_ok=True)
        for name, part, label in pictures:
            title = f"{run.task.name}, model={label}"
            draw(part, title, darkest if len(runs) > 1 else None).save(output / name)
            console.say(f"{output / name}")
        (output / "attention.html").write_text(page(texts[0], shown), encoding="utf-8")
        console.say(f"{output / 'attention.html'}")
        if failed:
            sys.exit("Error: the weights are not what attention gives; see FAIL above.")

    run_command(command)


if __name__ == "__main__":
    main()
