"""Reduce shards of GPT-2 tokens to a small vocabulary: reduce_vocabulary.py OUT VAL TRAIN...

The 4,094 most frequent tokens of the TRAIN shards keep an id of their own, by frequency. All
other tokens become id 4094, and the end-of-text token becomes 4095.
"""

import sys
from pathlib import Path

import numpy as np

SIZE = 4096
END_OF_TEXT = 50256

out, val, *train = map(Path, sys.argv[1:])
shards = {path: np.fromfile(path, dtype=np.uint16, offset=1024) for path in (val, *train)}
counts = sum(np.bincount(shards[path], minlength=50257) for path in train)
counts[END_OF_TEXT] = -1
frequent = np.argsort(-counts, kind="stable")[: SIZE - 2]
print(f"{counts[frequent].sum() / (counts.sum() + 1):.1%} of the tokens keep an id of their own")
new_id = np.full(2**16, SIZE - 2, np.uint16)
new_id[frequent] = np.arange(SIZE - 2)
new_id[END_OF_TEXT] = SIZE - 1
out.mkdir(parents=True, exist_ok=True)
for path, tokens in shards.items():
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    (out / path.name).write_bytes(header.tobytes() + new_id[tokens].tobytes())
