"""Muon with the arguments of torch.optim.Muon, for DDP, FSDP2, experts and heads. Copy this file.

    muon = Muon(matrices, lr=0.02, process_group=torch.distributed.group.WORLD)  # with DDP

Tested with torch 2.13. Without FSDP2, it should also work with torch 2.5 or newer.
Copyright (c) 2026 the authors. SPDX-License-Identifier: MIT.
"""

import math
import warnings

import torch
import torch.distributed as dist

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients (a, b, c) of an iteration
FIVE_ITERATIONS = (NEWTON_SCHULZ,) * 5
LR_FACTORS = {  # for each adjust_lr_fn, the learning-rate factor of a matrix (M, N)
    "original": lambda M, N: max(1, M / N) ** 0.5,  # https://kellerjordan.github.io/posts/muon/
    "match_rms_adamw": lambda M, N: 0.2 * max(M, N) ** 0.5,  # https://arxiv.org/abs/2502.16982
    "spectral_unclamped": lambda M, N: (M / N) ** 0.5,
    "unit_rms": lambda M, N: max(M, N) ** 0.5,  # our own: lr is about the RMS of an update
}
LR_FACTORS[None] = LR_FACTORS["original"]  # as in torch.optim.Muon


def orthogonalize(G, dtype=torch.bfloat16, coefficients=FIVE_ITERATIONS, eps=1e-7):
    """Return approximately U V^T for each matrix G = U S V^T, by Newton-Schulz iterations.

    G: (..., M, N), of any float dtype; it is not modified. dtype: dtype of the matmuls.
    coefficients: a tuple of tuples, (a, b, c) for each iteration. eps: added to the Frobenius norm.
    Returns bfloat16, (..., M, N). Source: https://kellerjordan.github.io/posts/muon/
    """
    # In float32, squares of entries above 1e19 overflow. MPS and some Intel GPUs lack float64.
    norm_dtype = torch.float32 if G.device.type in ("mps", "xpu") else torch.float64
    norm = torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True, dtype=norm_dtype) + eps
    X = (G.float() / norm.float()).to(dtype)
    is_tall = G.size(-2) > G.size(-1)
    X = X.mT if is_tall else X  # (..., m, n) with m <= n
    m, n = X.shape[-2:]
    X = X.reshape(-1, m, n)
    if n >= 2 * m and coefficients == FIVE_ITERATIONS:
        X = gram_newton_schulz(X)
    else:
        X = newton_schulz(X, coefficients)
    X = X.mT if is_tall else X
    return X.reshape(G.shape).bfloat16()


def newton_schulz(X, coefficients):
    """Apply the Newton-Schulz iterations to X, (matrices, m, n) with m <= n.

    With R = X X^T and Z = b R + c R^2, an iteration replaces X by (a I + Z) X, and so each singular
    value s by a s + b s^3 + c s^5. If the norm of X is at most 1, five iterations with the default
    coefficients bring those above 0.003 to between 0.68 and 1.2.
    """
    for a, b, c in coefficients:
        R = X @ X.mT
        Z = torch.baddbmm(R, R, R, beta=b, alpha=c)  # b R + c R R
        X = torch.baddbmm(X, Z, X, beta=a)  # a X + Z X
    return X


def gram_newton_schulz(X):
    """Return the result of newton_schulz for FIVE_ITERATIONS, up to rounding.

    It is faster if n >= 2 m. Z is symmetric, so the next R is (a I + Z) R (a I + Z). Therefore,
    iterate on the small R only, accumulate the factors a I + Z in Q, and apply Q to X. In bfloat16,
    R drifts from X X^T, so it is recomputed once, after two iterations. Other coefficients or more
    iterations can overflow. Source: https://dao-lab.ai/blog/2026/gram-newton-schulz
    """
    a, b, c = NEWTON_SCHULZ
    identity = torch.eye(X.size(1), dtype=X.dtype, device=X.device)
    for iterations in 2, 3:
        R = X @ X.mT
        Q = None  # the product of the factors so far
        for i in range(iterations):
            Z = torch.baddbmm(R, R, R, beta=b, alpha=c)  # b R + c R R
            Q = Z + a * identity if Q is None else torch.baddbmm(Q, Z, Q, beta=a)  # (a I + Z) Q
            if i < iterations - 1:  # the last R is not needed
                R = torch.baddbmm(R, R, Z, beta=a)  # R (a I + Z)
                R = torch.baddbmm(R, Z, R, beta=a)  # (a I + Z) R (a I + Z)
        X = Q @ X
    return X


