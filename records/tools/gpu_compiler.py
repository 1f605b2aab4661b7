"""Compile a GPT for an NVIDIA GPU on a machine without one, and list the generated kernels.

TorchInductor and Triton generate the same kernels as on the GPU, and ptxas compiles them. Nothing
runs: tensors are fake, on a simulated device "cuda:0". This module replaces functions of torch.cuda
and must be imported before torch, in a process of its own. Needs torch 2.13.0, triton 3.7.1, g++.
Prints the name of each compiled kernel to stderr.
"""

import contextlib
import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

VERSIONS = {"torch": "2.13.0", "triton": "3.7.1"}  # this module changes parts of both

for package, version in VERSIONS.items():
    if not importlib.metadata.version(package).startswith(version):
        raise ModuleNotFoundError(name=f"{package}=={version}")

FOLDER = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = FOLDER.name
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # kernels are recorded in this process

if shutil.which("g++") is None:
    fix = "install it, for example with apt-get install g++"
    sys.exit(f"{Path(sys.argv[0]).name}: g++ is not installed: {fix}")

# The simulated device must be loaded before torch looks for a real one.
torch_folder = Path(importlib.util.find_spec("torch").origin).parent
library = f"{FOLDER.name}/pretend.so"
command = ["g++", "-std=c++20", "-shared", "-fPIC", "-o", library, f"-I{torch_folder}/include"]
command += [Path(__file__).with_name("pretend.cpp"), f"-L{torch_folder}/lib", "-lc10"]
subprocess.run([*command, "-ltorch_cpu", f"-Wl,-rpath,{torch_folder}/lib"], check=True)
simulated_device = ctypes.CDLL(library)
import torch  # noqa: E402

simulated_device.set_guard()


# ---- The simulated GPU --------------------------------------------------------------------------
@dataclasses.dataclass
class GPU:
    """Properties of a GPU, named as in torch.cuda, and its rates.

    The limits of a multiprocessor are those of the compute capability, from the CUDA Programming
    Guide. Their number is from the GPU's data sheet or architecture white paper.
    """

    major: int
    minor: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    shared_memory_per_block_optin: int
    flops: float  # FLOP/s of products in bfloat16, dense, accumulating in float32
    bandwidth: float  # bytes/s to and from its memory
    bus: float  # bytes/s: NCCL's bus bandwidth in a node of 8 GPUs
    source: str  # of the three rates
    name: str = "simulated"
    regs_per_multiprocessor: int = 65536


GPUS = {
    "B200": GPU(
        10, 0, 148, 2048, 232448, 2250e12, 7.7e12, 830e9,
        "NVIDIA Blackwell data sheet, HGX B200; bus: measured, github.com/NVIDIA/nccl/issues/1807"),
    "H200": GPU(
        9, 0, 132, 2048, 232448, 989e12, 4.8e12, 400e9,
        "NVIDIA H200 data sheet, SXM; bus: assumed"),
    "H100": GPU(
        9, 0, 132, 2048, 232448, 989e12, 3.35e12, 400e9,
        "NVIDIA H100 data sheet, SXM; bus: assumed"),
    "A100": GPU(
        8, 0, 108, 2048, 166912, 312e12, 2.04e12, 230e9,
        "NVIDIA A100 data sheet, 80 GB SXM; bus: measured, github.com/NVIDIA/nccl/issues/527"),
    "L40S": GPU(
        8, 9, 142, 1536, 101376, 362e12, 0.864e12, 20e9,
        "NVIDIA L40S data sheet; bus: assumed, 0.64 of PCIe 4.0 x16"),
    "A10G": GPU(
        8, 6, 80, 1536, 101376, 70e12, 0.6e12, 20e9,
        "NVIDIA A10G data sheet for AWS, 2022; bus: assumed, 0.64 of PCIe 4.0 x16"),
    "5090": GPU(
        12, 0, 170, 1536, 101376, 209.5e12, 1.792e12, 28e9,
        "NVIDIA RTX Blackwell white paper; bus: measured, github.com/NVIDIA/nccl/issues/1639"),
    "4090": GPU(
        8, 9, 128, 1536, 101376, 165e12, 1.01e12, 20e9,
        "NVIDIA Ada white paper; bus: assumed, 0.64 of PCIe 4.0 x16"),
}  # fmt: skip
chosen = SimpleNamespace(gpu=GPUS["H100"])  # set chosen.gpu before the first compilation

