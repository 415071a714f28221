"""The store of states: nothing is lost, doubled, mixed up or silently changed, whatever is killed and wherever."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mtp_train.data.dataset import PackedBatches
from mtp_train.data.manifest import ShardInfo
from mtp_train.data.shards import Header, Manifest, ShardReader, ShardWriter, merge, part_name, read_manifest, stored_ids, verify, write_shard
from mtp_train.interfaces import Sample, Tap, TargetInfo

TARGET = TargetInfo("toy", "", "w" * 64, "llama", "float32", "", 8, 4, 256, "tok", "chat")
HEADER = Header(TARGET, (Tap(2, "pre"), Tap(4, "post")), {"name": "embedded", "version": "1"}, "corpus-a", "float32")


def make_sample(number: int, header: Header = HEADER, length: int | None = None) -> Sample:
    """A sample that depends on its number alone."""
    rng = torch.Generator().manual_seed(number)
    size = length or int(torch.randint(3, 10, (), generator=rng))
    mask = torch.arange(size) >= size // 2
    states = torch.randn(size, len(header.taps), header.target.hidden_size, generator=rng)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[header.state_dtype]
    return Sample(f"row {number} é\ud800", f"domain{number % 3}", torch.randint(0, 256, (size,), generator=rng), mask, states.to(dtype))


def write_part(directory: Path, numbers: range, part: int = 0, num_parts: int = 1, header: Header = HEADER, shard_tokens: int = 20) -> None:
    """Capture as precompute does it: only what is not stored."""
    writer = ShardWriter(directory, header, shard_tokens, part, num_parts)
    for number in numbers:
        sample = make_sample(number, header)
        if sample.id not in writer.stored:
            writer.add(sample)
    writer.finish()


def assert_same(got: Sample, expected: Sample) -> None:
    assert (got.id, got.domain) == (expected.id, expected.domain)
    for name in ("input_ids", "loss_mask", "hidden_states"):
        mine, theirs = getattr(got, name), getattr(expected, name)
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine, theirs), name


def hashes(manifest: Manifest) -> list[tuple[str, str]]:
    return [(shard.file, shard.sha256) for shard in manifest.shards]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("taps", [(Tap(4, "post"),), (Tap(0, "pre"), Tap(4, "pre"), Tap(4, "post"))])
def test_round_trip_is_bit_exact(tmp_path: Path, dtype: str, taps: tuple[Tap, ...]) -> None:
    header = replace(HEADER, taps=taps, state_dtype=dtype)
    write_part(tmp_path, range(12), header=header)
    manifest = merge(tmp_path)
    reader = ShardReader(tmp_path, max_open=1)
    assert len(manifest.shards) > 2
    assert reader.manifest == manifest == Manifest.from_json(manifest.to_json()) == verify(tmp_path)
    order = list(range(12))
    random.Random(0).shuffle(order)
    for i in order:
        assert_same(reader[i], make_sample(i, header))
    samples = [make_sample(i, header) for i in range(12)]
    assert reader.lengths.tolist() == [len(s.input_ids) for s in samples]
    assert reader.supervised.tolist() == [int(s.loss_mask.sum()) for s in samples]
    assert reader.domains == [s.domain for s in samples]
    counts = reader.token_counts(256)
    assert counts.keys() == {"domain0", "domain1", "domain2"}
    for domain, found in counts.items():
        supervised = torch.cat([s.input_ids[s.loss_mask] for s in samples if s.domain == domain])
        assert torch.equal(found, torch.stack([(supervised == token).sum() for token in range(256)]))
    assert sum(s.tokens for s in manifest.shards) == sum(len(s.input_ids) for s in samples)
    with pytest.raises(IndexError):
        reader[12]


def test_the_file_is_plain_safetensors_with_a_small_header(tmp_path: Path) -> None:
    samples = [make_sample(i, length=2) for i in range(300)]
    info = write_shard(tmp_path / "a.safetensors", samples, HEADER)
    tensors = load_file(tmp_path / "a.safetensors")
    assert set(tensors) == {"offsets", "supervised", "input_ids", "hidden_states", "loss_mask", "names"}
    assert info.bytes == (tmp_path / "a.safetensors").stat().st_size
    assert torch.equal(tensors["hidden_states"], torch.cat([s.hidden_states for s in samples]))
    assert tensors["hidden_states"].shape == (600, 2, 8)
    with open(tmp_path / "a.safetensors", "rb") as file:
        assert int.from_bytes(file.read(8), "little") < 1000
    save_file(tensors, tmp_path / "b.safetensors")  # the library lays the same tensors out in the same number of bytes, header padding apart
    assert abs((tmp_path / "b.safetensors").stat().st_size - info.bytes) < 200


def test_frequent_tokens_and_how_much_of_each_domain_they_cover(tmp_path: Path) -> None:
    """Targets of one domain 5 5 5 7, of the other 7 9: the two most frequent tokens are 5 and 7."""
    writer = ShardWriter(tmp_path, HEADER, 100)
    for domain, ids in (("one", [5, 5, 5, 7]), ("other", [7, 9])):
        writer.add(Sample(domain, domain, torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool), torch.zeros(len(ids), 2, TARGET.hidden_size)))
    writer.finish()
    merge(tmp_path)
    chosen, shares = ShardReader(tmp_path).frequent_tokens(2, 256)
    assert chosen.tolist() == [5, 7]
    assert shares == {"one": 1.0, "other": 0.5}


def test_a_reader_picks_taps_in_the_order_asked_for(tmp_path: Path) -> None:
    header = replace(HEADER, taps=(Tap(1, "pre"), Tap(2, "pre"), Tap(4, "post")))
    write_part(tmp_path, range(3), header=header)
    merge(tmp_path)
    asked = (Tap(2, "pre"), Tap(1, "pre"), Tap(4, "post"))
    assert torch.equal(ShardReader(tmp_path, taps=asked)[1].hidden_states, make_sample(1, header).hidden_states[:, [1, 0, 2]])
    assert torch.equal(ShardReader(tmp_path, taps=asked[2:])[1].hidden_states, make_sample(1, header).hidden_states[:, 2:])
    with pytest.raises(ValueError, match=r"after layers 1 \(pre\), 2 \(pre\), 4 \(post\); the head also reads 3 \(pre\)"):
        ShardReader(tmp_path, taps=(Tap(3, "pre"), Tap(4, "post")))


def test_a_read_sample_may_be_written_to(tmp_path: Path) -> None:
    write_part(tmp_path, range(3))
    merge(tmp_path)
    reader = ShardReader(tmp_path)
    reader[1].hidden_states.zero_()
    assert_same(reader[1], make_sample(1))


def test_the_writer_copies_what_it_is_given(tmp_path: Path) -> None:
    whole = make_sample(0, length=30)
    view = replace(whole, input_ids=whole.input_ids[:7], loss_mask=whole.loss_mask[:7], hidden_states=whole.hidden_states[:7])
    expected = replace(view, input_ids=view.input_ids.clone(), hidden_states=view.hidden_states.clone())
    writer = ShardWriter(tmp_path, HEADER, 1000)
    writer.add(view)
    whole.hidden_states.zero_()
    whole.input_ids.zero_()
    writer.finish()
    merge(tmp_path)
    assert_same(ShardReader(tmp_path)[0], expected)


def test_empty_parts_and_empty_shards(tmp_path: Path) -> None:
    write_part(tmp_path, range(0), 0, 2)
    write_part(tmp_path, range(4), 1, 2)
    manifest = merge(tmp_path)
    assert [s.id for s in map(ShardReader(tmp_path).__getitem__, range(4))] == [make_sample(i).id for i in range(4)]
    info = write_shard(tmp_path / "part-00000-of-00002-shard-00000.safetensors", [], HEADER)
    (tmp_path / "manifest.json").write_text(replace(manifest, shards=(info, *manifest.shards)).to_json())
    assert len(ShardReader(tmp_path)) == 4
    assert verify(tmp_path)
    write_part(tmp_path / "none", range(0))
    merge(tmp_path / "none")
    assert len(ShardReader(tmp_path / "none")) == 0
    assert ShardReader(tmp_path / "none").token_counts(9) == {}


# ---------------------------------------------------------------- kills


def capture_until(directory: str, kill_at: int) -> None:
    """Capture 8 rows as part 0 of 2, killed (SIGKILL, nothing runs after it) just before the `kill_at`-th step on the file system."""
    seen = 0

    def count(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.rename", "os.remove", "os.listdir", "os.scandir") and directory in str(args[0]):
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    write_part(Path(directory), range(8), 0, 2)


def sweep(root: str) -> None:
    """Kill at every step in turn, in forks; go on from each; print the steps and what differed from an undisturbed capture."""
    torch.set_num_threads(1)
    write_part(Path(root) / "whole", range(8), 0, 2)
    expected = listing(Path(root) / "whole")
    different = []
    for kill_at in range(1, 1000):
        directory = Path(root) / f"at{kill_at}"
        pid = os.fork()
        if pid == 0:
            capture_until(str(directory), kill_at)
            os._exit(0)
        if os.WIFEXITED(os.waitpid(pid, 0)[1]):
            break
        write_part(directory, range(8), 0, 2)
        different += [kill_at] if listing(directory) != expected else []
    sys.stdout.write(json.dumps({"steps": kill_at - 1, "different": different}))


def listing(directory: Path) -> dict[str, bytes]:
    """Everything but the claim, which names the process."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix != ".lock"}


