"""Save and load Muon as other libraries do, on two ranks: does training go on bit for bit?

    python libraries.py [FOLDER]    FOLDER: where train_gpt2.py is; default: this repository

Requires accelerate and transformers. Each case trains a small network for four steps, and again
with a save into a file and a load by new objects after two of them.
"""

import copy
import io
import itertools
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2]).resolve()
sys.path.insert(0, str(FOLDER))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        widths = 24, 24, 40, 24, 24, 64, 24  # several shapes, so that both ranks own matrices
        self.layers = nn.ModuleList(
            nn.Linear(*pair, bias=False) for pair in itertools.pairwise(widths)
        )

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": x.square().mean(), "logits": x}


def new_optimizer(model):
    from train_gpt2 import Muon

    ranks = dict(rank=dist.get_rank(), world_size=dist.get_world_size())
    return Muon(model.parameters(), lr=0.01, beta2=0.9, **ranks)


def inputs(step):
    seed = 10 * step + dist.get_rank()
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(seed))


def train(model, optimizer, steps, sum_gradients=True, backward=torch.Tensor.backward):
    for step in steps:
        backward(model(inputs(step))["loss"])
        if sum_gradients:
            for p in model.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()


def through_a_file(state):
    """Every rank loads what rank 0 saves."""
    file = io.BytesIO()
    torch.save(state, file)
    data = [file.getvalue()]
    dist.broadcast_object_list(data)
    return torch.load(io.BytesIO(data[0]), weights_only=True)


def plainly(continue_with):
    """Train, let continue_with(model, optimizer, folder) return new ones, and train on."""
    model = Network()
    optimizer = new_optimizer(model)
    train(model, optimizer, range(2))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model, optimizer = continue_with(model, optimizer, folder[0])
    train(model, optimizer, range(2, 4))
    return model


def rank_0_state_dict(model, optimizer, folder):
    new = new_optimizer(model)
    new.load_state_dict(through_a_file(optimizer.state_dict()))
    return model, new


def two_loads(model, optimizer, folder):
    new = new_optimizer(model)
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    new.load_state_dict(copy.deepcopy(new.state_dict()))
    return model, new


def deepcopy_and_load(model, optimizer, folder):
    model, new = copy.deepcopy((model, optimizer))
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return model, new


def pickle_and_load(model, optimizer, folder):
    model, new = pickle.loads(pickle.dumps((model, optimizer)))
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return model, new


def distributed_checkpoint(model, optimizer, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict

    dcp.save({"muon": state_dict.get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    new = new_optimizer(model)
    state = {"muon": state_dict.get_optimizer_state_dict(model, new)}
    dcp.load(state, checkpoint_id=folder)
    state_dict.set_optimizer_state_dict(model, new, state["muon"])
    return model, new


def with_accelerate(interrupted):
    from accelerate import Accelerator

    def prepared():
        accelerator = Accelerator(cpu=True)
        model = Network()
        return accelerator, *accelerator.prepare(model, new_optimizer(model))

    accelerator, model, optimizer = prepared()
    train(model, optimizer, range(2), sum_gradients=False, backward=accelerator.backward)
    if interrupted:
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        accelerator.save_state(folder[0])
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        accelerator, model, optimizer = prepared()
        accelerator.load_state(folder[0])
    train(model, optimizer, range(2, 4), sum_gradients=False, backward=accelerator.backward)
    return accelerator.unwrap_model(model)


def with_trainer(interrupted):
    from transformers import Trainer, TrainingArguments

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8 * 4

        def __getitem__(self, i):
            x = torch.randn(24, generator=torch.Generator().manual_seed(i))
            return {"x": x, "labels": 0}

    def trainer(folder, steps):
        model = Network()
        arguments = TrainingArguments(
            folder, max_steps=steps, save_steps=2, per_device_train_batch_size=4, use_cpu=True,
            report_to=[], disable_tqdm=True, logging_steps=100, lr_scheduler_type="constant",
        )  # fmt: skip
        optimizers = new_optimizer(model), None
        return Trainer(model, arguments, train_dataset=Data(), optimizers=optimizers)

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if not interrupted:
        whole = trainer(folder[0], 4)
        whole.train()
        return whole.model
    trainer(folder[0], 2).train()
    dist.barrier()
    resumed = trainer(folder[0], 4)
    resumed.train(resume_from_checkpoint=f"{folder[0]}/checkpoint-2")
    return resumed.model


def uninterrupted(model, optimizer, folder):
    return model, optimizer


PLAIN = [rank_0_state_dict, two_loads, deepcopy_and_load, pickle_and_load, distributed_checkpoint]
CASES = {f.__name__: lambda f=f: (plainly(uninterrupted), plainly(f)) for f in PLAIN} | {
    "accelerate_save_state": lambda: (with_accelerate(False), with_accelerate(True)),
    "transformers_trainer": lambda: (with_trainer(False), with_trainer(True)),
}


def run_case(name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    expected, model = CASES[name]()
    pairs = list(zip(expected.parameters(), model.parameters()))
    equal = all(torch.equal(*pair) for pair in pairs)
    difference = max((p - q).abs().max().item() for p, q in pairs)
    verdict = "equal in every bit" if equal else f"weights differ by up to {difference:.2g}"
    if dist.get_rank() == 0:
        print(f"RESULT {verdict}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    for name in CASES:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node=2", __file__, str(FOLDER)]
        environment = os.environ | {"CASE": name, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=120
            )
            lines = (done.stdout + done.stderr).splitlines()
            found = [line for line in lines if line.startswith("RESULT")]
            errors = [line.split("]:")[-1].strip() for line in lines if "Error: " in line]
            verdict = found[0][7:] if found else f"fails: {(errors or lines or ['?'])[0]:.150}"
        except subprocess.TimeoutExpired:
            verdict = "hangs"
        print(f"{name:24s} {verdict}", flush=True)


if __name__ == "__main__":
    run_case(os.environ["CASE"]) if "CASE" in os.environ else main()
