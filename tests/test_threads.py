"""When a run rehearses and which number of threads it takes, with a clock of our own; `test_fit` sees to its bits."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from speechformer.training import devices, threads
from speechformer.training.threads import REST, SLOWER, ThreadTuner, is_enough


class Machine:
    """A run on four cores whose steps take `seconds[threads]`; its clock moves only when it computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.step, self.rehearsed = 100.0, 0, 0
        self.seconds = {4: 0.1, 2: 0.2, 1: 0.4}
        self.task = SimpleNamespace(tokens=torch.tensor(0), buffers=list, generator=torch.default_generator)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(devices, "all_threads", lambda: 4)
        monkeypatch.setattr(ThreadTuner, "rehearse", self.rehearse)
        self.folder = SimpleNamespace(owner={})

    def compute(self) -> float:
        seconds = self.seconds[torch.get_num_threads()]
        self.now += seconds
        self.task.tokens += 10
        return seconds

    def rehearse(self, *_: Any) -> float:
        self.rehearsed += 1
        before = self.task.tokens.clone()
        seconds = self.compute()
        self.task.tokens = before + 10
        return seconds

    def train(self, tuner: ThreadTuner, seconds: float) -> None:
        until = self.now + seconds
        trainer: Any = SimpleNamespace()
        while self.now < until:
            trainer.global_step = self.step
            tuner.on_train_batch_start(trainer, self.task, None, 0)
            self.compute()
            self.step += 1
            tuner.on_train_batch_end(trainer, self.task, None, None, 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield Machine(monkeypatch)
    torch.set_num_threads(before)


BUSY = {4: 3.0, 2: 0.8, 1: 0.3}


@pytest.mark.parametrize(
    "seconds, number",
    [
        ({4: 0.1, 2: 0.2, 1: 0.4}, 4),  # large and idle
        ({4: 0.1, 2: 0.09, 1: 0.095}, 4),  # no clear difference
        ({4: 0.1, 2: 0.06, 1: 0.08}, 2),  # small
        (BUSY, 1),
    ],
)
def test_the_fastest_number_is_taken(seconds: dict[int, float], number: int, machine: Machine) -> None:
    machine.seconds = seconds
    tuner = ThreadTuner([machine.folder], begins=True)
    machine.train(tuner, 1)
    assert torch.get_num_threads() == tuner.number == number
    assert machine.folder.owner == ({} if number == 4 else {"threads": number})
    assert tuner.changes == []  # the first step had it


def test_a_run_on_an_idle_machine_rehearses_once(machine: Machine) -> None:
    machine.train(tuner := ThreadTuner([machine.folder], begins=True), 1)
    first = machine.rehearsed
    machine.train(tuner, 300)
    assert machine.rehearsed == first and not tuner.changes


@pytest.mark.parametrize("idle_for", [60, 2])  # the latter within the rest after the first rehearsal
def test_load_that_comes_and_goes_is_noticed(idle_for: float, machine: Machine) -> None:
    idle = machine.seconds
    machine.train(tuner := ThreadTuner([machine.folder], begins=True), idle_for)
    begun, machine.seconds = machine.step, BUSY
    machine.train(tuner, 30)
    assert tuner.number == 1 and 0 < tuner.changes[0][0] - begun <= 3  # steps of 3 seconds
    ended, machine.seconds = machine.now, idle
    while tuner.number != 4 and machine.now < ended + 1000:
        machine.train(tuner, 1)
    assert tuner.number == 4
    cost = 3.0 * 3 + 0.8 * 3  # of the last rehearsal beside others, roughly
    assert machine.now - ended < REST * cost
    assert [number for _, number in tuner.changes] == [1, 4]


def test_rehearsals_take_a_fiftieth_of_the_time(machine: Machine) -> None:
    machine.seconds = BUSY
    machine.train(tuner := ThreadTuner([machine.folder], begins=True), 1)
    begun, counted, machine.rehearsed = machine.now, machine.step, 0
    machine.train(tuner, 5000)
    in_steps = (machine.step - counted) * BUSY[1]
    assert machine.rehearsed and (machine.now - begun - in_steps) / (machine.now - begun) < 1.2 / REST


def test_a_resumed_run_begins_with_the_number_that_it_had(machine: Machine) -> None:
    torch.set_num_threads(2)
    machine.train(ThreadTuner([machine.folder], begins=False), 0.4)
    assert torch.get_num_threads() == 2 and not machine.rehearsed


def test_a_resumed_run_with_all_threads_notices_that_the_machine_is_busy(machine: Machine) -> None:
    machine.seconds = BUSY
    machine.train(tuner := ThreadTuner([machine.folder], begins=False), 10)
    assert torch.get_num_threads() == 1 and tuner.changes


@pytest.mark.parametrize(
    "times, enough",
    [
        ([], False),
        ([0.009] * 3, False),
        ([0.011] * 3, True),
        ([0.5, 0.01, 0.01], True),
        ([0.02, 0.01, 0.01 * SLOWER + 0.01], False),  # they differ
        ([0.1, 0.1, 0.2], True),  # but this took long
        ([0.35], True),
        ([0.1, 0.1], False),
    ],
)
def test_a_number_is_rehearsed_until_its_times_agree(times: list[float], enough: bool) -> None:
    assert is_enough(times) == enough


@pytest.mark.parametrize(
    "config, share, tunes",
    [
        ({}, None, True),
        ({"threads": 2}, None, False),
        ({}, 2, False),
        ({"compile": "default"}, None, False),
        ({"trainer": {"devices": 2}}, None, False),
    ],
)
def test_only_what_nobody_has_decided_is_tuned(
    config: dict[str, Any], share: int | None, tunes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "all_threads", lambda: 4)
    monkeypatch.setattr(devices, "share_of_threads", lambda: share)
    folder: Any = SimpleNamespace(previous={}, owner={})
    whole = {"threads": None, "compile": None, "trainer": {"devices": 1}} | config
    assert bool(threads.tuners(whole, [folder])) == tunes
