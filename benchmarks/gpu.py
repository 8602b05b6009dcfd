"""Time what needs a GPU. Each part can be named alone:

    ensemble    runs of 60 steps as one ensemble, against the first of them one after another
    large       a training step of a language model of GPT-2's size in bfloat16, compiled, and its share of the rate
                of matrix products of 8,192 x 8,192: with few sequences, and with as many as the memory holds
    optimizer   its update alone: AdamW fused, which runs use, for each tensor, and compiled
    graphs      runs with `compile=reduce-overhead`, evaluations, and tests of two lengths: one to its end, and one
                that is stopped by the signal of a cluster and resumes
    foreign     generation by a random Qwen3 of 135M parameters, as Hugging Face saves it, and the difference of its
                logits: `load_pretrained` beside `transformers`, if that is installed
    mechanisms  a training step of a decoder of one layer in bfloat16, by mechanism and length, and its peak of
                memory. Beside it, FlexAttention with capped scores and, if it is installed, flash-linear-attention
    fsdp        a run with split parameters, as of `machine=fsdp`, on one GPU: killed and resumed, against one without
    real        10 million tokens of stories at 30M parameters: a window against full attention, and the window again,
                killed and resumed. The part `prepare` makes the stories before
    patterns    forward and backward of one causal layer's attention, 8 heads of width 64 in bfloat16, by length and
                batch: FlexAttention, a dense mask, and our sparse blocks. Memory is
                the peak of the first pass, which builds the mask. "Chosen" is what a model takes without dropout.
                benchmarks/limits.py fits the rules of the dispatcher to it
    compiled    a training step of the reports' language model, with compiled blocks and with CUDA graphs
    precision   a training step of a language model 512 wide, in bfloat16 and in single precision

benchmarks/gpu.sh runs the parts with time limits, after the tests on a GPU. `--dry` runs tiny versions anywhere.

    python benchmarks/gpu.py [PART ...] --output FOLDER
"""

import contextlib
import functools
import importlib.util
import itertools
import json
import logging
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention import PATTERNS
from common import TASKS, Row, main, time_in_turns
from steps import REPORT

from speechformer.errors import one_sentence

