"""Seed faults into a copy of the package, one at a time, and see which tests fail: `python tests/faults.py`.

The table says best what the tests are for. A fault is one changed line; each should make the named test files fail.

    python tests/faults.py              the fast tests
    python tests/faults.py --slow       the slow ones, of the same files
    python tests/faults.py --only sweeps
    python tests/faults.py --tests OTHER/tests    tests of another checkout, with other names of files ignored

It prints a line for each fault and ends with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = (  # a file of the package, the right code, the wrong code, the test files that should see it
    ("layers/positions.py", "-by_head(self.slopes()", "by_head(self.slopes()", "positions"),
    ("layers/positions.py", "between[0::2][: heads", "between[1::2][: heads", "positions"),
    ("layers/positions.py", "math.log(max_distance / exact)", "math.log(max_distance)", "positions"),
    ("models/stack.py", "torch.arange(offset, offset + T, device", "torch.arange(0, T, device", "sampling"),
    ("layers/positions.py", "return q * scale_TH, k / scale_TH", "return q * scale_TH, k * scale_TH", "positions"),
    ("layers/attention.py", "mask & (j <= i)", "mask & (j <= i + 1)", "attention patterns models"),
    ("layers/attention.py", "/ math.sqrt(q_BNTH.shape[-1]) + bias", "+ bias", "attention models"),
    ("layers/patterns.py", "(i - j).abs() < window, 1)", "(i - j).abs() <= window, 1)", "patterns"),
    ("layers/recurrent.py", "self.dropout(x_BTD) if k else x_BTD", "self.dropout(x_BTD)", "recurrent"),
    (
        "models/encoder_decoder.py",
        "(source_BS == PAD, -math.inf, 0.0)",
        "(source_BS == PAD, 0.0, 0.0)",
        "encoder_decoder",
    ),
    ("models/encoder_decoder.py", 'past[0]["h"][:, -1:]', 'past[0]["h"][:, :1]', "encoder_decoder"),
    ("models/ensemble.py", "torch.arange(0, K * V, V", "torch.arange(0, K, 1", "models_ensemble"),
    ("models/stack.py", "Pairs(positions[k], self.patterns[k]", "Pairs(positions[0], self.patterns[0]", "by_layer"),
    ("kernels/sparse.py", "torch.stack(log_sums).softmax(dim=0)", "torch.stack(log_sums).softmax(dim=2)", "sparse"),
    ("kernels/sparse.py", ".clamp(min=HIDDEN)", "", "sparse"),
    ("kernels/loss.py", "label_smoothing=smoothing)", "label_smoothing=0.0)", "dispatch"),
    ("corpora/splits.py", "for row in allowed:", "for row in train:", "splits data_speeches"),
    ("corpora/splits.py", "list(corpus.classify_test)}", "list(corpus.classify_train)}", "splits data_speeches"),
    (
        "corpora/splits.py",
        "if words and not copy and not words & taken",
        "if words and not copy",
        "data_speeches splits",
    ),
    ("corpora/duplicates.py", "NEAR * len(words) - 1e-9) + 1", "NEAR * len(words) - 1e-9)", "duplicates"),
    ("corpora/files.py", '.removesuffix("\\n").split("\\n")', ".splitlines()", "speeches pairs"),
    ("corpora/pairs.py", '> (rules["ratio"] or', '>= (rules["ratio"] or', "pairs"),
    ("data/pairs.py", "a not in sources and b not in references", "a not in sources", "data_pairs"),
    ("data/pairs.py", "[BEGIN, *target, END])", "[BEGIN, *target])", "data_pairs"),
    ("data/batches.py", "stream[places + 1].long()", "stream[places].long()", "data_speeches documents"),
    ("data/batches.py", "self.order(self.epoch)[self.batches_done :]", "self.order(self.epoch)", "data_pairs fit"),
    (
        "data/base.py",
        'return "validation" if ("validation", "") in',
        'return "test" if ("validation", "") in',
        "data_speeches",
    ),
    ("data/probes.py", "rows.choices[:, 1:]", "rows.choices[:, :-1]", "probes"),
    ("data/probes.py", "rows.answers[:, 1:]", "rows.symbols[:, 1:]", "probes"),
    ("tasks/classify.py", '"not_in_train": ~batch["in_train"]', '"not_in_train": batch["in_train"]', "tasks"),
    ("tasks/language_model.py", "ids[:, :-1], ids[:, 1:].flatten()", "ids[:, :-1], ids[:, :-1].flatten()", "tasks"),
    ("tasks/optim.py", "(step + 1) / warmup", "step / warmup", "tasks"),
    ("tasks/optim.py", "0.5 * (1 + math.cos", "0.5 * (1 - math.cos", "tasks"),
    ("tasks/language_model.py", "loss / math.log(2) / size.bytes", "loss / size.bytes", "documents"),
    ("generation/beam_search.py", "((5 + length) / 6)", "((6 + length) / 6)", "beam_search"),
    ("generation/sampling.py", "probabilities[top_k:] = 0", "probabilities[top_k + 1:] = 0", "sampling"),
    ("analysis/load.py", "if task.diverged():", "if False:", "load"),
    ("analysis/play_page.py", 'for character in "<>&', 'for character in ">&', "play"),
    (
        "analysis/play/engine.js",
        "Math.abs(i - j) < window * dilation",
        "Math.abs(i - j) <= window * dilation",
        "play",
    ),
    ("report/statistics.py", "(weight * own.error) ** 2 for", "(weight * own.sd) ** 2 for", "statistics report"),
    ("report/statistics.py", "math.sqrt(self.n + 1)", "math.sqrt(self.n)", "statistics report"),
    ("report/statistics.py", "(tests - np.arange(len(p)))", "tests", "statistics report"),
    ("report/tables.py", "corrected = holm([", "corrected = list([", "figures"),
    ("report/tables.py", "summary.n < FEW_SEEDS", "summary.n > FEW_SEEDS", "figures report"),
    ("report/page.py", "else escape_markdown(str(value))", "else str(value)", "report"),
    (
        "training/checkpoints.py",
        "                if run.averaged > 1:",
        "                if False:",
        "fit translate train",
    ),
    ("training/checkpoints.py", "                keep_previous(path)", "                pass", "fit kills"),
    (
        "training/checkpoints.py",
        'if task.mode == "max" else value < ',
        'if task.mode == "min" else value < ',
        "fit train",
    ),
    (
        "training/devices.py",
        'config["threads"] or owner.get("threads") or',
        'config["threads"] or',
        "fit runs",
    ),
    ("runs/folder.py", "WEIGHTS, PREVIOUS, ENSEMBLE)", "WEIGHTS)", "fit kills runs"),
    ("runs/folder.py", "self.replaces = True", "self.replaces = False", "runs"),
    ("runs/identity.py", '("checkpoint_every", "compile",', '("checkpoint_every",', "sweeps fit"),
    ("corpora/files.py", "os.fsync(file.fileno())", "pass", "files kills"),
    ("sweeps/search.py", "statistics.mean(scores)", "scores[0]", "search"),
    (
        "kernels/padding.py",
        "index_copy(0, self.index_R, x_BTD)",
        "index_copy(0, self.index_R.flip(0), x_BTD)",
        "dispatch",
    ),
    (
        "kernels/padding.py",
        "grad.index_select(0, ctx.inverse)",
        "grad.index_select(0, ctx.inverse.flip(0))",
        "dispatch",
    ),
    ("layers/recurrence.py", ".triu(1)", ".triu(2)", "recurrence"),
    ("layers/recurrence.py", "G_early[..., -1:, :]", "G_early[..., :1, :]", "recurrence"),
    (
        "layers/attention.py",
        "x.repeat_interleave(self.heads // self.kv_heads, dim=1)",
        "x.repeat(1, self.heads // self.kv_heads, 1, 1)",
        "mechanisms",
    ),
    ("layers/mechanisms.py", "self.start = 0.8", "self.start = 0.7", "mechanisms"),
    ("layers/mechanisms.py", "math.log(layer.sizes.length)", "math.log2(layer.sizes.length)", "mechanisms"),
    ("layers/mechanisms.py", "exp() - (-largest).exp()", "exp() - 2 * (-largest).exp()", "mechanisms"),
    ("layers/mixers.py", "self.decay_map(x_BTD)) / 16", "self.decay_map(x_BTD)) / 8", "mechanisms"),
    ("layers/mixers.py", "(-5 - torch.arange", "(-4 - torch.arange", "mechanisms"),
    ("models/families.py", "lambda _, x: x + 1", "lambda _, x: x", "pretrained"),
    ("tasks/registry.py", "if damaged is not None:", "if False:", "properties"),
    ("training/results.py", 'seed_everything(config["seed"]', "seed_everything(0", "fit"),
    ("baselines.py", "MultinomialNB(fit_prior=False)", "MultinomialNB(fit_prior=True)", "baselines"),
)


def pytest_fails(checkout: Path, files: list[str], is_slow: bool) -> str:
    """Return the first test of some files that fails in a checkout; empty if none does."""
    marks = "slow and not slurm" if is_slow else "not slow and not slurm"
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *files]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "" if done.returncode in (0, 5) else (lines or [f"exit code {done.returncode}"])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", action="store_true", help="run the slow tests in place of the fast ones")
    parser.add_argument("--only", default="", help="faults whose file has this in its name")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="the folder of the tests")
    arguments = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        for part in ("speechformer", "conf", "notebooks", "outputs/reference", "studies"):
            shutil.copytree(ROOT / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(arguments.tests, checkout / "tests")
        for path in ROOT.glob("*.*"):
            if path.is_file():
                shutil.copy(path, checkout)
        for name, right, wrong, subjects in FAULTS:
            path = checkout / "speechformer" / name
            code = path.read_text(encoding="utf-8")
            if arguments.only not in name:
                continue
            assert right in code, f"{name} has no longer {right!r}"
            path.write_text(code.replace(right, wrong, 1), encoding="utf-8")
            files = [f"tests/test_{subject}.py" for subject in subjects.split()]
            begun = time.perf_counter()
            caught = pytest_fails(checkout, [file for file in files if (checkout / file).exists()], arguments.slow)
            missed += not caught
            print(f"{name}: {right!r}: {caught or 'MISSED'} ({time.perf_counter() - begun:.0f} s)", flush=True)
            path.write_text(code, encoding="utf-8")
    print(f"{missed} faults were missed.")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
