"""Selection among many adapters: what is read, what is left out and why, and that shards add up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stored_adapters as stored
import torch
from watch import contents

from aniso.addresses import Shard
from aniso.learn.selection import (
    AdapterScoring,
    BlockGradient,
    BlockwiseGradient,
    ScoreFiles,
    WholeGradient,
    adapter_scoring,
)
from aniso.models.encoder import Encoder
from aniso.vectors import (
    AdapterStores,
    Bank,
    BlockSource,
    Catalogue,
    load_adapter_directory,
    refresh_catalogue,
)
from aniso.weights.object_store import Retry
from aniso.weights.remote_file import RemoteFile, joined

Refused = Callable[..., AbstractContextManager[Any]]
ROOT = "memory://shelf"
NAMES = ("ant", "bee", "cat", "dog", "eel")
NOW = Retry(attempts=3, pause=0)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return stored.encoder()


@pytest.fixture(scope="module")
def base(encoder: Encoder) -> BlockSource:
    return BlockSource.of(encoder.weight_source())


@pytest.fixture(scope="module")
def gradient(encoder: Encoder, base: BlockSource) -> BlockGradient:
    return BlockGradient.of(encoder, stored.loss(), base)


@pytest.fixture
def memory() -> Iterator[type[stored.Faulty]]:
    with stored.faulty_memory() as system:
        for seed, name in enumerate(NAMES):
            stored.put(f"{ROOT}/{name}", stored.adapter(seed))
        yield system


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The same adapters on disk."""
    for seed, name in enumerate(NAMES):
        stored.put(str(tmp_path / "shelf" / name), stored.adapter(seed))
    return tmp_path / "shelf"


def stores(*addresses: str, **options: Any) -> AdapterStores:
    return AdapterStores(addresses or (ROOT,), retry=NOW, **options)


# scores and choices are those of a bank


@pytest.mark.parametrize("budget", [1, 2, "6kB", "20kB", 99])
@pytest.mark.parametrize("kind", [BlockwiseGradient, WholeGradient])
def test_the_choice_is_that_of_a_bank_of_the_same_adapters(
    memory, encoder, base, gradient, directory, kind, budget
) -> None:
    bank, _ = load_adapter_directory(encoder.weight_source(), directory)
    expected = kind(encoder, stored.loss(), budget).choose(bank)
    places = stores()
    scored = AdapterScoring(base, refresh_catalogue(base, places), gradient, stores=places).run()
    chosen = scored.choose(budget, whole=kind.whole)
    assert chosen.cells == expected.cells and chosen.nbytes == expected.nbytes
    assert chosen.scores == {name: dict(expected.scores[name]) for name in chosen.cells}
    assert chosen.summary() == expected.summary()
    assert bool(chosen.notes) == bool(expected.notes) == (budget == 99)


def test_a_score_is_the_inner_product_with_the_product_of_the_factors(memory, base, gradient) -> None:
    (one, *_) = AdapterScoring(base, refresh_catalogue(base, stores()), gradient).run().results
    factors = list(stored.tensors(0).values())
    products = [2.0 * b @ a for a, b in zip(factors[::2], factors[1::2], strict=True)]  # alpha / r = 2
    by_shape = {(tuple(p.shape), round(float(p.norm()), 4)): p for p in products}
    assert len(one.blocks) == len(products)
    for block, score, norm in zip(one.blocks, one.scores, one.norms, strict=True):
        wanted = by_shape.get((tuple(gradient.blocks[block].shape), round(float(norm), 4)))
        if wanted is None:  # rows of queries in a block of queries, keys and values
            continue
        assert score == pytest.approx(float((wanted * gradient.blocks[block]).sum()), rel=1e-5, abs=1e-9)
    assert one.norm == pytest.approx(float(torch.cat([p.reshape(-1) for p in products]).norm()), rel=1e-5)


def test_the_bank_of_a_choice_is_that_of_the_same_adapters_on_disk(
    memory, encoder, base, gradient, directory, tmp_path
) -> None:
    places = stores()
    scored = AdapterScoring(base, refresh_catalogue(base, places), gradient, stores=places).run()
    for whole in (False, True):
        chosen = scored.choose(2, whole=whole)
        memory.reads.clear()
        bank = scored.bank(chosen).save(tmp_path / f"bank-{whole}")
        local, _ = load_adapter_directory(encoder.weight_source(), directory)
        expected = local.only_cells(chosen.cells).save(tmp_path / f"local-{whole}")
        assert {name: bank[name].blocks for name in bank} == {n: expected[n].blocks for n in expected}
        for name in bank:
            for block in bank[name].blocks:
                own, same = bank[name][block.name], expected[name][block.name]
                assert type(own) is type(same) and torch.equal(own.dense(), same.dense())
            assert bank[name].norms == expected[name].norms
            assert any("ETag" in note for note in bank[name].notes)
        assert len(memory.reads) <= 2 * len(chosen.cells)
    assert Bank.load(tmp_path / "bank-True").names == tuple(chosen.cells)