NAMES = ("window 256", "bigbird and window 64", "alibi, full")
MIDDLE = {"width": 512, "heads": 8, "layers": 6, "ff": 2048, "block_size": 1024, "vocab_size": 8192}
GELU = ["architecture.activation=gelu"]
MECHANISMS = {
    "softmax": "",
    "grouped queries": "attention.kv_heads=2",
    "sink": "attention=sink",
    "softcap": "attention.softcap=30",
    "gated delta": "attention=gated_delta",
    "window 256": "pattern=window pattern.window=256",
}
Sides = dict[str, tuple[list[str], signal.Signals | None]]  # overrides of runs, and the signal that each gets
FREE = 0.9  # share of the memory that a batch may fill
MOST_BATCH = 64


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        ensemble, members, alone, steps: overrides, runs of an ensemble, runs one after another, steps of each.
        large, batch, product: the decoder of `large`, its first batch, the size of the matrix product.
        heads, width, lengths, batches, most_tokens: of `patterns`, and of `mechanisms` with one sequence.
        graphs, fsdp, real, stories: overrides of runs.
        foreign, prompt, generated: sizes of a Qwen3, tokens of its prompt, and how many it generates.
    """

    ensemble: str = ""
    members: Sequence[int] = (32, 128)
    alone: int = 4
    steps: int = 60
    large: Sequence[int] = (768, 12, 12, 3072, 1024, 50_304)
    batch: int = 16
    product: int = 8192
    heads: int = 8
    width: int = 64
    lengths: Sequence[int] = (4096, 16_384)
    batches: Sequence[int] = (1, 2, 4, 8, 16)
    most_tokens: int = 65_536
    graphs: str = "machine=gpu compile=reduce-overhead eval_interval=50 trainer.max_steps=200 checkpoint_every=50"
    fsdp: str = "machine=gpu trainer.max_steps=100 eval_interval=50 checkpoint_every=25"
    foreign: Sequence[int] = (768, 12, 16, 2304, 1024, 32_768)
    prompt: int = 256
    generated: int = 32
    stories: str = "corpus=stories corpus.documents=5000 corpus.words=2000"
    real: str = (
        "machine=gpu compile=default trainer.precision=bf16-mixed width=512 heads=8 layers=10 ff=2048 "
        "block_size=1024 batch_size=64 trainer.max_steps=153 eval_interval=51 checkpoint_every=50"
    )


SMALL = "machine=cpu width=16 heads=2 layers=1 ff=16 trainer.max_steps=20 eval_interval=10 checkpoint_every=5"
DRY = Sizes(
    ensemble="corpus=sample task.evaluation_tokens=500 width=16 heads=2 layers=1 ff=16",
    members=(2,),
    alone=1,
    steps=3,
    large=(32, 2, 1, 32, 32, 64),
    batch=2,
    product=64,
    heads=2,
    width=16,
    lengths=(512,),
    batches=(1,),
    graphs=f"{SMALL} block_size=16",
    fsdp=f"{SMALL} block_size=16",
    foreign=(16, 2, 1, 16, 32, 64),
    prompt=4,
    generated=2,
    stories="corpus=stories corpus.documents=50",
    real=f"{SMALL} block_size=64",
)


@contextlib.contextmanager
def left_out(what: str) -> Iterator[None]:
    """Say on a GPU, in one sentence, that something fails, perhaps for lack of memory, and go on."""
    import torch

    try:
        yield
    except Exception as error:
        if not torch.cuda.is_available():
            raise
        print(f"{what} is left out: {one_sentence(error)}", flush=True)


def measure_ensemble(rounds: int, sizes: Sizes) -> Iterator[Row]:
    """Measure ensembles and runs in sequence, once: their training, and the whole runs with their phases."""
    from speechformer.config import compose
    from speechformer.training.run import execute, execute_ensemble
    from speechformer.training.runtime import silence_libraries

    silence_libraries()
    logging.getLogger("speechformer").setLevel(logging.WARNING)
    alone: dict[str, tuple[float, float]] = {}
    for members, (task, name) in itertools.product(sizes.members, TASKS.items()):
        overrides = [
            f"task={task}",
            f"trainer.max_steps={sizes.steps}",
            "trainer.max_epochs=-1",
            *sizes.ensemble.split(),
        ]
        cfgs = [compose([*overrides, f"eval_interval={10**9}", f"seed={seed}"]) for seed in range(members)]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if task not in alone:
                execute(cfgs[0], folder / "warm-up")
                began = time.perf_counter()
                results = [execute(cfg, folder / f"alone{k}") for k, cfg in enumerate(cfgs[: sizes.alone])]
                training = sum(result["seconds_by_phase"]["training"] for result in results)
                alone[task] = training / sizes.steps / sizes.alone, (time.perf_counter() - began) / sizes.alone
            began = time.perf_counter()
            execute_ensemble([(cfg, folder / f"member{k}", []) for k, cfg in enumerate(cfgs)])
            whole = time.perf_counter() - began
            phases = execute(cfgs[0], folder / "member0")["seconds_by_phase"]  # finished: only its result
        step, run = alone[task]
        steps = {"ensemble": [phases["training"] / sizes.steps / members], "sequential": [step]}
        yield Row("time for each run", f"{members} x {name}, a training step", steps)
        runs = {"ensemble": [whole / members], "sequential": [run]}
        yield Row("time for each run", f"{members} x {name}, the whole run", runs, {"phases": phases})


def measure_large(rounds: int, sizes: Sizes) -> Iterator[Row]:
    """Measure a step of a large model, and count its FLOPs by Chowdhery et al. 2022, "PaLM", appendix B."""
    import torch
    from workloads import DEVICE, build_decoder_step

    from speechformer.training.runtime import free_memory, peak_bytes, reset_peak

    shape = dict(zip(("width", "heads", "layers", "ff", "block_size", "vocab_size"), sizes.large))
    B, T, size = sizes.batch, shape["block_size"], sizes.product
    on_gpu = DEVICE.type == "cuda"  # a compiler for a CPU takes longer than all the rest of a dry run
    a, b = torch.randn(2, size, size, device=DEVICE, dtype=torch.bfloat16)
    product = time_in_turns({"product": functools.partial(torch.matmul, a, b)}, rounds)["product"]
    del a, b

    def measure(B: int, compiled_loss: bool) -> tuple[Row, int]:
        reset_peak(DEVICE)
        step, count = build_decoder_step(shape, GELU, B, True, compiled=on_gpu, compiled_loss=compiled_loss)
        seconds = time_in_turns({"speechformer": step}, rounds)
        # causality needs half of the products of attention
        flops = (6 * count + 6 * shape["layers"] * shape["width"] * T) * B * T
        facts: dict[str, Any] = {"tokens": B * T, "flops": flops, "matmul_rate": 2 * size**3 / min(product)}
        facts["bytes"] = {"speechformer": peak_bytes(DEVICE)}
        loss = "compiled" if compiled_loss else "not compiled"
        name = f"{count / 1e6:.0f}M parameters, {B} x {T:,} tokens, bfloat16, loss {loss}"
        return Row("a training step of a large model", name, seconds, facts), count

    for k, compiled_loss in enumerate((True, True, False) if on_gpu else (True,)):
        torch._dynamo.reset()  # another number of sequences is compiled for itself
        free_memory()  # of the model before
        with left_out(f"{B} x {T:,} tokens"):
            row, count = measure(B, compiled_loss)
            yield row
            if k == 0 and on_gpu:
                B = most_sequences(count, row.facts["bytes"]["speechformer"], B, torch.cuda.mem_get_info()[1])


def most_sequences(parameters: int, peak: int, B: int, memory: int) -> int:
    """Return the largest power of two of sequences that fits into a share of the memory, from the peak of B of them.

    Weights, gradients and both moments of AdamW take 16 bytes for each parameter, whatever the batch.
    """
    each = (peak - 16 * parameters) / B
    return min(MOST_BATCH, 2 ** int(math.log2(max(1, (FREE * memory - 16 * parameters) / each))))


def measure_optimizer(rounds: int, sizes: Sizes) -> Iterator[Row]:
    """Measure the update of matrices as large as those of the large model."""
    import torch
    from workloads import DEVICE

    D, _, layers, F, _, V = sizes.large
    shapes = [(V, D), *[(3 * D, D), (D, D), (F, D), (D, F)] * layers]
    parameters = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    sides: dict[str, Callable[[], object]] = {
        "fused": torch.optim.AdamW(parameters, lr=1e-4, fused=True).step,
        "foreach": torch.optim.AdamW(parameters, lr=1e-4, foreach=True).step,
    }
    with left_out("a compiled update"):
        plain = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
        compiled = torch.compile(plain.step, backend="inductor" if DEVICE.type == "cuda" else "aot_eager")
        compiled()
        sides["compiled"] = compiled
    name = f"AdamW, {sum(map(torch.numel, parameters)) / 1e6:.0f}M parameters"
    yield Row("an update", name, time_in_turns(sides, rounds))


def train(overrides: Sequence[str], folder: Path, stop: signal.Signals | None = None) -> tuple[float, dict[str, Any]]:
    """Run the training command, and return its seconds and result.

    Args:
        stop: the signal that the process gets after its first checkpoint; the command is then repeated, and resumes.
    """
    command = [sys.executable, "-m", "speechformer.train", *overrides, "logger=csv", f"hydra.run.dir={folder}"]
    began = time.perf_counter()
    if stop is not None:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not (folder / "last.ckpt").exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(stop)
        process.wait()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return time.perf_counter() - began, result


def largest_difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Return the largest relative difference of two results, in any metric and any point of their curves."""
    points = [({**result["metrics"]}, *result["curve"]) for result in (first, second)]
    if len(points[0]) != len(points[1]):
        return math.inf
    pairs = [(a[name], b.get(name)) for a, b in zip(*points) for name in a if a[name] is not None]
    return max(math.inf if b is None else abs(a - b) / max(abs(a), 1e-9) for a, b in pairs)