answers = dict(
    is_available=True, device_count=1, current_device=0, is_initialized=True, _is_compiled=True,
    set_device=None, synchronize=None, _exchange_device=0, _maybe_exchange_device=0,
    _lazy_init=None, manual_seed_all=None, set_rng_state=None,
    get_rng_state=torch.zeros(16, dtype=torch.uint8),
)  # fmt: skip
for function_name, answer in answers.items():
    setattr(torch.cuda, function_name, lambda *args, answer=answer, **named: answer)
torch.cuda.get_device_properties = lambda *args: chosen.gpu
torch.version.cuda = "13.0"
torch._C._cuda_getCurrentRawStream = lambda index: 0

# These modules copy functions of torch.cuda, so they are imported after the replacement.
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402
from torch._functorch.aot_autograd import make_boxed_func  # noqa: E402
from torch._inductor import compile_fx, config, memory  # noqa: E402
from torch._inductor.fx_passes import joint_graph  # noqa: E402
from torch._inductor.runtime import triton_helpers  # noqa: E402
from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # noqa: E402
from torch._inductor.utils import run_and_get_graph_lowering  # noqa: E402
from torch._inductor.virtualized import V  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

import train_gpt2  # noqa: E402

# Disable Inductor's passes that need the values of tensors.
joint_graph.lazy_init = lambda device: None  # registers fusion and padding patterns
config.joint_graph_constant_folding = False
config.use_static_triton_launcher = False
torch._logging.set_logs(inductor=logging.ERROR)
warnings.filterwarnings("ignore", "dynamo_pgo force disabled")  # because caches are disabled
config.profile_bandwidth = True  # estimates the bytes that a kernel moves


# ---- Triton: the real compiler, with a driver that loads no binary -------------------------------
driver = SimpleNamespace(
    utils=SimpleNamespace(
        get_device_properties=lambda device: dict(
            max_shared_mem=chosen.gpu.shared_memory_per_block_optin
        ),
        # module, function, registers, spilled words, maximum threads
        load_binary=lambda name, binary, shared, device: (0, 0, 0, 0, 1024),
    ),
    launcher_cls=lambda source, metadata: None,
    get_current_target=lambda: GPUTarget("cuda", 10 * chosen.gpu.major + chosen.gpu.minor, 32),
    get_active_torch_device=lambda: torch.device("cuda", 0),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)
triton.runtime.driver.set_active(driver)
triton_helpers.set_driver_to_gpu = lambda: None  # keeps this driver


# ---- Kernels and graphs -------------------------------------------------------------------------
@dataclasses.dataclass
class Kernel:
    """A Triton kernel of a graph."""

    kind: str  # attention, scatter (adds atomically), embedding (of such a sum), or triton
    launches: int
    bytes: float  # read and written per launch
    sizes: tuple  # of its loops


@dataclasses.dataclass
class Graph:
    """A compiled graph."""

    kind: str  # validation, forward, backward
    kernels: list
    peak_bytes: int  # peak of live bytes without parameters, estimated by Inductor


ITEM_SIZES = {"*bf16": 2, "*fp32": 4, "*i64": 8, "*i1": 1}
generated = {}  # Triton kernels by name


original_make_launchers = CachingAutotuner._make_launchers


def record_kernel(self):
    """Record a Triton kernel. Called again if Inductor adds configurations to it."""
    original_make_launchers(self)
    source, meta, signature = self.fn.src, self.inductor_meta, self.triton_meta["signature"]
    loops = re.findall(r"\b([xyzr]\d?_?)numel = (\d+)", source)
    sizes = {axis: int(size) for axis, size in loops}
    moved = 1e9 * (meta.get("kernel_num_gb") or 0)
    # In a loop this long, each load reads from memory, but Inductor counts each input only once.
    if sizes.get("r0_", 0) >= 8192:
        loads = re.findall(r"tl\.load\((\w+) \+ \((.*?)\), ", source)
        reads = Counter(name for name, index in loads if "x" in index and "r0" in index)
        again = sum((count - 1) * ITEM_SIZES[signature[name]] for name, count in reads.items())
        moved += again * sizes["x"] * sizes["r0_"]
    name, kind = meta["kernel_name"], "triton"
    if name.startswith("triton_poi_fused_embedding_dense_backward") and meta["num_load"]:
        moved *= 3  # Inductor counts only the 2 bytes that are written, not the 4 that are read
    if name.startswith("triton_tem"):
        kind = "attention"  # FlexAttention is the only template of a kernel
    elif meta.get("atomic_add_found"):
        kind = "scatter"
    elif "embedding_dense_backward" in name:
        kind = "embedding"
    generated[name] = Kernel(kind, launches=0, bytes=moved, sizes=tuple(sizes.values()))
    print(name, file=sys.stderr, flush=True)