# what is read


def test_only_headers_are_read_and_then_only_tensors(memory, base, gradient) -> None:
    places = stores()
    catalogue = refresh_catalogue(base, places)
    assert len(memory.reads) == 2 * len(NAMES) == places.traffic.requests
    for row in catalogue.rows:
        assert (row.rank, row.targets, row.blocks, row.norm) == (2, ("fc1", "q_proj"), 4, None)
    memory.reads.clear()
    scored = AdapterScoring(base, catalogue, gradient, stores=places).run()
    ends = {f"/shelf/{row.name}": (len(row.header), row.nbytes) for row in catalogue.rows}
    assert {(path, (start, stop)) for path, start, stop in memory.reads} == set(ends.items())
    assert len(memory.reads) == len(NAMES)
    assert all(row.norm is not None and row.norm > 0 for row in scored.catalogue.rows)


def test_a_refresh_reads_what_is_new_or_has_changed(memory, base, tmp_path) -> None:
    file = tmp_path / "catalogue.parquet"
    refresh_catalogue(base, stores()).save(file)
    before = Catalogue.load(file)
    memory.reads.clear()
    assert refresh_catalogue(base, stores(), before) == before
    assert memory.reads == []
    stored.put(f"{ROOT}/bee", stored.adapter(9, lora_alpha=16))
    stored.put(f"{ROOT}/fox", stored.adapter(10))
    memory().rm(f"{ROOT}/cat", recursive=True)
    after = refresh_catalogue(base, stores(), before)
    assert {path for path, _, _ in memory.reads} == {"/shelf/bee", "/shelf/fox"}
    assert [row.name for row in after.rows] == ["ant", "bee", "dog", "eel", "fox"]
    assert after.rows[0] == before.rows[0] and after.rows[1].etag != before.rows[1].etag


def test_another_base_is_compared_with_known_headers(memory, base, encoder) -> None:
    catalogue = refresh_catalogue(base, stores())
    state = {
        key: value + 1 if value.is_floating_point() else value for key, value in encoder.state_dict().items()
    }
    memory.reads.clear()
    other = refresh_catalogue(BlockSource.of(state), stores(), catalogue)
    assert memory.reads == [] and {row.base for row in other.rows}.isdisjoint(
        row.base for row in catalogue.rows
    )
    assert all(row.usable for row in other.rows)


def test_ranges_near_each_other_are_one_request() -> None:
    assert joined([(100, 200), (0, 90), (150, 250), (1 << 20, (1 << 20) + 5)]) == [
        (0, 250),
        (1 << 20, (1 << 20) + 5),
    ]
    data = bytes(range(256)) * 1024
    asked = []

    def read(start: int, stop: int) -> bytes:
        asked.append((start, stop))
        return data[start:stop]

    file = RemoteFile("memory://x/y", len(data), read, data[:100])
    file.fetch([(50, 90), (200, 300), (310, 400), (200_000, 200_100)])
    assert asked == [(200, 400), (200_000, 200_100)]
    assert file.read(20, 60) == data[20:80] and file.read(250, 100) == data[250:350] and len(asked) == 2
    assert file.read(90, 20) == data[90:110] and asked[-1] == (90, 110)
    assert file.sha256() == RemoteFile("memory://x/y", len(data), read).sha256()


# what cannot be used


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_every_unusable_adapter_is_a_row_with_a_reason(
    memory, base, gradient, directory, tmp_path, place
) -> None:
    root = ROOT if place == "memory" else str(directory)
    mark = tmp_path / "it-ran"
    bad = stored.unusable(mark)
    for name, (files, _) in bad.items():
        stored.put(f"{root}/{name}", files)
    places = stores(root)
    scored = AdapterScoring(base, refresh_catalogue(base, places), gradient, stores=places).run()
    found = {row.name: row.code for row in scored.catalogue.rows}
    assert found == dict.fromkeys(NAMES, "") | {name: code for name, (_, code) in bad.items()}
    assert all(bool(row.reason) != row.usable for row in scored.catalogue.rows)
    assert set(scored.choose(99).cells) == set(NAMES)
    assert not mark.exists()
    # and they are kept, so that damaged ones are not read again
    scored.catalogue.save(tmp_path / "file")
    known = Catalogue.load(tmp_path / "file")
    assert known == scored.catalogue == refresh_catalogue(base, stores(root), known)


