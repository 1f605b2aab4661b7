"""Checkpoints: a run's state, written whole beside training, found again and read without risk.

`log_dir/run_id/state_step*.pt` is what torch.save makes of a state of tensors and plain values.
run_state says what is in one, resume puts it back; in between: how it gets to the disk and back.
"""

import contextlib
import copy
import dataclasses
import os
import signal
import time
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from shards import lock
from torch.utils._pytree import tree_map_only

# settings that a resumed run may change, as num_iterations may grow; all others define the run
MAY_CHANGE = {
    "train_files", "val_files", "allow_repeat", "bytes_per_token", "device_batch_size",
    "val_loss_every", "val_tokens", "target_val_loss", "checksum_every", "save_every",
    "keep_checkpoints", "resume", "log_dir", "run_id", "device", "compile", "attention",
    "comm_timeout",
}  # fmt: skip
OPTIMIZER_TENSORS = {  # of each parameter
    "AdamW": {"step", "exp_avg", "exp_avg_sq"},
    "Muon": {"momentum_buffer"},
}


def catch_signals():
    """Return a list that SIGTERM, SIGINT and SIGUSR1 are added to from now on; they end nothing."""
    signals = []

    def note(number, frame):
        if not signals and os.environ.get("RANK", "0") == "0":
            os.write(2, f"{signal.Signals(number).name}: saving after this step\n".encode())
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, note)
    return signals


def by_age(paths):
    """Return paths, the newest first; those that vanish meanwhile are left out."""
    times = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            times[path] = path.stat().st_mtime_ns
    return sorted(times, key=lambda path: (times[path], path.name), reverse=True)