CachingAutotuner._make_launchers = record_kernel


def compile_graph(graph_module, inputs, **named):
    """Compile an FX graph; return the Graph."""
    kinds = {"is_inference": "validation", "is_backward": "backward"}
    kind = next((kinds[flag] for flag in kinds if named.get(flag)), "forward")
    compiled, [lowering] = run_and_get_graph_lowering(
        compile_fx.compile_fx_inner, graph_module, inputs, **named
    )
    scheduler = lowering.scheduler
    ends = lowering.graph_inputs, lowering.get_output_names()
    buffers, nodes = scheduler.name_to_buf, scheduler.name_to_fused_node
    with V.set_graph_handler(lowering):
        peak, *_ = memory.prepare_planning_info(scheduler.nodes, buffers, nodes, *ends)
    launches = Counter(re.findall(r"^ +(triton_\w+)\.run\(", compiled.source_code, re.M))
    kernels = [dataclasses.replace(generated[name], launches=n) for name, n in launches.items()]
    return Graph(kind, kernels, peak)


def attention_of_gpu(query, key, value, mask=None, is_causal=True, scale=None):
    """Call the attention kernel that PyTorch would choose on a GPU; it cannot be asked here."""
    aten, gradient = torch.ops.aten, torch.is_grad_enabled()
    if chosen.gpu.major not in (9, 10):
        return aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, gradient, 0.0, is_causal, scale=scale
    )[0]


def tensor_of_gpu(value, tensor=torch.tensor):
    """A replacement for torch.tensor, which would really use the device; values do not matter."""
    like = tensor(value, device="cpu")
    return torch.zeros(like.shape, dtype=like.dtype, device="cuda")


@contextlib.contextmanager
def on_gpu(args, recipe, world_size, running):
    """Yield (run, graphs): a train_gpt2.Run on the simulated GPU, compiled as in training.

    Inside, tensors are fake, and there are no data. graphs: the Graphs of the model. Each call of a
    graph runs in the context manager running(graph).
    """
    graphs = []
    sequences = args.batch_size // world_size
    sizes = [n for n in range(1, args.device_batch_size + 1) if sequences % n == 0]

    def inner_compile(graph_module, inputs, **named):
        graph = compile_graph(graph_module, inputs, **named)
        graphs.append(graph)

        def call(*inputs):
            with running(graph):
                return graph_module.forward(*inputs)

        return make_boxed_func(call)

    def backend(graph_module, inputs):
        return compile_fx.compile_fx(graph_module, inputs, inner_compile=inner_compile)

    patch = mock.patch.object(F, "scaled_dot_product_attention", attention_of_gpu)
    with fake_tensor.FakeTensorMode(), patch:
        with torch.device("cuda"), mock.patch.object(torch, "tensor", tensor_of_gpu):
            model = recipe.build_model(args, torch.bfloat16)
        model.compile = functools.partial(torch.nn.Module.compile, model, backend=backend)
        run = train_gpt2.Run(
            recipe=recipe,
            args=args,
            device=torch.device("cuda"),
            model=model,
            optimizers=recipe.build_optimizers(model, args),
            train_loader=None,
            validation=None,
            micro_batch_size=sizes[-1],
            fixed={},
            log=lambda line: None,
            stop_request=train_gpt2.StopRequest(),
        )
        # compile_model raises this when it reads the training loss, after all graphs are compiled.
        with contextlib.suppress(fake_tensor.DataDependentOutputException):
            train_gpt2.compile_model(run)
        yield run, graphs
