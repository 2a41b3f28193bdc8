"""Parquet: rows by number, cells that are read late, damage that is named, and few decodings of a row group."""

import base64
import datetime
import decimal
import json
import logging
import pickle
import re
import struct
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from small import documents, strictly, write_recipe

import zephon
from zephon import DataError
from zephon.catalogue import Catalogue, Shard
from zephon.digest import lane_digest, step_digest
from zephon.formats import parquet
from zephon.formats.blobs import File
from zephon.formats.cache import ByteCache
from zephon.formats.parquet import GROUPS, CellBlob, ParquetReader, open_parquet
from zephon.types import Bad, Blob


def write(path: Path, columns: dict[str, Any] | pa.Table, group: int = 10, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, path, row_group_size=group, **options)
    return path


def opened(*paths: Path) -> tuple[list[Shard], ParquetReader]:
    return open_parquet({path.name: path for path in paths})


def rows_of(*paths: Path) -> list[Any]:
    shards, reader = opened(*paths)
    return list(strictly(reader, np.arange(sum(shard.rows for shard in shards))))


def one(values: pa.Array, tmp_path: Path) -> Any:
    """What the last row of a column becomes."""
    return rows_of(write(tmp_path / "one.parquet", {"x": values}, group=2))[-1]["x"]


# --- rows ----------------------------------------------------------------------------------------------------------


def test_rows_come_in_the_order_asked_for_across_groups_and_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{k}.parquet", {"n": range(100 * k, 100 * k + 35)}) for k in range(3)]
    shards, reader = opened(*paths)
    assert [(shard.name, shard.rows, shard.groups) for shard in shards] == [
        (f"{k}.parquet", 35, (10, 10, 10, 5)) for k in range(3)
    ]
    numbers = np.random.default_rng(1).integers(0, 105, 300)
    assert reader.read(numbers) == [{"n": 100 * (k // 35) + k % 35} for k in numbers.tolist()]
    assert reader.read(numbers[:0]) == []
    assert reader.place(0) == f"{paths[0]}, row 0 (row group 0)"
    assert reader.place(35 + 12) == f"{paths[1]}, row 12 (row group 1)"
    assert reader.place(104) == f"{paths[2]}, row 34 (row group 3)"


def test_files_and_row_groups_without_rows_are_passed_over(tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int64())])
    with pq.ParquetWriter(tmp_path / "b.parquet", schema) as out:
        for values in ([], [1, 2], [], [3], []):
            out.write_table(pa.table({"n": values}, schema))
    write(tmp_path / "a.parquet", pa.table({"other": pa.array([], pa.string())}))
    write(tmp_path / "c.parquet", pa.table({"n": pa.array([], pa.int64())}))
    shards, reader = opened(*(tmp_path / f"{name}.parquet" for name in "abc"))
    assert [shard.rows for shard in shards] == [0, 3, 0]
    assert reader.read(np.array([2, 0, 1])) == [{"n": 3}, {"n": 1}, {"n": 2}]
    chunks = Catalogue.of(shards, lanes=1, chunk_rows=None).chunks
    index = np.arange(chunks.count)
    assert chunks.sizes(index).sum() == 3


NOON = datetime.datetime(2024, 2, 29, 12, 0, 0, 123456)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (pa.array([None, "é"], pa.large_string()), "é"),
        (pa.array([None, "v"], pa.string_view()), "v"),
        (pa.array(["a", "b"]).dictionary_encode(), "b"),
        (pa.array([1, None]), None),
        (pa.array([None, decimal.Decimal("-12.34")], pa.decimal128(9, 2)), decimal.Decimal("-12.34")),
        (pa.array([NOON], pa.timestamp("us")), NOON),
        (pa.array([NOON], pa.timestamp("us", "UTC")), NOON.replace(tzinfo=datetime.UTC)),
        (pa.array([1_000_001_999], pa.timestamp("ns")), datetime.datetime(1970, 1, 1, 0, 0, 1, 1)),
        (pa.array([1999], pa.duration("ns")), datetime.timedelta(microseconds=1)),
        (pa.array([[1999]], pa.list_(pa.duration("ns"))), [datetime.timedelta(microseconds=1)]),
        (pa.array([[1999]], pa.large_list(pa.duration("ns"))), [datetime.timedelta(microseconds=1)]),
        (pa.array([[1999]], pa.list_(pa.duration("ns"), 1)), [datetime.timedelta(microseconds=1)]),
        (
            pa.array([{"t": 1999}], pa.struct([("t", pa.timestamp("ns"))])),
            {"t": datetime.datetime(1970, 1, 1, 0, 0, 0, 1)},
        ),
        (
            pa.array([[(1, [{"t": 1999}])]], pa.map_(pa.int8(), pa.list_(pa.struct([("t", pa.duration("ns"))])))),
            [(1, [{"t": datetime.timedelta(microseconds=1)}])],
        ),
        (pa.array([["v"]], pa.list_(pa.string_view())), ["v"]),
        (pa.array([NOON.date()]), NOON.date()),
        (pa.array([[{"a": 1, "b": [None, "x"]}]]), [{"a": 1, "b": [None, "x"]}]),
        (pa.array([[("k", b"v")]], pa.map_(pa.string(), pa.binary())), [("k", b"v")]),
        (pa.nulls(1), None),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_values_are_what_python_has(values: pa.Array, wanted: Any, tmp_path: Path) -> None:
    found = one(values, tmp_path)
    assert found == wanted
    assert type(found) is type(wanted)
    assert "Time" not in repr(found)  # pandas' Timestamp and Timedelta, which equal Python's


def test_old_timestamps_of_96_bits_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"t": pa.array([NOON])}, use_deprecated_int96_timestamps=True)
    assert rows_of(path) == [{"t": NOON}]


