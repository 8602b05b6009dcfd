"""`hydra/sweeper=optuna`: its trials, their scores, and what survives a kill."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from test_sweeps import LM, Sweep, results, sweep  # noqa: F401

from speechformer.errors import UserError
from speechformer.runs.search import STUDY, import_optuna, journal
from speechformer.sweeps import folder as sweeps
from speechformer.sweeps import search

optuna = pytest.importorskip("optuna")

SPACE = "recipe.lr=tag(log, interval(1e-4,1e-1))"
SEARCH = [*LM, "protocol=clean", "hydra/sweeper=optuna", "hydra.sweep.dir=sweep"]


def study(folder: Path) -> Any:
    return optuna.load_study(study_name=STUDY, storage=journal(folder))


def space_of(*choices: str) -> optuna.distributions.CategoricalDistribution:
    return optuna.distributions.CategoricalDistribution([*choices])


def parsed(*words: str) -> tuple:
    overrides = OverridesParser.create().parse_overrides([*words])
    return search.split_overrides({override.get_key_element(): override for override in overrides})


def test_search_spaces_have_hydras_syntax() -> None:
    """Oracle: optuna's distributions."""
    of = optuna.distributions
    fixed, space, seeds = parsed(
        *(
            "width=8",
            "~study",
            "dropout=interval(0,0.5)",
            SPACE,
            "layers=range(1,6,2)",
            "ff=int(tag(log, interval(8,64)))",
        ),
        *("model=alibi,rope", "recipe.warmup_steps=choice(0,100)", "seed=0,1"),
    )
    assert fixed == ["width=8", "~study"] and seeds == [["seed=0"], ["seed=1"]]
    assert space == {
        "dropout": of.FloatDistribution(0, 0.5),
        "recipe.lr": of.FloatDistribution(1e-4, 1e-1, log=True),
        "layers": space_of("1", "3", "5"),
        "ff": of.IntDistribution(8, 64, log=True),
        "model": space_of("alibi", "rope"),
        "recipe.warmup_steps": space_of("0", "100"),
    }
    assert parsed("dropout=0,0.1")[2] == [[]]
    of_experiment = ["model=rope,nope", "dropout=0,0.1"]  # the command line comes after it
    assert parsed(*of_experiment, "model=rope")[:2] == (["model=rope"], {"dropout": space_of("0", "0.1")})
    for words, message in ((["seed=0,1"], "needs something to search"), (["ff=interval(9,1)"], "no search space")):
        with pytest.raises(UserError, match=message):
            parsed(*words)


@pytest.mark.slow
def test_a_search_tells_the_held_out_scores_and_goes_on(sweep: Sweep, tmp_path: Path) -> None:  # noqa: F811
    """Oracle: the results of the runs. Their number is of all commands together."""
    code, out, err = sweep(*SEARCH, SPACE, "model=alibi,nope", "hydra.sweeper.trials=3")
    assert code == 0, err
    ended = results(tmp_path / "sweep")
    assert len(ended) == 3 and "Sweep of 3 runs: 3 finished." in out
    trials = study(tmp_path / "sweep").trials
    for trial in trials:
        name = f"recipe.lr={trial.params['recipe.lr']:.3g} model={trial.params['model']}"
        assert trial.value == pytest.approx(ended[name]["best"]["value"])
        assert ended[name]["best"]["metric"] == "validation_perplexity"
    best = min(trials, key=lambda trial: trial.value)
    assert study(tmp_path / "sweep").direction.name == "MINIMIZE"
    assert (
        f"Best trial: recipe.lr={best.params['recipe.lr']:.3g} model={best.params['model']}: {best.value:.4g}." in out
    )
    code, out, _ = sweep(*SEARCH, SPACE, "model=alibi,nope", "hydra.sweeper.trials=4")
    trials = study(tmp_path / "sweep").trials
    assert code == 0 and len(trials) == len({trial.params["recipe.lr"] for trial in trials}) == 4
    code, _, _ = sweep(*SEARCH, SPACE, "hydra.sweeper.trials=4")
    assert "sweep holds another search. Choose a new or an empty folder" in str(code)


