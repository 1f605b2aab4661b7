"""Time Muon's step against other implementations, over processes, and predict it for many GPUs.

    python tests/bench/bench_muon.py              # ours, torch.optim.Muon, plain loops: one process
    python tests/bench/bench_muon.py --scaling [--processes=2]     # one thread each against one
    python tests/bench/bench_muon.py --simulate [--tflops=200] [--gbytes=300] [--picture=FILE.png]

Every contender runs in a process of its own; they take turns, and medians and the ratios of turns
are printed. A contender that one probe shows to need over a minute a step is left out, with the
estimate: on a CPU without bf16 products those that insist on bf16 do.
"""

import argparse
import itertools
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "records" / "tools"), str(ROOT / "tests")]
from plain import PlainMuon  # noqa: E402
from step_profile import newton_schulz_flops  # noqa: E402

import train_gpt2  # noqa: E402
from train_gpt2 import Muon  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = train_gpt2.product_dtype(train_gpt2.Hyperparameters(), DEVICE)


def gpt2_shapes(n_layer, C):
    return ([(C, C)] * 4 + [(4 * C, C), (C, 4 * C)]) * n_layer


SETS = {"CPU record": gpt2_shapes(2, 128), "GPT-2 124M": gpt2_shapes(12, 768)}


def addmm_newton_schulz(G, dtype):
    """torch.optim.Muon's products: X X^T, then two addmm."""
    X = G.to(dtype)
    X = X / (X.norm() + 1e-7)
    X = X.T if G.size(0) > G.size(1) else X
    for _ in range(5):
        A = X @ X.T
        B = torch.addmm(A, A, A, beta=-4.7750, alpha=2.0315)
        X = torch.addmm(X, B, X, beta=3.4445)
    return X.T if G.size(0) > G.size(1) else X


class AddmmMuon(PlainMuon):
    newton_schulz = staticmethod(addmm_newton_schulz)


def make(name, params):
    if name == "ours":
        return Muon(params, lr=1e-4, dtype=DTYPE)
    if name == "torch.optim.Muon":
        return torch.optim.Muon(params, lr=1e-4, weight_decay=0.0)
    return (AddmmMuon if name == "its products" else PlainMuon)(params, lr=1e-4, dtype=DTYPE)


CONTENDERS = ["ours", "torch.optim.Muon", "its products", "plain loop"]


def parameters(shapes):
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE))
        p.grad = torch.randn(shape, generator=generator).to(DEVICE)
        params.append(p)
    return params


def seconds_of(optimizer):
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def memory():
    """Peak bytes of this process."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def contender(name, shapes, pipe):
    """Answer each request with a step's seconds, the last with the bytes that Muon took."""
    probe = make(name, parameters([shapes[0]]))
    seconds_of(probe)
    flops = sum(min(s) ** 2 * (min(s) + 2 * max(s)) for s in shapes)
    estimate = seconds_of(probe) * flops / (3 * shapes[0][0] ** 3)
    if estimate > 60:
        pipe.send(estimate)
        return
    params = parameters(shapes)
    held = memory()
    optimizer = make(name, params)
    seconds_of(optimizer)
    pipe.send(None)
    while pipe.recv():
        pipe.send(seconds_of(optimizer))
    pipe.send(memory() - held)


def start(target, *arguments):
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()  # so that a dead process is noticed
    return ours


def compare(sets, rounds):
    names = [n for n in CONTENDERS if n != "torch.optim.Muon" or hasattr(torch.optim, "Muon")]
    for title, shapes in sets.items():
        print(
            f"\n{title}: {len(shapes)} matrices, {DEVICE.type}, {torch.get_num_threads()} "
            f"threads, {rounds} rounds; products in {DTYPE}, "
            f"torch.optim.Muon's in torch.bfloat16"
        )
        print(
            f"{'':18s} {'median ms':>10s} {'range':>17s} {'/ ours':>7s} {'range':>13s} {'MiB':>8s}"
        )
        pipes, times, absent = {}, {}, {}
        for name in names:  # one after the other: probes must not disturb each other
            pipes[name] = start(contender, name, shapes)
            absent[name] = pipes[name].recv()
        for _, name in itertools.product(range(rounds), names):
            if absent[name] is None:
                pipes[name].send(True)
                times.setdefault(name, []).append(1000 * pipes[name].recv())
        for name in names:
            if absent[name] is not None:
                print(f"{name:18s} left out: a step would take about {absent[name]:.0f} s")
                continue
            pipes[name].send(False)
            ms, extra = times[name], pipes[name].recv() / 2**20
            ratios = [t / ours for t, ours in zip(ms, times["ours"])]
            print(
                f"{name:18s} {statistics.median(ms):10.1f} {min(ms):8.1f}-{max(ms):8.1f} "
                f"{statistics.median(ratios):7.2f} {min(ratios):6.2f}-{max(ratios):6.2f} "
                f"{extra:8.1f}"
            )


# ---- Over processes -----------------------------------------------------------------------------
def sent_bytes():
    """Bytes that crossed the loopback interface so far (Linux)."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def ranks_main(rank, world_size, shapes, folder, pipe):
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank,
                                world_size=world_size)  # fmt: skip
    params = parameters(shapes)
    muon = Muon(params, lr=1e-4, rank=rank, world_size=world_size, dtype=DTYPE)
    model = torch.nn.ParameterList(params)

    def sync():
        begin = time.perf_counter()
        train_gpt2.sync_gradients(model)
        return time.perf_counter() - begin

    actions = {"step": lambda: seconds_of(muon), "gradients": sync}
    muon.step()
    pipe.send(None)
    while action := pipe.recv():
        if world_size > 1:
            dist.barrier()
        pipe.send(actions[action]())


ACTIONS = ("step", "gradients")  # Muon's step; the sum of all gradients


def ask(team, action):
    """Have every rank do it; return the slowest one's seconds and the bytes that travelled."""
    before = sent_bytes()
    for pipe in team:
        pipe.send(action)
    return max([pipe.recv() for pipe in team]), sent_bytes() - before