# --- cells ---------------------------------------------------------------------------------------------------------

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
WHOLE = bytes(range(200))
CELLS: list[tuple[pa.DataType, Any]] = [
    (pa.binary(), WHOLE),
    (pa.large_binary(), WHOLE),
    (pa.binary_view(), WHOLE),
    (pa.binary(200), WHOLE),
    (pa.dictionary(pa.int32(), pa.binary()), WHOLE),
    (IMAGE, {"bytes": WHOLE, "path": "a.jpg"}),
    (pa.list_(pa.binary()), [b"", WHOLE, None]),
    (pa.large_list(pa.binary()), [WHOLE]),
    (pa.list_(pa.binary(), 2), [b"x", WHOLE]),
    (pa.list_(IMAGE), [{"bytes": WHOLE, "path": None}, None, {"bytes": None, "path": "c"}]),
    (pa.struct([("pages", pa.list_(pa.list_(IMAGE)))]), {"pages": [[], [{"bytes": WHOLE, "path": "d"}], None]}),
]


def fetched(value: Any) -> Any:
    """The value with bytes in place of blobs; that there were no bytes is checked."""
    assert not isinstance(value, bytes)
    if isinstance(value, CellBlob):
        blob: Blob = pickle.loads(pickle.dumps(value))
        data = blob.read()
        assert blob == value
        assert len(data) == blob.size
        assert [blob.head(size) for size in (0, 3, 10_000)] == [b"", data[:3], data]
        return data
    if isinstance(value, dict):
        return {name: fetched(part) for name, part in value.items()}
    return [fetched(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("kind", "value"), CELLS, ids=lambda value: str(value) if isinstance(value, pa.DataType) else ""
)
def test_binary_cells_are_read_late(kind: pa.DataType, value: Any, tmp_path: Path) -> None:
    gap = value if pa.types.is_fixed_size_list(kind) else None  # older pyarrow reads no gaps between those
    values = [gap, value, value, gap, value]
    plain = pa.array(values, kind.value_type if pa.types.is_dictionary(kind) else kind)
    column = plain.dictionary_encode() if pa.types.is_dictionary(kind) else plain
    _, reader = opened(write(tmp_path / "x.parquet", {"n": range(5), "cell": column}, group=3))
    order = np.array([4, 2, 0, 1, 3])
    found = reader.read(order)
    assert [fetched(row) for row in found] == [{"n": i, "cell": values[i]} for i in order.tolist()]
    reader.close()  # nothing is kept now: a blob decodes its column alone
    assert [fetched(row["cell"]) for row in found] == [values[i] for i in order.tolist()]
    assert all(key[2] != "n" for key in GROUPS._kept)


def test_a_cell_says_where_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"images": pa.array([[], [None, {"bytes": b"x"}]], pa.list_(IMAGE))})
    blob = rows_of(path)[1]["images"][1]["bytes"]
    assert blob.place == f"{path}, row group 0, row 1 of it, images[1].bytes"
    assert len(pickle.dumps(blob)) < 200 + len(str(path))


