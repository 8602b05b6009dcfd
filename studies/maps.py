"""Measure the attention maps of the runs behind the claims on maps: `python -m studies.maps outputs/reproduce/runs`.

For a query with weights w_j over S keys, on every third test sentence of the classification that no model cuts:

    entropy     - sum_j w_j ln w_j / ln S     0: all weight on one key, 1: the same on each
    maximum     max_j w_j
    distance    sum_j w_j |i - j|             in tokens

Each is a mean over heads, queries that have a choice, and sentences. The output, `maps.json` beside the folder of
runs, has them for each run by the name of its folder: of each layer, and of all layers but the first (`later`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import speechformer
from speechformer.corpora.speeches import load_corpus
from speechformer.errors import ArgumentParser, run_command
from speechformer.runs.folder import write_json
from studies.results import MAPS, Results, read_yaml, terms_of

STEP = 3  # every third test sentence


def measure(run: Any, texts: Iterable[str]) -> dict[str, float]:
    """Return the measures of a trained run, on the texts of two tokens or more that it reads as a whole."""
    found: list[torch.Tensor] = []
    for text in texts:
        inputs = run.read(text)
        if not inputs.is_cut and 1 < len(inputs.ids[0]) <= run.block_size:
            (part,) = run.attention(inputs)
            keys = part.mask.sum(dim=-1)
            weights = part.weights[:, :, keys > 1]  # [L, N, queries with a choice, S]
            entropy = torch.special.entr(weights).sum(dim=-1) / keys[keys > 1].log()
            by_head = [entropy.mean(dim=-1), weights.amax(dim=-1).mean(dim=-1), part.distance()]
            found.append(torch.stack(by_head).mean(dim=-1))  # [measures, L]
    means = torch.stack(found).mean(dim=0)
    named = dict(zip(("entropy", "maximum", "distance"), means.tolist()))
    measures = {f"map_{name}_layer_{k}": own for name, layers in named.items() for k, own in enumerate(layers, 1)}
    later = {f"map_{name}_later": sum(layers[1:]) / len(layers[1:]) for name, layers in named.items() if layers[1:]}
    return measures | later | {"map_distance": float(means[2].mean())}


def main() -> None:
    """Run the command line."""
    parser = ArgumentParser(prog="python -m studies.maps", description="Measure the attention maps of runs.")
    parser.add_argument("folder", type=Path, help="of the runs of studies/reports.sh, with their checkpoints")
    arguments = parser.parse_args()

    def command() -> None:
        results, maps = Results([arguments.folder]), {}
        claims = [entry for entry in read_yaml("claims.yaml")["claims"].values() if entry["family"] == "maps"]
        for name in dict.fromkeys(line["variant"] for entry in claims for line in terms_of(entry)):
            for run in results.place(name, "paper").runs if (name, "paper") in results.places else ():
                sentences = [text for _, text in load_corpus(run.result["config"]["corpus"]).classify_test]
                maps[run.folder.name] = measure(speechformer.load(run.folder), sentences[::STEP])
                print(run.folder.name)
        write_json(arguments.folder.parent / MAPS, maps)

    run_command(command)


if __name__ == "__main__":
    main()
