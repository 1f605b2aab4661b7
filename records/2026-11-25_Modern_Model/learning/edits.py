"""Write edited copies of train_gpt2.py for the ablation: edits.py SCRIPT OUT

`unmodified` is record 21; the others change one part each. In all of them, masks have blocks
of 32 tokens instead of 128, so that the window can grow within 256 tokens.
"""

import sys
from pathlib import Path

EDITS = {
    "unmodified": [],
    "no_x0": [
        (
            "x = self.stream_weights[0] * x + self.stream_weights[1] * x0",
            "x = self.stream_weights[0] * x + 0 * self.stream_weights[1]",
        )
    ],
    "no_skips": [
        (
            "x = x + self.skip_weights[mirror] * outputs[mirror]",
            "x = x + 0 * self.skip_weights[mirror]",
        )
    ],
    "rotary_all_channels": [
        (
            "        frequencies = 1024.0 ** -torch.linspace(0, 1, D // 4)\n"
            "        frequencies = F.pad(frequencies, (0, D // 2 - D // 4))"
            "  # the others carry no position\n",
            "        frequencies = 1024.0 ** -torch.linspace(0, 1, D // 2)\n",
        )
    ],
    "default_scale": [("mask, scale=0.12", "mask, scale=None")],
    "no_softcap": [("LOGIT_SOFTCAP = 15.0", "LOGIT_SOFTCAP = 0.0")],
    "tied_head": [
        (
            "        nn.init.zeros_(self.lm_head.weight)\n",
            "        self.wte.weight = self.lm_head.weight\n",
        ),
        (
            "embeddings = [*model.wte.parameters(), *model.value_tables.parameters()]",
            "embeddings = [*model.value_tables.parameters()]",
        ),
    ],
}

source, out = Path(sys.argv[1]).read_text(), Path(sys.argv[2])
for name, changes in EDITS.items():
    text = source
    for old, new in [("BLOCK = 128  #", "BLOCK = 32  #"), *changes]:
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    (out / f"{name}.py").write_text(text)