def test_a_cell_is_read_in_another_process(tmp_path: Path) -> None:
    blob = rows_of(write(tmp_path / "x.parquet", {"a": range(3), "b": [b"0", b"1", WHOLE]}, group=2))[2]["b"]
    code = "import pickle, sys; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer).read())"
    assert subprocess.run([sys.executable, "-c", code], input=pickle.dumps(blob), stdout=-1, check=True).stdout == WHOLE


def test_names_with_dots_are_names(tmp_path: Path) -> None:
    columns = {"a": pa.array([{"b": b"in"}]), "a.b": [b"dotted"]}
    _, reader = opened(write(tmp_path / "x.parquet", columns))
    row = reader.read(np.array([0]))[0]
    reader.close()
    assert fetched(row) == {"a": {"b": b"in"}, "a.b": b"dotted"}


# --- what is refused -----------------------------------------------------------------------------------------------


def bad_text(kind: str) -> pa.Array:
    raw = pa.array([b"fine", b"ab\xff", b"fine"])
    texts = pa.StringArray.from_buffers(3, *raw.buffers()[1:])
    if kind == "struct":
        return pa.StructArray.from_arrays([texts, pa.array([b"x"] * 3)], ["t", "b"])
    return texts if kind == "top" else pa.ListArray.from_arrays(pa.array([0, 1, 2, 3]), texts)


@pytest.mark.parametrize("kind", ["top", "list", "struct"])
def test_text_that_is_not_utf8_names_its_row_and_column(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"n": range(3), "t": bad_text(kind)}, group=2)
    _, reader = opened(path)
    assert reader.read(np.array([0, 2]))[0]["n"] == 0
    with pytest.raises(DataError, match=r"x.parquet, row 1 \(row group 0\): column 't' is not valid UTF-8 at byte 2"):
        strictly(reader, np.array([2, 0, 1]))


def test_a_time_that_python_does_not_have_names_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"t": pa.array([0, 2**60], pa.timestamp("us"))})
    with pytest.raises(DataError, match=r"row 1 \(row group 0\): column 't' is no value of Python's"):
        rows_of(path)


def damaged(path: Path, change: Any) -> Path:
    raw = bytearray(path.read_bytes())
    path.write_bytes(change(raw))
    return path


def put(raw: bytearray, at: int, data: bytes) -> bytearray:
    raw[at : at + len(data)] = data
    return raw


TEXTS = {"text": [f"word {i}" for i in range(3000)]}


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: b"PAR1PAR1",
        lambda raw: put(raw, len(raw) - 8, b"\xff\xff\xff\x7f"),
        lambda raw: put(raw, len(raw) - 60, b"\xff" * 40),
    ],
    ids=["last byte", "half", "nothing", "magic alone", "footer length", "footer"],
)
def test_a_damaged_footer_is_refused_at_once(change: Any, tmp_path: Path) -> None:
    path = damaged(write(tmp_path / "x.parquet", TEXTS), change)
    with pytest.raises(DataError, match=r"x.parquet.* (does not end as|footer cannot be read).*damaged"):
        opened(path)