def measure_graphs(rounds: int, sizes: Sizes) -> Iterator[Row]:
    """Compare a run with CUDA graphs and one that is stopped and resumes."""
    overrides = f"task=lm corpus=sample model=rope task.lengths=[64] {sizes.graphs}".split()
    sides: Sides = {"CUDA graphs": (overrides, None), "stopped and resumed": (overrides, signal.SIGTERM)}
    yield from compare_runs("a language model", sides)


def measure_prepare(rounds: int, sizes: Sizes) -> Iterator[Row]:
    """Make the stories of `real`, on the CPU."""
    with tempfile.TemporaryDirectory() as temporary:
        train(f"task=lm model=rope {sizes.stories} {SMALL} trainer.max_epochs=-1".split(), Path(temporary, "run"))
    yield from ()


def measure_real(rounds: int, sizes: Sizes) -> Iterator[Row]:
    """Compare a window with full attention over a real run, and the window with itself, killed and resumed."""
    full = f"task=lm model=rope dropout=0 trainer.max_epochs=-1 {sizes.stories} {sizes.real}".split()
    window = [*full, *PATTERNS["window 256"].split()]
    sides: Sides = {"window 256": (window, None), "full": (full, None)}
    if sizes is not DRY:
        sides["window 256, killed and resumed"] = window, signal.SIGKILL
    yield from compare_runs("stories", sides)


