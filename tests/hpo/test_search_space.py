"""Search spaces, samplers, the saved configuration and rendered results."""

import json

import pytest

from whet.api.search import prepare_search, run_search, winning_args
from whet.base.errors import UsageError
from whet.config.sources import as_text, parse_args, parse_value
from whet.hpo import samplers
from whet.hpo.search_config import check_same_search
from whet.hpo.space import Choices, NumberRange, read_space
from whet.hpo.worker import devices_for
from whet.machine.facts import Accelerator, Machine
from whet.recipes.text.config import TextConfig, describe
from whet.report.search_report import render_search, winner_text
from whet.run.search_result import SearchCandidate, SearchResult, SearchTrial, read_search, write_search


def dimensions(*words: str, **options):
    return read_space(TextConfig, words, **options)[0].dimensions


def test_ranges_lists_and_settings_are_parsed():
    space, fixed = read_space(
        TextConfig,
        ["lr=1e-5..1e-3:log", "arch.layers=[1,2,4]", "global_batch_size=32..512:step=32", "epochs=2", "dropout=0..0.5"],
    )
    actual = space.dimensions
    assert actual["lr"] == NumberRange(low=1e-5, high=1e-3, is_log=True)
    assert actual["arch.layers"] == Choices(values=(1, 2, 4))
    assert actual["global_batch_size"] == NumberRange(low=32, high=512, step=32, is_integer=True)
    assert len(actual["global_batch_size"].values) == 16
    assert actual["dropout"] == NumberRange(low=0, high=0.5)
    assert fixed == ("epochs=2",)
    assert read_space(TextConfig, [*space.arguments, *fixed])[0] == space, "arguments are parsed back"


def test_range_is_integer_if_its_key_is():
    assert dimensions("weight_decay=0..1")["weight_decay"].is_integer is False
    assert dimensions("epochs=1..4")["epochs"].is_integer is True
    assert dimensions("global_batch_size=1e1..1e3:log")["global_batch_size"].is_integer is True


def test_range_ends_at_its_last_step_and_is_shown_exactly():
    assert str(dimensions("epochs=4..8:step=3")["epochs"]) == "4..7:step=3"
    assert str(dimensions("dropout=0..0.3:step=0.1")["dropout"]) == "0..0.3:step=0.1"
    assert str(dimensions("lr=1.2345678e-5..1e-3")["lr"]) == "1.2345678e-05..0.001"


def test_list_for_a_list_key_is_a_value():
    space, fixed = read_space(TextConfig, ["data_paths=[a,b]", "lr=1e-4..1e-3"])
    assert list(space.dimensions) == ["lr"]
    assert fixed == ("data_paths=[a,b]",)


def test_file_describes_the_same_space():
    actual = dimensions(file={"lr": "1e-5..1e-3:log", "schedule": ["linear", "cosine"]})
    assert actual == dimensions("lr=1e-5..1e-3:log", "schedule=[linear,cosine]")
    assert actual == dimensions(file={"lr": "1e-5..1e-3:log", "schedule": "[linear,cosine]"})
    _, fixed = read_space(TextConfig, ["lr=1e-4..1e-3"], file={"label_column": "7"})
    assert parse_args(fixed).values == {"label_column": "7"}, "a text of a file stays one"


def test_dependent_settings_are_validated_together():
    assert dimensions("arch.hidden_size=[96,100]", "arch.heads=[3,5]")
    with pytest.raises(UsageError, match=r"heads must divide"):
        dimensions("arch.hidden_size=[96,97]", "arch.heads=[3,4]")


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["lr=1e-3..1e-5"], "from the lower number"),
        (["lr=0..1:log"], "starts above 0"),
        (["lr=1e-4..1e-3:log:step=1e-4"], "not both"),
        (["lr=1e-4..1e-3:logarithmic"], "may have :log or :step"),
        (["lr=[1e-3]"], "at least two"),
        (["lrr=1e-4..1e-3"], "unknown key"),
        (["arch.layers=[1,two]"], "a whole number"),
        (["dropout=0..1"], "less than 1"),
        (["global_batch_size=0..64"], "greater than 0"),
        (["lr=1e-4..1e-3", "lr=1e-4"], "both set and searched"),
        (["seed=[1,2]"], "the same in all trials"),
        (["lr=1e-4..1e-3", "seeds=3"], "cannot be set in a search"),
        (["split_seed=[1,2]"], "the same in all trials"),
        (["micro_batch=[1,2]"], "belongs to the plan"),
        (["epochs=2"], "nothing to search"),
        (["lr=1e-4..1e-3:step=5"], "larger than the range"),
        (["epochs=1..4:step=0.5"], "integers only"),
        (["lr=[1e-3,0.001]"], "at least two"),
        (["lr=[1,1.0]"], "are the same"),
        (["goal=[accuracy,macro_f1]"], "the same in all trials"),
        (["eval_every=[5,10]"], "the same in all trials"),
    ],
)
def test_invalid_dimensions_are_refused(words, reported):
    with pytest.raises(UsageError, match=reported):
        dimensions(*words)