@pytest.mark.parametrize("codec", ["zstd", "snappy", "gzip"])
def test_damaged_pages_are_named_when_they_are_read(codec: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", TEXTS, group=1500, compression=codec, use_dictionary=False)
    at = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    damaged(path, lambda raw: put(raw, at + 3, b"\xff" * 300))
    _, reader = opened(path)
    good, bad, other = reader.read(np.array([7, 2000, 8]))
    assert [good, other] == [{"text": "word 7"}, {"text": "word 8"}]
    assert isinstance(bad, Bad)
    assert re.search(r"x.parquet: row group 1 cannot be read.*damaged", bad.reason)


def test_a_damaged_group_costs_its_rows_and_nothing_else(tmp_path: Path) -> None:
    """Skipped alike at every number of ranks; what is left comes in the order in which it would have come."""
    texts = {"text": documents(400)}
    path = write(tmp_path / "data" / "x.parquet", texts, group=20, compression="zstd", use_dictionary=False)
    source = '[[sources]]\nname = "x"\npaths = ["data/*.parquet"]\non_error = "skip"\nmax_bad = 0.2\n'
    recipe = write_recipe(tmp_path, sources=source)
    at = pq.read_metadata(path).row_group(3).column(0).data_page_offset
    damaged(path, lambda raw: put(raw, at + 3, b"\xff" * 300))
    seen: list[Any] = []
    with zephon.Stream.open(recipe) as stream:
        for world in (1, 4):
            loaders = [stream.loader(rank, world) for rank in range(world)]
            digests, skips = [], set[str]()
            while len(skips) < 20:
                parts = [loader.step_records() for loader in loaders]
                digests.append(step_digest({lane: lane_digest(mine) for part in parts for lane, mine in part.items()}))
                skips |= {one.place for loader in loaders for one in loader.take_skipped()}
            seen.append((digests, sorted(skips)))
    assert seen[0] == seen[1]
    assert seen[0][1] == sorted(f"{path}, row {row} (row group 3)" for row in range(60, 80))


def test_checksums_of_pages_are_compared(tmp_path: Path) -> None:
    plain = {"compression": "none", "use_dictionary": False}
    for checked in (False, True):
        path = write(tmp_path / f"{checked}.parquet", TEXTS, 3000, write_page_checksum=checked, **plain)
        damaged(path, lambda raw: raw.replace(b"word 777", b"word 778"))
        if checked:
            with pytest.raises(DataError, match=r"True.parquet: row group 0 cannot be read .*CRC"):
                rows_of(path)
        else:
            assert rows_of(path)[777] == {"text": "word 778"}  # nothing can notice that


class Kms(pe.KmsClient):
    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        return base64.b64decode(wrapped_key)


@pytest.mark.parametrize("plain", [False, True])
def test_encrypted_files_are_refused(plain: bool, tmp_path: Path) -> None:
    config = pe.EncryptionConfiguration(footer_key="f", column_keys={"c": ["text"]}, plaintext_footer=plain)
    factory = pe.CryptoFactory(lambda _: Kms())
    keys = factory.file_encryption_properties(pe.KmsConnectionConfig(), config)
    path, table = tmp_path / "x.parquet", pa.table(TEXTS)
    with pq.ParquetWriter(path, table.schema, encryption_properties=keys) as out:
        out.write_table(table)
    with pytest.raises(DataError, match=r"x.parquet.*([Ee]ncrypted|decrypt)"):
        rows_of(path)


def test_columns_that_differ_between_files_are_refused(tmp_path: Path) -> None:
    base = write(tmp_path / "a.parquet", {"text": ["x"], "n": [1]})
    for name, columns, told in [
        ("type", {"text": ["x"], "n": ["1"]}, r"'n'.*INT64 None in .*a.parquet, BYTE_ARRAY String in .*type.parquet"),
        ("less", {"text": ["x"]}, r"'n'.*INT64 None in .*a.parquet, missing in .*less.parquet"),
        ("more", {"text": ["x"], "n": [1], "m": [2]}, r"'m'.*missing in .*a.parquet, INT64 None in .*more.parquet"),
        ("unit", {"text": ["x"], "n": pa.array([1], pa.timestamp("us"))}, r"'n'.*Timestamp"),
    ]:
        with pytest.raises(DataError, match=told):
            opened(base, write(tmp_path / f"{name}.parquet", columns))


def test_columns_that_differ_in_name_only_are_one(tmp_path: Path) -> None:
    """How a column is held in memory, the order of columns, and whether any value is there, change no row."""
    same: list[dict[str, Any]] = [
        {"text": ["x"], "n": [1]},
        {"n": [1], "text": pa.array(["x"], pa.large_string())},
        {"text": pa.array(["x"]).dictionary_encode(), "n": [1]},
    ]
    paths = [write(tmp_path / f"{k}.parquet", columns) for k, columns in enumerate(same)]
    assert rows_of(*paths) == [{"text": "x", "n": 1}] * 3
    nulls = write(tmp_path / "nulls.parquet", {"text": ["y"], "n": pa.nulls(1)})
    assert rows_of(*paths, nulls)[-1] == {"text": "y", "n": None}


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(DataError, match="several columns of one name"):
        rows_of(write(tmp_path / "x.parquet", table))


def varint(value: int) -> bytes:
    """As thrift's compact protocol writes a number."""
    value, out = value << 1, b""
    while value > 127:
        value, out = value >> 7, out + bytes([value & 127 | 128])
    return out + bytes([value])


def test_a_row_group_that_is_said_to_be_absurdly_large_is_refused_from_the_footer(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", TEXTS | {"n": range(3000)}, group=3000)
    raw, size = path.read_bytes(), pq.read_metadata(path).row_group(0).total_byte_size
    footer = raw[-8 - struct.unpack("<I", raw[-8:-4])[0] : -8]
    assert footer.count(varint(size)) == 1
    footer = footer.replace(varint(size), varint(5 << 30))
    path.write_bytes(raw[: -8 - len(footer)] + footer + struct.pack("<I", len(footer)) + b"PAR1")
    with pytest.raises(DataError, match=r"row group 0 is said to hold 3000 rows, 5368709120 bytes.*row_group_size"):
        opened(path)


def test_large_row_groups_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "LARGE_BYTES", 8000)
    with caplog.at_level(logging.WARNING):
        opened(*(write(tmp_path / f"{k}.parquet", TEXTS, group=group) for k, group in enumerate((100, 1000, 3000))))
    (record,) = caplog.records
    assert "4 row group(s) hold more than" in record.getMessage()
    assert "2.parquet" in record.getMessage()
    assert "row_group_size=1000" in record.getMessage()


def test_without_pyarrow_the_extra_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path\n"
        "from zephon.formats.parquet import open_parquet\n"
        f"open_parquet({{'x': Path({str(write(tmp_path / 'x.parquet', TEXTS))!r})}})\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert "pip install -e '.[parquet]'" in told


# --- files that change, and what is remembered of them --------------------------------------------------------------


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"text": [f"text {i}" for i in range(40)], "b": [b"b"] * 40})
    _, reader = opened(path)
    row = reader.read(np.array([3]))[0]
    stat = path.stat()
    damaged(path, lambda raw: put(raw, 10, b"other"))
    assert reader.read(np.array([4]))[0]["text"] == "text 4"  # decoded before that
    with pytest.raises(DataError, match=r"x.parquet was changed .*while the run reads it"):
        reader.read(np.array([30]))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"x.parquet was changed"):
        reader.read(np.array([20]))
    reader.close()
    with pytest.raises(DataError, match=r"x.parquet was changed"):
        row["b"].read()
    path.unlink()
    reader.close()
    with pytest.raises(DataError, match=r"x.parquet cannot be read"):
        row["b"].head(1)
    assert stat.st_size != 100


