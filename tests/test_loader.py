"""The loader: shards to batches, whole, in order, and never past a damaged file."""

import os
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import run_ranks, write_shard
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import train_gpt2
from train_gpt2 import DistributedDataLoader, shard_size

IN_ONE_FOLDER = [HealthCheck.function_scoped_fixture]


def fresh_shards(folder, parts):
    """Write parts as shards s_0, s_1, ... of folder, and nothing else; return their glob."""
    for old in folder.glob("*.bin"):
        old.unlink()
    for i, part in enumerate(parts):
        write_shard(folder / f"s_{i}.bin", part)
    return str(folder / "s_*.bin")


def open_ranks(pattern, batch_size, T, world_size, repeat=False, state=None):
    loaders = []
    for rank in range(world_size):
        loaders.append(
            DistributedDataLoader(pattern, batch_size, T, rank, world_size, "cpu", repeat)
        )
        if state:
            loaders[-1].load_state_dict(state)
    return loaders


def next_window(loaders):
    """Return the ranks' next inputs and targets, laid together."""
    batches = [loader.next_batch() for loader in loaders]
    assert all(x.shape == batches[0][0].shape == y.shape for x, y in batches)
    return [np.concatenate([part.numpy().ravel() for part in parts]) for parts in zip(*batches)]


def common_state(loaders):
    """Return state_dict() as a group would give it: the hashes of all ranks summed up."""
    state = loaders[0].state_dict()
    state["data_hash"] = f"{sum(loader.hash_sum for loader in loaders) % 2**64:016x}"
    return state


