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
import typing
from pathlib import Path

import torch

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [str(TOOLS.parent.parent), str(TOOLS)]
from report import COLORS, command, headed, markdown, new_figure, save  # noqa: E402

from train_gpt2 import GPT, Hyperparameters, Muon, matrix_cost, params_of, stacks_of  # noqa: E402

ARGS = Hyperparameters()
COUNTS = [2**k for k in range(11)]  # GPUs


def stated(value, basis):
    return dataclasses.field(default=value, metadata={"basis": basis})


@dataclasses.dataclass(frozen=True)
class Setup:
    """One device's times, ms in a step of 512 sequences, and its links. ValueError: impossible."""

    forward_backward_ms: float = stated(1120.0, "[another GPT-2][gpus]: 1,124 ms on one H100")
    # An upper bound: wide matrices take fewer operations than the five full iterations that
    # Muon.loads counts, 1.30 TFLOP in all.
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
    """Return the script's optimizer for W ranks: it knows the owners of matrices and the loads."""
    return Muon(list(network().h.parameters()), lr=0.0, world_size=W)


def rounds(W):
    """Return the matrices whose updates travel together, of each round.

    They are those of W stacks; the last round may have fewer.
    """
    stacks = stacks_of(params_of(muon(W)))
    return [list(itertools.chain(*stacks[first : first + W])) for first in range(0, len(stacks), W)]


@functools.cache
def share(shape):
    """Return a matrix's share of all Newton-Schulz work, as Muon.loads counts it."""
    return matrix_cost(torch.empty(shape, device="meta")) / sum(muon(1).loads)


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
    """Return ms of the sums of a step: all gradients in float32, and two scalars before them."""
    gradients = 4 * sum(p.numel() for p in network().parameters())
    scalars = 8  # the loss and the sum of norms
    return all_reduce_ms(gradients, W, setup) + all_reduce_ms(scalars, W, setup)


def signals_ms(setup, W):
    """Return ms of asking on the CPUs whether a signal came: gloo's ring, round to sum and to tell.

    Each step asks once, before its first micro-batch, when the device has nothing else to do.
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


class Check(typing.NamedTuple):
    """A public figure, and what is predicted for it from another public figure, measured."""

    what: str
    short: str
    measured: float
    on: int  # GPUs, where that was measured
    W: int  # GPUs of the figure
    unit: str
    seen: float
    predicted: float
    why: str

    @property
    def error(self):
        return self.predicted / self.seen - 1


def checks():
    """Return the Checks, predicted from the stated inputs."""
    setup, before, after = Setup(), 178.9, 153.84  # ms: record 5, record 6
    spared = 1 - muon_ms(setup, 8)[0] / setup.newton_schulz_ms  # of Newton-Schulz, by sharing it
    flat = all_reduce_ms(2 * sum(p.numel() for p in network().h.parameters()), 8, setup)
    fitting = (before - after + flat) / spared
    four = 2 * 136.8784 / 2.245  # ms
    minutes = 10.54 / 115  # for each ms of a step, on 2 nodes
    return [
        Check(
            "[record 7][speedrun] on 8 H100, from one H100 of another code",
            "record 7, H100",
            1124.0,
            1,
            8,
            "ms",
            141.82,
            sum(parts(setup, 8).values()),
            "it hides travel behind the backward pass, we do not",
        ),
        Check(
            "[GPT-2 124M, AdamW][gpus]: 2,509 ms on 1 A100, on 8",
            "AdamW, A100",
            2509.02,
            1,
            8,
            "ms",
            327.57,
            rescaled(2509.02, 1, 8),
            "AdamW does not divide; an A100's links are slower; its page was found by files alone",
        ),
        Check(
            "[speedrun of November 2025][four]: 121.9 ms on 4 H100, [on 8][eight]",
            "November 2025, H100",
            four,
            4,
            8,
            "ms",
            61.31,
            rescaled(four, 4, 8),
            "it sends bf16, hidden; not one machine; read as written halved",
        ),
        Check(
            "[nanoGPT][nodes]: 115 ms on 2 nodes of 8 H100, on 8 nodes",
            "nanoGPT, H100",
            115.0,
            16,
            64,
            "ms",
            30.0,
            rescaled(115, 16, 64),
            "partly a calibration: its 3 ms of travel on both made us let both "
            "kinds of links work at once",
        ),
        Check(
            "the same: 10.54 min to a loss on 2 nodes, on 4",
            "nanoGPT, to a loss",
            10.54,
            16,
            32,
            "min",
            5.88,
            minutes * rescaled(115, 16, 32),
            "the number of steps to the loss varies",
        ),
        Check(
            "the same, on 8",
            "nanoGPT, to a loss",
            10.54,
            16,
            64,
            "min",
            3.38,
            minutes * rescaled(115, 16, 64),
            "so, too: 30 ms a step make 2.75 min",
        ),
        Check(
            "[record 5][speedrun] to 6: 178.9 ms, Newton-Schulz then shared by 8",
            "record 5 to 6, H100",
            before,
            8,
            8,
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
- Gradients travel in float32 when the backward pass is over, all in one all_reduce: two trips, each
  of which takes (W-1)/W of the buffer through each GPU, inside nodes first.
- Latency: an all_reduce waits 2 log2(W) hops, of the CPUs 2(W-1).
- Left out: copying the gradients into one buffer (0.4 ms at 2.7 TB/s), smaller kernels with fewer
  sequences a GPU, stragglers, starting a collective, shared switches, computing slowed by sending,
  validation, checkpoints."""
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
        [c.what, f"{c.seen:g} {c.unit}", f"{c.predicted:.4g} {c.unit}", f"{c.error:+.1%}", c.why]
        for c in checks()
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