@pytest.mark.slow
def test_killed_anywhere_and_resumed_equals_undisturbed(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", f"from tests.test_shards import sweep; sweep({str(tmp_path)!r})"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["steps"] > 30
    assert result["different"] == []


def test_the_comparison_after_a_kill_sees_faults(tmp_path: Path) -> None:
    """Seeded faults: what a writer that does not recover would leave."""
    for name in ("a", "b"):
        write_part(tmp_path / name, range(14), 0, 2)
    expected = listing(tmp_path / "a")
    assert listing(tmp_path / "b") == expected
    (tmp_path / "b" / f".{part_name(0, 2)}-shard-00009.safetensors.host.1.abc.tmp").write_bytes(b"half")
    assert listing(tmp_path / "b") != expected
    write_part(tmp_path / "b", range(14), 0, 2)
    assert listing(tmp_path / "b") == expected
    index = tmp_path / "b" / f"{part_name(0, 2)}.json"
    index.write_text(index.read_text().replace('"complete": true', '"complete": false'))
    assert listing(tmp_path / "b") != expected


def test_recovery_touches_its_own_part_alone(tmp_path: Path) -> None:
    write_part(tmp_path, range(4), 0, 2)
    write_part(tmp_path, range(4, 8), 1, 2)
    own = [tmp_path / f".{part_name(0, 2)}.json.host.1.abc.tmp", tmp_path / f"{part_name(0, 2)}-shard-00007.safetensors"]
    other = [tmp_path / f".{part_name(1, 2)}.json.host.1.abc.tmp", tmp_path / f"{part_name(1, 2)}-shard-00007.safetensors", tmp_path / "notes.tmp"]
    for path in own + other:
        path.write_bytes(b"left")
    write_part(tmp_path, range(4), 0, 2)
    assert not any(path.exists() for path in own)
    assert all(path.exists() for path in other)


def test_a_lost_shard_is_captured_again_and_comes_back_equal(tmp_path: Path) -> None:
    write_part(tmp_path, range(14))
    before, raw = merge(tmp_path), listing(tmp_path)
    (tmp_path / before.shards[1].file).write_bytes(b"short")
    assert len(stored_ids(tmp_path, 0)) == 14 - before.shards[1].samples
    writer = ShardWriter(tmp_path, HEADER, 20)
    assert not (tmp_path / "manifest.json").exists()  # withdrawn
    with pytest.raises(ValueError, match=r"part-00000-of-00001"):
        merge(tmp_path)
    del writer
    write_part(tmp_path, range(14))
    assert hashes(merge(tmp_path)) == hashes(before)
    assert listing(tmp_path) == raw


def test_repeating_a_finished_part_changes_nothing(tmp_path: Path) -> None:
    write_part(tmp_path, range(8))
    merge(tmp_path)
    raw, times = listing(tmp_path), {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    write_part(tmp_path, range(8))
    assert listing(tmp_path) == raw
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if ".lock" not in path.name}.items() <= times.items()
    assert merge(tmp_path) == read_manifest(tmp_path)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, HEADER, 10_000)
    writer.add(make_sample(0, length=50))
    writer.flush()
    before = listing(tmp_path)
    writer.add(make_sample(1, length=500))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, hard))  # stands in for a full disk: the write itself fails with an errno
    try:
        with pytest.raises(OSError, match="finished shards are kept") as caught:
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert listing(tmp_path) == before
    writer.finish()  # room was made
    merge(tmp_path)
    assert_same(ShardReader(tmp_path)[1], make_sample(1, length=500))


