"""Compile PyTorch models for an NVIDIA GPU on a machine without one, and list the GPU kernels.

TorchInductor and Triton generate the same kernels as on the GPU, and ptxas compiles them. Nothing
runs: tensors are fake, on a pretended device "cuda:0". This module replaces functions of torch.cuda
and must be imported before torch, in a process of its own. Needs torch 2.13.0, triton 3.7.1, g++.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

FOLDER = tempfile.TemporaryDirectory()
atexit.register(FOLDER.cleanup)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{FOLDER.name}/inductor"
os.environ["TRITON_CACHE_DIR"] = f"{FOLDER.name}/triton"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # kernels are recorded in this process


def load_pretended_device():
    """Compile and load pretend.cpp: it must register its hooks before torch registers others."""
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    library = f"{FOLDER.name}/pretend.so"
    include, lib = f"-I{torch_folder}/include", f"{torch_folder}/lib"
    source = Path(__file__).with_name("pretend.cpp")
    command = ["g++", "-std=c++20", "-shared", "-fPIC", include, source, "-o", library]
    command += [f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(library)


pretended_device = load_pretended_device()
import torch  # noqa: E402

pretended_device.set_guard()


# ---- The pretended GPU --------------------------------------------------------------------------
def gpu(name, capability, multiprocessors, gib, shared_memory):
    """Return what torch.cuda.get_device_properties returns, and the capability (90: sm_90)."""
    return SimpleNamespace(
        name=name,
        capability=capability,
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=multiprocessors,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=1536 if capability == 89 else 2048,
        max_threads_per_block=1024,
        total_memory=gib * 2**30,
        shared_memory_per_block_optin=shared_memory,
        L2_cache_size=50 * 2**20,
    )


GPUS = {
    "H100": gpu("NVIDIA H100 80GB HBM3", 90, 132, 80, 232448),
    "H200": gpu("NVIDIA H200", 90, 132, 141, 232448),
    "A100": gpu("NVIDIA A100-SXM4-80GB", 80, 108, 80, 166912),
    "4090": gpu("NVIDIA GeForce RTX 4090", 89, 128, 24, 101376),
}
chosen = SimpleNamespace(gpu=GPUS["H100"])  # set it before the first compilation

answers = dict(
    is_available=True, device_count=1, current_device=0, is_initialized=True, _is_compiled=True,
    set_device=None, synchronize=None, _exchange_device=0, _maybe_exchange_device=0,
    _lazy_init=None, set_rng_state=None, get_rng_state=torch.zeros(16, dtype=torch.uint8),
)  # fmt: skip
for function_name, answer in answers.items():
    setattr(torch.cuda, function_name, lambda *args, answer=answer, **named: answer)
torch.cuda.get_device_properties = lambda *args: chosen.gpu
torch.cuda.get_device_name = lambda *args: chosen.gpu.name
torch.cuda.get_device_capability = lambda *args: divmod(chosen.gpu.capability, 10)
torch.cuda.mem_get_info = lambda *args: (chosen.gpu.total_memory, chosen.gpu.total_memory)
torch.version.cuda = "13.0"
torch._C._cuda_getCurrentRawStream = lambda index: 0

# These copy functions of torch.cuda, so they are imported after it has been changed.
import torch._inductor.config as inductor_config  # noqa: E402
import torch._subclasses.fake_tensor as fake_tensor  # noqa: E402
import triton  # noqa: E402
from torch import nn  # noqa: E402
from torch._functorch import config as functorch_config  # noqa: E402
from torch._functorch.aot_autograd import make_boxed_func  # noqa: E402
from torch._inductor import memory  # noqa: E402
from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # noqa: E402
from torch._inductor.fx_passes import joint_graph  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # noqa: E402
from torch.utils._ordered_set import OrderedSet  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402
from triton.backends import Backend, backends  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.driver import DriverBase  # noqa: E402


# ---- Triton: the real compiler, and a driver that reads what a cubin uses -----------------------
def load_binary(name, cubin, shared, device):
    """Return (module, function, registers, spilled words, most threads) of a cubin."""
    path = Path(FOLDER.name, "kernel.cubin")
    path.write_bytes(cubin)
    tool = Path(triton.__file__).with_name("backends") / "nvidia/bin/cuobjdump"
    command = [tool, "--dump-resource-usage", path]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return 0, 0, int(found["REG"]), (int(found["STACK"]) + int(found["LOCAL"])) // 4, 1024


def triton_properties(device):
    gpu = chosen.gpu
    sizes = dict(max_shared_mem=gpu.shared_memory_per_block_optin, max_num_regs=65536, warpSize=32)
    return sizes | dict(multiprocessor_count=gpu.multi_processor_count)


class Driver(DriverBase):
    utils = SimpleNamespace(get_device_properties=triton_properties, load_binary=load_binary)
    launcher_cls = staticmethod(lambda source, metadata: None)
    is_active = staticmethod(lambda: True)
    get_benchmarker = map_python_to_cpp_type = None

    def __init__(self):
        self.get_current_target = lambda: GPUTarget("cuda", chosen.gpu.capability, 32)
        self.get_active_torch_device = lambda: torch.device("cuda", 0)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


Driver.__abstractmethods__ = frozenset()
nvidia_compiler = backends["nvidia"].compiler
backends.clear()
backends["nvidia"] = Backend(nvidia_compiler, Driver)
triton.runtime.driver.set_active(Driver())


def compile_for(kernels, capability):
    """Compile the first candidate of each Triton kernel for another GPU, such as 80 for sm_80.

    Raises what Triton or ptxas raises if a kernel cannot be compiled.
    """
    for kernel in kernels:
        source, options = kernel.sources[0]
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


# ---- Inductor: what it does with the contents of tensors, done on the CPU or left out -----------
class OnCPU(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        cpu = torch.device("cpu")
        kwargs = {k: cpu if isinstance(v, torch.device) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def fold_on_cpu(self, *args, run=joint_graph.UniformValueConstantFolder.run):
    with OnCPU():
        return run(self, *args)


def lazy_init_on_cpu(device=None, init=joint_graph.lazy_init):
    return init(torch.device("cpu"))


joint_graph.UniformValueConstantFolder.run = fold_on_cpu
joint_graph.lazy_init = lazy_init_on_cpu  # traces its patterns on tensors
fake_tensor.init_gpu_context = lambda device: None
inductor_config.use_static_triton_launcher = False
inductor_config.profile_bandwidth = not INTERPRETED  # estimates the bytes that a kernel moves


# ---- Kernels and graphs -------------------------------------------------------------------------
@dataclasses.dataclass
class Kernel:
    """One kernel of a graph. bytes and flops are per launch."""

    name: str
    kind: str  # triton, scatter (atomic additions), product, attention
    launches: int
    bytes: float
    flops: float = 0.0
    sizes: tuple = ()  # of a Triton kernel's loops, or of operands, then results
    candidates: tuple = ()  # (registers, spilled words) for each configuration that may be chosen
    sources: tuple = ()  # what triton.compile was called with, for each configuration
    int64: bool = False  # whether indices need 64 bits


@dataclasses.dataclass
class Graph:
    """A compiled graph: "validation", "forward" or "backward"."""

    kind: str
    code: str  # Python, as Inductor wrote it
    kernels: list
    external: set  # names of called functions that are not Triton kernels
    peak_bytes: int  # most bytes alive at a time, without parameters; Inductor's estimate
    inputs: tuple = ()  # names that torch.compile gives to the model's tensors


ITEM_SIZES = {"*bf16": 2, "*fp16": 2, "*fp32": 4, "*i64": 8, "*i32": 4, "*fp64": 8, "*i1": 1}
generated = {}  # Triton kernels of the graph being compiled, by name


def record_kernel(self, make_launchers=CachingAutotuner._make_launchers):
    """Record a Triton kernel once its configurations have been compiled; more may follow."""
    make_launchers(self)
    source, meta = self.fn.src, self.inductor_meta
    loops = {axis: int(size) for axis, size in re.findall(r"\b([xyzr]\d?_?)numel = (\d+)", source)}
    moved = 1e9 * (meta.get("kernel_num_gb") or 0)
    signature = self.triton_meta["signature"]
    generated[meta["kernel_name"]] = Kernel(
        name=meta["kernel_name"],
        kind="scatter" if meta.get("atomic_add_found") else "triton",
        launches=0,
        bytes=moved + bytes_read_again(source, signature, loops),
        sizes=tuple(loops.values()),
        candidates=tuple((launcher.n_regs, launcher.n_spills) for launcher in self.launchers),
        sources=tuple(recorded_sources or generated[meta["kernel_name"]].sources),
        int64=any(kind == "i64" for name, kind in signature.items() if name.endswith("numel")),
    )
    recorded_sources.clear()


def bytes_read_again(source, signature, loops):
    """Return the bytes that later loops over rows read again, which Inductor's count omits."""
    total = 0
    seen = set()
    if loops.get("r0_", 0) < 8192:  # shorter rows stay in the cache
        return 0
    for loop in source.split("for r0_offset in")[1:]:
        read = {
            pointer
            for pointer, index in re.findall(r"tl\.load\((\w+) \+ \((.*?)\), ", loop)
            if "x" in index and "r0" in index
        }
        again = read & seen
        total += (
            sum(ITEM_SIZES[signature[pointer]] for pointer in again) * loops["x"] * loops["r0_"]
        )
        seen |= read
    return total


