"""The rule behind `bash run.sh check --preset=text --minutes=N`: settings for a text and a time.

It was fitted to the runs in records/2026-11-25_Minutes, whose README explains it.
"""

import gc
import math
import time
from dataclasses import dataclass

import train_gpt2

SIZES = [(2, 128), (4, 128), (4, 192), (6, 256), (8, 384), (12, 512)]  # layers, channels
TOKENS_PER_PARAMETER = 5  # minimum number of training tokens per parameter of the blocks
MAX_EPOCHS = 4  # times that a run reads its text
VALIDATIONS = 4  # after the one at step 0; the last is at the end
SEQUENCE_LENGTH = 256

# Tuned learning rates for 64 steps (the preset cpu) and for 1,040 (text), with 128 channels.
FEW_STEPS, MANY_STEPS = 64, 1040
RATES = {
    "learning_rate": (0.02, 0.004),
    "embedding_learning_rate": (0.3, 0.1),
    "scalar_learning_rate": (0.04, 0.02),
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
    processes: int = 1

    def __post_init__(self):
        # A token of GPT-2 stands for about four bytes, so a quarter of the sequences hold as much
        # text. Its n-grams are shorter for the same reason.
        is_bytes = self.vocab_size < 1024
        self.max_ngram = 6 if is_bytes else 3
        share = math.ceil((16 if is_bytes else 4) / self.processes)
        self.batch_size = share * self.processes
        self.tokens_per_step = self.batch_size * SEQUENCE_LENGTH
        self.max_steps = MAX_EPOCHS * self.tokens // self.tokens_per_step

    def settings(self, size, steps):
        """Return the settings of a run as a dict. size: (layers, channels)."""
        layers, channels = size
        epochs = steps * self.tokens_per_step / self.tokens
        return dict(
            n_layer=layers,
            n_head=channels // 64,
            n_embd=channels,
            max_ngram=self.max_ngram,
            ngram_rows=2**18 if self.tokens < 2**22 else 2**20,
            ngram_dropout=round(0.6 * min(1.0, max(0.0, epochs - 1)), 2),  # against overfitting
            sequence_length=SEQUENCE_LENGTH,
            batch_size=self.batch_size,
            num_iterations=steps,
            warmdown_iters=round(0.8 * steps),
            muon_momentum_warmup=round(0.15 * steps),
            **{name: learning_rate(name, steps, channels) for name in RATES},
            val_loss_every=math.ceil(steps / VALIDATIONS),
            save_every=math.ceil(steps / VALIDATIONS),
        )

    def choose(self, minutes, given):
        """Collective: return (size, steps) of a run. given: other arguments, such as --train_files.

        The size is the largest one whose blocks have no more parameters than the text has tokens,
        and at least TOKENS_PER_PARAMETER training tokens for each. The latter is not required if
        the next smaller size would leave time unused, because the text limits its steps.
        """
        chosen = None
        for size in SIZES:
            layers, channels = size
            parameters = 12 * layers * channels**2  # of the matrices of all blocks
            if chosen and parameters > self.tokens:
                break
            settings = self.settings(size, FEW_STEPS)
            seconds = seconds_per_step([*arguments(settings), *given])
            steps = self.clamp(60 * minutes / seconds)
            trained_enough = steps * self.tokens_per_step >= TOKENS_PER_PARAMETER * parameters
            if chosen and chosen[1] < self.max_steps and not trained_enough:
                break
            chosen = size, steps
        return chosen

    def clamp(self, steps):
        """Return a whole number of steps, at least 8 and, above that, at most max_steps."""
        return max(8, round(min(steps, self.max_steps)))


def arguments(settings):
    """Return settings as arguments of train_gpt2.py."""
    return [f"--{name}={value}" for name, value in settings.items()]


def seconds_per_step(argv):
    """Collective: return how long a training step takes without torch.compile."""
    args = train_gpt2.parse_args([*argv, "--compile=False"])
    run = train_gpt2.set_up(args, train_gpt2.StopRequest())
    inputs, targets, _ = run.train_loader.batch(0)
    for _ in range(2):  # the first step also creates the states of the optimizers
        start = time.perf_counter()
        train_gpt2.train_step(run.model, run.optimizers, inputs, targets, run.args).item()
        seconds = time.perf_counter() - start
    del run
    gc.collect()  # the model refers to itself, so its memory would not be free for the next one
    return max(train_gpt2.all_gather_objects(seconds))
