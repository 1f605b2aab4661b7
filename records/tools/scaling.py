"""Predict a step's time on 1 to 1024 GPUs, on paper, and say how far public figures disagree.

    python records/tools/scaling.py [--forward_backward_ms=1120 ...] [--picture FILE.png]

The _ms options are one device's times in a whole step of the default settings, 512 x 1024 tokens,
as `bash run.sh profile` shows them; the others describe the links. What is not given is stated, not
measured. What travels is read from train_gpt2.py's own Muon, built without storage.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import sys
from pathlib import Path

import torch

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [str(TOOLS.parent.parent), str(TOOLS)]
from report import command, markdown, save  # noqa: E402

from train_gpt2 import GPT, Hyperparameters, Muon, bundle_cost  # noqa: E402

ARGS = Hyperparameters()
COUNTS = [2**k for k in range(11)]  # GPUs


def stated(value, basis):
    return dataclasses.field(default=value, metadata={"basis": basis})


@dataclasses.dataclass(frozen=True)
class Setup:
    """One device's times, ms in a step of 512 sequences, and its links. ValueError: impossible."""

    forward_backward_ms: float = stated(1120.0, "[another GPT-2][gpus]: 1,124 ms on one H100")
    newton_schulz_ms: float = stated(8.2, "1.63 TFLOP (Muon.loads) at 200 TFLOP/s")
    adamw_ms: float = stated(0.4, "28 bytes of memory traffic a weight, 38.6M, at 2.7 TB/s")
    other_ms: float = stated(2.0, "a guess: applying updates, norms, loading, launches")
    node_gbytes: float = stated(300.0, "GB/s a GPU sends in its node; [370][links] at best")
    network_gbytes: float = stated(40.0, "GB/s a GPU sends to other nodes, 80% of 400 Gbit/s")
    latency_us: float = stated(3.0, "a hop; [NCCL's table][hops]: 1.9 in a node, 4.0 between")
    gloo_us: float = stated(30.0, "a guess: a hop between CPUs, whose sum tells of signals")
    gpus_a_node: int = stated(8, "as in the public runs")

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if name.endswith("gbytes"):  # may be infinite, to see what is left
                legal, fits = "above 0", value > 0
            elif name == "forward_backward_ms":
                legal, fits = "above 0 and finite", 0 < value < math.inf
            else:
                legal, fits = "at least 0 and finite", 0 <= value < math.inf
            if not fits:
                raise ValueError(f"{name}={value} must be {legal}")
        if self.gpus_a_node not in COUNTS:
            raise ValueError(f"gpus_a_node={self.gpus_a_node} must be in {COUNTS}")


# ---- the model: what the script computes and sends in a step -------------------------------------
@functools.cache
def network():
    with torch.device("meta"):  # shapes only
        return GPT(ARGS)


@functools.cache
def muon(W):
    """Return the script's optimizer for W ranks: owners, loads, bundles."""
    return Muon(list(network().h.parameters()), lr=0.0, world_size=W)


def rounds(W):
    """Return the matrices whose updates travel together, of each round of W bundles."""
    bundles = muon(W).bundles[0]
    together = [bundles[first : first + W] for first in range(0, len(bundles), W)]
    return [list(itertools.chain(*bundles)) for bundles in together]


@functools.cache
def share(shape):
    """Return a matrix's share of all Newton-Schulz work, as Muon.loads counts it."""
    return bundle_cost([torch.empty(shape, device="meta")]) / sum(muon(1).loads)


def trip(size, W, gpus_a_node):
    """Return bytes a GPU sends (inside its node, to others) to sum `size` bytes, or to spread them.

    Together (W-1)/W of the buffer. Between nodes, each GPU takes its part of what its node holds.
    """
    local = min(W, gpus_a_node)
    nodes = W // local
    return (local - 1) / local * size, (nodes - 1) / nodes * size / local


def trip_ms(size, W, setup):
    """Return ms of a trip: chunk by chunk, so that both kinds of links are busy all the time."""
    inside, between = trip(size, W, setup.gpus_a_node)
    return max(inside / setup.node_gbytes, between / setup.network_gbytes) / 1e6


def all_reduce_ms(size, W, setup):
    """Return ms: two trips, in trees of log2(W) hops."""
    return 2 * trip_ms(size, W, setup) + 2 * math.log2(W) * setup.latency_us / 1000


def gradients_ms(setup, W):
    """Return ms of sync_gradients, in float32: the head's to all, each matrix's to its owner.

    A reduce runs along a ring of W-1 hops that ends at its owner. The next ring begins behind its
    own owner, as soon as that rank has passed on its part of the one before.
    """
    owners = [muon(W).owner[p] for p in network().h.parameters()]
    hops = W - 1 + sum((b - a) % W for a, b in itertools.pairwise(owners))
    matrices = 4 * sum(p.numel() for p in network().h.parameters())
    head = all_reduce_ms(4 * network().lm_head.weight.numel(), W, setup)
    scalars = all_reduce_ms(8, W, setup)  # the loss and the largest gradient
    return trip_ms(matrices, W, setup) + hops * setup.latency_us / 1000 + head + scalars


