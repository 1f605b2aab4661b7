"""Muon for any project: shared work, sharded parameters, NorMuon, cautious weight decay.

To use it, copy this file: it needs only torch. train_gpt2.py has the same algorithm in 60 lines.
"""

import torch
import torch.distributed as dist

# Coefficients (a, b, c) of each Newton-Schulz iteration. There must be at least three.
NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)] * 5


def orthogonalize(G, dtype=torch.bfloat16):
    """Return approximately U V^T for each matrix G = U S V^T, by Newton-Schulz iterations.

    G: (..., M, N), of any float dtype; it is not modified. dtype: dtype of the matmuls. Returns
    bfloat16, which is what Muon communicates. Source: https://kellerjordan.github.io/posts/muon/
    """
    # In float64, squares do not overflow. MPS has no float64.
    norm_dtype = torch.float32 if G.is_mps else torch.float64
    # Two reductions are faster than one over the whole matrix.
    row_norms = torch.linalg.vector_norm(G, dim=-1, keepdim=True, dtype=norm_dtype)
    frobenius_norm = torch.linalg.vector_norm(row_norms, dim=-2, keepdim=True) + 1e-7
    X = (G.float() / frobenius_norm.float()).to(dtype)
    is_tall = G.size(-2) > G.size(-1)
    X = X.mT if is_tall else X  # (..., m, n) with m <= n
    m, n = X.shape[-2:]
    X = X.reshape(-1, m, n)
    X = newton_schulz(X) if n < 2 * m else gram_newton_schulz(X)  # whichever is faster
    X = X.mT if is_tall else X
    return X.reshape(G.shape).bfloat16()


def newton_schulz(X):
    """Apply the Newton-Schulz iterations to X, (matrices, m, n) with m <= n.

    With R = X X^T and Z = b R + c R^2, an iteration replaces X by (a I + Z) X. This maps each
    singular value s to a s + b s^3 + c s^5. After five iterations, nearly all of them lie between
    0.7 and 1.2.
    """
    for a, b, c in NEWTON_SCHULZ:
        R = X @ X.mT
        Z = torch.baddbmm(R, R, R, beta=b, alpha=c)  # b R + c R R
        X = torch.baddbmm(X, Z, X, beta=a)  # a X + Z X
    return X


def gram_newton_schulz(X):
    """Return the result of newton_schulz, up to rounding. It is faster for n >= 2 m.

    The next R is (a I + Z) R (a I + Z). So iterate on the small R only, accumulate the factors
    a I + Z in Q, and apply Q to X once. In bfloat16, R drifts from X X^T, so Q is applied and R is
    recomputed after two iterations. Source: https://dao-lab.ai/blog/2026/gram-newton-schulz
    """
    identity = torch.eye(X.size(1), dtype=X.dtype, device=X.device)
    for coefficients in NEWTON_SCHULZ[:2], NEWTON_SCHULZ[2:]:
        R, Q = X @ X.mT, None
        for i, (a, b, c) in enumerate(coefficients):
            Z = torch.baddbmm(R, R, R, beta=b, alpha=c)  # b R + c R R
            Q = Z + a * identity if Q is None else torch.baddbmm(Q, Z, Q, beta=a)  # (a I + Z) Q
            if i < len(coefficients) - 1:  # the last R is not needed
                R = torch.baddbmm(R, R, Z, beta=a)  # R (a I + Z)
                R = torch.baddbmm(R, Z, R, beta=a)  # (a I + Z) R (a I + Z)
        X = Q @ X
    return X


