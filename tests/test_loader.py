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

from train_gpt2 import DistributedDataLoader, TokenStream, UserError, shard_size

IN_ONE_FOLDER = [HealthCheck.function_scoped_fixture]
CPU = torch.device("cpu")


def fresh_shards(folder, parts):
    """Write parts as the only shards of a folder, s_0, s_1, ...; return their glob."""
    for old in folder.glob("*.bin"):
        old.unlink()
    for i, part in enumerate(parts):
        write_shard(folder / f"s_{i}.bin", part)
    return str(folder / "s_*.bin")


def open_ranks(pattern, batch_size, T, world_size, shuffle_seed=None):
    """Return the loaders of all ranks, in one process."""
    stream = TokenStream(pattern, 65536)
    return [
        DistributedDataLoader(stream, batch_size, T, rank, world_size, CPU, shuffle_seed)
        for rank in range(world_size)
    ]


def global_batch(loaders, step):
    """Return (inputs, targets, hash) of a step: the parts of all ranks, put together."""
    inputs, targets, hashes = zip(*[loader.batch(step) for loader in loaders])
    shape = loaders[0].batch_size // len(loaders), loaders[0].T
    for part in inputs + targets:
        assert part.dtype == torch.int64 and part.shape == shape
    return torch.cat(inputs), torch.cat(targets), sum(hashes) % 2**48


@settings(deadline=None, max_examples=60, suppress_health_check=IN_ONE_FOLDER)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    T=st.integers(1, 9),
    world_size=st.sampled_from([1, 2, 3, 4, 6, 12]),
    steps=st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
def test_the_batch_of_a_step_is_the_stream(tmp_path, sizes, T, world_size, steps):
    """It depends only on the step: not on the number of ranks or on earlier calls.

    The stream starts over at its end, even within a step.
    """
    stream = np.arange(sum(sizes))
    pattern = fresh_shards(tmp_path, np.split(stream, np.cumsum(sizes)[:-1]))
    ranks, alone = open_ranks(pattern, 12, T, world_size), open_ranks(pattern, 12, T, 1)
    for step in steps:
        inputs, targets, batch_hash = global_batch(ranks, step)
        expected = np.arange(step * 12 * T, (step + 1) * 12 * T + 1) % len(stream)
        assert (inputs.flatten().numpy() == expected[:-1]).all()
        assert (targets.flatten().numpy() == expected[1:]).all()
        assert batch_hash == global_batch(alone, step)[2]


def test_inputs_and_targets_share_no_memory(tmp_path):
    (loader,) = open_ranks(fresh_shards(tmp_path, [range(100)]), 4, 5, 1)
    inputs, targets, _ = loader.batch(0)
    targets.fill_(-1)
    assert inputs.flatten().tolist() == [*range(20)] and inputs.is_contiguous()


# ---- What identifies tokens: the hash of batches, the contents of a stream ----------------------
def test_the_hash_depends_on_every_token_and_on_the_order(tmp_path):
    def data_hash(tokens):
        (loader,) = open_ranks(fresh_shards(tmp_path, [tokens]), 4, 5, 1)
        return f"{(loader.batch(0)[2] + loader.batch(1)[2]) % 2**48:012x}"

    stream = np.arange(41)
    swapped = np.concatenate([stream[20:40], stream[:20], stream[40:]])
    others = [data_hash(np.where(np.arange(41) == i, 99, stream)) for i in range(41)]
    assert len({data_hash(stream), data_hash(swapped), *others}) == 43
    assert data_hash(np.zeros(41)) != "0" * 12
    # a golden value, so that the logs of different versions can be compared
    assert data_hash(stream) == "0026d143b4b5"


@settings(deadline=None, max_examples=40, suppress_health_check=IN_ONE_FOLDER)
@given(data=st.data(), size=st.integers(2, 300_000))
def test_contents_change_with_any_token_of_a_small_shard(tmp_path, data, size):
    tokens = np.arange(size) % 1000
    before = TokenStream(fresh_shards(tmp_path, [range(9), tokens]), 65536).contents
    assert [size for size, _ in before] == [9, size]
    tokens[data.draw(st.integers(0, size - 1))] += 1
    after = TokenStream(fresh_shards(tmp_path, [range(9), tokens]), 65536).contents
    assert after[0] == before[0] and after[1] != before[1]


def test_contents_cover_128_parts_of_a_large_shard(tmp_path):
    tokens = np.zeros(10_000_000, np.uint16)
    before = TokenStream(fresh_shards(tmp_path, [tokens]), 65536).contents
    for place, noticed in (0, True), (70_000, False), (79_000, True), (9_950_000, True):
        edited = tokens.copy()
        edited[place] = 1
        after = TokenStream(fresh_shards(tmp_path, [edited]), 65536).contents
        assert (after != before) == noticed, place


