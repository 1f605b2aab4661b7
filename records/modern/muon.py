"""Muon for any project: like torch.optim.Muon, and for several ranks, DTensors, experts and heads.

To use it, copy this file: it needs only torch.
"""

import math
import warnings

import torch
import torch.distributed as dist

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients (a, b, c) of an iteration
STACK_ENTRIES = 2**19  # small matrices are multiplied together; more would not fit a CPU's cache
LR_FACTORS = {  # for each adjust_lr_fn, the factor of the learning rate of an M x N matrix
    "original": lambda M, N: max(1, M / N) ** 0.5,  # Keller Jordan's
    "match_rms_adamw": lambda M, N: 0.2 * max(M, N) ** 0.5,  # an RMS like that of AdamW's updates
    "spectral_unclamped": lambda M, N: (M / N) ** 0.5,
    "unit_rms": lambda M, N: max(M, N) ** 0.5,  # lr is the RMS of an update
}
LR_FACTORS[None] = LR_FACTORS["original"]  # as in torch.optim.Muon


def orthogonalize(G, dtype=torch.bfloat16, coefficients=(NEWTON_SCHULZ,) * 5, eps=1e-7):
    """Return approximately U V^T for each matrix G = U S V^T, by Newton-Schulz iterations.

    G: (..., M, N), of any float dtype; it is not modified. dtype: dtype of the matmuls.
    coefficients: (a, b, c) of each iteration. eps: added to the Frobenius norm. Returns bfloat16,
    which is what Muon communicates. Source: https://kellerjordan.github.io/posts/muon/
    """
    # Squares could overflow in float32. MPS has no float64.
    norm_dtype = torch.float32 if G.is_mps else torch.float64
    # Two reductions are faster than one over the whole matrix.
    row_norms = torch.linalg.vector_norm(G, dim=-1, keepdim=True, dtype=norm_dtype)
    frobenius_norm = torch.linalg.vector_norm(row_norms, dim=-2, keepdim=True) + eps
    X = (G.float() / frobenius_norm.float()).to(dtype)
    is_tall = G.size(-2) > G.size(-1)
    X = X.mT if is_tall else X  # (..., m, n) with m <= n
    m, n = X.shape[-2:]
    X = X.reshape(-1, m, n)
    if n >= 2 * m and [*map(tuple, coefficients)] == [NEWTON_SCHULZ] * 5:
        X = gram_newton_schulz(X)
    else:
        X = newton_schulz(X, coefficients)
    X = X.mT if is_tall else X
    return X.reshape(G.shape).bfloat16()


def newton_schulz(X, coefficients):
    """Apply the Newton-Schulz iterations to X, (matrices, m, n) with m <= n.

    With R = X X^T and Z = b R + c R^2, an iteration replaces X by (a I + Z) X. This maps each
    singular value s to a s + b s^3 + c s^5. After five iterations, nearly all of them lie between
    0.7 and 1.2.
    """
    for a, b, c in coefficients:
        R = X @ X.mT
        Z = torch.baddbmm(R, R, R, beta=b, alpha=c)  # b R + c R R
        X = torch.baddbmm(X, Z, X, beta=a)  # a X + Z X
    return X


