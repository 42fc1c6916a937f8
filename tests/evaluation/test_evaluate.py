"""A run: what it measures, that it goes on where it was killed, and what it refuses."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

import kvjax
from kvjax.evaluation import Experiment, contenders, duo_at_budget, read_records
from kvjax.evaluation.prompt_parts import PromptParts
from kvjax.evaluation.records import MANIFEST, RESULTS
from kvjax.evaluation.units import make_units


@pytest.fixture(scope="module")
def whole(small_run, tmp_path_factory):
    """The folder of a whole run, and its summary."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, small_run.run(folder)


def test_every_policy_answers_every_example_both_ways(whole):
    folder, summary = whole
    records = read_records(folder)
    # Two needles and two turns both ways, and two stretches of text one way; three contenders.
    assert len(records) == (2 * 4 + 2) * 3
    assert sorted(records) == sorted(summary.records)
    assert {(r.policy, r.budget) for r in records} == {("full", None), ("streaming", None), ("snapkv", 48)}
    for record in records:
        assert 180 - 48 <= record.prompt_tokens <= 200
        if record.policy == "full":
            assert record.kept_tokens == record.prompt_tokens
        else:
            assert record.kept_tokens == {"snapkv": 48, "streaming": 40}[record.policy]
    assert all(record.score > 4 for record in records if record.task == "perplexity")


def test_the_full_cache_answers_alike_both_ways(whole):
    _, summary = whole
    both = [r for r in summary.records if r.policy == "full" and r.task != "perplexity"]
    aware, agnostic = ([r for r in both if r.mode == mode] for mode in ("aware", "agnostic"))
    assert [r.answer for r in aware] == [r.answer for r in agnostic]


def test_answers_are_those_of_generate(whole, small_run):
    _, summary = whole
    (case,) = [r for r in summary.records if r.policy == "snapkv" and r.task == "needle" and r.depth == 0.0][:1]
    experiment, words = small_run.make_experiment(), small_run.Words()
    units = make_units(experiment, words)
    (item,) = [i for u in units.units for i in u.items if i.case[:4] == ("needle", 200, 0.0, 0)]
    assert isinstance(item.parts, PromptParts)
    cache = kvjax.prefill(
        *(small_run.make_model(), item.parts.context),
        policy=small_run.POLICIES["snapkv"](48),
        max_new_tokens=units.room,
    )[1]
    result = kvjax.generate(
        *(small_run.make_model(), item.parts.question),
        cache=cache,
        max_new_tokens=item.parts.answer_tokens,
        tokenizer=words,
        stop_tokens=(),
    )
    agnostic = [r for r in summary.records if r.key == ("snapkv", 48, "agnostic", *case.key[3:])]
    assert [r.answer for r in agnostic] == result.texts


def test_the_manifest_says_how_it_was_done(whole):
    folder, _ = whole
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["model"] == "small"
    assert manifest["finished"] is True
    assert set(manifest["versions"]) == {"kvjax", "jax", "python"}
    assert manifest["experiment"]["seed"] == 0
    assert manifest["command"]
    kept = {(e["policy"], e["budget"]): e for e in manifest["measured"]}
    assert kept["snapkv", 48]["kept_tokens"] <= 48 < kept["full", None]["kept_tokens"]
    assert kept["snapkv", 48]["cache_bytes_a_row"] < kept["full", None]["cache_bytes_a_row"]


def test_a_killed_run_goes_on_to_the_same_table(whole, small_run, tmp_path):
    folder, _ = whole
    out = tmp_path / "killed"
    killed = subprocess.run([sys.executable, str(small_run.file), str(out)], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    there = len(read_records(out))
    assert 12 <= there < 30
    # Killed within a line, too.
    with (out / RESULTS).open("a") as file:
        file.write('{"policy": "sna')
    counted = []
    small_run.run(out, report=lambda progress: counted.append(progress.done))
    assert counted[0] > there
    assert counted[-1] == 30
    assert (out / "table.md").read_text() == (folder / "table.md").read_text()
    # Nothing is left to do.
    again = []
    small_run.run(out, report=again.append)
    assert not again


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 1}, "`out` holds a run with another `seed`: .* has 0, not 1; go on with that, or take another"),
        ({"samples": 2}, "`out` holds a run with another `samples`"),
        ({"tasks": ("needle",)}, "`out` holds a run with another `tasks`"),
    ],
)
def test_another_experiment_in_the_same_folder_is_an_error(whole, small_run, settings, message):
    with pytest.raises(ValueError, match=message):
        small_run.run(whole[0], **settings)