def test_the_hash_is_of_the_footer(tmp_path: Path) -> None:
    first, same, other, longer = (
        opened(write(tmp_path / f"{k}.parquet", {"text": texts}))[0][0]
        for k, texts in enumerate((["a", "b"], ["a", "b"], ["a", "c"], ["a", "b", "b"]))
    )
    assert first.sha256 == same.sha256
    assert len({first.sha256, other.sha256, longer.sha256}) == 3
    assert first.bytes == sum(first.group_bytes) > 0


def test_progress_counts_whole_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{k}.parquet", TEXTS) for k in range(5)]
    told: list[tuple[int, int]] = []
    open_parquet({path.name: path for path in paths}, lambda done, total: told.append((done, total)))
    size = paths[0].stat().st_size
    assert told == [(k * size, 5 * size) for k in range(1, 6)]
    assert not list(tmp_path.glob("*.idx"))


def test_a_long_footer_is_read_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {f"column {i}": range(200) for i in range(40)}, group=2)
    assert pq.read_metadata(path).serialized_size > parquet._TAIL
    assert opened(path)[0][0].groups == (2,) * 100
    assert rows_of(path)[137]["column 3"] == 137


# --- what is kept --------------------------------------------------------------------------------------------------


def key(number: int) -> Any:
    return File("x", 1, 1), number, None


def test_the_cache_keeps_what_was_used_last_up_to_its_bytes() -> None:
    cache = ByteCache(30, 30)
    for number in (1, 2, 3, 1, 4):
        assert cache.get(key(number), lambda number=number: (f"group {number}", 10)) == f"group {number}"
    assert (cache.made, cache.bytes) == (4, 30)
    assert [cache.find(key(number)) for number in (1, 2, 3, 4)] == ["group 1", None, "group 3", "group 4"]
    cache.get(key(5), lambda: ("large", 100))
    assert cache.bytes == 100  # one that is larger than all is kept, alone
    cache.forget({key(5)[0]})
    assert cache.bytes == 0


def test_the_cache_grows_for_what_is_decoded_again_and_no_further() -> None:
    cache = ByteCache(20, 50)
    for _ in range(8):
        for number in range(4):
            cache.get(key(number), lambda: ("", 10))
    assert cache.bytes == 40
    made = cache.made
    for number in range(4):
        cache.get(key(number), lambda: ("", 10))
    assert cache.made == made
    for number in range(10, 100):  # each is used once: no reason to grow
        cache.get(key(number), lambda: ("", 10))
    assert cache.bytes == 40
    for _ in range(5):
        for number in range(200, 208):
            cache.get(key(number), lambda: ("", 10))
            assert cache.bytes <= 50


