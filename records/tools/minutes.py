"""The rule behind `bash run.sh check --preset=text --minutes=N`: settings for a text and a time.

It was fitted to the runs in records/2026-11-25_Minutes, whose README explains it.
"""

import gc
import math
import statistics
import time
from dataclasses import dataclass

import torch

import train_gpt2

SIZES = [(2, 128), (4, 128), (4, 192), (6, 256), (8, 384), (12, 512)]  # layers, channels
TOKENS_PER_PARAMETER = 5  # minimum number of training tokens per parameter of the blocks
MAX_EPOCHS = 4  # times that a run reads its text
VALIDATIONS = 4  # after the one at step 0; the last is at the end
SEQUENCE_LENGTH = 256

# Rates that were tuned for 64 steps (an earlier preset cpu) and for 1,040 (an earlier preset text,
# whose rates are those of today's), with 128 channels.
FEW_STEPS, MANY_STEPS = 64, 1040
RATES = {
    "learning_rate": (0.02, 0.004),
    "embedding_learning_rate": (0.3, 0.1),
    "ngram_learning_rate": (0.3, 0.04),
    "muon_learning_rate": (0.004, 0.0015),
}


def learning_rate(name, steps, channels):
    """Return a learning rate: the power of the number of steps that gives both tuned rates.

    Below 64 steps, it is constant. The head's rate is inversely proportional to the width, and
    Muon's to the square root of the width.
    """
    first, last = RATES[name]
    exponent = math.log(last / first) / math.log(MANY_STEPS / FEW_STEPS)
    rate = first * max(1.0, steps / FEW_STEPS) ** exponent
    if name == "learning_rate":
        rate /= channels / 128
    if name == "muon_learning_rate":
        rate /= (channels / 128) ** 0.5
    return float(f"{rate:.2g}")


@dataclass
class Rule:
    """Chooses the settings of a run on one text."""

    tokens: int  # number of training tokens in the text
    vocab_size: int

    def __post_init__(self):
        # A token of GPT-2 stands for about four bytes, so a quarter of the sequences hold as much
        # text. Its n-grams are shorter for the same reason.
        is_bytes = self.vocab_size < 1024
        self.max_ngram = 6 if is_bytes else 3
        processes = train_gpt2.get_world_size()
        self.batch_size = math.ceil((16 if is_bytes else 4) / processes) * processes
        self.tokens_per_step = self.batch_size * SEQUENCE_LENGTH
        self.max_steps = MAX_EPOCHS * self.tokens // self.tokens_per_step

    def settings(self, size, steps, seconds_per_step):
        """Return the settings of a run as a dict. size: (layers, channels)."""
        layers, channels = size
        epochs = steps * self.tokens_per_step / self.tokens
        quarter_hour = math.ceil(900 / seconds_per_step)  # in steps
        val_loss_every = math.ceil(steps / VALIDATIONS)
        return dict(
            n_layer=layers,
            n_head=channels // 64,
            n_embd=channels,
            max_ngram=self.max_ngram,
            ngram_rows=2**18 if self.tokens < 2**22 else 2**20,
            ngram_dropout=round(0.7 * min(1.0, max(0.0, epochs - 1)), 2),  # against overfitting
            sequence_length=SEQUENCE_LENGTH,
            batch_size=self.batch_size,
            num_iterations=steps,
            **{name: learning_rate(name, steps, channels) for name in RATES},
            val_loss_every=val_loss_every,
            save_every=min(val_loss_every, quarter_hour),
        )

    def choose(self, minutes, given):
        """Collective: return the settings of a run. given: other arguments, such as --train_files.

        The size is the largest one whose blocks have no more parameters than the text has tokens,
        and at least TOKENS_PER_PARAMETER training tokens for each. The latter is not required if
        the next smaller size would leave time unused, because the text limits its steps.
        """
        chosen = None
        for size in SIZES:
            layers, channels = size
            parameters = 12 * layers * channels**2  # of all blocks, if each has attention
            if chosen and parameters > self.tokens:
                break
            trial = arguments(self.settings(size, FEW_STEPS, seconds_per_step=1))
            step, validation = seconds_of([*given, *trial])
            seconds = 60 * minutes - (1 + VALIDATIONS) * validation
            steps = max(1, min(max(8, round(seconds / step)), self.max_steps))
            trained_enough = steps * self.tokens_per_step >= TOKENS_PER_PARAMETER * parameters
            if chosen and chosen["num_iterations"] < self.max_steps and not trained_enough:
                break
            chosen = self.settings(size, steps, step)
        return chosen


def arguments(settings):
    """Return settings as arguments of train_gpt2.py."""
    return [f"--{name}={value}" for name, value in settings.items()]


def timed(function, *arguments):
    """Return the seconds that a call takes. The function must wait for the device."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def seconds_of(argv):
    """Collective: return the seconds of a step and of a validation with these arguments."""
    gc.collect()  # frees the memory of earlier trials
    return measure(train_gpt2.set_up(train_gpt2.parse_args(argv), train_gpt2.StopRequest()))


def measure(run):
    """Collective: return the seconds of a step and of a validation; takes a few steps.

    A step of AdamW may follow only several steps of Muon, so these are timed together.
    """
    steps = run.args.adamw_every
    batch = run.train_loader.batch(run.step)
    micro_batch = [part[: run.micro_batch_size] for part in batch]

    def train_steps():
        for _ in range(steps):
            train_gpt2.train_step(run, *batch)["loss"].item()  # waits for the device
            run.step += 1  # decides whether AdamW has a step, too
        run.step -= steps

    @torch.no_grad()
    def validate():
        run.model(*micro_batch).item()

    train_steps()  # creates the states of the optimizers
    step = statistics.median(timed(train_steps) for _ in range(3)) / steps
    validate()
    validation = timed(validate) * math.ceil(len(run.validation) / run.micro_batch_size)
    return train_gpt2.from_rank_0((step, validation))