def gram_newton_schulz(X):
    """Return the result of newton_schulz for the default coefficients, up to rounding.

    It is faster if n >= 2 m. Z and R commute, so the next R is (a I + Z) R (a I + Z). So iterate on
    the small R only, accumulate the factors a I + Z in Q, and apply Q to X. In bfloat16, R drifts
    from X X^T, so it is recomputed once, after two iterations. Other coefficients or more
    iterations can overflow. Source: https://dao-lab.ai/blog/2026/gram-newton-schulz
    """
    a, b, c = NEWTON_SCHULZ
    identity = torch.eye(X.size(1), dtype=X.dtype, device=X.device)
    for iterations in 2, 3:
        R, Q = X @ X.mT, None
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

    params: matrices (M, N), stacks of matrices (experts, M, N), or 4-D convolution kernels, which
      are flattened to (M, N).
    lr, weight_decay, momentum, nesterov, ns_steps: as in torch.optim.Muon. eps: as there, but added
      to the norm.
    ns_coefficients: as there, or a list with (a, b, c) for each step; then ns_steps is ignored.
    adjust_lr_fn: as there ("original" by default), or "unit_rms"; see LR_FACTORS.
    blocks: the number of equal blocks of rows in each matrix, or a list with the number of rows of
      each block. Each block is orthogonalized separately, for example each head of a projection,
      or q, k and v if they are one parameter.
    beta2: decay of NorMuon's moving averages of squared row norms (column norms if M < N), by which
      it divides an update. 0 disables NorMuon. Source: https://arxiv.org/abs/2510.05491
    cautious: decay only entries that the update moves towards zero.
    process_group: the ranks that hold the same parameters and share the work, for example
      torch.distributed.group.WORLD. Without it, every rank does all the work (except for DTensors).
    dtype: dtype of the matmuls, torch.bfloat16 or torch.float32.
    Raises ValueError if a parameter, a value or a loaded state is invalid.

    Average the gradients over the ranks before step(), as DDP does. All ranks must pass the
    parameters in the same order, and a parameter must have a gradient on all ranks or on none. Each
    parameter is orthogonalized by one rank, which sends the update to the others.

    DDP: pass process_group. Every rank's state_dict() is complete. FSDP: parameters may be DTensors
    with any placements, such as those of fully_shard; the ranks of their mesh share the work.
    Momenta are sharded like their parameters, so save them with torch.distributed.checkpoint.
    """

    def __init__(
        self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True,
        ns_coefficients=NEWTON_SCHULZ, eps=1e-7, ns_steps=5, adjust_lr_fn=None,
        *, blocks=1, beta2=0.0, cautious=False, process_group=None, dtype=torch.bfloat16,
    ):  # fmt: skip
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype={dtype} must be torch.bfloat16 or torch.float32")
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise ValueError("this rank is not in process_group")
        self.process_group = process_group
        self.dtype = dtype
        defaults = dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
            ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn,
            blocks=blocks, beta2=beta2, cautious=cautious,
        )  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group):
        """Add a group of parameters. Raises ValueError if Muon cannot handle it."""
        super().add_param_group(param_group)
        try:
            check_muon_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict):
        """Load a state of this class or of torch.optim.Muon. Raises ValueError for others."""
        for group in state_dict["param_groups"]:
            if not {"momentum", "nesterov", "ns_steps", "adjust_lr_fn"} <= group.keys():
                raise ValueError("this is the state of another optimizer: load a state of Muon")
        previous = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, old_group in zip(self.param_groups, previous):
            for name, value in old_group.items():  # torch.optim.Muon lacks blocks, for example
                group.setdefault(name, value)
            check_muon_group(group)

    def __getstate__(self):
        """Return what a pickle or a copy needs. It cannot hold the process group."""
        return super().__getstate__() | dict(process_group=None, dtype=self.dtype)

    @torch.no_grad()
    def step(self, closure=None):
        """Collective: update all parameters in place; return the closure's loss, or None."""
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
            replicated = [p for p in params if not is_dtensor(p)]
            if replicated:
                self.update_replicated(replicated, group, rank_costs)
            for members in batches_of([p for p in params if is_dtensor(p)]):
                self.update_dtensors(members, group)
        return loss

    def update_momentum(self, p, group):
        """Update the moving average of the gradients of p."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        if group["beta2"] and "row_squares" not in state:
            sizes = [matrices * max(M, N) for matrices, M, N in block_shapes(p, group)]
            state["row_squares"] = p.new_zeros(sum(sizes))  # for a DTensor p, a replicated DTensor
        state["momentum_buffer"].lerp_(gradient_of(p), 1 - group["momentum"])

    def direction(self, p, group):
        """Return the momentum that is orthogonalized, with the shape and the placements of p."""
        momentum = self.state[p]["momentum_buffer"]
        if group["nesterov"]:
            momentum = torch.lerp(gradient_of(p), momentum, group["momentum"])
        return momentum.to(self.dtype)

    def update_replicated(self, params, group, rank_costs):
        """Collective: update parameters that every rank holds in full.

        Each rank orthogonalizes some of them and writes the updates into its slots of a buffer. The
        other slots are 0, so the sum over the ranks gives every rank all updates.
        """
        rank = 0
        if self.process_group is not None:
            rank = dist.get_rank(self.process_group)
        elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            fix = "if all of them hold the same parameters, pass process_group to share it"
            warnings.warn(f"Muon does all the work on every rank: {fix}", stacklevel=5)
        sizes = [p.numel() for p in params]
        buffer = torch.zeros(sum(sizes), dtype=torch.bfloat16, device=params[0].device)
        updates = {p: slot.view(p.shape) for p, slot in zip(params, buffer.split(sizes))}
        costs = {p: parameter_cost(block_shapes(p, group)) for p in params}
        mine = set()  # the parameters whose updates this rank computes
        for p in sorted(params, key=costs.get, reverse=True):
            owner = rank_costs.index(min(rank_costs))  # the same on all ranks
            rank_costs[owner] += costs[p]
            if owner == rank:
                mine.add(p)
        for members in batches_of([p for p in params if p in mine]):
            directions = [self.direction(p, group) for p in members]
            directions = torch.stack(directions) if len(members) > 1 else directions[0][None]
            shapes = block_shapes(members[0], group)
            for p, update in zip(members, orthogonalize_blocks(directions, shapes, group)):
                updates[p].copy_(update)
                if group["beta2"]:
                    equalize_rows(updates[p], self.state[p]["row_squares"], shapes, group["beta2"])
        if len(rank_costs) > 1:
            dist.all_reduce(buffer, group=self.process_group)
            if group["beta2"]:  # share NorMuon's averages, which only the owner has updated
                averages = [self.state[p]["row_squares"] * (p in mine) for p in params]
                buffer = torch.cat(averages)
                dist.all_reduce(buffer, group=self.process_group)
                for p, average in zip(params, buffer.split([len(a) for a in averages])):
                    self.state[p]["row_squares"].copy_(average)
        for p, update in updates.items():
            apply_update(p, update, group)

    def update_dtensors(self, members, group):
        """Collective: update DTensors of equal shape and placement.

        Redistribute the shards so that each rank of the mesh has some whole parameters,
        orthogonalize them, and redistribute the updates as shards.
        """
        directions = torch.stack([self.direction(p, group) for p in members])
        # dist.tensor is imported already if DTensors exist.
        some_per_rank = [dist.tensor.Shard(0)] * directions.device_mesh.ndim
        whole = directions.redistribute(placements=some_per_rank)
        updates = torch.empty_like(whole, dtype=torch.bfloat16)
        shapes = block_shapes(members[0], group)
        if len(whole.to_local()):
            updates.to_local().copy_(orthogonalize_blocks(whole.to_local(), shapes, group))
        if group["beta2"]:
            # Each rank updates the averages of its parameters, and then all ranks receive them.
            averages = torch.stack([self.state[p]["row_squares"] for p in members])
            my_averages = averages.redistribute(placements=some_per_rank)
            for update, average in zip(updates.to_local(), my_averages.to_local()):
                equalize_rows(update, average, shapes, group["beta2"])
            averages = my_averages.redistribute(placements=averages.placements)
            for p, average in zip(members, averages):
                self.state[p]["row_squares"].copy_(average)
        for p, update in zip(members, updates.redistribute(placements=directions.placements)):
            apply_update(p, update, group)


def orthogonalize_blocks(directions, shapes, group):
    """Return the updates of parameters of equal shape, in bfloat16, without the learning rate.

    directions: (parameters, *shape). shapes: see block_shapes.
    """
    coefficients = group["ns_coefficients"]
    if not isinstance(coefficients[0], (tuple, list)):
        coefficients = [coefficients] * group["ns_steps"]
    factors = [LR_FACTORS[group["adjust_lr_fn"]](M, N) for _, M, N in shapes]
    directions = directions.contiguous()
    updates = torch.empty_like(directions, dtype=torch.bfloat16)
    blocks = zip(split_blocks(directions, shapes), split_blocks(updates, shapes))
    for (block, result), factor in zip(blocks, factors):
        count = max(1, STACK_ENTRIES // block[0].numel())
        for stack, out in zip(block.split(count), result.split(count)):
            out.copy_(orthogonalize(stack, directions.dtype, coefficients, group["eps"]))
        if factor != factors[0]:  # apply_update uses the first factor for all blocks
            result.mul_(factor / factors[0])
    return updates


def equalize_rows(update, averages, shapes, beta2):
    """Divide each row by a moving average of its RMS, and restore the norm of each matrix.

    update: of one parameter, changed in place. In matrices with M < N, columns take the place of
    rows. averages: of the mean square of each row, 1-D, updated in place. They start at 0 and need
    no bias correction, because restoring the norm cancels a common factor. shapes: see
    block_shapes.
    """
    sizes = [matrices * max(M, N) for matrices, M, N in shapes]
    for block, average in zip(split_blocks(update, shapes), averages.split(sizes)):
        dim = 2 if block.size(1) >= block.size(2) else 1
        squares = block.float().square().mean(dim)  # (matrices, M or N)
        average = average.view_as(squares)
        average.lerp_(squares.type_as(average), 1 - beta2)
        scale = average.float().clamp(min=1e-10).rsqrt()
        norm2_before = squares.sum(1, keepdim=True)
        norm2_after = (squares * scale.square()).sum(1, keepdim=True).clamp(min=1e-20)
        block.mul_((scale * (norm2_before / norm2_after).sqrt()).unsqueeze(dim))


def apply_update(p, update, group):
    """Apply weight decay to p, then subtract the scaled update, which is shaped like p."""
    lr = float(group["lr"])
    if group["weight_decay"]:
        decay = 1 - lr * group["weight_decay"]
        p.mul_(torch.where(p * update > 0, decay, 1.0) if group["cautious"] else decay)
    _, M, N = block_shapes(p, group)[0]
    p.add_(update, alpha=-lr * LR_FACTORS[group["adjust_lr_fn"]](M, N))


def block_shapes(p, group):
    """Return (matrices, M, N) for each block of a list, or once for all blocks of equal size."""
    stack, M, N = p.shape if p.ndim == 3 else (1, p.size(0), p.shape[1:].numel())
    blocks = group["blocks"]
    if isinstance(blocks, int):
        return [(stack * blocks, M // blocks, N)]
    return [(stack, rows, N) for rows in blocks]


def split_blocks(params, shapes):
    """Return a view (matrices, M, N) for each entry of shapes. params: contiguous, (..., M, N)."""
    rows = [M for _, M, _ in shapes]
    return params.view(-1, sum(rows), shapes[0][2]).split(rows, dim=1)


def parameter_cost(shapes):
    """Return the relative cost of orthogonalizing a parameter, within 25%."""
    sides = [(matrices, min(M, N), max(M, N)) for matrices, M, N in shapes]
    return sum(matrices * m * m * (2 * m + n) for matrices, m, n in sides)


def check_muon_group(group):
    """Raise ValueError unless Muon can handle the parameters and the options of a group."""
    for name, limit in dict(lr=math.inf, weight_decay=math.inf, momentum=1, beta2=1).items():
        if not 0 <= group[name] < limit:
            raise ValueError(f"{name}={group[name]} must be at least 0 and less than {limit}")
    if group["adjust_lr_fn"] not in LR_FACTORS:
        raise ValueError(f"adjust_lr_fn={group['adjust_lr_fn']} must be one of {[*LR_FACTORS]}")
    for p in group["params"]:
        shape = tuple(p.shape)
        if p.ndim not in (2, 3, 4):
            raise ValueError(f"Muon takes matrices, not {shape}: give this parameter to AdamW")
        rows = shape[-2] if p.ndim == 3 else shape[0]
        blocks = sizes = group["blocks"]
        if isinstance(blocks, int):
            sizes = [rows // max(1, blocks)] * blocks
        if sum(sizes) != rows or min(sizes) < 1:
            raise ValueError(f"{blocks=} must add up to, or divide, {rows} rows of {shape}")
        if p.device != group["params"][0].device:
            raise ValueError(f"a group is on {p.device} and another device: make one for each")
        if is_dtensor(p) and p.device_mesh.get_coordinate() is None:
            raise ValueError(f"this rank is not in {p.device_mesh}: do not pass its DTensors here")


def is_dtensor(p):
    """Return whether p is a DTensor, without importing DTensor, which takes a second."""
    return hasattr(p, "placements")


def gradient_of(p):
    """Return the gradient of p, with the placements of p."""
    if is_dtensor(p) and p.grad.placements != p.placements:
        return p.grad.redistribute(placements=p.placements)  # it may be a partial sum
    return p.grad


def batches_of(params):
    """Split parameters into lists of equal shape and placements, of up to STACK_ENTRIES entries.

    A list of DTensors may have as many entries for each rank of their mesh.
    """
    alike = {}
    for p in params:
        mesh, placements = (p.device_mesh, p.placements) if is_dtensor(p) else (None, None)
        alike.setdefault((p.shape, mesh, placements), []).append(p)
    batches = []
    for (shape, mesh, _), members in alike.items():
        ranks = 1 if mesh is None else mesh.size()
        count = ranks * max(1, STACK_ENTRIES // shape.numel())
        batches += [members[i : i + count] for i in range(0, len(members), count)]
    return batches