def test_paths_in_a_configuration_are_never_opened(memory, base, tmp_path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    stored.put(f"{ROOT}/evil", stored.adapter(0, base_model_name_or_path="../../secret.json"))
    for name in ("../out", "..%2Fout"):
        stored.put(f"{ROOT}/{name}", stored.adapter(0))
    before = contents(tmp_path)
    catalogue = refresh_catalogue(base, stores())
    row = next(row for row in catalogue.rows if row.name == "evil")
    assert row.usable and row.trained_on == "../../secret.json"
    assert all(row.uri.startswith(f"{ROOT}/") and "/../" not in row.uri for row in catalogue.rows)
    assert all("/" not in row.name and not row.name.startswith(".") for row in catalogue.rows)
    assert contents(tmp_path) == before


def test_an_adapter_larger_than_its_base_is_left_out(memory, base) -> None:
    many = stored.save(stored.tensors(0, rank=4000))
    stored.put(f"{ROOT}/huge", stored.adapter(0, many, r=4000))
    row = next(row for row in refresh_catalogue(base, stores()).rows if row.name == "huge")
    assert row.code == "LORA-KIND" and "larger than its base" in row.reason


def test_a_row_outside_of_the_given_addresses_is_not_read(memory, base, gradient) -> None:
    catalogue = refresh_catalogue(base, stores())
    stored.put("memory://elsewhere/fox", stored.adapter(1))
    moved = replace(catalogue.rows[0], uri="memory://elsewhere/fox")
    memory.reads.clear()
    forged = Catalogue((moved, replace(catalogue.rows[1], root="memory://elsewhere")))
    scored = AdapterScoring(base, forged, gradient, stores=stores()).run()
    assert [one.code for one in scored.results] == ["CATALOGUE", "CATALOGUE"] and memory.reads == []


# requests that fail


def test_failed_and_short_reads_are_repeated(memory, base, gradient) -> None:
    failing: dict[tuple[str, int], int] = {}

    def faults(path: str, start: int) -> bytes | Exception | None:
        times = failing[path, start] = failing.get((path, start), 0) + 1
        if times == 1:
            return OSError("503 Slow Down")
        return b"short" if times == 2 else None

    memory.faults = staticmethod(faults)
    places = stores(connections=1)
    scored = AdapterScoring(base, refresh_catalogue(base, places), gradient, stores=places).run()
    assert all(row.usable for row in scored.catalogue.rows) and set(scored.choose(9).cells) == set(NAMES)
    assert set(failing.values()) == {3}
    assert places.traffic.failures == 2 * len(failing) and places.traffic.requests == 3 * len(failing)


def test_what_cannot_be_reached_is_a_row_with_a_reason_and_is_tried_again(
    memory, base, gradient, tmp_path
) -> None:
    memory.faults = staticmethod(lambda path, start: ConnectionError("reset") if "/bee/" in path else None)
    catalogue = refresh_catalogue(base, stores())
    row = next(row for row in catalogue.rows if row.name == "bee")
    assert row.code == "REMOTE-READ" and "reset" in row.reason and "tries: 3" in row.reason
    assert len(catalogue.usable) == len(NAMES) - 1
    assert len([path for path, _, _ in memory.reads if path.endswith("/bee")]) == 3
    memory.faults = staticmethod(lambda path, start: None)
    memory.reads.clear()
    catalogue = refresh_catalogue(base, stores(), catalogue)
    assert {path for path, _, _ in memory.reads} == {"/shelf/bee"} and len(catalogue.usable) == len(NAMES)
    # while tensors are read
    memory.faults = staticmethod(lambda path, start: ConnectionError("reset") if "/cat/" in path else None)
    files = ScoreFiles(tmp_path / "scores")
    scored = AdapterScoring(base, catalogue, gradient, stores=stores(), files=files).run()
    assert [one.uri for one in scored.results if one.code] == [f"{ROOT}/cat"]
    assert len(scored.catalogue.usable) == len(NAMES), "the network says nothing about an adapter"
    assert "cat" not in scored.choose(9).cells
    memory.faults = staticmethod(lambda path, start: None)
    memory.reads.clear()
    scored = AdapterScoring(base, catalogue, gradient, stores=stores(), files=files).run()
    assert {path for path, _, _ in memory.reads} == {"/shelf/cat"}
    assert "cat" in scored.choose(9).cells
    assert AdapterScoring(base, catalogue, gradient, stores=stores(), files=files).merged().choose(9).cells


def test_an_object_that_is_gone_is_not_tried_again(memory, base, gradient) -> None:
    places = stores()
    catalogue = refresh_catalogue(base, places)
    memory().rm(f"{ROOT}/ant", recursive=True)
    scored = AdapterScoring(base, catalogue, gradient, stores=places).run()
    assert [one.code for one in scored.results] == ["FILE-MISSING", "", "", "", ""]
    assert places.traffic.failures == 1


# shards


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_shards_adds_up_to_the_same(
    memory, base, gradient, tmp_path, count, monkeypatch
) -> None:
    monkeypatch.setattr(adapter_scoring, "PART", 2)
    catalogue = refresh_catalogue(base, stores())
    alone = AdapterScoring(base, catalogue, gradient).run()
    memory.reads.clear()
    files = ScoreFiles(tmp_path / "scores")
    for number in range(1, count + 1):
        AdapterScoring(base, catalogue, gradient, files=files).run(Shard(number, count))
    assert len(memory.reads) == len(NAMES), "each adapter is read by one worker"
    merged = AdapterScoring(base, catalogue, gradient, files=files).merged()
    assert len(memory.reads) == len(NAMES), "merging reads no adapter"
    assert merged.catalogue == alone.catalogue
    for whole in (False, True):
        assert merged.choose(2, whole=whole) == alone.choose(2, whole=whole)


def test_an_interrupted_shard_resumes_also_with_another_number_of_shards(
    memory, base, gradient, tmp_path, monkeypatch, refused: Refused
) -> None:
    monkeypatch.setattr(adapter_scoring, "PART", 1)
    catalogue = refresh_catalogue(base, stores())
    files = ScoreFiles(tmp_path / "scores")

    def stop(what: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        AdapterScoring(base, catalogue, gradient, files=files, progress=stop).run()
    assert len(list(files.directory.glob("part-*.parquet"))) == 2
    with refused("SCORES", 3, "3 of 5", "--shard 1/1"):
        AdapterScoring(base, catalogue, gradient, files=files).merged()
    memory.reads.clear()
    for number in (1, 2):
        AdapterScoring(base, catalogue, gradient, files=files).run(Shard(number, 2))
    assert len(memory.reads) == 3
    again = AdapterScoring(base, catalogue, gradient, files=files).merged()
    assert again.choose(1) == AdapterScoring(base, catalogue, gradient).run().choose(1)


def test_a_changed_adapter_is_scored_again(memory, base, gradient, tmp_path) -> None:
    files = ScoreFiles(tmp_path / "scores")
    catalogue = refresh_catalogue(base, stores())
    AdapterScoring(base, catalogue, gradient, files=files).run()
    stored.put(f"{ROOT}/bee", stored.adapter(77))
    catalogue = refresh_catalogue(base, stores(), catalogue)
    memory.reads.clear()
    scored = AdapterScoring(base, catalogue, gradient, files=files).run()
    assert {path for path, _, _ in memory.reads} == {"/shelf/bee"}
    expected = AdapterScoring(base, catalogue, gradient).run()
    assert scored.choose(5, whole=True) == expected.choose(5, whole=True)


def test_workers_share_one_gradient_and_scores_of_another_are_refused(
    memory, encoder, base, gradient, tmp_path, refused: Refused
) -> None:
    files = ScoreFiles(tmp_path / "scores")
    made = files.gradient(gradient.identity, lambda: gradient)
    again = files.gradient(gradient.identity, lambda: pytest.fail("computed again"))
    assert again.key == made.key and all(torch.equal(again.blocks[n], t) for n, t in gradient.blocks.items())
    catalogue = refresh_catalogue(base, stores())
    AdapterScoring(base, catalogue, again, files=files).run()
    other = BlockGradient.of(encoder, stored.loss(4), base)
    with refused("RUN-CHANGED", 3, "another model, objective or seed", "pictures"):
        files.gradient(other.identity, lambda: pytest.fail("computed again"))
    with refused("RUN-CHANGED", 3, "scores of another gradient"):
        AdapterScoring(base, catalogue, other, files=files).run()
    moved = {k: v + 1 if v.is_floating_point() else v for k, v in encoder.state_dict().items()}
    with refused("BANK-BASE", 3, "--model"):
        AdapterScoring(BlockSource.of(moved), catalogue, gradient)


# files


@pytest.mark.parametrize("damage", ["cut", "flipped", "text", "other columns"])
def test_damaged_catalogues_and_scores_are_refused(
    memory, base, gradient, tmp_path, damage, refused: Refused
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "catalogue.parquet"
    catalogue = refresh_catalogue(base, stores())
    catalogue.save(file)
    files = ScoreFiles(tmp_path / "scores")
    AdapterScoring(base, catalogue, gradient, files=files).run()
    (part,) = files.directory.glob("part-*.parquet")
    for path in (file, part):
        data = path.read_bytes()
        if damage == "other columns":
            pq.write_table(pa.table({"uri": ["x"]}), path)
        else:
            cut = {"cut": data[:-20], "flipped": data[:-8] + b"\xff" * 8, "text": b"uri,etag\n"}[damage]
            path.write_bytes(cut)
    with refused("CATALOGUE", 3, "catalogue.parquet"):
        Catalogue.load(file)
    with refused("SCORES", 3, "part-"):
        files.read(gradient)


def test_writing_a_catalogue_leaves_the_old_or_the_new_one(memory, base, tmp_path, monkeypatch) -> None:
    file = tmp_path / "catalogue.parquet"
    catalogue = refresh_catalogue(base, stores())
    catalogue.save(file)
    before = contents(tmp_path)
    from aniso.weights import atomic

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.disk, "pwrite", full)
    with pytest.raises(Exception, match="OUT-SPACE"):
        Catalogue(catalogue.rows[:1]).save(file)
    monkeypatch.undo()
    assert contents(tmp_path) == before


def test_names_of_vectors_are_unique_and_stay(memory, base) -> None:
    for place in ("a/b", "a-b", "a b"):
        stored.put(f"{ROOT}/{place}", stored.adapter(1))
    catalogue = refresh_catalogue(base, stores())
    names = {row.uri: row.name for row in catalogue.rows}
    assert len(set(names.values())) == len(names) == 8
    stored.put(f"{ROOT}/a-/b", stored.adapter(1))
    stored.put(f"{ROOT}/a-b", stored.adapter(2))
    again = {row.uri: row.name for row in refresh_catalogue(base, stores(), catalogue).rows}
    assert {uri: again[uri] for uri in names} == names and len(set(again.values())) == 9


def test_links_of_a_directory_to_itself_end(base, directory) -> None:
    (directory / "loop").symlink_to(directory)
    (directory / "broken").mkdir()
    (directory / "broken" / "adapter_config.json").symlink_to(directory / "nowhere")
    (directory / ".hidden").mkdir()
    catalogue = refresh_catalogue(base, stores(str(directory)))
    assert [row.name for row in catalogue.usable] == list(NAMES)
    assert [row.name for row in catalogue.rows if row.code] == ["broken"]


def test_a_file_that_changed_since_it_was_listed_is_not_mixed_up(base, gradient, directory) -> None:
    places = stores(str(directory))
    catalogue = refresh_catalogue(base, places)
    stored.put(str(directory / "ant"), stored.adapter(50))
    scored = AdapterScoring(base, catalogue, gradient, stores=places).run()
    assert [one.code for one in scored.results] == ["FILE-CHANGED", "", "", "", ""]


def test_addresses_are_checked_before_anything_is_opened(refused: Refused) -> None:
    for address in (
        "ftp://x/y",
        "zip://x::s3://y",
        "s3://",
        "reference://x",
        "simplecache::s3://b/x",
        "file:///etc",
    ):
        with refused("REMOTE-URI", 2, "s3://"):
            AdapterStores([address])
    with refused("FILE-MISSING", 3, "nowhere"):
        AdapterStores(["nowhere"])


def test_nothing_remote_is_read_when_aniso_is_offline(base, monkeypatch, refused: Refused) -> None:
    monkeypatch.setenv("ANISO_OFFLINE", "1")
    with refused("HUB-OFFLINE", 3, "hf://a/b"):
        refresh_catalogue(base, AdapterStores(["hf://a/b"], retry=NOW))


def test_scores_on_disk_are_a_plain_table(memory, base, gradient, tmp_path) -> None:
    import pyarrow.parquet as pq

    files = ScoreFiles(tmp_path / "scores")
    scored = AdapterScoring(base, refresh_catalogue(base, stores()), gradient, files=files).run()
    (part,) = files.directory.glob("part-*.parquet")
    rows = pq.read_table(part).to_pylist()
    assert len(rows) == 4 * len(NAMES)
    assert {row["uri"] for row in rows} == {f"{ROOT}/{name}" for name in NAMES}
    one = scored.results[0]
    assert [r["score"] for r in rows if r["uri"] == one.uri] == np.asarray(one.scores).tolist()
    assert json.loads(pq.read_schema(part).metadata[b"aniso"])["gradient"] == gradient.key