class Muon(torch.optim.Optimizer):
    """MomentUm Orthogonalized by Newton-Schulz: replaces Nesterov momentum U S V^T with U V^T.

    Use AdamW or similar for embeddings, the output head and parameters that are not matrices.

    params: float matrices (M, N) with M outputs, as in nn.Linear, stacks (experts, M, N), or 4-D
      convolution kernels, flattened to (M, N). Leave out the 3-D weights of Conv1d, which would be
      taken for stacks. One rank orthogonalizes all matrices of a stack. For weights stored as
      (N, M), as in the Conv1D of transformers, the default adjust_lr_fn has the wrong factor, and
      blocks would divide the inputs.
    lr, weight_decay, momentum, nesterov, ns_steps: as in torch.optim.Muon. The momentum is a moving
      average: momentum * old + (1 - momentum) * gradient. Weight decay multiplies a parameter by
      1 - lr * weight_decay, without the factor of adjust_lr_fn. ns_steps: number of iterations.
    eps: added to the norm; in torch.optim.Muon, it is a lower bound of the norm. At least 1e-30.
    ns_coefficients: as there, or a list with (a, b, c) for each step; then ns_steps is ignored.
    adjust_lr_fn: a key of LR_FACTORS, by default "original", as there.
    blocks: the number of equal blocks of rows in each matrix, or a list with their numbers of rows.
      Each block, such as a head, or q, k or v of one parameter, is orthogonalized separately.
    beta2: NorMuon divides each row (column if M < N) by the root of a moving average of its mean
      square, then restores the norm of the matrix. This is the decay of that average; 0 disables
      it. Use it with float32 parameters: the average has their dtype, and bfloat16 loses small
      changes. Source: https://arxiv.org/abs/2510.05491, which always divides rows.
    cautious: decay only entries that the update moves towards zero.
    process_group: the ranks that hold the same parameters and share the work, such as
      torch.distributed.group.WORLD with DDP. Before init_process_group, WORLD is None, and then
      each rank does all the work. DTensors ignore it. Each rank keeps the momentum of all its
      parameters, so any rank can save it.
    dtype: dtype of the matmuls, torch.bfloat16 or torch.float32. Updates are rounded to bfloat16.
    Raises ValueError for an unsupported parameter, the state of another optimizer, and options out
    of range. step() raises RuntimeError if torch is too old for these DTensors. It also fails with
    ns_coefficients that are no triples, a loaded state of other shapes, or blocks that were changed
    after a step with beta2.

    Average the gradients over the ranks before step(), as DDP does. If the ranks pass parameters in
    different orders, updates are mixed up. A parameter needs a gradient on all ranks or on none;
    otherwise, step() fails, hangs or mixes up updates. With FSDP2 (and tensor parallelism), create
    Muon after fully_shard, which replaces the parameters: an earlier Muon would never see a
    gradient. State of a parameter: momentum_buffer, with its shape, dtype and placements, and with
    beta2 also row_squares, 1-D, on all ranks.
    """

    def __init__(
        self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True,
        ns_coefficients=NEWTON_SCHULZ, eps=1e-7, ns_steps=5, adjust_lr_fn=None,
        *, blocks=1, beta2=0.0, cautious=False, process_group=None, dtype=torch.bfloat16,
    ):  # fmt: skip
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype={dtype} must be torch.bfloat16 or torch.float32")
        self.process_group = process_group
        self.dtype = dtype
        super().__init__(params, dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
            ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn,
            blocks=blocks, beta2=beta2, cautious=cautious,
        ))  # fmt: skip

    def add_param_group(self, param_group):
        """Add a group, or raise ValueError if Muon cannot handle it."""
        super().add_param_group(param_group)
        group = self.param_groups.pop()  # keep it only if it is valid
        check_muon_group(group)
        self.param_groups.append(group)

    def load_state_dict(self, state_dict):
        """Load a state dict of this class or torch.optim.Muon; raise ValueError for another's.

        Its options replace those of the constructor. It has no dtype and no process_group.
        """
        previous = self.param_groups
        for group, loaded in zip(previous, state_dict["param_groups"]):
            if not {"momentum", "nesterov", "ns_steps", "adjust_lr_fn"} <= loaded.keys():
                raise ValueError("this is the state of another optimizer: load a state of Muon")
            check_muon_group({**group, **loaded, "params": group["params"]})
        super().load_state_dict(state_dict)
        # A state of torch.optim.Muon lacks options such as blocks: they stay as they are.
        self.param_groups = [old | new for old, new in zip(previous, self.param_groups)]

    def __getstate__(self):
        """Return what a pickle or a copy holds: all but process_group, which must be set again."""
        return super().__getstate__() | dict(process_group=None, dtype=self.dtype)

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters in place, on all ranks together. Return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        world_size = 1 if self.process_group is None else self.process_group.size()
        rank_costs = [0] * world_size  # the work assigned to each rank so far
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                self.update_momentum(p, group)
            dtensors = [p for p in params if is_dtensor(p)]
            replicated = [p for p in params if not is_dtensor(p)]
            for device in dict.fromkeys(p.device for p in replicated):
                on_device = [p for p in replicated if p.device == device]
                self.update_replicated(on_device, group, rank_costs)
            for batch in batches_of(dtensors):
                self.update_dtensors(batch, group)
        return loss

    def update_momentum(self, p, group):
        """Create missing state, give p.grad the placements of p, and update the momentum."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        if group["beta2"] and "row_squares" not in state:
            sizes = [matrices * max(M, N) for matrices, M, N in block_shapes(p, group)]
            state["row_squares"] = p.new_zeros(sum(sizes))  # new_zeros of a DTensor is replicated
        if is_dtensor(p):
            p.grad = p.grad.redistribute(placements=p.placements)  # it may be a partial sum
        state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])

    def direction(self, p, group):
        """Return what is orthogonalized, with the shape and the placements of p."""
        direction = self.state[p]["momentum_buffer"]
        if group["nesterov"]:
            direction = torch.lerp(p.grad, direction, group["momentum"])
        return direction.to(self.dtype)

    def update_replicated(self, params, group, rank_costs):
        """Update parameters of one device that every rank holds in full."""
        rank = 0 if self.process_group is None else self.process_group.rank()
        is_distributed = dist.is_available() and dist.is_initialized()
        if self.process_group is None and is_distributed and dist.get_world_size() > 1:
            advice = "if they hold the same parameters, pass process_group"
            sentence = f"the ranks do not share the work of Muon: {advice}"
            warnings.warn(sentence, stacklevel=5)  # names the line that calls step()
        sizes = [p.numel() for p in params]
        buffer = torch.zeros(sum(sizes), dtype=torch.bfloat16, device=params[0].device)
        # Each rank fills the slots of its own parameters; the sum over the ranks has all updates.
        updates = {p: slot.view(p.shape) for p, slot in zip(params, buffer.split(sizes))}
        owners = assign_owners(params, group, rank_costs)
        for batch in batches_of([p for p in params if owners[p] == rank]):
            directions = torch.stack([self.direction(p, group) for p in batch])
            results = orthogonalize_blocks(directions, block_shapes(batch[0], group), group)
            for p, update in zip(batch, results):
                updates[p].copy_(update)
        if self.process_group is not None:
            dist.all_reduce(buffer, group=self.process_group)
        if group["beta2"]:  # on every rank, so that the averages need not be sent
            for batch in batches_of(params):
                stacked = torch.stack([updates[p] for p in batch])
                averages = torch.stack([self.state[p]["row_squares"] for p in batch])
                equalize_rows(stacked, averages, block_shapes(batch[0], group), group["beta2"])
                for p, update, average in zip(batch, stacked, averages):
                    updates[p] = update
                    self.state[p]["row_squares"].copy_(average)
        for p, update in updates.items():
            apply_update(p, update, block_shapes(p, group), group)

    def update_dtensors(self, params, group):
        """Update DTensors of equal shape and placements."""
        shapes = block_shapes(params[0], group)
        sharded = torch.stack([self.direction(p, group) for p in params])
        expected = [type(placement) for placement in params[0].placements]
        if [type(placement) for placement in sharded.placements] != expected:
            raise RuntimeError("torch.stack lost the order of shards: use torch 2.13 or newer")
        # Splitting dimension 0, the list of parameters, leaves each parameter whole on a rank.
        by_parameter = [dist.tensor.Shard(0)] * sharded.device_mesh.ndim
        directions = sharded.redistribute(placements=by_parameter)
        updates = torch.empty_like(directions, dtype=torch.bfloat16)
        updates.to_local().copy_(orthogonalize_blocks(directions.to_local(), shapes, group))
        if group["beta2"]:
            # Each rank updates the averages of its parameters, and then all ranks receive them.
            replicated = torch.stack([self.state[p]["row_squares"] for p in params])
            averages = replicated.redistribute(placements=by_parameter)
            equalize_rows(updates.to_local(), averages.to_local(), shapes, group["beta2"])
            for p, average in zip(params, averages.full_tensor()):
                self.state[p]["row_squares"].to_local().copy_(average)
        updates = updates.redistribute(placements=sharded.placements)
        for p, update in zip(params, updates.to_local()):
            apply_update(p.to_local(), update, shapes, group)


def orthogonalize_blocks(directions, shapes, group):
    """Return updates in bfloat16, (parameters, *shape), like directions. shapes: see block_shapes.

    apply_update multiplies all blocks by the learning-rate factor of the first one, so here, a
    block with another factor is multiplied by their ratio.
    """
    coefficients = group["ns_coefficients"]
    if not isinstance(coefficients[0], (tuple, list)):
        coefficients = [coefficients] * group["ns_steps"]
    coefficients = tuple(tuple(abc) for abc in coefficients)
    lr_factor = LR_FACTORS[group["adjust_lr_fn"]]
    _, M, N = shapes[0]
    first_factor = lr_factor(M, N)
    directions = directions.contiguous()
    updates = torch.empty_like(directions, dtype=torch.bfloat16)
    blocks = zip(shapes, split_blocks(directions, shapes), split_blocks(updates, shapes))
    for (_, M, N), matrices, out in blocks:
        count = max(1, stack_entries(matrices.device) // (M * N))  # matrices in one matmul
        for part, part_out in zip(matrices.split(count), out.split(count)):
            part_out.copy_(orthogonalize(part, directions.dtype, coefficients, group["eps"]))
        if lr_factor(M, N) != first_factor:
            out.mul_(lr_factor(M, N) / first_factor)
    return updates


def equalize_rows(updates, averages, shapes, beta2):
    """Divide each row (column if M < N) by the root of an average; restore the norm of each matrix.

    updates: bfloat16, (parameters, *shape), changed in place. averages: of the mean squares,
    (parameters, the rows or columns of all its matrices), updated in place. They start at 0 and
    need no bias correction: it would scale all rows of a matrix alike, and restoring the norm
    cancels that. (Rows whose average is below 1e-10 are raised less.) shapes: see block_shapes.
    """
    sizes = [matrices * max(M, N) for matrices, M, N in shapes]
    averages = averages.view(-1, sum(sizes)).split(sizes, dim=1)
    for block, average in zip(split_blocks(updates, shapes), averages):
        dim = 2 if block.size(1) >= block.size(2) else 1
        squares = block.float().square().mean(dim)  # (matrices, M or N)
        average.lerp_(squares.view_as(average).type_as(average), 1 - beta2)
        scale = average.float().clamp(min=1e-10).rsqrt().view_as(squares)
        # Proportional to the squared norm of each matrix; the clamps leave a zero update at zero.
        before = squares.sum(1, keepdim=True)
        after = (squares * scale.square()).sum(1, keepdim=True).clamp(min=1e-20)
        block.mul_((scale * (before / after).sqrt()).unsqueeze(dim))


def apply_update(p, update, shapes, group):
    """Apply weight decay to p, then subtract lr * update * (the first block's factor of lr)."""
    lr = float(group["lr"])
    if group["weight_decay"]:
        decayed = p * (1 - lr * group["weight_decay"])
        if group["cautious"]:
            decayed = torch.where(p * update > 0, decayed, p)
        p.copy_(decayed)
    _, M, N = shapes[0]
    p.add_(update, alpha=-lr * LR_FACTORS[group["adjust_lr_fn"]](M, N))


def block_shapes(p, group):
    """Return a list of (number of matrices, M, N), for each block; equal blocks share an entry."""
    if p.ndim == 3:
        stack, rows, N = p.shape
    else:
        stack, rows, N = 1, p.size(0), p.shape[1:].numel()
    blocks = group["blocks"]
    if isinstance(blocks, int):
        return [(stack * blocks, rows // blocks, N)]
    return [(stack, M, N) for M in blocks]


def split_blocks(params, shapes):
    """Split contiguous params, (parameters, *shape), into a (..., M, N) view for each of shapes."""
    sizes = [M for _, M, _ in shapes]
    return params.view(-1, sum(sizes), shapes[0][2]).split(sizes, dim=1)


def assign_owners(params, group, rank_costs):
    """Return {parameter: rank that orthogonalizes it}, the same on all ranks; update rank_costs."""
    costs = {p: parameter_cost(block_shapes(p, group)) for p in params}
    owners = {}
    for p in sorted(params, key=costs.get, reverse=True):
        owners[p] = rank_costs.index(min(rank_costs))  # the rank with the least work so far
        rank_costs[owners[p]] += costs[p]
    return owners


def parameter_cost(shapes):
    """Return about the number of multiplications in one Newton-Schulz iteration of a parameter."""
    return sum(matrices * min(M, N) ** 2 * (M + N + min(M, N)) for matrices, M, N in shapes)


def check_muon_group(group):
    """Raise ValueError unless Muon can handle the parameters and the options of a group."""
    limits = dict(lr=(0, math.inf), weight_decay=(0, math.inf), momentum=(0, 1), beta2=(0, 1))
    limits |= dict(eps=(1e-30, math.inf), ns_steps=(1, math.inf))
    for name, (low, high) in limits.items():
        if not low <= group[name] < high:
            raise ValueError(f"{name}={group[name]} must be at least {low} and less than {high}")
    if group["adjust_lr_fn"] not in LR_FACTORS:
        raise ValueError(f"adjust_lr_fn={group['adjust_lr_fn']} must be one of {[*LR_FACTORS]}")
    for name in ("process_group", "dtype"):
        if name in group:
            raise ValueError(f"{name} is not an option of a group: make a Muon for each {name}")
    for p in group["params"]:
        if p.ndim not in (2, 3, 4) or not p.is_floating_point() or p.numel() == 0:
            given = f"{p.dtype} and shape {tuple(p.shape)}"
            raise ValueError(
                f"Muon takes non-empty float parameters of 2 to 4 dimensions, not {given}"
            )
        rows = p.size(-2 if p.ndim == 3 else 0)
        blocks = group["blocks"]
        if isinstance(blocks, int):
            fits = blocks > 0 and rows % blocks == 0
        else:
            fits = sum(blocks) == rows and min(blocks, default=0) > 0
        if not fits:
            raise ValueError(f"{blocks=} must divide, or sum to, {rows} rows of {tuple(p.shape)}")


def batches_of(params):
    """Yield lists of parameters that can be stacked, of limited size on each rank."""
    alike = {}
    for p in params:
        layout = (p.device_mesh, p.placements) if is_dtensor(p) else ()
        alike.setdefault((p.shape, p.dtype, *layout), []).append(p)
    for same in alike.values():
        first = same[0]
        ranks = first.device_mesh.size() if is_dtensor(first) else 1
        # Each rank gets 1 / ranks of a batch.
        count = ranks * max(1, stack_entries(first.device) // first.numel())
        for i in range(0, len(same), count):
            yield same[i : i + count]


def is_dtensor(p):
    """Return whether p is a DTensor, without importing that class, which is slow."""
    return hasattr(p, "placements")


def stack_entries(device):
    """Return the maximum number of entries of one batched matmul: on a CPU, 1 MB in bfloat16."""
    return 2**19 if device.type == "cpu" else 2**26  # other devices have not been measured
