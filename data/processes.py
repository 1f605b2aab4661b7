"""How torchrun's processes find each other, also those that it started again."""

import os
import time
from datetime import timedelta

import torch.distributed as dist


def connect(device, seconds):
    """Join torchrun's processes in a group whose collectives may take so many seconds.

    Restarted processes find the store of those before them, whose addresses would mislead them:
    each time that rank 0 starts is an epoch with keys of its own, which all others join.
    """
    from torch import _dynamo  # noqa: F401  imported later, it would hold the group past its end

    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives: the flight recorder's
    timeout, end, epoch = timedelta(seconds=seconds), time.monotonic() + seconds, 0
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    if rank == 0:
        epoch = store.add("epoch", 1)
    while not store.check([f"{epoch}/complete"]):
        if time.monotonic() > end:
            raise OSError(f"only some of {world_size} processes started within {seconds} s")
        if rank == 0 and store.check([f"{epoch}/joined/{r}" for r in range(1, world_size)]):
            store.set(f"{epoch}/complete", "")
        latest = store.add("epoch", 0)
        if latest > epoch and store.add(f"{latest}/joined/{rank}", 1) == 1:  # not by one before
            epoch = latest
        time.sleep(0.01)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timeout,
        rank=rank,
        store=dist.PrefixStore(f"{epoch}", store),
        world_size=world_size,
    )