@pytest.mark.parametrize(
    "value", [None, True, 3, 1e-5, 0.1 + 0.2, "linear", "7", "a,b", "it's", "null", ["a", 1, "b]c"]]
)
def test_values_as_arguments_are_read_back(value):
    assert parse_value(as_text(value), "") == value


def test_samplers_and_pruners_by_optuna_names():
    space, _ = read_space(TextConfig, ["lr=1e-5..1e-3:log", "arch.layers=[1,2]"])
    first, again, other = (
        samplers.make_sampler("TPESampler", space, seed=0, number=number)._random_sampler._rng.rng.random()
        for number in (3, 3, 4)
    )
    assert first == again != other, "a draw depends only on the number of the trial"
    assert type(samplers.make_pruner("median:n_warmup_steps=3")).__name__ == "MedianPruner"
    with pytest.raises(UsageError, match="no such sampler"):
        samplers.make_sampler("TPESampller", space, seed=0, number=0)
    for name in ("GridSampler", "BruteForceSampler"):
        with pytest.raises(UsageError, match="a finite number"):
            samplers.make_sampler(name, space, seed=0, number=0)
    with pytest.raises(UsageError, match="as an option"):
        samplers.make_sampler("TPESampler:seed=1", space, seed=0, number=0)
    with pytest.raises(UsageError, match="Optuna rejects"):
        samplers.make_pruner("MedianPruner:warmup=3")


def test_grid_is_finite():
    words = ["arch.layers=[1,2]", "epochs=1..3"]
    asked = prepare_search("text", words, sampler="grid")
    assert (asked.num_trials(20), asked.num_trials(4)) == (6, 4)
    assert prepare_search("text", words).num_trials(20) == 20
    for word in ("epochs=1..1000000000", "epochs=1..60000"):
        with pytest.raises(UsageError, match=r"a finite number|too many points"):
            prepare_search("text", ["arch.layers=[1,2]", word], sampler="BruteForceSampler")


def test_missing_sampler_package_is_an_early_error(monkeypatch):
    space, _ = read_space(TextConfig, ["lr=1e-5..1e-3:log"])
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="CmaEsSampler needs cmaes"):
        samplers.make_sampler("cmaes", space, seed=0, number=0)
    with pytest.raises(UsageError, match="WilcoxonPruner needs scipy"):
        samplers.make_pruner("Wilcoxon")


def test_resumed_search_must_have_the_same_configuration(tmp_path):
    asked = prepare_search("text", ["lr=1e-5..1e-3:log"], name="s", root=tmp_path)
    other = prepare_search("text", ["lr=1e-5..1e-3:log"], name="s", root=tmp_path, subset=0.5)
    check_same_search(asked.config, asked.config, where="s")
    with pytest.raises(UsageError, match="subset differs"):
        check_same_search(asked.config, other.config, where="s")
    assert not list(tmp_path.iterdir()), "reading writes nothing"
    for name in ("../s", "", ".s", "a\nb", "x" * 300):
        with pytest.raises(UsageError, match="invalid search name"):
            prepare_search("text", ["lr=1e-5..1e-3:log"], name=name, root=tmp_path)
    for wrong in ({"trials": 0}, {"trials": 1, "jobs": -1}, {"trials": 1, "timeout": float("nan")}):
        with pytest.raises(UsageError, match=r"at least 1|number of seconds"):
            run_search(asked, **wrong)
    with pytest.raises(UsageError, match="seeds must be"):
        prepare_search("text", ["lr=1e-5..1e-3:log"], root=tmp_path, seeds=10**6)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="no such device"):
        prepare_search("text", ["lr=1e-5..1e-3:log"], device="gpu", root=tmp_path)