# ---------------------------------------------------------------- refusals


def spoiled(**changes: object) -> Sample:
    return replace(make_sample(1, length=6), **changes)


NAN = make_sample(1, length=6).hidden_states.clone()
NAN[3, 1, 2] = float("nan")


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (spoiled(hidden_states=torch.zeros(2, 6, 8)), ["(2, 6, 8)", "(6, 2, 8)"]),  # axes swapped
        (spoiled(hidden_states=torch.zeros(5, 2, 8)), ["(5, 2, 8)", "(6, 2, 8)"]),
        (spoiled(hidden_states=torch.zeros(6, 1, 8)), ["(6, 1, 8)", "(6, 2, 8)"]),
        (spoiled(hidden_states=torch.zeros(6, 2, 9)), ["(6, 2, 9)", "(6, 2, 8)"]),
        (spoiled(hidden_states=torch.zeros(6, 2, 8, dtype=torch.int8)), ["int8"]),
        (spoiled(loss_mask=torch.ones(5, dtype=torch.bool)), ["(6,)", "(5,)"]),
        (spoiled(loss_mask=torch.ones(6)), ["float32", "torch.bool"]),
        (spoiled(hidden_states=NAN), ["inf or NaN", "token 3", "layer=4", "bfloat16"]),
        (spoiled(id=make_sample(0).id), ["already stored", part_name(0, 1)]),
        (Sample("empty", "d", torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool), torch.zeros(0, 2, 8)), ["(0,)", "T > 0"]),
    ],
)
def test_a_wrong_sample_is_refused_by_name(tmp_path: Path, sample: Sample, words: list[str]) -> None:
    writer = ShardWriter(tmp_path, HEADER, 1000)
    writer.add(make_sample(0))
    with pytest.raises(ValueError) as caught:
        writer.add(sample)
    assert all(word in str(caught.value) for word in [repr(sample.id), *words]), caught.value
    writer.finish()
    merge(tmp_path)
    assert ShardReader(tmp_path).ids == [make_sample(0).id]