def finding(setup):
    """Return what the picture says."""
    way, most = next(iter(sizes(1).items()))
    predicted = {W: measures(setup, W, most)[0] for W in COUNTS if way in sizes(W)}
    fastest = min(predicted, key=predicted.get)
    low, *_, high = sorted(check.error for check in checks())
    return (
        f"Predicted: a step of {way} is shortest on {fastest} GPUs, {predicted[fastest]:.1f} ms. "
        f"Public figures: missed by {low:+.1%} to {high:+.1%}"
    )


def draw_steps(axes, setup):
    """Draw the predicted steps as lines, public ones as points with the numbers of draw_errors."""
    for way, color in zip(sizes(1), COLORS):
        counts = [W for W in COUNTS if way in sizes(W)]
        ms, efficiency, *_ = zip(*(measures(setup, W, sizes(W)[way]) for W in counts))
        axes.plot(counts, ms, marker=".", color=color, label=f"predicted, {way}")
        ideal = [a * b for a, b in zip(ms, efficiency)]
        axes.plot(counts, ideal, "--", color=color, linewidth=1, label="the same at efficiency 1")
    draw_public(axes)
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="ms a step", xlim=(0.8, 1300))
    axes.set_xticks(COUNTS, COUNTS)
    ticks = [3, 10, 30, 100, 300, 1000, 3000]
    axes.set_yticks(ticks, ticks)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", fontsize=8)


def draw_public(axes):
    """Draw the public steps: those seen, those they are predicted from, and the prediction."""
    steps = {f"{i}": check for i, check in enumerate(checks(), 1) if check.unit == "ms"}
    for number, c in steps.items():
        counts = [W for W in COUNTS if c.on <= W <= c.W]
        path = [rescaled(c.measured, c.on, W) for W in counts[:-1]] + [c.predicted]
        axes.plot(counts, path, ":", color="0.4", linewidth=1.2, zorder=2)
        axes.plot(c.on, c.measured, "o", color="black", markerfacecolor="white", zorder=3)
        axes.plot(c.W, c.seen, "o", color="black", zorder=4)
        near = [x.seen for x in steps.values() if x.W == c.W and 0.8 < x.seen / c.seen < 1.25]
        rise = 4 if c.seen == max(near) else -12  # points
        far = dict(xytext=(7, rise), textcoords="offset points", fontsize=9, zorder=5)
        axes.annotate(number, (c.W, c.seen), **far)
    black = dict(color="black", linestyle="")
    axes.plot([], [], marker="o", label="public measurement", **black)
    axes.plot(
        [], [], marker="o", markerfacecolor="white", label="another, to predict it from", **black
    )
    axes.plot([], [], ":", color="0.4", label="predicted from that")


def draw_errors(axes):
    """Draw by how much each public figure is missed."""
    names = []
    for i, c in enumerate(checks(), 1):
        axes.plot(100 * c.error, i, "o", color="black")
        counts = f"{c.on} to {c.W} GPUs" if c.on < c.W else f"{c.W} GPUs"
        names.append(
            f"{i}  {c.short}, {counts}\n{c.seen:.4g} {c.unit}, predicted {c.predicted:.4g} {c.unit}"
        )
    axes.axvline(0, color="0.5", linewidth=1)
    axes.set(xlabel="predicted over measured, %", xlim=(-20, 20), ylim=(len(names) + 0.6, 0.4))
    axes.set_yticks(range(1, len(names) + 1), names, fontsize=9)
    axes.grid(alpha=0.3)


def draw(setup, text, path):
    """Draw predicted steps with the public ones, and by how much these are missed."""
    figure = new_figure(12, 5)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    draw_steps(left, setup)
    draw_errors(right)
    remark = "Public figures: of other codes, predicted from one another and the stated inputs."
    headed(figure, finding(setup), remark)
    makers = draw, draw_steps, draw_public, draw_errors, headed
    save(figure, path, *makers, finding(setup), COLORS, text)


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Setup):
        parser.add_argument(f"--{field.name}", type=field.type, help=f"{field.default:g}")
    parser.add_argument("--picture", help="a .png to draw; an .svg is written beside it")
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
