"""Golden runs: tiny runs that together cover the package, to show that a change of the code changes no result.

    python tests/golden_runs.py compare HEAD~1           every case at that commit and in the working tree, bit by bit
    python tests/golden_runs.py run . golden-full.json   every case in one checkout, with its hashes
    python tests/golden_runs.py record                   rewrite tests/golden.json, which test_golden.py compares with

The script uses the command line of a checkout and nothing else, so it works for any layout of the package, if its
config has the keys of the cases.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).with_name("golden.json")

TINY = "protocol=paper threads=1 trainer.accelerator=cpu width=16 heads=2 layers=1 ff=16"
TINY += " batch_size=8 checkpoint_every=5"
SPEECHES = "corpus=speeches corpus.root=CORPUS corpus.classes=[ann,bob,cy]"  # CORPUS: see `write_corpus`
CLASSIFY = f"task=classify {SPEECHES} trainer.max_epochs=3 recipe.lr=1e-2"
LM = f"task=lm {SPEECHES} block_size=16 trainer.max_steps=24 eval_interval=12 recipe.lr=1e-2"
TRANSLATE = "task=translate corpus=ted corpus.root=CORPUS trainer.max_steps=24 eval_interval=8 recipe.warmup_steps=4"
BPE = f"{TRANSLATE} task.vocab_size=300 task.batch_tokens=256 recipe.lr=6e-3"
WORDS = f"{TRANSLATE} task.tokens=words task.vocab_size=200 task.batch_tokens=null"
SWEEP = "-m hydra/launcher=ensemble seed=3,4 recipe.lr=1e-2,2e-2"  # last, to override the rate
CASES = {
    # classification; on a CPU the encoder leaves padding out
    "classify": CLASSIFY,
    "classify_clean": f"{CLASSIFY} protocol=clean model=learned pattern=window pattern.window=3 recipe=adamw layers=2"
    " architecture.pool=cls architecture.activation=gelu trainer.gradient_clip_val=0.5",
    "classify_post_norm": f"{CLASSIFY} model=alibi model.scale=1.1 pattern=block pattern.block=4 recipe=normal"
    " architecture.norm=post architecture.final_norm=false trainer.accumulate_grad_batches=2",
    "classify_no_dropout": f"{CLASSIFY} model=rope pattern=bigbird recipe=cosine recipe.warmup_steps=3 recipe.lr=2e-3"
    " dropout=0 architecture.qkv_bias=false vocab_size=400",
    "classify_relative": f"{CLASSIFY} model=relative pattern=global recipe=xavier recipe.label_smoothing=0.1"
    " architecture.bias=false trainer.limit_train_batches=5",
    "classify_list": f"{CLASSIFY} model=alibi model.slopes=[0.5,0.1] model.scale=2 pattern=strided pattern.stride=3"
    " recipe.optimizer=sgd recipe.schedule=linear recipe.lr=0.3 layers=2",
    "classify_rnn": f"{CLASSIFY} model=rnn model.cell=lstm layers=2 trainer.gradient_clip_val=1.0",
    "classify_muon": f"{CLASSIFY} model=kerple pattern=sinks pattern.tokens=2 pattern.window=3 recipe=muon layers=2"
    " task.unknown_rate=0.5 task.balanced=true task.naive_bayes=2 protocol=clean",
    "classify_randomised": f"{CLASSIFY} model=randomised model.max_positions=64 embedding_dropout=0.3",
    "classify_rope": f"{CLASSIFY} model=rope width=32",
    "classify_linear": f"{CLASSIFY} attention=linear architecture.norm=parallel architecture.norm_type=dyt"
    " architecture.activation=relu2",
    "classify_sample": "task=classify corpus=sample trainer.max_epochs=1 trainer.limit_train_batches=20",
    # language modelling
    "lm": f"{LM} model=nope pattern=strided pattern.stride=3 task.lengths=[24,40]",
    "lm_slopes": f"{LM} model=alibi model.slopes=learned pattern=dilated task.stride=4 architecture.tied_output=true",
    "lm_clean": f"{LM} protocol=clean model=learned pattern=global recipe=vaswani recipe.warmup_steps=6 recipe.lr=2"
    " trainer.accumulate_grad_batches=2 trainer.gradient_clip_val=0.5 layers=2 task.lengths=[24]",
    "lm_rnn": f"{LM} model=rnn dropout=0 layers=2 task.lengths=[24]",
    "lm_bf16": f"{LM} model=rope pattern=window trainer.precision=bf16-mixed recipe.label_smoothing=0.1",
    "lm_muon": f"{LM} model=forgetting recipe=muon protocol=clean task.ngram_targets=0.5 task.ngram_mixture=context"
    " task.unknown_rate=0.5 architecture.output_bias=unigram",
    "lm_documents": "task=lm corpus=stories corpus.documents=40 corpus.words=20 block_size=16 trainer.max_steps=24"
    " protocol=clean eval_interval=12 model=fire task.documents=separate task.tokens=bpe task.vocab_size=300",
    "lm_by_layer": f"{LM} model=by_layer model.layers=[xpos,nope] pattern=by_layer layers=2",
    "lm_rotations": f"{LM} model=by_layer model.layers=[rope,xpos] layers=2 width=32 dropout=0",
    "lm_mechanisms": f"{LM} model=rope attention=by_layer layers=6 architecture.norm=sandwich"
    " attention.layers=[softmax,sink,sigmoid,entmax,softpick,differential] architecture.activation=gelu_tanh",
    "lm_mixers": f"{LM} model=rope attention=by_layer layers=6 task.lengths=[40]"
    " attention.layers=[linear,retention,gated_linear,delta,gated_delta,ssd] architecture.activation=geglu",
    "lm_options": f"{LM} model=pope pattern=top_blocks pattern.block=4 layers=2 attention.kv_heads=1"
    " attention.qk_norm=true attention.conv=3 attention.softcap=20 attention.length_scale=true"
    " attention.output_gate=true attention.value_residual=true architecture.norm_type=rms"
    " architecture.activation=swiglu",
    "lm_sample": "task=lm corpus=sample model=relative pattern=bigbird trainer.max_steps=10",
    # translation
    "translate": f"{BPE} task.average_checkpoints=2 task.beam=3 task.length_penalty=2",
    "translate_words": f"{WORDS} protocol=clean model=alibi task.beam=1 architecture.tied_output=false"
    " architecture.shared_embeddings=false architecture.norm=post pattern=window recipe=adam dropout=0",
    "translate_rope": f"{BPE} model=rope layers=2 task.average_checkpoints=3 task.beam=2 task.length_penalty=0.6"
    " trainer.accumulate_grad_batches=2 trainer.gradient_clip_val=1.0 architecture.scale_embedding=false",
    "translate_rope_wide": f"{BPE} model=rope width=32 layers=2",
    "translate_rnn": f"{BPE} recipe=inverse_sqrt model=rnn task.beam=2",
    "translate_rnn_attention": f"{WORDS} recipe=inverse_sqrt model=rnn_attention model.cell=lstm task.beam=2"
    " layers=2",
    "translate_rnn_bahdanau": f"{BPE} recipe=inverse_sqrt model=rnn_attention model.attention=bahdanau task.beam=2",
    "translate_muon": f"{BPE} model=xpos recipe=muon recipe.label_smoothing=0.1 task.bpe_dropout=0.2",
    "translate_sample": "task=translate corpus=sample model=learned trainer.max_steps=6 task.beam=1 block_size=32",
    "translate_digits": "task=translate corpus=digits corpus.max_length=5 task.tokens=words task.vocab_size=10"
    " task.batch_tokens=null block_size=16 model=relative trainer.max_steps=200 eval_interval=100 batch_size=64"
    " recipe.lr=1e-2 recipe.warmup_steps=20 width=32",  # so many steps that it translates something
    # probes
    "probe": "task=probe probe=recall model=rope trainer.max_steps=12 eval_interval=6 task.test_rows=20"
    " recipe.warmup_steps=3",
    # a sweep whose runs train as one model; one after another they would differ in rounding
    "ensemble_classify": f"{CLASSIFY} pattern=full,window protocol=clean {SWEEP}",
    "ensemble_lm": f"{LM} model=alibi,rope trainer.gradient_clip_val=0.5 {SWEEP}",
    # runs that are killed and started again, and the same without that
    "lm_long": f"{LM} trainer.max_steps=240 eval_interval=60 recipe=cosine",
    "lm_killed": f"{LM} trainer.max_steps=240 eval_interval=60 recipe=cosine",
    "translate_long": f"{BPE} trainer.max_steps=120 eval_interval=10 task.average_checkpoints=3 task.beam=2",
    "translate_killed": f"{BPE} trainer.max_steps=120 eval_interval=10 task.average_checkpoints=3 task.beam=2",
}
FAST = ("classify", "classify_clean", "classify_no_dropout", "classify_rnn", "lm", "lm_slopes", "translate")


def overrides(case: str, corpus: Path) -> list[str]:
    """Return the overrides of a case on the folder that `write_corpus` wrote."""
    return f"{TINY} {CASES[case]}".replace("CORPUS", str(corpus)).split()


def settings(checkout: Path, folder: Path) -> dict[str, Any]:
    """Return how to start a process of a checkout: there, with its package, and with a cache of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SPEECHFORMER", "SLURM"))}
    own = {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    return {"cwd": checkout, "env": inherited | own | {"CUDA_VISIBLE_DEVICES": ""}}


def write_corpus(checkout: Path, folder: Path) -> Path:
    """Write the first lines of the sample, with test sentences in train and pairs that cleaning removes."""
    corpus = folder / "corpus"
    command = [sys.executable, "-m", "speechformer.corpora.sample", str(corpus)]
    subprocess.run(command, **settings(checkout, folder), check=True, stdout=subprocess.DEVNULL)
    lines = {file.name: file.read_bytes().splitlines(keepends=True) for file in corpus.iterdir()}
    shortened = {name: own[: (120 if "train" in name else 30) if "_" in name else 12] for name, own in lines.items()}
    shortened["test_CLS.tsv"] += shortened["train_CLS.tsv"][:10]
    shortened["train_LM.txt"] += shortened["test_LM_marlowe.txt"][:5]
    for name in ("train.en", "train.fr"):
        long = b" ".join(line.strip() for line in lines[name][300:320]) + b"\n"
        repeated = [*lines[name][:3], *shortened[name.replace("train", "test")][:3]]
        shortened[name] = [*lines[name][:200], b"<doc>\n", long, *repeated]
    for name, own in shortened.items():
        (corpus / name).write_bytes(b"".join(own))
    return corpus


def execute(checkout: Path, case: str, corpus: Path, folder: Path) -> list[dict[str, Any]]:
    """Run a case and return the figures of its runs: one run, or those of a sweep."""
    words, place = overrides(case, corpus), folder / case
    swept = [f"hydra.sweep.dir={place}", "hydra.sweep.subdir=${hydra.job.num}"]
    words += swept if "-m" in words else [f"hydra.run.dir={place}"]
    command = [sys.executable, "-m", "speechformer.train", *sorted(words, key="-m".__ne__)]  # -m comes first
    if case.endswith("_killed"):
        process = subprocess.Popen(command, **settings(checkout, folder), stdout=subprocess.DEVNULL)
        while process.poll() is None and not (place / "last.ckpt").exists():
            time.sleep(0.005)
        process.kill()
        if process.wait() != -signal.SIGKILL or (place / "result.json").exists():
            raise RuntimeError("The run ended before it was killed; give it more steps.")
    done = subprocess.run(command, **settings(checkout, folder), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    results = sorted(place.glob("*/result.json"), key=lambda path: int(path.parent.name))
    return [figures(path.parent) for path in results or [place / "result.json"]]


def figures(folder: Path) -> dict[str, Any]:
    """Return readable figures of a run's folder, and sha256 sums of its results to the last bit."""
    import torch

    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    metrics, curve, best = result["metrics"], result["curve"], result["best"]
    contents: dict[str, Any] = {f"metric {name}": value for name, value in metrics.items()}
    for name in {name for point in curve for name in point}:
        contents[f"curve {name}"] = [[point["step"], point[name]] for point in curve if name in point]
    contents["best"] = [best["value"], best["step"]]
    own = {name: [json.dumps(content).encode()] for name, content in contents.items()}  # floats with all their digits
    if (folder / "translations.tsv").exists():
        own["translations"] = [(folder / "translations.tsv").read_bytes()]
    for path in folder.glob("*.ckpt"):
        state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        own[path.name] = list(raw(state))
        if path.name == "last.ckpt":
            # Matrices only: the gradient of the keys' biases is zero but for rounding, which Adam scales up.
            norm = sum(float(value.double().square().sum()) for value in state.values() if value.dim() > 1) ** 0.5
    return {
        "status": result["status"],
        "steps": result["steps"],
        "corpus": result["corpus"]["sha256"],
        "weight_norm": norm,
        "metrics": metrics,
        "sha256": {name: hashlib.sha256(b"".join(content)).hexdigest() for name, content in sorted(own.items())},
    }


def raw(state: dict[str, Any]) -> Iterator[bytes]:
    """Yield a state_dict as bytes, sorted by name without its first component, the attribute of the task."""
    import torch

    for name, value in sorted(state.items(), key=lambda item: item[0].partition(".")[2]):
        bits = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
        yield f"{name.partition('.')[2]} {value.dtype} {tuple(value.shape)}\n".encode()
        yield bits.contiguous().numpy().tobytes()


def run(checkout: Path, cases: Sequence[str], jobs: int) -> dict[str, Any]:
    """Run cases in a checkout, `jobs` at a time; return the figures or the error of each."""
    checkout = checkout.resolve()
    with tempfile.TemporaryDirectory(prefix="golden-") as name, ThreadPoolExecutor(jobs) as pool:
        corpus = write_corpus(checkout, Path(name))

        def one(case: str) -> Any:
            began = time.monotonic()
            try:
                return execute(checkout, case, corpus, Path(name))
            except Exception as error:
                return {"error": str(error)}
            finally:
                print(f"{case}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)

        return dict(zip(cases, pool.map(one, cases)))


def difference(before: Any, after: Any) -> str:
    """Say in one line how the figures of a case differ; return an empty string if they are equal to the last bit.

    A metric that only `after` has changes no result.
    """
    if failed := [outcome["error"] for outcome in (before, after) if isinstance(outcome, dict)]:
        return f"failed: {failed[0]}"
    if len(before) != len(after):
        return f"{len(before)} and {len(after)} runs"
    parts, largest = set(), 0.0
    for a, b in zip(before, after):
        parts |= {key for key in ("status", "steps", "corpus") if a[key] != b[key]}
        added = {name for name in b["sha256"].keys() - a["sha256"].keys() if name.startswith(("metric ", "curve "))}
        changed = {name for name, _ in a["sha256"].items() ^ b["sha256"].items()} - added
        parts |= {name.partition(" ")[0] for name in changed}
        for x, y in ((a["metrics"][name], b["metrics"][name]) for name in a["metrics"].keys() & b["metrics"].keys()):
            if x != y:
                largest = max(largest, math.inf if None in (x, y) else abs(x - y) / max(abs(x), abs(y)))
    return f"differs: {', '.join(sorted(parts))}; metrics by up to {largest:.1e}" if parts else ""


def numerics_version(checkout: Path) -> int:
    """Return the version of the numerics that a checkout states; 0 before there was one."""
    path = checkout / "speechformer" / "runs" / "identity.py"
    stated = re.search(r"^NUMERICS_VERSION\D*(\d+)", path.read_text() if path.exists() else "", re.MULTILINE)
    return int(stated[1]) if stated else 0


def report(before: dict[str, Any], after: dict[str, Any], fine: str = "equal") -> int:
    """Print a line for each case and each run that was killed; return 1 if anything differs or failed."""
    texts = {case: difference(before[case], after[case]) for case in after}
    lines = {case: text or fine for case, text in texts.items()}
    for killed in (case for case in after if case.endswith("_killed")):
        if (whole := killed.replace("_killed", "_long")) in after:
            name = f"{killed} and {whole}"
            texts[name] = difference(after[killed], after[whole])
            lines[name] = texts[name] or "equal"
    print("\n".join(f"{name}: {line}" for name, line in lines.items()))
    return int(any(texts.values()))


@contextlib.contextmanager
def worktree(commit: str | None) -> Iterator[Path]:
    """Provide a git worktree of a commit, or the working tree as it is if `commit` is None."""
    if commit is None:
        yield ROOT
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="golden-checkout-") as folder:
        subprocess.run([*git, "add", "--quiet", "--detach", folder, commit], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


def compare(base: Path, head: Path, cases: Sequence[str], jobs: int) -> int:
    """Compare two checkouts; return 1 if a case failed, or differs although both state the same numerics."""
    before, after = run(base, cases, jobs), run(head, cases, jobs)
    differs = report(before, after)
    versions = numerics_version(base), numerics_version(head)
    if not differs or any(isinstance(outcome, dict) for outcome in (*before.values(), *after.values())):
        return differs
    if 0 in versions or versions[0] == versions[1]:
        print(f"The results differ; raise NUMERICS_VERSION (now {versions[1]}) in speechformer/runs/identity.py.")
        return 1
    print(f"The results differ, as NUMERICS_VERSION says: {versions[0]} and {versions[1]}.")
    return 0


def record(jobs: int) -> int:
    """Write the readable figures of the fast cases; return 1 if one failed, or differs under the same version."""
    from test_golden import CHANGED, differences

    cases, earlier, version = {}, json.loads(GOLDEN.read_text(encoding="utf-8")), numerics_version(ROOT)
    for case, outcome in run(ROOT, FAST, jobs).items():
        if isinstance(outcome, dict):
            print(outcome["error"], file=sys.stderr)
            return 1
        cases[case] = {key: outcome[0][key] for key in ("corpus", "steps", "weight_norm", "metrics")}
        is_comparable = case in earlier["cases"] and version == earlier["numerics_version"]
        if is_comparable and (lines := differences(earlier["cases"][case], cases[case])):
            print("\n".join([f"{case}: {CHANGED}", *lines]), file=sys.stderr)
            return 1
    content = {"numerics_version": version, "cases": cases}
    GOLDEN.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    alone = commands.add_parser("run", help="run the cases in a checkout; write their figures and hashes")
    alone.add_argument("checkout", type=Path)
    alone.add_argument("output", type=Path)
    two = commands.add_parser("compare", help="compare two commits; exit with 1 if a result differs")
    two.add_argument("base")
    two.add_argument("head", nargs="?", help="default: the working tree")
    for command in (alone, two):
        command.add_argument("--cases", type=lambda names: names.split(","), default=list(CASES), metavar="A,B")
    for command in (alone, two, commands.add_parser("record", help="rewrite tests/golden.json")):
        command.add_argument("--jobs", type=int, default=2, help="runs at a time")
    arguments = parser.parse_args()
    if arguments.command == "record":
        return record(arguments.jobs)
    if unknown := sorted(set(arguments.cases) - set(CASES)):
        parser.error(f"unknown cases: {', '.join(unknown)}; choose from {', '.join(CASES)}")
    if arguments.command == "run":
        outcomes = run(arguments.checkout, arguments.cases, arguments.jobs)
        arguments.output.write_text(json.dumps(outcomes, indent=2) + "\n", encoding="utf-8")
        return report(outcomes, outcomes, "finished")
    with worktree(arguments.base) as base, worktree(arguments.head) as head:
        return compare(base, head, arguments.cases, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