RESULT = SearchResult(
    name="<b>s</b>",
    recipe="text",
    goal="accuracy",
    space=("lr=0.0001..0.01:log", "schedule=[linear,cosine]"),
    fixed={"epochs": 2},
    trials=(
        SearchTrial(number=0, state="complete", value=0.8, settings={"lr": 1e-3, "schedule": "linear"}, steps=90),
        SearchTrial(number=1, state="pruned", value=0.4, settings={"lr": 1e-4, "schedule": "cosine"}, steps=10),
        SearchTrial(number=2, state="infeasible", settings={"lr": 9e-3, "schedule": "cosine"}, machine="m", note="oom"),
        SearchTrial(number=3, state="complete", value=0.79, settings={"lr": 2e-3, "schedule": "cosine"}, steps=90),
    ),
    importance={"lr": 0.9, "schedule": 0.1},
    candidates=(
        SearchCandidate(
            number=3,
            settings={"lr": 2e-3, "schedule": "cosine"},
            values={"1": 0.8, "2": 0.81},
            mean=0.805,
            low=0.74,
            high=0.87,
        ),
        SearchCandidate(
            number=0,
            settings={"lr": 1e-3, "schedule": "linear"},
            values={"1": 0.79, "2": 0.8},
            mean=0.795,
            low=0.73,
            high=0.86,
        ),
    ),
    seeds=2,
    is_confirmed=True,
    difference_low=-0.01,
    difference_high=0.03,
)


def test_result_renders_as_text(tmp_path):
    write_search(tmp_path, RESULT)
    assert read_search(tmp_path) == RESULT
    assert "not clearly ahead of trial 0" in winner_text(RESULT)
    assert "0.805, 0.74 to 0.87 with 2 seeds" in winner_text(RESULT)
    assert "infeasible on m: oom" in render_search(RESULT)


def test_interval_of_a_fraction_is_clipped_to_0_and_1():
    wide = RESULT.candidates[0].model_copy(update={"mean": 0.21, "low": -0.1906, "high": 1.6179})
    result = RESULT.model_copy(update={"candidates": (wide, RESULT.candidates[1])})
    logged = (winner_text(result), render_search(result))
    assert all("0 to 1" in one and "-0.1906" not in one for one in logged)
    assert "-0.1906 to 1.618" in winner_text(result.model_copy(update={"goal": "reward"}))
    percent = wide.model_copy(update={"mean": 87.0, "low": 85.0, "high": 89.0})
    assert "85 to 89" in winner_text(result.model_copy(update={"candidates": (percent,)}))


def test_omitted_rows_are_counted():
    trials = tuple(SearchTrial(number=n, state="complete", value=n / 100, settings={"lr": "7"}) for n in range(45))
    result = RESULT.model_copy(update={"trials": trials, "candidates": ()})
    assert "and 5 more" in render_search(result)
    assert " more; " not in render_search(result, max_rows=None)


def test_clear_winner_is_named_also_if_lower_is_better():
    assert "; clearly ahead" in winner_text(RESULT.model_copy(update={"difference_low": 0.001}))
    lower = {"is_higher_better": False, "difference_low": -0.03, "difference_high": -0.01}
    assert RESULT.model_copy(update=lower).is_clear


def test_final_training_gets_shared_and_winning_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("reviews", "runs/reviews"):
        (tmp_path / folder).mkdir(parents=True)
    write_search(tmp_path / "runs" / "reviews", RESULT)
    assert winning_args("reviews", recipe="text")[0] == "epochs=2", "a folder of data has the same name"
    write_search(tmp_path, RESULT)
    assert winning_args(str(tmp_path), recipe="text") == ("epochs=2", "lr=0.002", "schedule=cosine")
    (tmp_path / "result.json").write_text(json.dumps({**RESULT.as_json(), "candidates": []}))
    with pytest.raises(UsageError, match="no winner"):
        winning_args(str(tmp_path), recipe="text")


def test_trials_share_a_plan_if_only_the_training_differs():
    first, second = (TextConfig(lr=lr, weight_decay=lr, seed=seed) for lr, seed in ((1e-3, 0), (1e-4, 1)))
    assert describe(first) == describe(second), "evidence is cached by workload and holds for both"
    assert describe(first) != describe(TextConfig(global_batch_size=64))


@pytest.mark.parametrize(
    ("cards", "device", "expected", "reported"),
    [
        ([], "auto", ["auto"] * 3, ""),
        (["cuda"] * 2, "auto", ["cuda:0", "cuda:1"], ""),
        (["cuda"], "auto", ["auto"], "one after the other"),
        (["mps"], "mps", ["mps"], "one after the other"),
        (["cuda"] * 4, "cuda:2", ["cuda:2"], "one after the other"),
        (["cuda"] * 4, "cpu", ["cpu"] * 3, ""),
    ],
)
def test_jobs_on_simulated_machines(monkeypatch, cards, device, expected, reported):
    machine = Machine(name="simulated", accelerators=tuple(Accelerator(kind=kind) for kind in cards))
    monkeypatch.setattr("whet.machine.probe.probe_machine", lambda: machine)
    lines: list[str] = []
    assert devices_for(device, jobs=3, log=lines.append) == expected
    assert reported in " ".join(lines)
    assert bool(lines) == bool(reported)
