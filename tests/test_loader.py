"""The loader reads every token once and in order, and rejects damaged files."""

import os
import shutil

import numpy as np
import pytest
import shards
import torch
from conftest import write_shard
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from train_gpt2 import DistributedDataLoader, UserError, check_shard

IN_ONE_FOLDER = [HealthCheck.function_scoped_fixture]
CPU = torch.device("cpu")


def fresh_shards(folder, parts):
    """Write parts as the only shards of a folder, s_0, s_1, ...; return their glob."""
    for old in folder.glob("*.bin"):
        old.unlink()
    for i, part in enumerate(parts):
        write_shard(folder / f"s_{i}.bin", part)
    return str(folder / "s_*.bin")


def open_ranks(pattern, batch_size, T, world_size, state=None):
    """Return the loaders of all ranks, in one process, at the position of `state`."""
    loaders = []
    for rank in range(world_size):
        loaders.append(DistributedDataLoader(pattern, batch_size, T, rank, world_size, CPU))
        if state and rank == 0:
            loaders[0].load_state_dict(state)
        loaders[rank].position = loaders[0].position
    return loaders


def next_window(loaders):
    """Return the next inputs and targets of all ranks, concatenated."""
    batches = [loader.next_batch() for loader in loaders]
    for inputs, targets in batches:
        assert inputs.dtype == targets.dtype == torch.int64
        assert (
            inputs.shape == targets.shape == (loaders[0].batch_size // len(loaders), loaders[0].T)
        )
    return [np.concatenate([part.numpy().ravel() for part in parts]) for parts in zip(*batches)]


def common_state(loaders):
    """Return state_dict() as it is in a process group, where data_hash sums over the ranks."""
    state = loaders[0].state_dict()
    state["data_hash"] = f"{sum(loader.hash_sum for loader in loaders) % 2**48:012x}"
    return state


@settings(deadline=None, max_examples=60, suppress_health_check=IN_ONE_FOLDER)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    T=st.integers(1, 9),
    runs=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([12, 24]), st.integers(0, 12)),
        min_size=1,
        max_size=4,
    ),
)
def test_the_batches_of_all_ranks_are_the_stream(tmp_path, sizes, T, runs):
    """Each run continues where the previous one stopped, with any number of ranks and batch size.

    The stream starts over at its end, even within a step.
    """
    stream = np.arange(sum(sizes))
    pattern = fresh_shards(tmp_path, np.split(stream, np.cumsum(sizes)[:-1]))
    state, position = None, 0
    for world_size, batch_size, steps in runs:
        loaders = open_ranks(pattern, batch_size, T, world_size, state)
        for _ in range(steps):
            inputs, targets = next_window(loaders)
            expected = np.arange(position, position + batch_size * T + 1) % len(stream)
            assert (inputs == expected[:-1]).all() and (targets == expected[1:]).all()
            position += batch_size * T
        state = common_state(loaders)
        assert state["position"] == position
    whole = open_ranks(pattern, 1, T, 1)
    for _ in range(position // T):
        whole[0].next_batch()
    assert common_state(whole) == state


# ---- The hash of all tokens so far, and the fingerprint of the latest ---------------------------
def test_the_hash_depends_on_every_token_and_on_the_order(tmp_path):
    def data_hash(tokens):
        loader = open_ranks(fresh_shards(tmp_path, [tokens]), 4, 5, 1)[0]
        loader.next_batch(), loader.next_batch()
        return loader.data_hash()

    stream = np.arange(41)
    swapped = np.concatenate([stream[20:40], stream[:20], stream[40:]])
    others = [data_hash(np.where(np.arange(41) == i, 99, stream)) for i in range(41)]
    assert len({data_hash(stream), data_hash(swapped), *others}) == 43
    assert data_hash(np.zeros(41)) != "0" * 12
    # a golden value, so that the logs of different versions can be compared
    assert data_hash(stream) == "0026d143b4b5"


def test_a_state_of_other_tokens_is_rejected(tmp_path):
    stream = np.arange(200)
    pattern = fresh_shards(tmp_path, np.split(stream, 2))
    loader = open_ranks(pattern, 2, 5, 1)[0]
    for _ in range(12):
        loader.next_batch()
    state = loader.state_dict()
    assert state["position"] == 120

    def restored(*parts, **changes):
        (other,) = open_ranks(fresh_shards(tmp_path, parts), 2, 5, 1, {**state, **changes})
        return other.next_batch()[0][0, 0].item()

    assert restored(stream) == 120  # divided into shards differently
    later = np.where(np.arange(200) > 120, 7, stream)
    assert restored(later, stream) == 120  # other tokens, but later ones
    others = [np.where(np.arange(200) == i, 999, stream) for i in (0, 77, 120)]
    for tokens in [stream[1:], *others]:
        with pytest.raises(UserError, match="no longer holds"):
            restored(tokens)
    with pytest.raises(UserError, match="no longer holds"):
        restored(stream, position=130)


# ---- Damaged and changing files -----------------------------------------------------------------
def is_rejected(path):
    """Return whether a file is not a shard; train_gpt2.py and data/shards.py must agree."""
    try:
        size, _ = check_shard(path)
    except UserError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        with pytest.raises(ValueError, match=path.name):
            shards.shard_size(path)
        return True
    assert shards.shard_size(path) == size
    return False


@settings(deadline=None, max_examples=40, suppress_health_check=IN_ONE_FOLDER)
@given(parts=st.lists(st.lists(st.integers(0, 65535), max_size=50), min_size=1, max_size=4))
def test_the_loader_reads_what_the_tools_write(tmp_path, parts):
    """data/shards.py and train_gpt2.py both implement the format."""
    path = tmp_path / "s_0.bin"
    arrays = [np.array(part, np.uint16) for part in parts]
    stream = np.concatenate(arrays)
    shards.write_shard(path, len(stream), arrays)
    assert path.read_bytes() == write_shard(tmp_path / "other", stream).read_bytes()
    assert is_rejected(path) == (len(stream) == 0)
    if len(stream):
        assert (open_ranks(str(path), 1, 1, 1)[0].read(0, len(stream)) == stream).all()


WHOLE = (
    np.array([20240520, 1, 40] + [0] * 253, "<i4").tobytes() + np.arange(40, dtype="<u2").tobytes()
)


@settings(deadline=None, max_examples=500, suppress_health_check=IN_ONE_FOLDER)
@given(
    start=st.integers(0, len(WHOLE)),
    removed=st.integers(0, 40) | st.just(len(WHOLE)),
    added=st.binary(max_size=40),
)
@example(8, len(WHOLE), b"")  # only the magic number and the version
@example(500, len(WHOLE), b"")  # half a header
@example(1024, len(WHOLE), b"")  # a header
@example(len(WHOLE) - 2, 2, b"")  # one token less
@example(len(WHOLE), 0, b"\0\0")  # one token more
@example(0, 1, b"\0")  # another magic number
@example(4, 1, b"\2")  # another version
@example(8, 4, b"\xff\xff\xff\xff")  # a negative number of tokens
@example(1020, 1, b"\1")  # the last number of the header
@example(1024, 2, b"\x40\0")  # token 64
@example(0, len(WHOLE), b"Once upon a time\n")
def test_a_damaged_file_is_a_clear_error(tmp_path, start, removed, added):
    content = WHOLE[:start] + added + WHOLE[start + removed :]
    tokens = np.frombuffer(content[1024 : len(content) // 2 * 2], "<u2")
    assume(content[:1024] != WHOLE[:1024] or len(content) != len(WHOLE) or max(tokens) >= 64)
    path = tmp_path / "s_0.bin"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    phrase = "is not a complete shard" if is_rejected(path) else "but vocab_size=64"
    with pytest.raises(UserError, match=rf"s_0\.bin .*{phrase}"):
        DistributedDataLoader(str(path), 1, 13, 0, 1, CPU, vocab_size=64)


UNUSABLE = [
    ("no file matches", lambda folder: (folder / "s_0.bin").unlink()),
    ("s_1.bin is not a file", lambda folder: (folder / "s_1.bin").mkdir()),
    ("s_1.bin is not a file", lambda folder: os.mkfifo(folder / "s_1.bin")),  # open() would block
    ("s_1.bin is not a file", lambda folder: (folder / "s_1.bin").symlink_to("nowhere")),
    ("a shard and a copy", lambda folder: shutil.copy(folder / "s_0.bin", folder / "s_1.bin")),
    ("a shard and a copy", lambda folder: (folder / "s_1.bin").symlink_to("s_0.bin")),
    ("is being packed", lambda folder: (folder / ".pack").mkdir()),
]


@pytest.mark.parametrize("phrase, spoil", UNUSABLE)
def test_unusable_data_are_rejected(phrase, spoil, tmp_path):
    pattern = fresh_shards(tmp_path, [range(100)])
    DistributedDataLoader(pattern, 6, 4, 0, 3, CPU)
    with pytest.raises(UserError, match="must be a multiple of the 3 ranks"):
        DistributedDataLoader(pattern, 8, 4, 0, 3, CPU)
    spoil(tmp_path)
    with pytest.raises(UserError, match=phrase):
        DistributedDataLoader(pattern, 6, 4, 0, 3, CPU)


def replace(path):
    write_shard(path.with_suffix(".new"), range(5000)).rename(path)


CHANGES = {  # of a shard of 5000 tokens
    "replaced": replace,
    "truncated": lambda path: os.truncate(path, 9_000),
    "rewritten": lambda path: path.write_bytes(path.read_bytes()),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_that_changes_while_in_use_is_an_error(tmp_path, change):
    """A new mode, link or name is no change."""
    stream = np.arange(20000)
    pattern = fresh_shards(tmp_path, np.split(stream, 4))
    loader = open_ranks(pattern, 2, 50, 1)[0]
    path = tmp_path / "s_1.bin"
    path.chmod(0o600)
    os.link(path, path.with_suffix(".link"))
    path.rename(path.with_suffix(".x")).rename(path)
    seen = [loader.next_batch()[0].numpy().ravel() for _ in range(60)]  # reads 1,000 tokens of it
    assert (np.concatenate(seen) == stream[:6000]).all()
    before = path.stat()
    CHANGES[change](path)
    if change in ("replaced", "truncated"):  # noticed even with the old time
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    phrase = r"s_1\.bin (changed while in use|is not a complete shard|is not a file)"
    with pytest.raises(UserError, match=phrase):
        loader.next_batch()


def test_an_id_beyond_the_vocabulary_never_reaches_the_device(tmp_path):
    """The first tokens of each shard are checked at once, the others when they are read."""
    stream = np.arange(121_000) % 70
    stream[115_000] = 70
    pattern = fresh_shards(tmp_path, np.split(stream, [1000]))
    loader = DistributedDataLoader(pattern, 1, 1000, 0, 1, CPU, vocab_size=70)
    for _ in range(114):
        assert loader.next_batch()[1].max() < 70
    with pytest.raises(UserError, match=r"s_1\.bin holds token 70, but vocab_size=70"):
        loader.next_batch()


def test_shards_are_read_in_the_order_of_their_names(tmp_path):
    """Which is lexical: s_0, s_1, s_10, s_100, ..., s_2. A batch may span many of them."""
    parts = np.split(np.arange(240), 120)
    loader = open_ranks(fresh_shards(tmp_path, parts), 2, 110, 1)[0]
    expected = np.concatenate([parts[i] for i in sorted(range(120), key=str)])
    assert (loader.next_batch()[0].numpy().ravel() == expected[:220]).all()


# ---- Shuffled sequences -------------------------------------------------------------------------
def shuffled(pattern, seed=7, world_size=1, rank=0, position=0):
    return DistributedDataLoader(
        pattern, 4, 5, rank, world_size, CPU, shuffle_seed=seed, position=position
    )


def test_a_shuffled_epoch_reads_every_sequence_once(tmp_path):
    pattern = fresh_shards(tmp_path, [range(57), range(57, 100)])  # 20 sequences: 5 steps an epoch
    loader = shuffled(pattern)
    epochs = []
    for _ in range(3):
        batches = [loader.next_batch() for _ in range(5)]
        inputs = torch.cat([inputs for inputs, _ in batches])
        targets = torch.cat([targets for _, targets in batches])
        assert sorted(inputs.flatten().tolist()) == [*range(100)]
        assert torch.equal(targets, (inputs[:, :1] + torch.arange(1, 6)) % 100)
        epochs.append(inputs.tolist())
    assert epochs[0] != epochs[1] != epochs[2]
    assert shuffled(pattern).next_batch()[0].tolist() == epochs[0][:4]
    assert shuffled(pattern, seed=8).next_batch()[0].tolist() != epochs[0][:4]


def test_a_shuffled_run_notices_text_added_while_it_was_stopped(tmp_path):
    pattern = fresh_shards(tmp_path, [range(100)])
    loader = shuffled(pattern)
    loader.next_batch()
    same = shuffled(pattern, position=loader.position)
    assert same.fingerprint() == loader.fingerprint()
    write_shard(tmp_path / "s_9.bin", range(100, 150))
    longer = shuffled(pattern, position=loader.position)
    assert longer.fingerprint() != loader.fingerprint()


def test_a_shuffled_order_depends_on_neither_the_ranks_nor_an_interruption(tmp_path):
    pattern = fresh_shards(tmp_path, [range(100)])
    alone = shuffled(pattern)
    for step in range(12):
        expected = alone.next_batch()
        parts = [shuffled(pattern, 7, 2, rank, 20 * step).next_batch() for rank in (0, 1)]
        for whole, halves in zip(expected, zip(*parts)):
            assert torch.equal(whole, torch.cat(halves))