# ---- Damaged and changing files -----------------------------------------------------------------
def is_rejected(path):
    """Return whether a file is not a shard; train_gpt2.py and data/shards.py must agree."""
    try:
        size = shard_size(path)
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
        assert (TokenStream(str(path), 65536).read(0, len(stream)) == stream).all()


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
        TokenStream(str(path), 64)


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
    TokenStream(pattern, 100)
    spoil(tmp_path)
    with pytest.raises(UserError, match=phrase):
        TokenStream(pattern, 100)


def test_the_ranks_must_divide_the_batch(tmp_path):
    with pytest.raises(UserError, match="must be a multiple of the 3 ranks"):
        open_ranks(fresh_shards(tmp_path, [range(100)]), 8, 4, 3)


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
    (loader,) = open_ranks(fresh_shards(tmp_path, np.split(stream, 4)), 2, 50, 1)
    path = tmp_path / "s_1.bin"
    path.chmod(0o600)
    os.link(path, path.with_suffix(".link"))
    path.rename(path.with_suffix(".x")).rename(path)
    assert loader.batch(60)[0][0, 0] == 6000
    before = path.stat()
    CHANGES[change](path)
    if change in ("replaced", "truncated"):  # noticed even with the old time
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises((UserError, OSError), match=r"s_1\.bin"):
        loader.batch(60)


def test_an_id_beyond_the_vocabulary_never_reaches_the_device(tmp_path):
    """Every token is checked when it is read. Small shards are read whole at the start."""
    stream = np.arange(9_000_000) % 70
    bad = 100 * (len(stream) // 128) + 2**16 + 1000  # between two parts that the checksum reads
    stream[bad] = 70
    small = fresh_shards(tmp_path / "small", [stream[:99], stream[bad - 99 : bad + 99]])
    with pytest.raises(UserError, match=r"s_1\.bin holds token 70, but vocab_size=70"):
        TokenStream(small, 70)
    large = TokenStream(fresh_shards(tmp_path, [stream]), 70)
    assert large.read(bad - 1000, 1000).max() < 70
    with pytest.raises(UserError, match=r"s_0\.bin holds token 70, but vocab_size=70"):
        large.read(bad - 999, 1000)


def test_shards_are_read_in_the_order_of_their_names(tmp_path):
    """Which is lexical: s_0, s_1, s_10, s_100, ..., s_2. A batch may span many of them."""
    parts = np.split(np.arange(240), 120)
    (loader,) = open_ranks(fresh_shards(tmp_path, parts), 2, 110, 1)
    expected = np.concatenate([parts[i] for i in sorted(range(120), key=str)])
    assert (loader.batch(0)[0].numpy().ravel() == expected[:220]).all()


# ---- Shuffled sequences -------------------------------------------------------------------------
def test_a_shuffled_epoch_reads_every_sequence_once(tmp_path):
    pattern = fresh_shards(tmp_path, [range(57), range(57, 100)])  # 20 sequences: 5 steps an epoch
    (loader,) = open_ranks(pattern, 4, 5, 1, shuffle_seed=7)
    epochs = []
    for epoch in range(3):
        batches = [loader.batch(step) for step in range(5 * epoch, 5 * epoch + 5)]
        inputs = torch.cat([inputs for inputs, *_ in batches])
        targets = torch.cat([targets for _, targets, _ in batches])
        assert sorted(inputs.flatten().tolist()) == [*range(100)]
        assert torch.equal(targets, (inputs[:, :1] + torch.arange(1, 6)) % 100)
        epochs.append(inputs.tolist())
    assert epochs[0] != epochs[1] != epochs[2]
    offsets = {loader.batch(5 * epoch)[0][0, 0].item() % 5 for epoch in range(9)}
    assert len(offsets) > 1, "each epoch is cut at new places"
    for seed, same in (7, True), (8, False):
        (other,) = open_ranks(pattern, 4, 5, 1, shuffle_seed=seed)
        assert (other.batch(0)[0].tolist() == epochs[0][:4]) == same


def test_a_shuffled_order_does_not_depend_on_the_ranks(tmp_path):
    pattern = fresh_shards(tmp_path, [range(100)])
    alone, ranks = (open_ranks(pattern, 4, 5, count, shuffle_seed=7) for count in (1, 2))
    for step in 11, 3, 0:  # in any order
        for whole, parts in zip(global_batch(alone, step), global_batch(ranks, step)):
            assert torch.equal(torch.as_tensor(whole), torch.as_tensor(parts))
