"""The rule behind `bash run.sh check --preset=text --minutes=N`: settings for a text and a time.

It was fitted to the runs in records/2026-11-25_Minutes, whose README explains it.
"""

import math
import time
from dataclasses import dataclass

import train_gpt2
from train_gpt2 import PRESETS, Hyperparameters

SIZES = [(2, 128), (4, 128), (4, 192), (6, 256), (8, 384), (12, 512)]  # layers, channels
TOKENS_PER_PARAMETER = 5  # a size is chosen if the run trains each of its parameters on so many
MAX_EPOCHS = 4  # times that a run reads its text
VALIDATIONS = 4  # during a run, besides the first one

# The rates were tuned for these presets, of 64 and of 1,040 steps.
SHORT = Hyperparameters(**PRESETS["cpu"][1])
LONG = Hyperparameters(**PRESETS["text"][1])
RATES = [name for name in vars(LONG) if name.endswith("learning_rate")]


def learning_rate(name, steps, channels):
    """Return a learning rate: the power of the steps that gives the rates of both presets.

    Runs of fewer than 64 steps have the rates of 64 steps. With more channels, the rate of the head
    falls in proportion, and Muon's with the square root.
    """
    short, long = getattr(SHORT, name), getattr(LONG, name)
    exponent = math.log(long / short) / math.log(LONG.num_iterations / SHORT.num_iterations)
    rate = short * max(1.0, steps / SHORT.num_iterations) ** exponent
    width = channels / LONG.n_embd
    if name == "learning_rate":
        rate /= width
    if name == "muon_learning_rate":
        rate /= width**0.5
    return float(f"{rate:.2g}")


@dataclass
class Rule:
    """The rule for one text."""

    tokens: int  # to train on
    vocab_size: int

    def __post_init__(self):
        # A token of GPT-2 stands for about four bytes, so a quarter of the sequences hold as much
        # text. Its n-grams are shorter for the same reason.
        self.bytes = self.vocab_size < 1024
        self.batch_size = 16 if self.bytes else 4
        self.max_ngram = 6 if self.bytes else 3
        self.tokens_per_step = self.batch_size * LONG.sequence_length
        self.max_steps = MAX_EPOCHS * self.tokens // self.tokens_per_step

    def settings(self, size, steps):
        """Return the settings of a run, as arguments. size: (layers, channels)."""
        layers, channels = size
        epochs = steps * self.tokens_per_step / self.tokens
        settings = dict(
            n_layer=layers,
            n_head=channels // 64,
            n_embd=channels,
            max_ngram=self.max_ngram,
            ngram_rows=2**18 if self.tokens < 2**22 else 2**20,
            ngram_dropout=round(min(0.6, max(0.0, 0.2 * (epochs - 1))), 2),
            batch_size=self.batch_size,
            num_iterations=steps,
            warmdown_iters=round(0.8 * steps),
            muon_momentum_warmup=round(0.15 * steps),
            **{name: learning_rate(name, steps, channels) for name in RATES},
            val_loss_every=math.ceil(steps / VALIDATIONS),
            save_every=math.ceil(steps / VALIDATIONS),
        )
        return [f"--{name}={value}" for name, value in settings.items()]

    def choose(self, minutes, given):
        """Collective: return (size, steps) of a run, judging by a step of each size.

        given: other arguments, such as --train_files. The size is the largest one that is not
        larger than the text and that is trained long enough. If the next smaller one is done with
        its text before the time is up, the size need not be trained long enough.
        """
        chosen = None
        for size in SIZES:
            layers, channels = size
            parameters = 12 * layers * channels**2  # of the matrices of all blocks
            if chosen and parameters > self.tokens:
                break
            seconds = seconds_per_step([*self.settings(size, SHORT.num_iterations), *given])
            steps = self.limit(60 * minutes / seconds)
            trained_enough = steps * self.tokens_per_step >= TOKENS_PER_PARAMETER * parameters
            if chosen and chosen[1] < self.max_steps and not trained_enough:
                break
            chosen = size, steps
        return chosen

    def limit(self, steps):
        """Return a number of steps, at least 8 and not more than the text is good for."""
        return max(8, min(round(steps), self.max_steps))


def seconds_per_step(argv):
    """Collective: return how long a training step takes without torch.compile."""
    args = train_gpt2.parse_args([*argv, "--compile=False"])
    run = train_gpt2.set_up(args, train_gpt2.StopRequest())
    inputs, targets, _ = run.train_loader.batch(0)
    for _ in range(2):  # the first step also creates the states of the optimizers
        start = time.perf_counter()
        train_gpt2.train_step(run.model, run.optimizers, inputs, targets, run.args)[0].item()
        seconds = time.perf_counter() - start
    return max(train_gpt2.all_gather_objects(seconds))