@pytest.mark.parametrize(("dtype", "large", "refused"), [("float16", 1e5, True), ("bfloat16", 1e5, False), ("float32", 1e30, False), ("float16", 6e4, False)])
def test_overflow_of_the_stored_type_is_refused(tmp_path: Path, dtype: str, large: float, refused: bool) -> None:
    writer = ShardWriter(tmp_path, replace(HEADER, state_dtype=dtype), 1000)
    states = torch.zeros(6, 2, 8)
    states[2, 0, 5] = -large
    if refused:
        with pytest.raises(ValueError, match=r"overflow float16 \(largest 1e\+05\).*token 2, Tap\(layer=2.*bfloat16"):
            writer.add(spoiled(hidden_states=states))
    else:
        writer.add(spoiled(hidden_states=states))


OTHERS = {
    "target": (replace(HEADER, target=replace(TARGET, weights_hash="x" * 64)), ["w" * 64, "x" * 64]),
    "quantisation": (replace(HEADER, target=replace(TARGET, quantisation="fp8")), ["quantisation", "fp8"]),
    "template": (replace(HEADER, target=replace(TARGET, chat_template_hash="other")), ["chat", "other"]),
    "taps": (replace(HEADER, taps=(Tap(3, "pre"), Tap(4, "post"))), ["layer=2", "layer=3"]),
    "norm": (replace(HEADER, taps=(Tap(2, "post"), Tap(4, "post"))), ["norm='pre'", "norm='post'"]),
    "corpus": (replace(HEADER, corpus_fingerprint="corpus-b"), ["corpus-a", "corpus-b"]),
    "dtype": (replace(HEADER, state_dtype="bfloat16"), ["float32", "bfloat16"]),
    "engine": (replace(HEADER, engine={"name": "vllm", "version": "0.32"}), ["embedded", "vllm"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_states_of_different_origin_are_never_mixed(tmp_path: Path, name: str) -> None:
    header, words = OTHERS[name]
    write_part(tmp_path / "a", range(3), 0, 2)
    for part in (0, 1):  # its own part, or another worker's
        with pytest.raises(ValueError) as caught:
            ShardWriter(tmp_path / "a", header, 20, part, 2)
        assert all(word in str(caught.value) for word in words), caught.value
    write_part(tmp_path / "b", range(3, 6), 1, 2, header)
    for path in (tmp_path / "b").iterdir():
        path.rename(tmp_path / "a" / path.name)
    with pytest.raises(ValueError) as caught:
        merge(tmp_path / "a")
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_path_of_the_target_may_differ(tmp_path: Path) -> None:
    write_part(tmp_path, range(3), 0, 2)
    write_part(tmp_path, range(3, 6), 1, 2, replace(HEADER, target=replace(TARGET, name="/elsewhere/toy")))
    merge(tmp_path)


LAST, MIDDLE = Tap(4, "post"), Tap(2, "pre")


@pytest.mark.parametrize("taps", [(), (Tap(4, "pre"),), (LAST, MIDDLE), (MIDDLE, MIDDLE, LAST), (Tap(-1, "pre"), LAST), (Tap(5, "pre"), LAST)])
def test_impossible_taps(taps: tuple[Tap, ...]) -> None:
    with pytest.raises(ValueError, match=r"0\.\.4, and end in the teacher state"):
        replace(HEADER, taps=taps)


def test_parts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no parts"):
        merge(tmp_path)
    write_part(tmp_path, range(8, 12), 2, 3)  # out of order
    write_part(tmp_path, range(4), 0, 3)
    unfinished = ShardWriter(tmp_path, HEADER, 20, 1, 3)
    with pytest.raises(ValueError, match="another process is writing"):
        ShardWriter(tmp_path, HEADER, 20, 1, 3)
    with pytest.raises(ValueError, match=f"incomplete: {part_name(1, 3)};"):
        merge(tmp_path)
    with pytest.raises(ValueError, match=r"is not a data set.*part 0 complete, part 1 incomplete, part 2 complete.*merge"):
        ShardReader(tmp_path)
    del unfinished
    (tmp_path / f"{part_name(1, 3)}.json").unlink()
    with pytest.raises(ValueError, match=f"missing or incomplete: {part_name(1, 3)};"):
        merge(tmp_path)
    write_part(tmp_path, range(4, 8), 1, 3)
    merge(tmp_path)
    assert ShardReader(tmp_path).ids == [make_sample(i).id for i in range(12)]
    with pytest.raises(ValueError, match="begun with 3 parts, now 2"):
        ShardWriter(tmp_path, HEADER, 20, 0, 2)
    with pytest.raises(ValueError, match=r"part=3 .*num_parts=3"):
        ShardWriter(tmp_path, HEADER, 20, 3, 3)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ShardReader(tmp_path / "nowhere")


def test_two_way_split_of_eleven_rows_and_doubled_ids(tmp_path: Path) -> None:
    write_part(tmp_path / "good", range(6), 0, 2)
    write_part(tmp_path / "good", range(6, 11), 1, 2)
    merge(tmp_path / "good")
    assert sorted(ShardReader(tmp_path / "good").ids) == sorted({make_sample(i).id for i in range(11)})
    write_part(tmp_path / "bad", range(6), 0, 2)
    write_part(tmp_path / "bad", range(5, 11), 1, 2)  # seeded fault: row 5 twice
    with pytest.raises(ValueError, match="1 sample ids are stored twice, such as 'row 5"):
        merge(tmp_path / "bad")


def test_damage_is_found(tmp_path: Path) -> None:
    write_part(tmp_path, range(14))
    manifest = merge(tmp_path)
    path = tmp_path / manifest.shards[1].file
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    path.write_bytes(flipped)
    ShardReader(tmp_path)  # opening does not hash
    expected = rf"1 of {len(manifest.shards)} shards are damaged: .*{path.name} has sha256 \w+, but as written it has sha256 {manifest.shards[1].sha256}"
    with pytest.raises(ValueError, match=expected):
        verify(tmp_path)
    path.write_bytes(good[:-1])
    for look in (ShardReader, verify, merge):
        with pytest.raises(ValueError, match=rf"{path.name} has {len(good) - 1} bytes, but as written it has {len(good)} bytes"):
            look(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path.name} is missing"):
        ShardReader(tmp_path)


def test_axes_are_checked_when_read(tmp_path: Path) -> None:
    write_part(tmp_path, range(3))
    manifest = merge(tmp_path)
    (tmp_path / "manifest.json").write_text(replace(manifest, taps=(Tap(4, "post"),)).to_json())
    with pytest.raises(ValueError, match=r"hidden_states \(\d+, 2, 8\), but the manifest says \(\d+, 1, 8\)"):
        ShardReader(tmp_path)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda data: data.update(format_version=2), ["format_version 2", "reads 1"]),
        (lambda data: data.pop("taps"), ["damaged", "taps"]),
        (lambda data: data.update(surprise=1), ["damaged", "surprise"]),
        (lambda data: data["shards"][0].pop("sha256"), ["damaged", "sha256"]),
    ],
)
def test_a_manifest_of_another_kind_is_refused(tmp_path: Path, edit, words: list[str]) -> None:
    write_part(tmp_path, range(3))
    data = json.loads(merge(tmp_path).to_json())
    edit(data)
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ValueError) as caught:
        read_manifest(tmp_path)
    assert all(word in str(caught.value) for word in ["manifest.json", *words]), caught.value
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json is damaged"):
        read_manifest(tmp_path)