def scaling(sets, rounds, processes):
    for title, shapes in sets.items():
        numel = sum(m * n for m, n in shapes)
        print(
            f"\n{title}: processes of one thread each, gloo, {rounds} rounds, products in {DTYPE}"
        )
        teams, times = {}, {}
        for world_size in (1, processes):
            folder = tempfile.mkdtemp()
            teams[world_size] = [
                start(ranks_main, rank, world_size, shapes, folder) for rank in range(world_size)
            ]
            for pipe in teams[world_size]:
                pipe.recv()

        sizes = {}
        for _ in range(rounds):
            for key in ((1, "step"), *itertools.product([processes], ACTIONS)):
                seconds, size = ask(teams[key[0]], key[1])
                times.setdefault(key, []).append(1000 * seconds)
                sizes.setdefault(key, []).append(size / 2**20 / key[0])
        for pipe in itertools.chain(*teams.values()):
            pipe.send(None)
        ratios = [a / b for a, b in zip(times[1, "step"], times[processes, "step"])]
        # a ring sends (W-1)/W of a buffer to reduce it, and as much again to spread the sum
        ring = (processes - 1) / processes * numel / 2**20
        bytes_a_value = {"step": 2 * 2, "gradients": 2 * 4}
        for key, ms in times.items():
            line = f"{key[0]} x {key[1]:10s} median {statistics.median(ms):9.1f} ms"
            if key[0] > 1:
                line += (
                    f", sent {statistics.median(sizes[key]):7.1f} MiB a rank, "
                    f"the least {ring * bytes_a_value[key[1]]:7.1f}"
                )
            print(line)
        print(
            f"step, one process / {processes}: {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f})"
        )


# ---- Many GPUs, by a model ----------------------------------------------------------------------
def predict(shapes, W, flops, bandwidth, latency):
    """Milliseconds of a step: {method: time}."""
    ring = (W - 1) / W / bandwidth
    numel = sum(m * n for m, n in shapes)
    trips = latency * (W > 1)

    def busiest(owners):
        loads = [0] * W
        for shape, owner in zip(shapes, owners):
            loads[owner] += newton_schulz_flops(shape)
        return max(loads) / flops

    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    muon = Muon(params, lr=1e-4, world_size=W)
    balanced = busiest(muon.owner[p] for p in params)
    computed, travelled = [0.0] * W, 0.0
    stacks = train_gpt2.stacks_of(params)  # as Muon sends them
    for first in range(0, len(stacks), W):
        together = list(itertools.chain(*stacks[first : first + W]))
        for p in together:
            computed[muon.owner[p]] += newton_schulz_flops(p.shape) / flops
        size = sum(p.numel() for p in together)
        travelled = max(travelled, max(computed)) + 2 * ring * 2 * size + trips
    sent = ring * 2 * numel  # bf16, once around
    dealt_in_turn = busiest(i % W for i in range(len(shapes)))
    return {
        "round robin": 1000 * (dealt_in_turn + 2 * sent + trips),
        "balanced": 1000 * (balanced + 2 * sent + trips),
        "balanced, overlapped": 1000 * travelled,
        "balanced, all_gather": 1000 * (balanced + sent + trips),
    }


def measured_flops():
    """FLOP/s of our step on the 124M set, on this device."""
    muon = Muon(parameters(SETS["GPT-2 124M"]), lr=1e-4, dtype=DTYPE)
    seconds_of(muon)
    spent = statistics.median(seconds_of(muon) for _ in range(5))
    return sum(map(newton_schulz_flops, SETS["GPT-2 124M"])) / spent


def simulate(tflops, gbytes, picture):
    source = "stated, not measured"
    if not tflops and DEVICE.type == "cuda":
        tflops, source = measured_flops() / 1e12, "measured here"
    tflops = tflops or 200.0
    print(
        f"Muon's step on GPT-2 124M, predicted, ms. Newton-Schulz at {tflops:.0f} TFLOP/s "
        f"({source}), all ranks send {gbytes:.0f} GB/s at once (stated), 20 us a collective."
    )
    print(
        "Left out: momentum and weight updates (a few passes over memory), launch times, and\n"
        "that computing and sending share the memory. Overlapped: as train_gpt2.Muon does it."
    )
    counts = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    shapes = SETS["GPT-2 124M"]
    rows = [predict(shapes, W, tflops * 1e12, gbytes * 1e9, 20e-6) for W in counts]
    print(f"{'GPUs':>5s} " + " ".join(f"{name:>21s}" for name in rows[0]))
    for W, row in zip(counts, rows):
        print(f"{W:5d} " + " ".join(f"{ms:21.2f}" for ms in row.values()))
    if picture:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for name in rows[0]:
            axes.plot(counts, [row[name] for row in rows], marker="o", markersize=3, label=name)
        axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="ms a step, predicted")
        axes.set_xticks(counts, counts)
        axes.legend()
        figure.savefig(picture, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=SETS, help="of the two sets of matrices, one")
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--tflops", type=float)
    parser.add_argument("--gbytes", type=float, default=300.0)
    parser.add_argument("--picture")
    options = parser.parse_args()
    sets = {name: SETS[name] for name in SETS if options.only in (None, name)}
    if options.simulate:
        simulate(options.tflops, options.gbytes, options.picture)
    elif options.scaling:
        scaling(sets, options.rounds, options.processes)
    else:
        compare(sets, options.rounds)
