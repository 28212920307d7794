"""Training checkpoints: an interrupted run ends with the very same numbers, or says why it cannot resume."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import threading
from dataclasses import replace

import colours
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from aniso.compose import Composition, Partition
from aniso.errors import StoppedError
from aniso.learn import Best, CoefficientNorm, CrossEntropy, Last, Lowest, Schedule, Trainable, fit
from aniso.learn._training.loop import Loop
from aniso.learn._training.training_checkpoint import State, TrainingCheckpoints, differences
from aniso.learn.finetune import finetune
from aniso.models.transforms import Transforms
from aniso.vectors import Bank
from aniso.weights import SafetensorsFile
from aniso.weights.atomic import locked
from aniso.weights.files import RawFile

SCHEDULE = Schedule(epochs=2, lr=0.2, batch_size=16)
CALLS = 7  # of told: three measurements, two steps in each of two epochs


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return colours.world(tmp_path_factory.mktemp("world"))


def objective(world):
    terms = CrossEntropy(world.target.train) - 0.1 * CrossEntropy(world.control.train, "few_shot")
    return terms + 0.01 * CoefficientNorm()


class BrokenOffError(Exception):
    pass


class At:
    """Does something at the n-th report of progress."""

    def __init__(self, n, act):
        self.n, self.act, self.calls = n, act, 0

    def __call__(self, what, done, total):
        self.calls += 1
        if self.calls == self.n:
            self.act()


def ask(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def fail():
    raise BrokenOffError


def run(world, directory, progress=None, schedule=SCHEDULE, **more):
    """Values, history and metrics of a run, for comparison."""
    composition = world.composition()
    more.setdefault("keep", Best(world.target.val))
    done = fit(composition, objective(world), schedule, directory=directory, progress=progress, **more)
    values = composition.values.detach().numpy().tobytes()
    return values, done.history, (directory / "metrics.jsonl").read_bytes()


def stopped(world, directory, n, number=signal.SIGTERM, **more):
    with pytest.raises(StoppedError) as caught:
        run(world, directory, At(n, lambda: ask(number)), **more)
    assert caught.value.exit_code == 128 + number
    assert "--resume" in caught.value.fix


@pytest.fixture(scope="module")
def uninterrupted(world, tmp_path_factory):
    """The directory of a run that nobody interrupted, and what it came to."""
    progress, directory = At(0, None), tmp_path_factory.mktemp("run") / "whole"
    found = run(world, directory, progress)
    assert progress.calls == CALLS
    assert not found[1][0].kept
    return directory, found


@pytest.fixture(scope="module")
def whole(uninterrupted):
    return uninterrupted[1]


@pytest.fixture
def finished(uninterrupted, tmp_path):
    return shutil.copytree(uninterrupted[0], tmp_path / "run")


# going on


def test_directories_do_not_change_results(world, whole):
    composition = world.composition()
    done = fit(composition, objective(world), SCHEDULE, keep=Best(world.target.val))
    assert (composition.values.detach().numpy().tobytes(), done.history) == whole[:2]


@pytest.mark.parametrize("n", range(1, CALLS + 1))
def test_a_run_that_was_asked_to_stop_anywhere_ends_the_same(world, whole, tmp_path, n):
    stopped(world, tmp_path / "run", n)
    assert run(world, tmp_path / "run", resume=True) == whole


@pytest.mark.parametrize("n", range(1, CALLS + 1))
def test_a_run_that_broke_off_anywhere_ends_the_same(world, whole, tmp_path, n):
    with pytest.raises(BrokenOffError):
        run(world, tmp_path / "run", At(n, fail))
    assert run(world, tmp_path / "run", resume=True) == whole


@pytest.fixture(autouse=True)
def _heeding_signals():
    """Undo what ``nohup`` or a background job makes every process ignore, for the length of a test."""
    wanted = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_every_request_to_end_is_heeded(world, tmp_path, number):
    stopped(world, tmp_path / "run", 2, number)
    assert TrainingCheckpoints(tmp_path / "run").files()[-1].name == "state-00000-000001.safetensors"


def test_ctrl_c_after_a_request_ends_at_once(world, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(world, tmp_path / "run", At(3, lambda: (ask(), os.kill(os.getpid(), signal.SIGINT))))


def test_a_request_that_comes_twice_is_one(world, whole, tmp_path):
    """A scheduler sends it to every process of a group, and a runner passes it on to its cells."""
    with pytest.raises(StoppedError):
        run(world, tmp_path / "run", At(3, lambda: (ask(), ask())))
    assert run(world, tmp_path / "run", resume=True) == whole


def test_handlers_are_put_back(world, finished):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run(world, finished, resume=True)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_run_may_be_interrupted_again_and_again(world, whole, tmp_path):
    stopped(world, tmp_path / "run", 2)
    stopped(world, tmp_path / "run", 1, resume=True)
    stopped(world, tmp_path / "run", 2, resume=True)
    assert run(world, tmp_path / "run", resume=True) == whole


def test_other_workers_go_on_the_same(world, whole, tmp_path):
    stopped(world, tmp_path / "run", 2)
    assert run(world, tmp_path / "run", resume=True, workers=1) == whole


def test_an_interruption_of_the_measurement_is_not_trained_again(world, tmp_path):
    stopped(world, tmp_path / "run", 3)
    assert TrainingCheckpoints(tmp_path / "run").files()[-1].name == "state-00000-000002.safetensors"
    progress = At(0, None)
    run(world, tmp_path / "run", progress, resume=True)
    assert progress.calls == CALLS - 3


def test_a_run_that_rules_end_stays_ended(world, tmp_path):
    good = world.composition()
    fit(good, CrossEntropy(world.target.train), Schedule(epochs=3, lr=0.1, batch_size=16))

    def ended(**more):
        composition = world.composition().load(good.coefficients)
        rule, wrong = Lowest(world.control.val, world.target.val), -CrossEntropy(world.target.train)
        schedule = Schedule(epochs=30, lr=1.0, batch_size=16)
        done = fit(composition, wrong, schedule, keep=rule, directory=tmp_path / "run", **more)
        return done.history, composition.values.tolist()

    first = ended()
    assert len(first[0]) < 31
    assert ended(resume=True, progress=At(1, fail)) == first


def test_a_finished_run_gives_its_result_again_and_does_nothing(world, whole, finished):
    before = {path.name: path.stat().st_mtime_ns for path in finished.glob("state-*")}
    rows = []
    assert run(world, finished, At(1, fail), resume=True, epoch_done=rows.append) == whole
    assert rows == []
    assert {path.name: path.stat().st_mtime_ns for path in finished.glob("state-*")} == before


def test_nothing_to_go_on_from_is_a_beginning(world, whole, tmp_path):
    assert run(world, tmp_path / "run", resume=True) == whole


def test_half_precision_goes_on_with_its_scale(world, tmp_path):
    schedule = replace(SCHEDULE, precision="fp16")
    with torch.backends.mkldnn.flags(enabled=False):
        expected = run(world, tmp_path / "whole", schedule=schedule)
        stopped(world, tmp_path / "run", 3, schedule=schedule)
        assert run(world, tmp_path / "run", schedule=schedule, resume=True) == expected


@pytest.mark.parametrize("linearised", [False, True])
def test_fine_tuning_goes_on_the_same(world, tmp_path, linearised):
    def tuned(name, **more):
        schedule = Schedule(epochs=2, lr=1e-3, batch_size=8)
        return finetune(
            world.encoder,
            world.target.train,
            schedule,
            linearised=linearised,
            directory=tmp_path / name,
            **more,
        )

    expected = tuned("whole")
    with pytest.raises(StoppedError):
        tuned("run", progress=At(3, ask))
    found = tuned("run", resume=True)
    assert found.losses == expected.losses
    names = expected.weights.tensors
    assert all(torch.equal(found.weights.read(name), expected.weights.read(name)) for name in names)


def test_a_run_outside_the_main_thread_leaves_states_too(world, whole, tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(run(world, tmp_path / "run")))
    thread.start()
    thread.join()
    assert found == [whole]


# what is left behind


def test_two_states_are_kept(world, tmp_path):
    counts = []
    run(
        world,
        tmp_path / "run",
        schedule=replace(SCHEDULE, epochs=4),
        epoch_done=lambda row: counts.append([p.name for p in TrainingCheckpoints(tmp_path / "run").files()]),
    )
    assert [len(names) for names in counts] == [1, 2, 2, 2, 2]
    assert counts[-1] == ["state-00003-000000.safetensors", "state-00004-000000.safetensors"]


def test_a_run_leaves_tensors_and_text_only(finished):
    names = sorted(path.name for path in finished.iterdir())
    assert names == [
        "images",
        "metrics.jsonl",
        "state-00001-000000.safetensors",
        "state-00002-000000.safetensors",
    ]
    for path in TrainingCheckpoints(finished).files():
        assert {"trained.values", "kept.values", "moment.exp_avg.values"} <= set(load_file(path))
        assert json.loads(SafetensorsFile(RawFile(path)).metadata["facts"])["history"]


def test_metrics_are_a_row_for_every_epoch(finished, whole):
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert rows == [row.content() for row in whole[1]]


def test_metrics_that_were_lost_are_written_again(world, finished, whole):
    (finished / "metrics.jsonl").unlink()
    assert run(world, finished, resume=True) == whole


def test_states_come_back_as_they_were(tmp_path):
    tensors = {"a": torch.randn(3), "b": torch.tensor(4.0), "c": torch.arange(3)}
    states = TrainingCheckpoints(tmp_path)
    states.save(State(3, 7, tensors, {"x": [1.1, None, "ä"]}))
    found, notes = states.newest()
    assert (found.epoch, found.step, found.facts, notes) == (3, 7, {"x": [1.1, None, "ä"]}, [])
    assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)


def test_states_are_ordered_by_number_and_not_by_name(tmp_path):
    states = TrainingCheckpoints(tmp_path)
    for epoch in (99_999, 100_000):
        states.save(State(epoch, 0, {"a": torch.zeros(1)}))
    assert states.newest()[0].epoch == 100_000


def test_what_is_no_state_is_left_alone(tmp_path):
    (tmp_path / "state-best.safetensors").write_bytes(b"mine")
    states = TrainingCheckpoints(tmp_path)
    for epoch in range(4):
        states.save(State(epoch, 0, {"a": torch.zeros(1)}))
    assert (tmp_path / "state-best.safetensors").exists()
    assert len(states.files()) == 2


# damage


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def emptied(path):
    path.write_bytes(b"")


def flipped(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def of_another_version(path):
    meta = dict(SafetensorsFile(RawFile(path)).metadata)
    save_file(load_file(path), path, {**meta, "schema": "2"})


def of_something_else(path):
    save_file({"x": torch.zeros(1)}, path)


def of_other_facts(path):
    meta = dict(SafetensorsFile(RawFile(path)).metadata)
    save_file(load_file(path), path, {**meta, "facts": meta["facts"].replace("0.5", "0.6")})


DAMAGES = [cut, emptied, flipped, of_another_version, of_something_else, of_other_facts]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_said_and_the_one_before_is_used(world, whole, finished, damage):
    damage(TrainingCheckpoints(finished).files()[-1])
    composition = world.composition()
    rule = Best(world.target.val)
    done = fit(composition, objective(world), SCHEDULE, keep=rule, directory=finished, resume=True)
    assert composition.values.detach().numpy().tobytes() == whole[0]
    assert done.history == whole[1]
    assert "state-00002-000000.safetensors cannot be read" in done.notes[0]
    assert TrainingCheckpoints(finished).newest()[0].epoch == 2


def test_no_state_that_can_be_used_is_an_error_and_no_new_start(world, finished, refused):
    for path in TrainingCheckpoints(finished).files():
        flipped(path)
    before = {path.name: path.read_bytes() for path in finished.rglob("*.*")}
    with refused("RUN-STATE", 3, "state-00001", "state-00002", "another directory"):
        run(world, finished, resume=True)
    assert {path.name: path.read_bytes() for path in finished.rglob("*.*")} == before


def test_any_flipped_bit_is_noticed(finished):
    path = TrainingCheckpoints(finished).files()[-1]
    data = path.read_bytes()
    whole = TrainingCheckpoints(finished).newest()[0]
    rng = random.Random(0)
    for _ in range(150):
        place, bit = rng.randrange(len(data)), rng.randrange(8)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        state, notes = TrainingCheckpoints(finished).newest()
        if not notes:  # blanks between a header's words carry nothing
            assert (state.epoch, state.facts) == (whole.epoch, whole.facts)
            assert all(torch.equal(t, whole.tensors[n]) for n, t in state.tensors.items())


def test_states_left_by_a_run_that_fell_back_are_removed(world, tmp_path, whole):
    stopped(world, tmp_path / "run", 5)
    flipped(TrainingCheckpoints(tmp_path / "run").files()[-1])
    stopped(world, tmp_path / "run", 1, resume=True)
    assert not TrainingCheckpoints(tmp_path / "run").newest()[1]
    assert run(world, tmp_path / "run", resume=True) == whole


# other circumstances


def changed(world, finished, refused, *mentions, model=None, terms=None, **more):
    how = {"schedule": SCHEDULE, "keep": Best(world.target.val), **more}
    with refused("RUN-CHANGED", 3, *mentions) as refusal:
        fit(
            model or world.composition(),
            terms or objective(world),
            how.pop("schedule"),
            directory=finished,
            resume=True,
            **how,
        )
    return refusal.error.facts["changed"]


def test_what_changed_is_listed(world, finished, refused):
    found = changed(world, finished, refused, "schedule.lr: 0.2 -> 0.1", schedule=replace(SCHEDULE, lr=0.1))
    assert len(found) == 1
    schedule = replace(SCHEDULE, epochs=3, max_grad_norm=2.0)
    found = changed(world, finished, refused, schedule=schedule, seed=1)
    assert found == ["schedule.epochs: 2 -> 3", "schedule.max_grad_norm: 1.0 -> 2.0", "seed: 0 -> 1"]


def test_another_rule_or_other_splits_to_choose_by_are_changes(world, finished, refused):
    changed(world, finished, refused, "keep", keep=Last())
    changed(world, finished, refused, "splits", keep=Best(world.control.val))
    changed(
        world, finished, refused, "references", keep=Best(world.target.val, references={"target val": 0.5})
    )


def test_other_prompts_of_a_split_to_choose_by_are_a_change(world, finished, refused):
    classes = replace(world.target.classes, prompts=("{}!",))
    changed(world, finished, refused, "keep", keep=Best(replace(world.target.val, classes=classes)))


def test_another_text_tower_is_a_change(world, finished, refused):
    other = copy.deepcopy(world.encoder)
    with torch.no_grad():
        dict(other.named_parameters())["logit_scale"].mul_(0.5)
    assert other.fingerprint == world.encoder.fingerprint
    changed(world, finished, refused, "trained.text", model=Composition(other, world.bank))


def test_another_way_to_see_pictures_is_a_change(world, finished, refused):
    other = copy.deepcopy(world.encoder)
    other.transforms = Transforms(replace(other.transforms.pixels, resize="squash"))
    changed(world, finished, refused, "trained.pixels.resize", model=Composition(other, world.bank))


def test_another_model_bank_or_partition_is_a_change(world, finished, refused):
    changed(world, finished, refused, "partition.rule", model=world.composition(Partition.whole()))
    smaller = colours.World(world.encoder, world.bank.only("one"), world.target, world.control)
    changed(world, finished, refused, "trained.bank", model=smaller.composition())
    moved = Bank.build(
        world.encoder,
        {name: world.bank[name] for name in reversed(world.bank.names)},
        allow_distant=True,
    )
    other = colours.World(world.encoder, moved, world.target, world.control)
    changed(world, finished, refused, "trained.bank", model=other.composition())
    terms = CrossEntropy(world.target.train)
    changed(world, finished, refused, "trained.trained", model=Trainable.weights(world.encoder), terms=terms)


@pytest.mark.parametrize(
    ("word", "change"),
    [
        ("view", lambda w: CrossEntropy(w.target.train, "eval")),
        ("split", lambda w: CrossEntropy(w.target.train.take(range(15)))),
        ("weight", lambda w: 2 * CrossEntropy(w.target.train)),
    ],
)
def test_what_changed_in_an_objective_is_named(world, tmp_path, refused, word, change):
    fit(world.composition(), CrossEntropy(world.target.train), SCHEDULE, directory=tmp_path / "run")
    found = changed(world, tmp_path / "run", refused, word, terms=change(world), keep=Last())
    assert len(found) == 1
    assert f".{word}: " in found[0]


def test_terms_that_came_or_went_are_a_change(world, finished, refused):
    changed(world, finished, refused, "objective", terms=CrossEntropy(world.target.train))


def test_differences_are_found_at_any_depth():
    was = {"a": {"b": 1, "c": [1, {"x": 2}]}, "d": None, "e": 1, "g": [1]}
    assert differences(was, was) == []
    assert differences(was, {"a": {"b": 2, "c": [1, {"x": 3}]}, "d": None, "f": 1, "g": [1, 2]}) == [
        "a.b: 1 -> 2",
        "a.c.2.x: 2 -> 3",
        "e: 1 -> None",
        "g: [1] -> [1, 2]",
        "f: None -> 1",
    ]


def test_another_number_of_threads_is_refused_unless_it_is_allowed(world, tmp_path, refused, monkeypatch):
    stopped(world, tmp_path / "run", 3)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    with refused("RUN-CHANGED", 3, f"threads: {threads} -> {threads + 1}", "--allow-env-change"):
        run(world, tmp_path / "run", resume=True)
    rule = Best(world.target.val)
    how = {"keep": rule, "directory": tmp_path / "run", "resume": True}
    done = fit(world.composition(), objective(world), SCHEDULE, allow_env_change=True, **how)
    said = f"resumed in another environment: threads: {threads} -> {threads + 1}"
    assert said in done.notes
    assert said in fit(world.composition(), objective(world), SCHEDULE, **how).notes
    facts = TrainingCheckpoints(tmp_path / "run").newest()[0].facts
    assert facts["notes"] == [said]


def test_allowing_another_environment_allows_nothing_else(world, finished, refused):
    changed(world, finished, refused, "seed: 0 -> 1", seed=1, allow_env_change=True)


def test_a_refused_run_changes_nothing(world, finished, refused):
    before = {path.name: path.read_bytes() for path in finished.rglob("*.*")}
    composition = world.composition()
    changed(world, finished, refused, model=composition, seed=3)
    assert {path.name: path.read_bytes() for path in finished.rglob("*.*")} == before
    assert not composition.values.any()


# two runs


def test_a_directory_that_holds_a_run_is_not_used_for_another(world, finished, refused):
    with refused("OUT-EXISTS", 2, "--resume"):
        run(world, finished)


def test_two_runs_do_not_share_a_directory(world, finished, refused):
    with locked(finished), refused("OUT-LOCKED", 8, "another process"):
        run(world, finished, resume=True)
    run(world, finished, resume=True)


def test_a_run_holds_its_directory_while_it_lasts(world, tmp_path, refused):
    def second():
        with refused("OUT-LOCKED", 8), locked(tmp_path / "run"):
            pass

    run(world, tmp_path / "run", At(3, second))
    with locked(tmp_path / "run"):
        pass


# failures


def test_a_failure_is_written_down_and_what_was_good_stays(world, tmp_path, refused):
    schedule = Schedule(epochs=9, lr=1e30, batch_size=16)
    with refused("LEARN-NONFINITE", 6, "the last good values") as refusal:
        run(world, tmp_path / "run", schedule=schedule)
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (failure["error"], failure["exit"]) == ("LEARN-NONFINITE", 6)
    assert failure["message"] == refusal.error.message
    state, notes = TrainingCheckpoints(tmp_path / "run").newest()
    assert notes == []
    assert bool(torch.isfinite(state.tensors["kept.values"]).all())


def test_a_state_of_other_tensors_is_refused(world, refused):
    trained = Trainable.coefficients(world.composition())
    loop = Loop(trained, objective(world), SCHEDULE, Last())
    state = loop.state()
    for name in ("trained.values", "kept.values"):
        less = {key: value for key, value in state.tensors.items() if key != name}
        with refused("RUN-STATE", 3, name):
            loop.restore(State(0, 0, less, state.facts))
    wrong = {**state.tensors, "trained.values": tiny.plain()["layers.0.gate"].repeat(3)}
    with refused("RUN-STATE", 3):
        loop.restore(State(0, 0, wrong, state.facts))
