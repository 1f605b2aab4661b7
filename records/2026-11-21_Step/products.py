"""How long the products of a step take alone, at the size of the bar: python products.py

6 layers x 384, vocabulary 50304, 8 x 512 tokens, float32. Each product, of random data, is timed
five times; ms: the least, times how often a step needs it. The plain step needs the same but one:
its Newton-Schulz makes no use of small Gram matrices. What the sum leaves of a step is all that
anything but faster products could save.
"""

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from train_gpt2 import zeropower_via_newtonschulz5

LAYERS, C, V, B, T, H, CHUNKS = 6, 384, 50304, 8, 512, 3, 8


def least(function):
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def three_products(tokens, width, out):
    """Seconds of x W^T and of both gradients: g W and g^T x."""
    x, W, g = (torch.randn(shape) for shape in ((tokens, width), (out, width), (tokens, out)))
    return sum(least(f) for f in (lambda: x @ W.T, lambda: g @ W, lambda: g.T @ x))


def attention():
    q = torch.randn(B, H, T, C // H, requires_grad=True)
    y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    forward = least(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    return forward + least(lambda: torch.autograd.grad(y, q, y, retain_graph=True))


def newton_schulz(*shape):
    G = torch.randn(shape)
    return least(lambda: zeropower_via_newtonschulz5(G))


def main():
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    linear = 6 * B * T  # FLOPs of a weight: three products
    rows = [
        ("head", 1, CHUNKS * three_products(B * T // CHUNKS, C, V), linear * V * C),
        ("c_q c_k c_v c_proj", 4 * LAYERS, three_products(B * T, C, C), linear * C * C),
        ("c_fc", LAYERS, three_products(B * T, C, 4 * C), linear * 4 * C * C),
        ("mlp.c_proj", LAYERS, three_products(B * T, 4 * C, C), linear * 4 * C * C),
        ("attention", LAYERS, attention(), None),
        ("Newton-Schulz, 4 of C x C", LAYERS, newton_schulz(4, C, C), None),
        ("Newton-Schulz, 4C x C", 2 * LAYERS, newton_schulz(4 * C, C), None),
    ]
    for name, count, seconds, flops in rows:
        rate = f"{flops / seconds / 1e9:4.0f} GFLOP/s" if flops else ""
        print(f"{name:26s} {1000 * count * seconds:6.0f} ms {rate}")
    print(f"{'all products of a step':26s} {1000 * sum(n * s for _, n, s, _ in rows):6.0f} ms")


main()