def compare_runs(name: str, sides: Sides) -> Iterator[Row]:
    """Measure runs one after another, and how far the results of all are from the first one's."""
    first: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for k, (side, (overrides, stop)) in enumerate(sides.items()):
            seconds, result = train(overrides, Path(temporary, f"run{k}"), stop)
            facts = {key: result[key] for key in ("curve", "attempts")} | {"phases": result["seconds_by_phase"]}
            if first:
                facts["difference"] = largest_difference(first, result)
            first = first or result
            yield Row(f"whole runs, {name}", side, {"the run": [seconds]}, facts)


def measure_foreign(rounds: int, sizes: Sizes) -> Iterator[Row]:
    """Measure greedy generation with a cache, and compare logits with those of `transformers`."""
    import torch
    import workloads

    from speechformer.training.runtime import free_memory, peak_bytes, reset_peak

    loaders = {"speechformer": workloads.load_foreign}
    if importlib.util.find_spec("transformers"):
        loaders["transformers"] = workloads.load_with_transformers
    else:
        print("transformers is not installed, so nothing is compared with it.")
    with tempfile.TemporaryDirectory() as folder:
        count = workloads.save_foreign(Path(folder), *sizes.foreign)
        for dtype in (torch.bfloat16, torch.float32):
            sides, held, logits = {}, {}, {}
            free_memory()  # of the models before
            for side, load in loaders.items():
                with left_out(f"{side}, {dtype}"):
                    before = torch.cuda.memory_allocated()
                    reset_peak(workloads.DEVICE)
                    generate, logits[side] = load(Path(folder), dtype, sizes.prompt, sizes.generated)
                    generate()
                    sides[side], held[side] = generate, (peak_bytes(workloads.DEVICE) or 0) - before
            facts: dict[str, Any] = {"bytes": held, "tokens": 1}
            if len(sides) == 2:
                ours, theirs = logits.values()
                facts["difference"] = float((ours - theirs).norm() / theirs.norm())
            seconds = time_in_turns(sides, rounds, units=sizes.generated)
            name = f"Qwen3 of {count / 1e6:.0f}M parameters, after {sizes.prompt} tokens, {dtype}"
            yield Row("a generated token", name, seconds, facts)


def measure_fsdp(rounds: int, sizes: Sizes) -> Iterator[Row]:
    """Compare a run with whole parameters, and one with split ones that is killed and resumes, on one device."""
    overrides = f"task=lm corpus=sample model=rope dropout=0 {sizes.fsdp}".split()
    split = [*overrides, "+trainer.strategy=fsdp"]
    sides: Sides = {"whole parameters": (overrides, None), "fsdp, killed and resumed": (split, signal.SIGKILL)}
    yield from compare_runs("split parameters", sides)


def measure_mechanisms(rounds: int, sizes: Sizes) -> Iterator[Row]:
    """Measure a training step of one layer with each mechanism; what does not fit into memory is left out."""
    from workloads import DEVICE, build_decoder_step, build_kernel_passes

    from speechformer.training.runtime import peak_bytes, reset_peak

    shape = {"width": sizes.heads * sizes.width, "heads": sizes.heads, "layers": 1, "ff": 64, "vocab_size": 64}
    for T in sizes.lengths:
        kernels = build_kernel_passes(T, sizes.heads, sizes.width)
        for name, overrides in MECHANISMS.items():
            step, _ = build_decoder_step({**shape, "block_size": T}, overrides.split(), bfloat16=True)
            sides, held = dict[str, Callable[[], object]](), {}
            for side, run in {"speechformer": step, **kernels.get(name, {})}.items():
                with left_out(f"{name}, {T:,} tokens, {side}"):
                    run()
                    reset_peak(DEVICE)
                    run()
                    sides[side], held[side] = run, peak_bytes(DEVICE)
            if sides:
                seconds = time_in_turns(sides, rounds)
                yield Row("a training step of one layer", f"{name}, {T:,} tokens", seconds, {"bytes": held}, False)