# ---------------------------------------------------------------- larger than memory


def write_sparse(directory: Path, num_shards: int, samples: int, length: int, hidden: int) -> int:
    """A data set whose token ids and states are holes, so that it takes almost no disk; returns its size in bytes."""
    tokens, target = samples * length, replace(TARGET, hidden_size=hidden)
    names = json.dumps([[f"row {i}" for i in range(samples)], ["d"] * samples]).encode()
    columns: list[tuple[str, str, tuple[int, ...], int, bytes]] = [
        ("offsets", "I64", (samples + 1,), 8, (torch.arange(samples + 1) * length).numpy().tobytes()),
        ("supervised", "I64", (samples,), 8, torch.full((samples,), length // 2).numpy().tobytes()),
        ("input_ids", "I64", (tokens,), 8, b""),
        ("hidden_states", "BF16", (tokens, 1, hidden), 2, b""),
        ("loss_mask", "BOOL", (tokens,), 1, (torch.arange(tokens) % length >= length // 2).numpy().tobytes()),
        ("names", "U8", (len(names),), 1, names),
    ]
    header, end, pieces = {}, 0, []
    for name, dtype, shape, width, data in columns:
        start, end = end, end + math.prod(shape) * width
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        pieces.append((start, data))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    shards = []
    for number in range(num_shards):
        with open(directory / f"shard-{number}.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for start, data in pieces:
                file.seek(8 + len(text) + start)
                file.write(data)
            size = file.truncate(8 + len(text) + end)
        shards.append(ShardInfo(f"shard-{number}.safetensors", samples, tokens, samples * (length - length // 2), size, "0" * 64))
    whole = Manifest(**{**vars(HEADER), "target": target, "taps": (Tap(4, "post"),), "state_dtype": "bfloat16"}, shards=tuple(shards), complete=True)
    (directory / "manifest.json").write_text(whole.to_json())
    return num_shards * size


def anonymous_mib() -> float:
    """Memory of this process that no file backs."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_fifty_gigabytes_are_opened_and_read_in_flat_memory(tmp_path: Path) -> None:
    size = write_sparse(tmp_path, num_shards=100, samples=128, length=512, hidden=4096)
    assert size > 50e9
    if sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) > 1e9:
        pytest.skip("this file system has no sparse files")
    before = anonymous_mib()
    reader = ShardReader(tmp_path)
    data = PackedBatches(reader, 1024, 1, seed=0)
    batches, largest = data.batches(0), 0.0
    for _ in range(8):
        batch = next(batches)
        assert int(batch.loss_mask.sum()) == 512
        assert batch.hidden_states.shape == (1, 1024, 1, 4096)
        largest = max(largest, anonymous_mib())
    batches.close()
    assert len(reader) == 12_800
    assert reader[12_799].id == "row 127"
    assert largest - before < 100  # a batch has 8 MiB; four of them and their samples are in flight
    with safe_open(tmp_path / "shard-0.safetensors", "pt") as file:  # seeded fault: one shard read whole
        kept = file.get_tensor("hidden_states").clone()
        assert anonymous_mib() - before > 400, kept.shape


def test_a_shard_of_another_number_of_samples_is_refused(tmp_path: Path) -> None:
    write_part(tmp_path, range(3))
    manifest = merge(tmp_path)
    (tmp_path / "manifest.json").write_text(replace(manifest, shards=(replace(manifest.shards[0], samples=9),)).to_json())
    with pytest.raises(ValueError, match=r"offsets \(4,\), but the manifest says \(10,\)"):
        ShardReader(tmp_path)