def test_the_score_of_several_seeds_is_their_mean(sweep: Sweep, tmp_path: Path) -> None:  # noqa: F811
    words = [SPACE, "seed=0,1", "hydra.sweeper.trials=2", "hydra.sweeper.at_once=2", "hydra/launcher=ensemble"]
    code, out, err = sweep(*SEARCH, *words)
    assert code == 0, err
    assert "Ensemble of 4 runs" in out and "the mean of 2 seeds" in out
    ended = results(tmp_path / "sweep")
    for trial in study(tmp_path / "sweep").trials:
        own = [
            value for name, value in ended.items() if name.startswith(f"recipe.lr={trial.params['recipe.lr']:.3g} ")
        ]
        assert len(own) == 2
        assert trial.value == pytest.approx(statistics.mean(result["best"]["value"] for result in own))


def test_a_trial_is_pruned_on_its_curve(sweep: Sweep, tmp_path: Path) -> None:  # noqa: F811
    """By a threshold that no perplexity is below, at the third evaluation of six."""
    words = [
        "hydra.sweeper.pruner._target_=optuna.pruners.ThresholdPruner",
        "+hydra.sweeper.pruner.upper=1",
        "eval_interval=1",
    ]
    code, out, err = sweep(*SEARCH, SPACE, "hydra.sweeper.trials=2", *words)
    assert code == 0, err
    assert "Sweep of 2 runs: 2 pruned." in out
    for trial in study(tmp_path / "sweep").trials:
        assert trial.state.name == "PRUNED" and [*trial.intermediate_values] == [1, 2, 3]
    for job in sweeps.jobs_of(tmp_path / "sweep"):
        assert job.state.status == "pruned"
        assert job.error.startswith("pruned at step 3, where its validation_perplexity was ")


@pytest.mark.slow
def test_trials_of_a_killed_command_are_run_again(sweep: Sweep, tmp_path: Path) -> None:  # noqa: F811
    """It goes on with its parameters. Oracle: the trial as it was asked for."""
    words = [*SEARCH, SPACE, "hydra.sweeper.trials=1"]
    assert sweep(*words)[0] == 0
    own = study(tmp_path / "sweep")
    (first,) = own.trials
    trial = own.ask({"recipe.lr": first.distributions["recipe.lr"]})
    fixed = own.user_attrs["search"]["fixed"]
    trial.set_user_attr("jobs", [[*fixed, *search.chosen(trial.params)]])
    own.ask({"recipe.lr": first.distributions["recipe.lr"]})  # it was killed before it had jobs
    code, _, err = sweep(*words[:-1], "hydra.sweeper.trials=4")
    assert code == 0, err
    trials = study(tmp_path / "sweep").trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]
    assert trials[1].params == trial.params
    assert len(results(tmp_path / "sweep")) == 3


def test_a_job_that_fails_is_a_failed_trial(sweep: Sweep, tmp_path: Path) -> None:  # noqa: F811
    code, _, err = sweep(*SEARCH, "heads=3,5", "hydra.sweeper.trials=2")
    assert code == 1 and "width must be a multiple of heads" in err
    assert [trial.state.name for trial in study(tmp_path / "sweep").trials] == ["FAIL"] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([SPACE, "protocol=paper"], "protocol=paper holds none out: it would choose on test. Add protocol=clean."),
        ([SPACE, "hydra.sweeper.trials=0"], "hydra.sweeper.trials must be a whole number of at least 1, not 0."),
        ([SPACE, "hydra.sweeper.sampler._target_=optuna.samplers.TPE"], "optuna.samplers.TPE"),
        ([], "needs something to search"),
    ],
)
def test_invalid_searches_are_one_sentence(words: list[str], message: str, sweep: Sweep) -> None:  # noqa: F811
    code, _, _ = sweep(*SEARCH, *words)
    assert str(code).startswith("Error: ") and message in str(code) and "\n" not in str(code)


def test_without_optuna_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(UserError, match="pip install 'speechformer.search.'"):
        import_optuna()


def test_a_job_outside_a_search_reports_nothing(tmp_path: Path) -> None:
    assert search.reporter(tmp_path, [], OmegaConf.create()) is None
    pruner = OmegaConf.create({"pruner": {"_target_": "optuna.pruners.NopPruner"}})
    trial = optuna.create_study(study_name=STUDY, storage=journal(tmp_path)).ask()
    trial.set_user_attr("jobs", [["seed=0"], ["seed=1"]])
    assert search.reporter(tmp_path, ["seed=0"], pruner) is None
    trial.set_user_attr("jobs", [["seed=0"]])
    assert search.reporter(tmp_path, ["seed=0"], pruner) is not None