def measure_patterns(rounds: int, sizes: Sizes) -> Iterator[Row]:
    """Measure the kernels by length and batch; what does not fit into memory is left out."""
    import torch
    from workloads import AttentionPass

    for T, B, name in itertools.product(sizes.lengths[::-1], sizes.batches, NAMES):
        if sizes.most_tokens < B * T:
            continue
        layer = AttentionPass(PATTERNS[name], T, sizes.heads, sizes.width, B, torch.bfloat16)
        names = {"FlexAttention": "FlexAttention", "dense mask": "dense mask", "sparse blocks": "blocks"}
        sides, held = {}, {}
        for kernel in [kernel for kernel in names if kernel in layer.kernels]:
            with left_out(f"{name}, {B} x {T:,} tokens, {kernel}"):
                held[names[kernel]] = layer.held_bytes(layer.kernels[kernel])
                sides[names[kernel]] = functools.partial(layer.run, layer.kernels[kernel])
        facts = {"bytes": held, "chosen": layer.chosen, "limits": {"B": B, "T": T, "partial": layer.partial}}
        if sides:
            seconds = time_in_turns(sides, rounds)
            yield Row("forward and backward", f"{name}, {B} x {T:,} tokens", seconds, facts, compared=False)


def measure_compiled(rounds: int, sizes: Sizes) -> Iterator[Row]:
    """Measure modes of `compile`."""
    import workloads

    from speechformer.models.stack import compile_blocks

    sides = {}
    for mode in ("reduce-overhead", "default", "not compiled"):
        task, data = workloads.build_task("lm", REPORT)
        batches = workloads.draw_batches("lm", REPORT, data, training=True)
        if mode != "not compiled":
            compile_blocks(task.model, mode, workloads.DEVICE)
        (loss,) = workloads.find_losses(task.model, training=True).values()
        optimizer = workloads.build_optimizer(task.model)
        sides[mode] = functools.partial(workloads.run_batches, task.model, batches, loss, optimizer)
    name, seconds = "language model, reports' size", time_in_turns(sides, rounds, units=len(batches))
    yield Row("a training step with compiled blocks", name, seconds)


def measure_precision(rounds: int, sizes: Sizes) -> Iterator[Row]:
    """Measure a step in bfloat16 and in single precision."""
    from workloads import build_decoder_step

    for B in (1, 8):
        half, single = (build_decoder_step(MIDDLE, GELU, B, bfloat16)[0] for bfloat16 in (True, False))
        seconds = time_in_turns({"bf16-mixed": half, "32-true": single}, rounds)
        yield Row("a training step by precision", f"512 wide, 6 layers, {B} x 1,024 tokens", seconds)


def format_memory(row: Row) -> str:
    """Format the peaks of all sides."""
    held = row.facts.get("bytes", {})
    return " / ".join(f"{held[side] / 2**20:,.0f}" for side in row.seconds if held.get(side))


def format_rate(row: Row) -> str:
    """Format the rate of our side; of the large model's step also its share of the rate of matrix products."""
    if "tokens" not in row.facts:
        return ""
    seconds = statistics.median(row.seconds["speechformer"])
    text = f"{row.facts['tokens'] / seconds:,.0f} tokens/s"
    if "flops" in row.facts:
        rate = row.facts["flops"] / seconds
        text += f", {rate / 1e12:.0f} TFLOP/s ({100 * rate / row.facts['matmul_rate']:.0f} %)"
    return text


def format_difference(row: Row) -> str:
    """Format how far a run is from the first one, or logits from those of `transformers`."""
    if "difference" not in row.facts:
        return ""
    attempts = row.facts.get("attempts", 1)
    return f"{row.facts['difference']:.1e}" + f", {attempts} attempts" * (attempts > 1)


def format_phases(row: Row) -> str:
    """Format the seconds of each phase of a run."""
    return ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in row.facts.get("phases", {}).items())


if __name__ == "__main__":
    measures = (
        *(measure_ensemble, measure_large, measure_optimizer, measure_graphs, measure_foreign, measure_mechanisms),
        *(measure_fsdp, measure_prepare, measure_real, measure_patterns, measure_compiled, measure_precision),
    )
    columns = {"memory in MiB": format_memory, "rate (of matrix products)": format_rate}
    columns["chosen"] = lambda row: row.facts.get("chosen", "")
    columns |= {"seconds by phase": format_phases, "difference": format_difference}
    main(__doc__, measures, columns, rounds=3, sizes=(Sizes(), DRY))