@settings(deadline=None, max_examples=60, suppress_health_check=IN_ONE_FOLDER)
@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    batch_size=st.sampled_from([6, 12]),
    T=st.integers(1, 9),
    repeat=st.booleans(),
)
def test_the_ranks_slices_laid_together_are_the_stream(tmp_path, sizes, batch_size, T, repeat):
    stream = np.arange(sum(sizes)) % 50000
    pattern = fresh_shards(tmp_path, np.split(stream, np.cumsum(sizes)[:-1]))
    window = batch_size * T
    steps = (len(stream) - 1) // window + (2 if repeat else 0)
    assume(steps)
    endless = np.tile(stream, 1 + (steps * window + 1) // len(stream))
    states = []
    for world_size in (1, 2, 3, 6):
        loaders = open_ranks(pattern, batch_size, T, world_size, repeat)
        for step in range(steps):
            inputs, targets = next_window(loaders)
            expected = endless[step * window : (step + 1) * window + 1]
            assert (inputs == expected[:-1]).all() and (targets == expected[1:]).all()
        states.append(common_state(loaders))
        if not repeat:
            with pytest.raises(ValueError, match="allow_repeat"):
                loaders[-1].next_batch()
    assert all(state == states[0] for state in states)


@settings(deadline=None, max_examples=40, suppress_health_check=IN_ONE_FOLDER)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    runs=st.lists(
        st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([6, 12]), st.integers(0, 12)),
        min_size=1, max_size=4,
    ),
)  # fmt: skip
def test_a_restored_position_goes_on_with_any_world_and_batch_size(tmp_path, sizes, runs):
    """Each run goes on where the one before stopped: nothing is lost, nothing comes twice."""
    T, stream = 3, np.arange(sum(sizes))
    pattern = fresh_shards(tmp_path, np.split(stream, np.cumsum(sizes)[:-1]))
    state, seen = None, []
    for world_size, batch_size, steps in runs:
        loaders = open_ranks(pattern, batch_size, T, world_size, state=state)
        for _ in range(steps):
            if loaders[0].position + batch_size * T < len(stream):
                seen.append(next_window(loaders)[0])
        state = common_state(loaders)
    seen = np.concatenate(seen) if seen else np.empty(0)
    assert (seen == stream[: len(seen)]).all() and state["position"] == len(seen)
    whole = open_ranks(pattern, 1, T, 1)
    for _ in range(len(seen) // T):
        whole[0].next_batch()
    assert common_state(whole) == state


def test_a_position_can_be_left_and_found_again(tmp_path):
    pattern = fresh_shards(tmp_path, [np.arange(500)])
    loader = open_ranks(pattern, 2, 5, 1)[0]
    first, start = loader.next_batch()[0].tolist(), {"position": 0, "data_hash": "0" * 16}
    for steps in (1, 15, 16, 17, 40):  # batches are made 16 at a time
        for _ in range(steps):
            loader.next_batch()
        loader.load_state_dict(start)
        assert loader.next_batch()[0].tolist() == first and loader.position == 10


def test_the_hash_depends_on_every_token_and_on_the_order(tmp_path):
    def data_hash(tokens):
        loader = open_ranks(fresh_shards(tmp_path, [tokens]), 4, 5, 1)[0]
        loader.next_batch(), loader.next_batch()
        return loader.data_hash()

    stream = np.arange(41)
    swapped = np.concatenate([stream[20:40], stream[:20], stream[40:]])
    others = [data_hash(np.where(np.arange(41) == i, 99, stream)) for i in range(41)]
    assert len({data_hash(stream), data_hash(swapped), *others}) == 43
    assert data_hash(np.zeros(41)) != "0" * 16
    assert data_hash(stream) == "22b5e80a4b4d0a48"  # golden: logs of any two versions compare


@settings(deadline=None, max_examples=200)
@given(
    T=st.integers(1, 12),
    tokens=st.lists(st.integers(0, 65535), min_size=25, max_size=60),
    data=st.data(),
)
def test_no_single_changed_token_escapes_the_hash(tmp_path_factory, T, tokens, data):
    n = (len(tokens) - 1) // T
    rows = np.array([tokens[: n * T + 1]], np.uint16)
    folder = tmp_path_factory.mktemp("shard")
    loader = open_ranks(fresh_shards(folder, [tokens]), 1, T, 1)[0]
    changed, i = rows.copy(), data.draw(st.integers(0, n * T))
    changed[0, i] ^= data.draw(st.integers(1, 65535))
    assert loader.hash_sequences(rows, [7]) != loader.hash_sequences(changed, [7])


def test_batches_are_made_in_the_background_and_one_shard_is_mapped(tmp_path, monkeypatch):
    pattern = fresh_shards(tmp_path, np.split(np.arange(60000), 12))
    loader, threads = open_ranks(pattern, 4, 25, 1)[0], set()
    read = loader.read
    monkeypatch.setattr(
        loader, "read", lambda *place: threads.add(threading.current_thread()) or read(*place)
    )
    for _ in range(599):
        loader.next_batch()
        maps = Path("/proc/self/maps").read_text()
        assert maps.count(f"{tmp_path}/s_") <= 2  # one, and at a change the next: resident
        # memory does not grow with the number of shards
    assert threads and threading.main_thread() not in threads


DAMAGES = {
    "empty": lambda content: b"",
    "half a header": lambda content: content[:500],
    "magic": lambda content: b"\0" + content[1:],
    "version": lambda content: content[:4] + b"\2" + content[5:],
    "a header value": lambda content: content[:1020] + b"\1" + content[1021:],
    "cut": lambda content: content[:-1],
    "too long": lambda content: content + b"\0\0",
    "no tokens": lambda content: content[:8] + bytes(4) + content[12:1024],
    "negative count": lambda content: content[:8] + b"\xff\xff\xff\xff" + content[12:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_refused_by_name(tmp_path, damage):
    path = write_shard(tmp_path / "s_0.bin", range(100))
    assert shard_size(path) == 100
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(ValueError, match=r"s_0\.bin.*(fetch|make one)"):
        DistributedDataLoader(str(tmp_path / "*.bin"), 1, 4, 0, 1, "cpu")


def replace_bytes(content, start, new):
    return content[:start] + new + content[start + len(new) :]


REFUSED = Counter()
CONTENT = 1024 + 2 * 40  # bytes of the shard that is damaged: 40 tokens below 64
DAMAGED = st.one_of(
    st.builds(  # bytes of the header
        lambda start, new: lambda content: replace_bytes(content, start, new[: 1024 - start]),
        st.integers(0, 1023), st.binary(min_size=1, max_size=16)),
    st.builds(lambda size: lambda content: content[:size], st.integers(0, CONTENT - 1)),
    st.builds(lambda more: lambda content: content + more, st.binary(min_size=1, max_size=64)),
    st.builds(lambda junk: lambda content: junk, st.binary(max_size=2000)),
    st.builds(  # an id of 64 or more
        lambda i, token: lambda content: replace_bytes(
            content, 1024 + 2 * i, token.to_bytes(2, "little")),
        st.integers(0, 39), st.integers(64, 65535)),
    st.builds(  # bytes lost or put in, anywhere
        lambda start, lost, more: lambda content: content[:start] + more + content[start + lost :],
        st.integers(0, CONTENT), st.integers(0, 40), st.binary(max_size=40)),
)  # fmt: skip


@settings(
    deadline=None, max_examples=500, phases=[Phase.generate], database=None,
    suppress_health_check=[*IN_ONE_FOLDER, HealthCheck.too_slow, HealthCheck.large_base_example],
)  # fmt: skip
@given(damages=st.lists(DAMAGED, min_size=22, max_size=22))
def test_ten_thousand_damaged_files_are_each_a_clear_error(tmp_path, damages):
    path = tmp_path / "s_0.bin"
    whole = write_shard(path, np.arange(40)).read_bytes()
    for damaged in damages:
        content = damaged(whole)
        ids = np.frombuffer(content[1024 : len(content) // 2 * 2], np.uint16)
        if content[:1024] == whole[:1024] and len(ids) == 40 and max(ids) < 64:
            continue  # some other text: no reader can tell
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"s_0\.bin.{20}"):
            loader = DistributedDataLoader(str(path), 1, 13, 0, 1, "cpu", vocab_size=64)
            for _ in range(3):  # all 40 tokens
                loader.next_batch()
        REFUSED["files"] += 1


def test_the_damaged_files_were_ten_thousand():
    assert REFUSED["files"] >= 10_000 or not REFUSED["files"]


def test_what_is_no_readable_file_is_refused(tmp_path):
    pattern = str(tmp_path / "*.bin")
    with pytest.raises(FileNotFoundError, match=r"data/fineweb\.py"):
        DistributedDataLoader(pattern, 1, 4, 0, 1, "cpu")
    path = tmp_path / "s_1.bin"
    for make, unmake in (
        (path.mkdir, path.rmdir),
        (lambda: os.mkfifo(path), path.unlink),  # opening it would wait for ever
        (lambda: path.symlink_to("nowhere"), path.unlink),
    ):
        make()
        with pytest.raises(ValueError, match="cannot read"):
            DistributedDataLoader(pattern, 1, 4, 0, 1, "cpu")
        unmake()
    write_shard(path, range(100))
    with pytest.raises(ValueError, match=r"multiple of 3.*\[1, 2, 4, 8\]"):
        DistributedDataLoader(pattern, 8, 4, 0, 3, "cpu")


def test_a_batch_may_span_thousands_of_shards(tmp_path):
    stream = np.arange(3000)
    loader = open_ranks(fresh_shards(tmp_path, np.split(stream, 1500)), 2, 1400, 1)[0]
    # names sort as text: s_0, s_1, s_10, s_100, ...
    order = sorted(range(1500), key=str)
    stream = stream.reshape(1500, 2)[order].ravel()
    assert (loader.next_batch()[0].numpy().ravel() == stream[:2800]).all()
    endless = open_ranks(str(tmp_path / "s_0.bin"), 1, 5000, 1, repeat=True)[0]
    assert (endless.next_batch()[0].numpy().ravel() == np.arange(5000) % 2).all()


def replace_by_a_shorter(path):
    """Rename another shard over path that has its time of modification, as cp -p does."""
    other = write_shard(path.with_suffix(".new"), range(50))
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.rename(path)


CHANGES = {
    "replaced, with the old one's time": replace_by_a_shorter,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "rewritten": lambda path: path.write_bytes(path.read_bytes()),
    "replaced": lambda path: write_shard(path.with_suffix(".new"), range(50)).rename(path),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_that_changes_in_use_ends_the_run(tmp_path, change):
    stream = np.arange(20000)
    pattern = fresh_shards(tmp_path, np.split(stream, 4))
    loader = open_ranks(pattern, 2, 50, 1)[0]
    seen = [loader.next_batch()[0].numpy().ravel()]
    CHANGES[change](tmp_path / "s_1.bin")
    sentence = r"s_1\.bin changed while in use|No such file or directory: .*s_1\.bin"
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        while True:
            seen.append(loader.next_batch()[0].numpy().ravel())
    seen = np.concatenate(seen)
    assert len(seen) <= 10000 and (seen == stream[: len(seen)]).all()


def test_an_id_beyond_the_vocabulary_never_reaches_the_device(tmp_path):
    stream = np.arange(1000) % 70
    stream[777] = 70
    loader = DistributedDataLoader(fresh_shards(tmp_path, np.split(stream, 2)), 1, 10, 0, 1, "cpu",
                                   vocab_size=70)  # fmt: skip
    with pytest.raises(ValueError, match=r"s_1\.bin holds the token id 70, but vocab_size=70"):
        while True:
            assert max(loader.next_batch()[1].flatten()) < 70


def compare_shards(rank, world_size, folder, cases):
    errors = []
    for case in range(cases):
        os.chdir(folder / f"{rank}_{case}")  # the same names, other files: as on two machines
        loader = DistributedDataLoader("s_*.bin", world_size, 4, rank, world_size, "cpu")
        try:
            errors.append(train_gpt2.check_ranks_agree(loader.last_tokens(), "why"))
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_ranks_that_see_other_shards_stop(tmp_path):
    usual = [range(9), range(9)]
    of_rank_2 = [usual, [range(9), range(1, 10)], [range(9), range(8)], [range(9)]]
    for case, parts in enumerate(of_rank_2):
        for rank in range(3):
            (tmp_path / f"{rank}_{case}").mkdir()
            fresh_shards(tmp_path / f"{rank}_{case}", parts if rank == 2 else usual)
    expected = "the ranks [2] hold another s_1.bin than the others: why"
    errors = run_ranks(compare_shards, 3, tmp_path / "ranks", tmp_path, len(of_rank_2))
    assert errors == [[None, expected, expected, expected]] * 3