class Muon(torch.optim.Optimizer):
    """MomentUm Orthogonalized by Newton-Schulz: replaces Nesterov momentum U S V^T with U V^T.

    Use AdamW or similar for embeddings, the output head and parameters that are not matrices.

    params: matrices (M, N), or 4-D convolution kernels, which are flattened to (M, N).
    lr: RMS of the change of an entry in a step.
    momentum: decay of the moving average of gradients.
    weight_decay: decoupled, as in AdamW: a step multiplies entries by 1 - lr * weight_decay.
      Entries whose update is exactly 0 do not decay.
    rank, world_size: the rank of this process in process_group, and the size of the group.
    process_group: the ranks that share the work; None is the default group.
    dtype: dtype of the matmuls, torch.bfloat16 or torch.float32.
    beta2: decay of NorMuon's moving averages, which equalize the row norms of an update (column
      norms if M < N). 0 disables NorMuon. Source: https://arxiv.org/abs/2510.05491
    cautious: decay only entries that the update moves towards zero.
    Raises ValueError if a parameter or a value is invalid.

    With several ranks, reduce the gradients first. A parameter must have a gradient on all ranks or
    on none. Each matrix is orthogonalized by one rank, which sends the update to the others.

    DDP: every rank's state_dict() is complete. FSDP: parameters may be DTensors with any
    placements, such as those of fully_shard; rank and world_size are ignored for them. Momenta are
    sharded like their parameters, so save them with torch.distributed.checkpoint.

    Updates of a matrix with M rows and N columns are scaled by sqrt(max(M, N)). To convert values:

        from                                              lr here        weight_decay here
        AdamW; torch.optim.Muon with "match_rms_adamw"    0.2 * lr       weight_decay / 0.2
        torch.optim.Muon by default; Keller Jordan's      lr / sqrt(N)   weight_decay * sqrt(N)

    For example, lr = 0.02 becomes 0.0007 at N = 768. Since this depends on N, use one param group
    per N.
    """

    def __init__(
        self,
        params,
        lr,
        momentum=0.95,
        weight_decay=0,
        rank=0,
        world_size=1,
        process_group=None,
        dtype=torch.bfloat16,
        beta2=0.0,
        cautious=False,
    ):
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be between 0 and world_size - 1 = {world_size - 1}")
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype={dtype} must be torch.bfloat16 or torch.float32")
        self.rank = rank
        self.world_size = world_size
        self.process_group = process_group
        self.dtype = dtype
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay)
        super().__init__(params, defaults | dict(beta2=beta2, cautious=cautious))

    def add_param_group(self, param_group):
        """Add a group of parameters. Raises ValueError if Muon cannot handle it."""
        super().add_param_group(param_group)
        check_muon_group(self.param_groups[-1])

    def __getstate__(self):
        """Keep the attributes of this class when it is pickled or copied."""
        own = ("rank", "world_size", "process_group", "dtype")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    @torch.no_grad()
    def step(self, closure=None):
        """Collective: update all parameters in place; return the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rank_costs = [0] * self.world_size  # the work assigned to each rank so far
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                if group["beta2"] and "row_squares" not in state:
                    M, N = matrix_shape(p)
                    # For a DTensor p, this is a replicated DTensor.
                    state["row_squares"] = p.new_zeros((M, 1) if M >= N else (1, N))
            self.update_replicated(group, rank_costs)
            self.update_dtensors(group)
        return loss

    def update_replicated(self, group, rank_costs):
        """Collective: update the parameters of a group that every rank holds in full.

        Each rank orthogonalizes some of the matrices and writes the updates into its slots of a
        buffer. The other slots are 0, so the sum over the ranks gives every rank all updates.
        """
        params = [p for p in group["params"] if not is_dtensor(p)]
        if not params:
            return
        sizes = [p.numel() for p in params]
        buffer = torch.zeros(sum(sizes), dtype=torch.bfloat16, device=params[0].device)
        updates = {p: slot.view(matrix_shape(p)) for p, slot in zip(params, buffer.split(sizes))}
        mine = []  # the parameters whose updates this rank computes
        for p in sorted(params, key=matrix_cost, reverse=True):
            owner = rank_costs.index(min(rank_costs))  # the same on all ranks
            rank_costs[owner] += matrix_cost(p)
            if owner == self.rank:
                mine.append(p)
            if p.grad is not None:
                self.update_momentum(p, group)  # on every rank, so that its state is complete
        for members in stacks_of([p for p in mine if p.grad is not None]):
            directions = [self.nesterov_direction(p, group).flatten(1) for p in members]
            directions = torch.stack(directions).to(self.dtype)
            for p, update in zip(members, orthogonalize(directions, self.dtype)):
                updates[p].copy_(update)
                if group["beta2"]:
                    equalize_rows(updates[p], self.state[p]["row_squares"], group["beta2"])
        if self.world_size > 1:
            dist.all_reduce(buffer, group=self.process_group)
        for p, update in updates.items():
            self.apply_update(p, update.view(p.shape), group)
        if group["beta2"] and self.world_size > 1:
            self.share_averages(params, set(mine))

    def share_averages(self, params, mine):
        """Collective: share NorMuon's averages, which only the owner of a matrix has updated."""
        averages = [self.state[p]["row_squares"] for p in params]
        for p, average in zip(params, averages):
            if p not in mine:
                average.zero_()  # so that the sum over ranks is exact
        buffer = torch.cat([average.flatten() for average in averages])
        dist.all_reduce(buffer, group=self.process_group)
        slots = buffer.split([average.numel() for average in averages])
        for average, slot in zip(averages, slots):
            average.copy_(slot.view_as(average))

    def update_dtensors(self, group):
        """Collective: update the DTensors of a group.

        Each round gives every rank of the mesh at most one whole matrix to orthogonalize, and then
        redistributes the updates as shards.
        """
        params = [p for p in group["params"] if is_dtensor(p) and p.grad is not None]
        for members in rounds_of(params):
            for p in members:
                self.update_momentum(p, group)
            directions = torch.stack(
                [self.nesterov_direction(p, group).to(self.dtype) for p in members]
            )  # (matrices, *p.shape), with the shards of the parameters
            # Redistribute so that each rank holds at most one whole matrix. dist.tensor is imported
            # already if DTensors exist.
            one_per_rank = [dist.tensor.Shard(0)] * directions.device_mesh.ndim
            whole = directions.redistribute(placements=one_per_rank)
            updates = torch.empty_like(whole, dtype=torch.bfloat16)
            for direction, update in zip(whole.to_local(), updates.to_local()):
                result = orthogonalize(direction.flatten(1), self.dtype)
                update.copy_(result.view(update.shape))
            if group["beta2"]:
                # Each rank updates the averages of its matrix, and then all ranks receive them.
                averages = torch.stack([self.state[p]["row_squares"] for p in members])
                my_averages = averages.redistribute(placements=one_per_rank)
                for update, average in zip(updates.to_local(), my_averages.to_local()):
                    equalize_rows(update.flatten(1), average, group["beta2"])
                averages = my_averages.redistribute(placements=averages.placements)
                for p, average in zip(members, averages):
                    self.state[p]["row_squares"].copy_(average)
            for p, update in zip(members, updates.redistribute(placements=directions.placements)):
                self.apply_update(p, update, group)

    def update_momentum(self, p, group):
        """Update the momentum of p, a moving average of its gradients."""
        self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])

    def nesterov_direction(self, p, group):
        """Return the Nesterov momentum of p, with the placement of p."""
        return torch.lerp(p.grad, self.state[p]["momentum_buffer"], group["momentum"])

    def apply_update(self, p, update, group):
        """Apply weight decay to p, then subtract the scaled update, which is shaped like p."""
        if group["weight_decay"]:
            decay_mask = p * update > 0 if group["cautious"] else update != 0
            p.mul_(torch.where(decay_mask, 1 - group["lr"] * group["weight_decay"], 1.0))
        scale = max(matrix_shape(p)) ** 0.5  # gives the update an RMS of 1
        p.add_(update, alpha=-group["lr"] * scale)


