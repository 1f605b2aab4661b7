"""Print how well the trained models in work/ copy: their losses on text that they read twice.

    python copying.py [CHANGE]     # default: all changes with weights

train_pairs.py writes the weights, which are not in the repository. The text is 32 pieces of 256
validation tokens. A model that copies predicts the second copy much better than the first.
"""

import subprocess
import sys

import numpy as np
import torch
import torch.nn.functional as F
from train_pairs import CHANGES, MODERN, WORK

PIECES, LENGTH = 32, 256
DOCUMENT_TOKEN = 2048  # no piece may contain it, because attention ends at a new document


def print_losses(name):
    """Print the losses of all seeds of a change, with the scripts that train_pairs.py edited."""
    folder = WORK / name
    sys.path.insert(0, str((folder / MODERN).parent))
    import train_modern  # adds the folder of train_gpt2.py to sys.path

    import train_gpt2

    stream = train_gpt2.TokenStream(f"{folder}/data/small/val_*.bin", DOCUMENT_TOKEN + 1)
    tokens = stream.read(0, stream.total_tokens // LENGTH * LENGTH).reshape(-1, LENGTH)
    tokens = tokens[(tokens != DOCUMENT_TOKEN).all(1)][:PIECES]
    twice = torch.from_numpy(np.tile(tokens, 2).astype(np.int64))  # (PIECES, 2 * LENGTH)
    for path in sorted(folder.glob("logs/*/model.pt")):
        state = torch.load(path, weights_only=True)
        model = train_modern.ModernGPT(train_modern.ModernSettings(**state["hyperparameters"]))
        model.load_state_dict(state["model"])
        with torch.no_grad():
            logits = model(twice)[:, :-1]
        # The first token of each copy is left out: it cannot be predicted by copying.
        losses = F.cross_entropy(logits.transpose(1, 2), twice[:, 1:], reduction="none")
        first, second = losses[:, : LENGTH - 1].mean(), losses[:, LENGTH:].mean()
        print(f"{path.parent.name}: first copy {first:.2f}, second copy {second:.2f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        torch.set_num_threads(1)
        print_losses(sys.argv[1])
    else:  # a process for each change, because their modules have the same names
        for name in CHANGES:
            if any((WORK / name).glob("logs/*/model.pt")):
                subprocess.run([sys.executable, __file__, name], check=True)
