"""The loader reads every token once and in order, and rejects damaged files."""

import os
import re
from pathlib import Path

import numpy as np
import pack
import pytest
import torch
from conftest import write_shard
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from train_gpt2 import DistributedDataLoader, Hyperparameters, TokenStream, UserError, open_data

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
    """Return (inputs, targets) of a step: the parts of all ranks, put together."""
    inputs, targets = zip(*[loader.batch(step) for loader in loaders])
    shape = loaders[0].batch_size // len(loaders), loaders[0].sequence_length
    for part in inputs + targets:
        assert part.dtype == torch.int64 and part.shape == shape and part.is_contiguous()
    return torch.cat(inputs), torch.cat(targets)


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
    loaders = open_ranks(pattern, 12, T, world_size)
    for step in steps:
        inputs, targets = global_batch(loaders, step)
        expected = np.arange(step * 12 * T, (step + 1) * 12 * T + 1) % len(stream)
        assert (inputs.flatten().numpy() == expected[:-1]).all()
        assert (targets.flatten().numpy() == expected[1:]).all()


@pytest.mark.parametrize(
    "size, place, noticed",
    [(9, 4, True), (300_000, 150_001, True), (300_000, 299_999, True)]
    # Of a large shard, about 128 parts are read.
    + [(10_000_000, place, True) for place in (0, 79_000, 9_950_000)]
    + [(10_000_000, 70_000, False)],
)
def test_checksums_depend_on_the_tokens(tmp_path, size, place, noticed):
    tokens = np.arange(size) % 1000
    before = TokenStream(fresh_shards(tmp_path, [range(9), tokens]), 65536).checksums()
    assert [size for size, _ in before] == [9, size]
    tokens[place] += 1
    after = TokenStream(fresh_shards(tmp_path, [range(9), tokens]), 65536).checksums()
    assert after[0] == before[0] and (after[1] != before[1]) == noticed


# ---- Damaged and changing files -----------------------------------------------------------------
@settings(deadline=None, max_examples=40, suppress_health_check=IN_ONE_FOLDER)
@given(tokens=st.lists(st.integers(0, 65535), min_size=1, max_size=200))
def test_the_loader_reads_what_the_tools_write(tmp_path, tokens):
    """data/pack.py and train_gpt2.py both implement the format."""
    path = tmp_path / "s_0.bin"
    pack.write_shard(path, np.array(tokens, np.uint16))
    assert path.read_bytes() == write_shard(tmp_path / "other", tokens).read_bytes()
    assert TokenStream(str(path), 65536).read(0, len(tokens)).tolist() == tokens


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
    is_shard = content[:1024] == WHOLE[:1024] and len(content) == len(WHOLE)
    beginning = re.escape(str(content[: len(content) // 4 * 4][:30]))
    not_a_shard = rf"is not a complete shard \(it begins with {beginning}\): .*git lfs pull"
    phrase = "but vocab_size=64" if is_shard else not_a_shard
    with pytest.raises(UserError, match=rf"s_0\.bin .*{phrase}"):
        TokenStream(str(path), 64).checksums()


def settings_of(folder, validation=range(50)):
    """Return settings for the training shards of a folder and for some validation tokens."""
    write_shard(folder / "val.bin", validation)
    shape = dict(vocab_size=100, batch_size=4, sequence_length=5, num_iterations=4)
    files = dict(train_files=f"{folder}/s_*.bin", val_files=f"{folder}/val.bin", val_tokens=0)
    return Hyperparameters(**shape | files)


@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")],  # open() of a pipe blocks
)
def test_what_is_not_a_file_is_no_shard(make, tmp_path):
    pattern = fresh_shards(tmp_path, [range(100)])
    make(tmp_path / "s_1.bin")
    with pytest.raises(UserError, match=r"s_1\.bin is not a file"):
        TokenStream(pattern, 65536)


def test_a_folder_that_is_being_packed_is_refused(tmp_path):
    fresh_shards(tmp_path, [range(100)])
    (tmp_path / ".pack").mkdir()
    with pytest.raises(UserError, match="has not finished writing"):
        open_data(settings_of(tmp_path), CPU)


def test_the_ranks_must_divide_the_batch(tmp_path, monkeypatch):
    monkeypatch.setattr("train_gpt2.get_world_size", lambda: 3)
    with pytest.raises(UserError, match="batch_size=4 must be a multiple of the 3 ranks"):
        open_data(settings_of(tmp_path), CPU)


@pytest.mark.parametrize("size, usable", [(50, 45), (300_000, 2**18 // 5 * 5)])
def test_val_tokens_0_means_2_to_18_tokens_in_complete_sequences(size, usable, tmp_path):
    fresh_shards(tmp_path, [range(100)])
    tokens = np.arange(size) % 97
    _, validation, val_tokens, _ = open_data(settings_of(tmp_path, tokens), CPU)
    assert val_tokens == usable
    assert (validation[:, :-1].ravel() == tokens[:usable]).all()
    assert (validation[:, 1:].ravel() == tokens[1 : usable + 1]).all()


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
        inputs = torch.cat([inputs for inputs, _ in batches])
        targets = torch.cat([targets for _, targets in batches])
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
        assert all(map(torch.equal, global_batch(alone, step), global_batch(ranks, step)))


def test_the_folder_of_a_pattern_may_have_the_characters_of_a_pattern(tmp_path):
    """The folder is taken literally, because the manifest and .pack in it are read by its name."""
    folder = tmp_path / "[v1] *"
    folder.mkdir()
    pattern = fresh_shards(folder, [range(9)])
    assert TokenStream(pattern, 100).paths == [str(folder / "s_0.bin")]
    for shape in (tmp_path / "?v1*" / "s_?.bin", tmp_path / "*" / "s_0.bin"):
        with pytest.raises(UserError, match=r"no file matches .*folders take no wildcards"):
            TokenStream(str(shape), 100)
