"""Train the plain model as train_gpt2.py does its own: python tests/plain_run.py [--field=value]

The same weights at the start, batches, schedule and validation, in one process; the log has the
lines of train_gpt2.py, so records/report.py draws both. For the loss at equal steps and equal time.
"""

import sys
import time
from pathlib import Path

import plain
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt2
from train_gpt2 import describe


def main(args):
    """Train as args say; return the last validation loss."""
    rank, world_size, device = train_gpt2.place_in_world(args)
    train_loader, val_loader = train_gpt2.open_data(args, rank, world_size, device)
    torch.manual_seed(args.seed)
    gpt = train_gpt2.GPT(args).to(device)
    model, dtype = plain.PlainGPT(args).to(device), train_gpt2.matmul_dtype(device)
    model.load_state_dict(gpt.state_dict())
    described = train_gpt2.build_optimizers(gpt, args, rank, world_size)  # for the log's table
    optimizers = plain.plain_optimizers(model, args, dtype)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    log = describe.Log(args, rank, args.run_id or time.strftime("plain-%Y%m%d-%H%M%S"), 0, 0.0)
    kernels = f"products:{dtype} attention:torch's own choice"
    describe.header(log, __file__, args, gpt, described, train_loader, val_loader, kernels)
    del gpt, described  # or their memory would count

    def validate():
        with log.timed("validation"):
            loss = train_gpt2.evaluate(model, val_loader, args.val_tokens)
        log(f"{log.progress('val_loss', loss)} data_hash:{train_loader.data_hash()}")
        return loss

    while log.step < args.num_iterations:
        if args.val_loss_every and log.step % args.val_loss_every == 0:
            validate()
        with log.timed("train"):
            with log.timed("loading"):
                batch = train_loader.next_batch()
            for optimizer, rate in zip(optimizers, rates):
                scale = train_gpt2.lr_multiplier(log.step, args)
                optimizer.param_groups[0]["lr"] = rate * scale
            loss = plain.plain_step(model, optimizers, *batch, dtype, args.device_batch_size).item()
        log.step += 1
        log(log.progress("train_loss", loss))
    val_loss = validate()
    describe.summary(log, args, model, train_loader, 0, val_loss)
    return val_loss


if __name__ == "__main__":
    main(train_gpt2.parse_args(sys.argv[1:]))
