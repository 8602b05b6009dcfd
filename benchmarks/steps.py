"""Time a training step and an evaluation against torch.nn.TransformerEncoder and x-transformers.

All sides have the same batches, dropout and fused AdamW, and compute the same function (peers.py). Each peer runs
with its fastest setting, which one round finds first. The unit is a step, or the evaluation of a batch:

    reports' size   width 64, 2 heads, 4 layers, block 32, batch 16, 5,760 words; sentences of the corpus, padded to
                    the longest of their batch. An evaluation has the batches of the test, of up to 4,096 tokens
    512 wide        8 heads, 8 layers, one text of 1,024 random words

It takes about 30 minutes on two cores, and needs the real speeches and x-transformers: pip install -e ".[bench]".

    python benchmarks/steps.py --output FOLDER
"""

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping

from common import TASKS, Row, main, time_in_turns

REPORT = {"width": 64, "heads": 2, "layers": 4, "ff": 100, "block_size": 32, "batch_size": 16}
LARGE = {"width": 512, "heads": 8, "layers": 8, "ff": 2048, "block_size": 1024, "batch_size": 1}
SIZES = {"reports' size": REPORT, "512 wide, 1,024 tokens": LARGE}
SCREENING_ROUNDS = 1


def measure_steps(rounds: int) -> Iterator[Row]:
    """Measure both tasks at both sizes."""
    import workloads
    from peers import PEERS

    for (size, sizes), (task, task_name) in itertools.product(SIZES.items(), TASKS.items()):
        ours, data = workloads.build_task(task, sizes)
        shape = {**sizes, "vocab_size": workloads.WORDS}
        models = {name: peer(task, shape, workloads.DROPOUT).to(workloads.DEVICE) for name, peer in PEERS.items()}
        models = {"speechformer": ours.model, **models}
        optimizers = {name: workloads.build_optimizer(model) for name, model in models.items()}
        for training in (True, False):
            batches = workloads.draw_batches(task, sizes, data if sizes is REPORT else None, training)
            sides: dict[tuple[str, str], Callable[[], None]] = {}
            for name, model in models.items():
                for setting, loss in workloads.find_losses(model, training).items():
                    optimizer = optimizers[name] if training else None
                    sides[name, setting] = functools.partial(workloads.run_batches, model, batches, loss, optimizer)
            settings = find_fastest(sides)
            fastest = {name: sides[name, setting] for name, setting in settings.items()}
            row_name = f"{task_name}, {size}, {'training step' if training else 'evaluation'}"
            seconds = time_in_turns(fastest, rounds, units=len(batches))
            yield Row("a step, or the evaluation of a batch", row_name, seconds, {"settings": settings})


def find_fastest(sides: Mapping[tuple[str, str], Callable[[], object]]) -> dict[str, str]:
    """Return the fastest setting of each model, from functions by (model, setting)."""
    seconds = time_in_turns(sides, SCREENING_ROUNDS)
    slowest_first = sorted(sides, key=lambda key: statistics.median(seconds[key]), reverse=True)
    fastest = dict(slowest_first)
    return {model: fastest[model] for model, _ in sides}


if __name__ == "__main__":
    main(__doc__, [measure_steps], {}, rounds=9)
