"""Tables on disk: lookups, merging, and every kind of damaged or foreign file as a miss."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from pathlib import Path

import msgspec
import pytest

from fa4tune.errors import TableError
from fa4tune.hardware.gpu import Gpu, load_gpu
from fa4tune.kernels.config import SM90ForwardConfig
from fa4tune.problem import AttentionProblem
from fa4tune.record import Provenance
from fa4tune.table.entry import SCHEMA, Entry, better, decode_entry, encode_entry
from fa4tune.table.key import table_key
from fa4tune.table.store import Table, TableWarning, default_directory

PROBLEM = AttentionProblem(4, 16, 16, 4096, 4096, 128, 128, "bf16", "causal", "fwd")
NEAR = AttentionProblem(4, 16, 16, 4000, 4000, 128, 128, "bf16", "causal", "fwd")


@pytest.fixture
def gpu() -> Gpu:
    return load_gpu("h200")


def make_entry(
    problem: AttentionProblem = PROBLEM,
    *,
    median_us: float = 900.0,
    source: str = "measured",
    tile_n: int = 128,
    at: str = "2026-01-01T00:00:00",
    **changes: object,
) -> Entry:
    key = table_key(problem, load_gpu("h200"))
    fields: dict[str, object] = {
        "problem": str(problem),
        "hardware_key": key.hardware,
        "kernel_class": key.kernel_class,
        "bucket": key.bucket,
        "kernel_version": key.kernel_version,
        "config": SM90ForwardConfig(tile_n=tile_n).as_dict(),
        "source": source,
        "kernel": "measured" if source == "measured" else "absent",
        "median_us": median_us,
        "spread_us": 3.0 if source == "measured" else None,
        "default_us": 1000.0,
        "ratio": 1000.0 / median_us,
        "provenance": Provenance(gpu="NVIDIA H200", measured_at=at),
    }
    return Entry(**{**fields, **changes})  # type: ignore[arg-type]


def test_entry_survives_a_round_trip_through_its_file(tmp_path: Path, gpu: Gpu) -> None:
    table = Table(tmp_path, fallback=())
    entry = make_entry()
    path = table.put(entry)
    assert decode_entry(path.read_bytes()) == entry
    hit = table.lookup(PROBLEM, gpu)
    assert hit is not None
    assert hit.exact
    assert hit.entry.kernel_config() == SM90ForwardConfig()


def test_lookup_falls_back_to_the_nearest_problem_of_the_bucket(tmp_path: Path, gpu: Gpu) -> None:
    table = Table(tmp_path, fallback=())
    far = AttentionProblem(4, 16, 16, 3000, 3000, 128, 128, "bf16", "causal", "fwd")
    assert table_key(far, gpu) == table_key(PROBLEM, gpu)
    table.put(make_entry(far))
    table.put(make_entry(NEAR))
    hit = table.lookup(PROBLEM, gpu)
    assert hit is not None
    assert not hit.exact
    assert hit.entry.problem == str(NEAR)


def test_lookup_misses_another_class_bucket_or_gpu(tmp_path: Path, gpu: Gpu) -> None:
    table = Table(tmp_path, fallback=())
    table.put(make_entry())
    full = AttentionProblem.parse(str(PROBLEM).replace("causal", "full"))
    short = AttentionProblem.parse(str(PROBLEM).replace("4096", "512"))
    assert table.lookup(full, gpu) is None
    assert table.lookup(short, gpu) is None
    assert table.lookup(PROBLEM, load_gpu("h100")) is None


def test_measured_in_the_bucket_beats_predicted_for_the_exact_problem(tmp_path: Path, gpu: Gpu) -> None:
    table = Table(tmp_path, fallback=())
    table.put(make_entry(median_us=1.0, source="predicted"))
    assert table.lookup(PROBLEM, gpu).entry.source == "predicted"  # type: ignore[union-attr]
    table.put(make_entry(NEAR))
    hit = table.lookup(PROBLEM, gpu)
    assert hit is not None
    assert (hit.entry.source, hit.exact) == ("measured", False)


def test_written_table_is_looked_up_before_the_fallback(tmp_path: Path, gpu: Gpu) -> None:
    Table(tmp_path / "packaged", fallback=()).put(make_entry(median_us=500.0, tile_n=96))
    stacked = Table(tmp_path / "own", fallback=[tmp_path / "packaged"])
    assert stacked.lookup(PROBLEM, gpu).entry.config["tile_n"] == 96  # type: ignore[union-attr]
    stacked.put(make_entry(median_us=900.0, tile_n=112))
    assert stacked.lookup(PROBLEM, gpu).entry.config["tile_n"] == 112  # type: ignore[union-attr]


def test_prediction_never_overwrites_a_measurement(tmp_path: Path) -> None:
    table = Table(tmp_path, fallback=())
    path = table.put(make_entry())
    table.put(make_entry(median_us=1.0, source="predicted"))
    assert decode_entry(path.read_bytes()).source == "measured"


@pytest.mark.parametrize(
    ("new", "old", "winner"),
    [
        (make_entry(median_us=800, tile_n=96), make_entry(median_us=900), "new"),
        (make_entry(median_us=950, tile_n=96), make_entry(median_us=900), "old"),
        (make_entry(median_us=950, at="2026-02-01"), make_entry(median_us=900), "new"),
        (make_entry(median_us=1, source="predicted"), make_entry(median_us=900), "old"),
        (make_entry(median_us=900), make_entry(median_us=1, source="predicted"), "new"),
    ],
)
def test_better_keeps(new: Entry, old: Entry, winner: str) -> None:
    assert better(new, old) is (new if winner == "new" else old)


def _damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    entry = json.loads(data)
    if how == "torn":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "binary":
        path.write_bytes(bytes(range(256)))
    elif how == "list":
        path.write_text("[1, 2]")
    elif how == "foreign":
        path.write_text('{"configs": {"BLOCK_M": 128}}')
    elif how == "newer schema":
        path.write_text(json.dumps({**entry, "schema": SCHEMA + 1, "field_of_the_future": 1}))
    elif how == "knob missing":
        entry["config"].pop("kv_stages")
        path.write_text(json.dumps(entry))
    elif how == "knob out of range":
        entry["config"]["tile_n"] = 100
        path.write_text(json.dumps(entry))
    elif how == "knob of another type":
        entry["config"]["tile_n"] = "wide"
        path.write_text(json.dumps(entry))
    elif how == "problem":
        path.write_text(json.dumps({**entry, "problem": "b4_what"}))
    elif how == "copied from another place":
        path.write_text(json.dumps({**entry, "hardware_key": "sm_90a-114sm-hbm3"}))
    elif how == "time":
        path.write_text(json.dumps({**entry, "median_us": 0}))
    elif how == "nested deeply":
        path.write_text("[" * 100_000)
    elif how == "directory":
        path.unlink()
        path.mkdir()


DAMAGE = [
    "torn",
    "empty",
    "binary",
    "list",
    "foreign",
    "newer schema",
    "knob missing",
    "knob out of range",
    "knob of another type",
    "problem",
    "copied from another place",
    "time",
    "nested deeply",
    "directory",
]


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_entry_is_a_miss_with_one_warning(tmp_path: Path, gpu: Gpu, how: str) -> None:
    table = Table(tmp_path, fallback=())
    path = table.put(make_entry())
    _damage(path, how)
    with pytest.warns(TableWarning, match=r"is left out: .*fa4tune table check") as seen:
        assert table.lookup(PROBLEM, gpu) is None
    assert len(seen) == 1
    assert str(path) in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.lookup(PROBLEM, gpu) is None
    assert [fault.path for fault in table.faults()] == [path]
    if how == "newer schema":
        assert f"schema {SCHEMA + 1}" in table.faults()[0].reason


def test_damaged_entry_does_not_hide_a_good_one_of_the_bucket(tmp_path: Path, gpu: Gpu) -> None:
    table = Table(tmp_path, fallback=())
    path = table.put(make_entry())
    table.put(make_entry(NEAR))
    _damage(path, "torn")
    with pytest.warns(TableWarning):
        hit = table.lookup(PROBLEM, gpu)
    assert hit is not None
    assert hit.entry.problem == str(NEAR)
    table.put(make_entry())  # writing over the torn file heals it
    assert table.lookup(PROBLEM, gpu).exact  # type: ignore[union-attr]


def test_unwritable_table_gives_one_clear_sentence(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(TableError, match=r"cannot be written .*--table DIR"):
        Table(blocked / "table", fallback=()).put(make_entry())


def test_default_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FA4TUNE_TABLE")
    monkeypatch.setenv("FA4TUNE_DATA", str(tmp_path))
    assert default_directory() == tmp_path / "table"
    monkeypatch.setenv("FA4TUNE_TABLE", str(tmp_path))
    assert default_directory() == tmp_path
    assert Table().directory == tmp_path


def test_merge_takes_the_faster_and_keeps_its_provenance(tmp_path: Path) -> None:
    ours, theirs = Table(tmp_path / "a", fallback=()), Table(tmp_path / "b", fallback=())
    ours.put(make_entry(median_us=900))
    ours.put(make_entry(NEAR, median_us=700))
    theirs.put(make_entry(median_us=800, tile_n=96, provenance=Provenance(gpu="another H200")))
    theirs.put(make_entry(NEAR, median_us=750, tile_n=96))
    broken = theirs.put(make_entry(AttentionProblem.parse(str(PROBLEM).replace("hq16_hk16", "hq32_hk32"))))
    broken.write_text("{")
    changed, faults = ours.merge(tmp_path / "b")
    assert changed == 1
    assert [fault.path for fault in faults] == [broken]
    found = {entry.problem: entry for _, entry in ours.entries()}
    assert found[str(PROBLEM)].provenance.gpu == "another H200"
    assert found[str(NEAR)].median_us == 700
    assert ours.merge(tmp_path / "b")[0] == 0
    with pytest.raises(TableError, match="not a directory"):
        ours.merge(tmp_path / "nowhere")


def _write_many(directory: str, worker: int, writes: int) -> None:
    table = Table(directory, fallback=())
    for i in range(writes):
        shared = make_entry(median_us=float(1000 - worker * writes - i), tile_n=48 + 16 * worker)
        table.put(shared)
        own = AttentionProblem.parse(str(PROBLEM).replace("b4", f"b{1000 + 100 * worker + i}"))
        table.put(make_entry(own))


def test_concurrent_writers_lose_nothing_and_tear_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_many, args=(str(tmp_path), w, 15)) for w in range(3)]
    for worker in workers:
        worker.start()
    table = Table(tmp_path, fallback=())
    while any(worker.is_alive() for worker in workers):
        assert table.faults() == []  # no reader ever sees half an entry
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    found = {entry.problem: entry for _, entry in table.entries()}
    own = {f"b{1000 + 100 * w + i}" for w in range(3) for i in range(15)}
    assert own <= {problem.split("_", 1)[0] for problem in found}
    assert found[str(PROBLEM)].median_us == 1000 - 2 * 15 - 14  # the fastest of all that were written
    assert not list(tmp_path.rglob("*.tmp"))


def test_killed_writer_leaves_the_old_entry(
    tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path, fallback=())
    table.put(make_entry())

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        table.put(make_entry(median_us=1.0, tile_n=96))
    assert table.lookup(PROBLEM, gpu).entry.median_us == 900.0  # type: ignore[union-attr]


def test_unknown_schema_field_is_kept_out_of_older_readers() -> None:
    data = msgspec.json.decode(encode_entry(make_entry()))
    with pytest.raises(TableError, match="not an entry"):
        decode_entry(msgspec.json.encode({k: v for k, v in data.items() if k != "schema"}))