class Checkpoints:
    """The newest `keep` checkpoints of a run, each of them whole; the work of rank 0.

    log: the run's Log; first: the path of the one that it was resumed from, or None. Raises
    ValueError if another process writes the same log. A save that fails is a warning in the log.
    """

    def __init__(self, log, keep, first=None):
        self.log, self.keep, self.first, self.began = log, keep, first, time.time_ns()
        self.folder = log.path.with_suffix("")
        self.thread, self.writing = ThreadPoolExecutor(1), None
        self.buffers = []  # host memory, of one save after the other
        if log.file:
            busy = f"another process is writing {log.path}: stop it, or pass another --run_id"
            try:
                lock(log.file, busy)
            except OSError as error:
                log(f"warning: nothing keeps a second run out of {log.path} ({error.strerror})")

    @property
    def last(self):
        """The path of the newest checkpoint that this run wrote or came from, or None."""
        found = by_age(self.folder.glob("state_step*.pt"))[:1]  # whichever rank asks
        return next((path for path in found if path.stat().st_mtime_ns >= self.began), self.first)

    def save(self, state):
        """Copy state to host memory, which is all that training waits for; write it in a thread."""
        if not self.log.file:  # another rank
            return
        self.wait()
        copies = {}  # by address: a tensor that occurs twice, as tied weights do, is kept once

        def to_host(tensor):
            if tensor.data_ptr() not in copies:
                i = len(copies)  # memory is used again: mapping it anew takes longer than copying
                if i == len(self.buffers) or self.buffers[i].shape != tensor.shape:
                    pin = tensor.device.type == "cuda"
                    buffer = torch.empty_like(tensor, device="cpu", pin_memory=pin)
                    self.buffers[i:] = [buffer]
                copies[tensor.data_ptr()] = self.buffers[i].copy_(tensor)
            return copies[tensor.data_ptr()]

        try:
            state = tree_map_only(torch.Tensor, to_host, state)
            self.writing = self.thread.submit(self.write, state)
        except (MemoryError, RuntimeError) as error:  # the host's memory does not suffice
            self.writing, self.buffers = Future(), []
            self.writing.set_exception(error)

    def write(self, state):
        """Write state under its final name once it is whole and on the disk; delete older ones."""
        if not all(weight.isfinite().all() for weight in state["model"].values()):
            raise ValueError("a weight is not finite")
        path = self.folder / f"state_step{state['step']:06d}.pt"
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with open(path.with_suffix(".partial"), "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(file.name, path)
            for folder in (self.folder, self.folder.parent):  # their lists of names, too
                descriptor = os.open(folder, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            others = by_age(other for other in self.folder.glob("state_step*.pt") if other != path)
            self.delete(others[self.keep - 1 :])
        finally:
            self.delete(self.folder.glob("*.partial"))  # this one, or a killed process's

    @staticmethod
    def delete(paths):
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink()

    def wait(self):
        """Wait until the last save has ended; return whether it is on the disk."""
        error = self.writing and self.writing.exception()
        self.writing = None
        if error:
            if isinstance(error.__context__, OSError):  # torch.save hides it
                error = error.__context__
            self.log(
                f"warning: a checkpoint was not written ({error}); training goes on, the newest "
                f"whole one: {self.last}"
            )
        return not error


def read(path):
    """Return the state in a checkpoint, its tensors mapped, not read; execute nothing in it."""
    if not os.path.isfile(path):  # opening a pipe would hang
        raise FileNotFoundError("no such file")
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def differences(state, args):
    """Return a list of the settings that define a run and are not the same in state and args."""
    then, now = state["hyperparameters"], dataclasses.asdict(args)
    may_change = MAY_CHANGE
    if now["num_iterations"] > then["num_iterations"]:
        may_change = MAY_CHANGE | {"num_iterations"}
    return [
        f"{name}={now.get(name)!r} instead of {then.get(name)!r}"
        for name in now | then
        if name not in may_change and now.get(name) != then.get(name)
    ]


def check(path, state, gpt, optimizers):
    """Raise ValueError unless the file is undamaged and its state has all that a run needs."""
    with zipfile.ZipFile(path) as archive:
        if broken := archive.testzip():  # torch.load compares no checksums
            raise ValueError(f"{broken} is damaged")
    step, data, settings = state["step"], state["train_loader"], state["hyperparameters"]
    position = step * settings["batch_size"] * settings["sequence_length"]
    if not 0 < step <= settings["num_iterations"] or data["position"] != position:
        raise ValueError("its step and its position do not agree")
    if not state["train_seconds"] > 0 or int(data["data_hash"], 16) < 0:
        raise ValueError("its time or its hash is none")
    torch.Generator().set_state(state["rng"])
    shapes = {name: (tensor.shape, torch.float32) for name, tensor in gpt.state_dict().items()}
    if {name: (tensor.shape, tensor.dtype) for name, tensor in state["model"].items()} != shapes:
        raise ValueError("it holds other weights")
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        names = OPTIMIZER_TENSORS[type(optimizer).__name__]
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            shapes = {name: () if name == "step" else p.shape for name in names}
            if {name: tensor.shape for name, tensor in saved["state"][i].items()} != shapes:
                raise ValueError(f"the state of {type(optimizer).__name__} is not whole")


def find(args, gpt, optimizers):
    """Return (path, state, lines for the log) of the checkpoint that args.resume asks for.

    auto: the newest in args.log_dir, or of args.run_id, that is whole and of these settings; path
    is None where there is none. Else a path; ValueError if it is missing, damaged, foreign or of
    other settings. A run_id must not be that of another run.
    """
    auto, lines, own = args.resume == "auto", [], Path(args.log_dir, args.run_id)
    paths = by_age(own.glob("state_step*.pt" if args.run_id else "*/state_step*.pt"))
    if not auto:
        if args.run_id and paths and Path(args.resume).parent.resolve() != own.resolve():
            raise ValueError(f"{own} holds the checkpoints of another run: pass another --run_id")
        paths = [Path(args.resume)]
    for path in paths:
        try:
            state = read(path)
            if not (differ := differences(state, args)):
                check(path, state, gpt, optimizers)
        except Exception as error:  # whatever a file of any content may cause
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            sentence = f"{path} is no whole checkpoint ({reason})"
            if not auto:
                raise ValueError(f"{sentence}: name another, or pass --resume=auto") from None
            lines.append(f"passed over: {sentence}")
            continue
        if not differ:
            state = copy.deepcopy(state)  # in memory, for the file may go
            return path, state, [*lines, f"resumed: {path} after step {state['step']}"]
        if not auto or args.run_id:
            raise ValueError(
                f"{path} belongs to another run: {', '.join(differ)}; give its settings, or start "
                f"anew without --resume, with another --run_id"
            )
    return None, None, [*lines, f"resume: no checkpoint in {args.log_dir} fits: a fresh start"]


def run_state(gpt, optimizers, train_loader, log, args):
    """Return what a run needs to go on: tensors and plain values, of all ranks; all ranks call."""
    return dict(
        step=log.step,
        train_seconds=log.seconds["train"],
        hyperparameters=dataclasses.asdict(args),
        model=gpt.state_dict(),
        train_loader=train_loader.state_dict(),
        rng=torch.get_rng_state(),
        optimizers=[optimizers[0].state_dict(), optimizers[1].gathered_state_dict()],
    )


def resume(args, gpt, optimizers, train_loader):
    """Load on all ranks the checkpoint that args.resume asks for; rank 0 reads it for them.

    Returns (its path or None, step, seconds of training, run_id, lines to log). Raises ValueError
    if it cannot be used, or if the tokens before its position are not those it was trained on.
    """
    path, state, lines = None, None, []
    if args.resume and train_loader.rank == 0:
        path, state, lines = find(args, gpt, optimizers)
    run_id = args.run_id
    if not run_id and path and args.resume == "auto":
        run_id = path.parent.name
    run_id = run_id or time.strftime("%Y%m%d-%H%M%S-") + os.urandom(3).hex()
    if dist.is_initialized():
        box = [path, state, lines, run_id]
        dist.broadcast_object_list(box)
        path, state, lines, run_id = box
    if path is None:
        return None, 0, 0.0, run_id, lines
    gpt.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        groups = optimizer.state_dict()["param_groups"]  # ours: args define them
        optimizer.load_state_dict(saved | dict(param_groups=groups))
    torch.set_rng_state(state["rng"])
    while train_loader.position < state["train_loader"]["position"]:
        train_loader.next_batch()
    if train_loader.state_dict() != state["train_loader"]:
        raise ValueError(
            f"{args.train_files!r} no longer holds the tokens that {path} was trained on: restore "
            f"them, pass another --log_dir, or start anew without --resume"
        )
    return path, state["step"], state["train_seconds"], run_id, lines