def check_muon_group(group):
    """Raise ValueError unless Muon can handle the parameters and the options of a group."""
    for p in group["params"]:
        if p.ndim not in (2, 4):
            fix = "split stacks into matrices, and give other parameters to AdamW"
            raise ValueError(f"Muon takes 2-D and 4-D parameters, not {tuple(p.shape)}: {fix}")
        if p.device != group["params"][0].device:
            raise ValueError(
                f"a param group is on {p.device} and another device: use one group per device"
            )
        if is_dtensor(p) and p.device_mesh.get_coordinate() is None:
            fix = "on each rank, pass only DTensors whose mesh includes it"
            raise ValueError(f"this rank is not in {p.device_mesh} of a DTensor: {fix}")
    lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
    beta2 = group["beta2"]
    if not (lr >= 0 and 0 <= momentum < 1 and weight_decay >= 0 and 0 <= beta2 < 1):
        values = f"{lr=}, {momentum=}, {weight_decay=}, {beta2=}"
        raise ValueError(f"{values} must be >= 0, and momentum and beta2 < 1")


def is_dtensor(p):
    """Return whether p is a DTensor, without importing DTensor, which takes a second."""
    return hasattr(p, "placements")


def matrix_shape(p):
    """Return (M, N), the shape of a parameter as a matrix."""
    return p.size(0), p.shape[1:].numel()


def matrix_cost(p):
    """Return the relative cost of orthogonalizing a matrix, within 25%."""
    m, n = sorted(matrix_shape(p))
    return m * m * (2 * m + n)


def equalize_rows(update, average, beta2):
    """Divide each row of an update by a moving average of its RMS, and restore the update's norm.

    update: (M, N), changed in place; if M < N, columns take the place of rows. average: of each
    row's mean square, (M, 1) or (1, N), updated in place. It starts at 0 and needs no bias
    correction, because restoring the norm cancels a common factor.
    """
    dim = 1 if update.size(0) >= update.size(1) else 0
    squares = update.float().square().mean(dim, keepdim=True)
    average.lerp_(squares.type_as(average), 1 - beta2)
    scale = average.float().clamp(min=1e-10).rsqrt()
    norm2_before = squares.sum()
    norm2_after = (squares * scale.square()).sum().clamp(min=1e-20)
    update.mul_(scale * (norm2_before / norm2_after).sqrt())


def stacks_of(params):
    """Split parameters into lists of equal shape, with at most about 2**19 entries in all.

    Small matrices are faster in a stack. Large ones are not, because a stack leaves the cache.
    """
    alike = {}
    for p in params:
        alike.setdefault(matrix_shape(p), []).append(p)
    stacks = []
    for (M, N), members in alike.items():
        count = max(1, 2**19 // (M * N))
        stacks += [members[i : i + count] for i in range(0, len(members), count)]
    return stacks


def rounds_of(params):
    """Group DTensors of equal shape and placement into lists of at most one per rank."""
    alike = {}
    for p in params:
        alike.setdefault((p.shape, p.device_mesh, p.placements), []).append(p)
    rounds = []
    for (_, mesh, _), members in alike.items():
        rounds += [members[i : i + mesh.size()] for i in range(0, len(members), mesh.size())]
    return rounds