def signals_ms(setup, W):
    """Return ms of asking on the CPUs whether a signal came: gloo's ring, round to sum and to tell.

    A step asks before each micro-batch; only the first time has the device nothing else to do.
    """
    return 2 * (W - 1) * setup.gloo_us / 1000


def muon_ms(setup, W):
    """Return ms of (the busiest rank's Newton-Schulz work, the wait for updates after it).

    A round's updates travel in bf16 while the next round is computed.
    """
    owner, busy, arrived = muon(W).owner, [0.0] * W, 0.0
    for matrices in rounds(W):
        for p in matrices:
            busy[owner[p]] += setup.newton_schulz_ms * share(p.shape)
        size = 2 * sum(p.numel() for p in matrices)
        arrived = max(arrived, *busy) + all_reduce_ms(size, W, setup)
    return max(busy), arrived - max(busy)


def parts(setup, W, sequences=ARGS.batch_size):
    """Return {part of a step: ms}; they add up to the step."""
    work, wait = muon_ms(setup, W)
    return {
        "forward and backward": setup.forward_backward_ms * sequences / ARGS.batch_size / W,
        "Newton-Schulz": work,
        "AdamW and the rest": setup.adamw_ms + setup.other_ms,
        "gradients": gradients_ms(setup, W),
        "updates": wait,
        "signals": signals_ms(setup, W),
    }


def measures(setup, W, sequences):
    """Return (ms, efficiency, share of communication, tokens/s) of a step.

    Efficiency: the time of one GPU for the same step, over that of W GPUs together.
    """
    of = parts(setup, W, sequences)
    ms, alone = sum(of.values()), sum(parts(setup, 1, sequences).values())
    sent = of["gradients"] + of["updates"] + of["signals"]
    return ms, alone / W / ms, sent / ms, 1000 * sequences * ARGS.sequence_length / ms


# ---- public figures ------------------------------------------------------------------------------
def rescaled(ms, W, to):
    """Return a public step's ms on `to` GPUs from that on W: its work divides, its travel is added.

    Of another code this is all that is known: one all_reduce of gradients, as large as ours.
    """
    size = 4 * sum(p.numel() for p in network().parameters())
    travel = {count: all_reduce_ms(size, count, Setup()) for count in (W, to)}
    return (ms - travel[W]) * W / to + travel[to]


def checks():
    """Return rows (what, unit, figure, predicted, why they differ), from the stated inputs."""
    setup, before, after = Setup(), 178.9, 153.84  # ms: record 5, record 6
    spared = 1 - muon_ms(setup, 8)[0] / setup.newton_schulz_ms  # of Newton-Schulz, by sharing it
    flat = all_reduce_ms(2 * sum(p.numel() for p in network().h.parameters()), 8, setup)
    fitting = (before - after + flat) / spared
    minutes = 10.54 / 115  # for each ms of a step, on 2 nodes
    return [
        (
            "[record 7][speedrun] on 8 H100, from one H100 of another code",
            "ms",
            141.82,
            sum(parts(setup, 8).values()),
            "it hides travel behind the backward pass, we do not",
        ),
        (
            "[GPT-2 124M, AdamW][gpus]: 2,509 ms on 1 A100, on 8",
            "ms",
            327.57,
            rescaled(2509.02, 1, 8),
            "AdamW does not divide; an A100's links are slower; its page was found by files alone",
        ),
        (
            "[speedrun of November 2025][four]: 121.9 ms on 4 H100, [on 8][eight]",
            "ms",
            61.31,
            rescaled(2 * 136.8784 / 2.245, 4, 8),
            "it sends bf16, hidden; not one machine; read as written halved",
        ),
        (
            "[nanoGPT][nodes]: 115 ms on 2 nodes of 8 H100, on 8 nodes",
            "ms",
            30.0,
            rescaled(115, 16, 64),
            "partly a calibration: its 3 ms of travel on both made us let both "
            "kinds of links work at once",
        ),
        (
            "the same: 10.54 min to a loss on 2 nodes, on 4",
            "min",
            5.88,
            minutes * rescaled(115, 16, 32),
            "the number of steps to the loss varies",
        ),
        (
            "the same, on 8",
            "min",
            3.38,
            minutes * rescaled(115, 16, 64),
            "so, too: 30 ms a step make 2.75 min",
        ),
        (
            "[record 5][speedrun] to 6: 178.9 ms, Newton-Schulz then shared by 8",
            "ms",
            after,
            before - setup.newton_schulz_ms * spared + flat,
            f"newton_schulz_ms={fitting:.0f} would fit: small kernels are far from 200 TFLOP/s",
        ),
    ]