recorded_sources = []


def compile_and_record(source, *args, compile_triton=triton.compile, **named):
    recorded_sources.append((source, named.get("options")))
    return compile_triton(source, *args, **named)


triton.compile = compile_and_record
CachingAutotuner._make_launchers = record_kernel


def calls_in(code):
    """Return ({Triton kernel: launches}, {other functions}) that Inductor's code calls."""
    launches, external = {}, set()
    pattern = r"^ +(triton_\w+)\.run\(|(extern_kernels\.\w+)\(|torch\.ops\.(\w+\.\w+)[.\w]*\("
    for name, extern, operator in re.findall(pattern, code, re.M):
        if name:
            launches[name] = launches.get(name, 0) + 1
        else:
            external.add(extern or operator)
    return launches, external


def external_kernel(node):
    """Return the Kernel of a product or an attention in an FX graph, or None."""
    packet = getattr(node.target, "overloadpacket", None)
    if "scaled_dot_product" in str(packet):
        backward = "backward" in str(packet)
        query, key, value = (a.meta["val"] for a in node.args[backward : 3 + backward])
        B, H, T, D = query.shape
        products = 5 if backward else 2  # each of 2 B H T T D operations, half of them masked
        flops = products * B * H * T * key.size(2) * D
        moved = (2 if backward else 1) * (query.nbytes + key.nbytes + 2 * value.nbytes)
        return Kernel(packet.__name__, "attention", 1, moved, flops, tuple(query.shape))
    if packet not in flop_registry:
        return None
    operands = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in node.args]
    result = node.meta["val"]
    flops = flop_registry[packet](*operands, out_val=result)
    tensors = [t for t in [*operands, result] if isinstance(t, torch.Tensor)]
    moved = sum(t.nbytes for t in tensors)
    sizes = tuple(size for t in tensors for size in t.shape)
    return Kernel(packet.__name__, "product", 1, moved, flops, sizes)