def test_a_failure_is_not_kept() -> None:
    cache = ByteCache(20, 50)

    def fail() -> tuple[Any, int]:
        raise DataError("damaged")

    for _ in range(2):
        with pytest.raises(DataError):
            cache.get(key(1), fail)
    assert not cache._making  # nor is anything of it
    assert cache.get(key(1), lambda: ("good", 1)) == "good"


def test_threads_read_at_once_and_decode_a_group_once(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{k}.parquet", {"n": range(1000 * k, 1000 * k + 500)}, group=50) for k in range(4)]
    _, reader = opened(*paths)
    before, start = GROUPS.made, threading.Barrier(8)

    def work(seed: int) -> bool:
        numbers = np.random.default_rng(seed).integers(0, 2000, 3000)
        start.wait()
        return [row["n"] for row in reader.read(numbers)] == [1000 * (k // 500) + k % 500 for k in numbers.tolist()]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert GROUPS.made - before == 40 + 4  # groups and footers


# --- streams -------------------------------------------------------------------------------------------------------


def stream_recipe(folder: Path, group: int = 7, **options: Any) -> Path:
    """As `write_recipe`, with source `a` in Parquet."""
    write(folder / "p" / "one.parquet", {"text": documents(60), "id": range(60)}, group)
    write(folder / "p" / "two.parquet", {"text": documents(40, 60), "id": range(40)}, group)
    sources = (
        '[[sources]]\nname = "a"\npaths = ["p/*.parquet"]\nweight = 0.7\n'
        '[[sources]]\nname = "b"\npaths = ["b/*.jsonl"]\nweight = 0.3\n'
    )
    return write_recipe(folder, sources=sources, **options)


def digests(recipe: Path, world: int, steps: int, state: dict[str, bytes] | None = None) -> tuple[list[str], Any]:
    with zephon.Stream.open(recipe) as stream:
        loaders = [stream.loader(rank=rank, world=world) for rank in range(world)]
        for loader in loaders if state else ():
            loader.load_state_dict(state)
        found = []
        for _ in range(steps):
            records = {lane: mine for loader in loaders for lane, mine in loader.step_records().items()}
            found.append(step_digest({lane: lane_digest(mine) for lane, mine in records.items()}))
        return found, {key: value for loader in loaders for key, value in loader.state_dict().items()}


@pytest.mark.parametrize("group", [3, 7, 60])
def test_steps_are_the_same_on_any_ranks_and_after_a_resume(group: int, tmp_path: Path) -> None:
    recipe = stream_recipe(tmp_path, group)
    whole, _ = digests(recipe, 1, 12)
    for world in (2, 4):
        first, state = digests(recipe, world, 5)
        assert first == whole[:5]
        assert digests(recipe, 4 // world, 7, state)[0] == whole[5:]


def test_processes_give_the_same_steps(tmp_path: Path) -> None:
    recipe = stream_recipe(tmp_path)
    inline, _ = digests(recipe, 1, 3)
    recipe.write_text(recipe.read_text() + 'runner = "process"\nworkers = 2\n')
    assert digests(recipe, 1, 3)[0] == inline


def test_a_finite_stream_delivers_every_row_once(tmp_path: Path) -> None:
    recipe = stream_recipe(tmp_path, tail='[mix]\non_end = "renormalise"')
    recipe.write_text(recipe.read_text().replace("lanes = 4", ""))
    with zephon.Stream.open(recipe) as stream:
        source = stream.sources[0]
        order = stream.lane_sources[0].order
        seen = Counter[int]()
        assert order.groups is not None
        for number in range(order.groups):
            rows = order.group(0, number)
            seen.update(source.catalogue.chunks.rows(rows.chunk, rows.row).tolist())
        assert seen == Counter(range(100))
        assert source.reader.read(np.array([61]))[0]["text"] == documents(40, 60)[1]


def test_other_files_are_not_resumed(tmp_path: Path) -> None:
    recipe = stream_recipe(tmp_path, 7)
    _, state = digests(recipe, 1, 2)
    stream_recipe(tmp_path, 8)  # the same rows in other row groups: another order
    with pytest.raises(zephon.UsageError, match="catalogue"):
        digests(recipe, 1, 2, state)


def test_rows_are_those_of_jsonl(tmp_path: Path) -> None:
    rows = [{"text": text, "n": i, "tags": ["x"] * (i % 3), "at": {"page": i}} for i, text in enumerate(documents(30))]
    path = write(tmp_path / "x.parquet", pa.Table.from_pylist(rows))
    assert json.loads(json.dumps(rows_of(path))) == rows
    assert not (tmp_path / "cache").exists()