def test_a_folder_of_other_things_is_an_error(small_run, tmp_path):
    (tmp_path / "letter.txt").write_text("Dear")
    with pytest.raises(ValueError, match=r"`out` must be a run's folder or an empty one, got .* holds other things"):
        small_run.run(tmp_path)


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": (200, 600)}, "`lengths` must not be over the 512 tokens that the model can read, got 600"),
        ({"lengths": (60,)}, "`lengths` must be at least [0-9]+ tokens for the task 'multi-turn', got 60"),
        ({"lengths": (40,)}, "`budgets` must not be above the shortest of `lengths`, 40, got 48"),
        ({"tasks": ("needles",)}, "`tasks` must be among needle, multi-key.* got 'needles'"),
        ({"modes": ("both",)}, "`modes` must be among aware, agnostic, got 'both'"),
        ({"depths": (2.0,)}, "`depths` must be from 0 to 1, got 2.0"),
        ({"samples": 0}, "`samples` must be at least 1 example, got 0"),
        ({"text": " \n"}, "`text` must be a text of words, got none"),
        ({"text": "A short text."}, "`text` must have at least as many tokens as the longest prompt, 200, got 4"),
        ({"tasks": ()}, "`tasks` must have at least one value, got none"),
    ],
)
def test_says_what_is_wrong_before_anything_runs(small_run, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        small_run.run(tmp_path / "new", **settings)
    assert not (tmp_path / "new").exists()


def test_a_budget_that_a_prompt_is_too_short_for_is_an_error(small_run, tmp_path):
    few = contenders({"snapkv": kvjax.SnapKV}, (0.05,))
    with pytest.raises(ValueError, match=r"`budget` = 0.05 of the [0-9]+ tokens of row 0 is [0-9]+ tokens, under"):
        small_run.run(tmp_path / "new", contenders=few)


def test_every_policy_comes_at_every_budget_after_the_full_cache(small):
    made = contenders({"h2o": kvjax.H2O, "full": kvjax.Full(), "duo": kvjax.DuoAttention}, (64, 0.5))
    assert [c.label for c in made] == ["full", "h2o, 64", "h2o, 50%", "duo, 64", "duo, 50%"]
    assert made[1].policy(small.spec, 100) == kvjax.H2O(budget=64)
    with pytest.raises(ValueError, match="`budget` must be at least"):
        contenders({"snapkv": kvjax.SnapKV}, (8,))
    with pytest.raises(ValueError, match="`policies` must name at least one policy"):
        contenders({}, (64,))
    with pytest.raises(ValueError, match="`budgets` must have at least one budget"):
        contenders({"h2o": kvjax.H2O}, ())


@pytest.mark.parametrize("budget", [128, 512, 0.25])
def test_duo_takes_the_sparsity_that_meets_a_budget(budget, small_run, monkeypatch):
    pattern = kvjax.HeadPattern.of(np.linspace(0, 1, 60).reshape(20, 3))
    monkeypatch.setattr("kvjax.policies.duo_attention.shipped_pattern", lambda model: pattern)
    model = kvjax.ModelSpec(
        **{**vars(small_run.make_model().spec), "num_layers": 20, "num_kv_heads": 3, "num_query_heads": 3}
    )
    duo = duo_at_budget(budget, model, 1000)
    kept = np.mean([np.minimum(spec.kept, 1000) for spec in duo.layer_specs(model, 1000, 8)])
    asked = budget if isinstance(budget, int) else 1000 * budget
    # One head more or less is a sixtieth.
    assert asked - 1000 / 60 < kept <= asked


def test_cases_have_seeds_of_their_own():
    experiment = Experiment(contenders=contenders({"h2o": kvjax.H2O}, (64,)), samples=3)
    cases = [case for length in experiment.lengths for case in experiment.cases(length)]
    assert len({experiment.seed_of(case) for case in cases}) == len(cases) == 2 * 9 * 15