def peak_of(lowering):
    """Return the most bytes that live at a time while a graph runs, by Inductor's estimate."""
    nodes, scheduler = lowering.scheduler.nodes, lowering.scheduler
    outputs = OrderedSet(lowering.get_output_names())
    inputs = OrderedSet(lowering.graph_inputs)
    peak, *_ = memory.prepare_planning_info(
        nodes, scheduler.name_to_buf, scheduler.name_to_fused_node, inputs, outputs
    )
    return peak


def compile_graph(graph_module, inputs, **named):
    """Compile an FX graph; return the Graph."""
    code, peaks = [], []

    def lower(self, compile_to_module=GraphLowering._compile_to_module):
        module = compile_to_module(self)
        peaks.append(peak_of(self))
        return module

    with (
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(code.append)),
        mock.patch.object(GraphLowering, "_compile_to_module", lower),
    ):
        compile_fx_inner(graph_module, inputs, **named)
    kind = "forward"
    if named.get("is_inference"):
        kind = "validation"
    elif named.get("is_backward"):
        kind = "backward"
    launches, external = calls_in(code[-1])
    kernels = []
    if not INTERPRETED:  # else nothing is compiled
        kernels += [
            dataclasses.replace(generated[name], launches=n) for name, n in launches.items()
        ]
    kernels += filter(None, map(external_kernel, graph_module.graph.nodes))
    return Graph(kind, code[-1], kernels, external, peaks[-1])


def attention_of_gpu(query, key, value, is_causal):
    """Call the attention kernel that PyTorch chooses on the GPU, which it cannot ask here."""
    if chosen.gpu.capability >= 90:
        gradient = torch.is_grad_enabled()
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        return cudnn(query, key, value, None, gradient, 0.0, is_causal)[0]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(query, key, value, 0.0, is_causal)[0]


def without_storage(build):
    """Return the module that build() makes, with fake tensors on the pretended GPU."""
    with torch.device("meta"):
        module = build()
    made = {}  # tied tensors stay tied
    for part in module.modules():
        for tensors in part._parameters, part._buffers:
            for name, old in tensors.items():
                if old is not None and old not in made:
                    new = torch.empty(old.shape, dtype=old.dtype, device="cuda")
                    made[old] = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
                tensors[name] = made.get(old)
    return module


@contextlib.contextmanager
def on_gpu(build, running=contextlib.nullcontext):
    """Yield (model, graphs): the module that build() makes, and a list of Graphs.

    Inside, tensors are fake. model.compile() compiles for the GPU; each compiled graph is added to
    graphs, and calls of it run in the context manager running(graph).
    """
    graphs, names = [], []

    def inner_compile(graph_module, inputs, **named):
        graph = compile_graph(graph_module, inputs, **named)
        graph.inputs = tuple(names)
        graphs.append(graph)

        def call(*inputs):
            with running(graph):
                return graph_module.forward(*inputs)

        return make_boxed_func(call)

    def backend(graph_module, inputs):
        names[:] = [n.name for n in graph_module.graph.nodes if n.op == "placeholder"]
        return compile_fx(graph_module, inputs, inner_compile=inner_compile)

    def compile_model(**named):
        nn.Module.compile(model, backend=backend, **{**named, "disable": False})

    with (
        fake_tensor.FakeTensorMode(),
        functorch_config.patch(enable_autograd_cache=False),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention_of_gpu),
    ):
        model = without_storage(build)
        model.compile = compile_model
        yield model, graphs