# ---- the page ------------------------------------------------------------------------------------
ASSUMPTIONS = """\
Assumptions:

- Forward and backward divide exactly; AdamW and the rest are repeated on every GPU.
- Newton-Schulz is dealt out by cost (Muon); a round's updates travel, in bf16, during the next.
- Gradients travel in float32 when the backward pass is over: one all_reduce for the tied embedding,
  72 reduces to owners. A trip takes (W-1)/W of a buffer through each GPU, inside nodes first.
- Latency: an all_reduce waits 2 log2(W) hops, of the CPUs 2(W-1); a reduce W-1 in a ring that ends
  at its owner; a rank begins the next reduce when it has passed on its part of the last.
- Left out: smaller kernels with fewer sequences a GPU, stragglers, starting a collective, shared
  switches, computing slowed by sending, validation, checkpoints."""
SOURCES = """\
[gpus]: https://github.com/Any-Winter-4079/GPT-3-Small-Pretraining-Experiments
[speedrun]: https://github.com/KellerJordan/modded-nanogpt
[four]: https://github.com/KellerJordan/modded-nanogpt/pull/155
[eight]: https://github.com/KellerJordan/modded-nanogpt/pull/154
[nodes]: https://github.com/modal-labs/multinode-training-guide/pull/27
[links]: https://github.com/NVIDIA/nccl-tests/issues/212
[hops]: https://github.com/NVIDIA/nccl/blob/01afd20a77b5/src/graph/tuning.cc"""


def sizes(W):
    """Return the sequences of a step on W GPUs, {how it scales: number}; none below one a GPU."""
    strong = {f"{ARGS.batch_size} sequences": ARGS.batch_size} if ARGS.batch_size >= W else {}
    return strong | {f"{ARGS.device_batch_size} a GPU": ARGS.device_batch_size * W}


def scaling(setup):
    rows = []
    for W in COUNTS:
        row = [f"{W}"]
        for way in sizes(1):
            if way in sizes(W):
                ms, efficiency, sent, tokens = measures(setup, W, sizes(W)[way])
                row += f"{ms:.1f}", f"{efficiency:.0%}", f"{sent:.0%}", f"{tokens / 1e6:.2f}"
            else:
                row += ["n/a"] * 4
        rows.append(row)
    head = ([f"{way}: ms/step", "efficiency", "communication", "M tokens/s"] for way in sizes(1))
    return markdown(["GPUs", *itertools.chain(*head)], rows)


def page(setup, given):
    rows = [
        [
            field.name,
            f"{getattr(setup, field.name):g}",
            "given" if field.name in given else f"stated, not measured: {field.metadata['basis']}",
        ]
        for field in dataclasses.fields(Setup)
    ]
    most, near = ARGS.batch_size, dataclasses.replace(setup, latency_us=0.0)
    bound = ", ".join(f"{part} {ms:.1f}" for part, ms in parts(setup, most).items())
    hops = gradients_ms(setup, most) - gradients_ms(near, most)
    public = [
        [what, f"{seen:g} {unit}", f"{predicted:.4g} {unit}", f"{predicted / seen - 1:+.1%}", why]
        for what, unit, seen, predicted, why in checks()
    ]
    return "\n\n".join(
        [
            "Predicted, not measured: a step of the default settings, GPT-2 124M.",
            markdown(["input", "value", "from"], rows),
            scaling(setup),
            "Efficiency: one GPU's time for the same step / the time of all GPUs together. n/a: a "
            f"sequence is not split. {most} sequences on {most} GPUs, ms: {bound}; of the "
            f"gradients, {hops:.1f} are latency.",
            ASSUMPTIONS,
            "Against public figures, each predicted from another one and the stated inputs:",
            markdown(["public figure", "seen", "predicted", "error", "why"], public),
            SOURCES,
        ]
    )


def draw(setup, text, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for way in sizes(1):
        counts = [W for W in COUNTS if way in sizes(W)]
        ms, efficiency, *_ = zip(*(measures(setup, W, sizes(W)[way]) for W in counts))
        (line,) = axes.plot(counts, ms, marker="o", markersize=3, label=way)
        axes.plot(counts, [a * b for a, b in zip(ms, efficiency)], "--", color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="ms a step, predicted")
    axes.set_xticks(COUNTS, COUNTS)
    axes.legend(title="dashed: efficiency 1")
    save(figure, path, text)


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Setup):
        parser.add_argument(f"--{field.name}", type=field.type, help=f"{field.default:g}")
    parser.add_argument("--picture", help="a .png to draw, log-log")
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    picture = given.pop("picture", None)
    setup = Setup(**given)
    text = page(setup, given)
    print(text)
    if picture:
        draw(setup, text, picture)
    return 0


if __name__ == "__main__":
    command(main)
