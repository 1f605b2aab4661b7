# from the repository, with the data of the CPU record (bash run.sh data):
# the same run twice, and once from its checkpoint of step 20: do the weights agree?
run="python train_gpt2.py --preset=cpu --num_iterations=40 --warmdown_iters=20 --val_loss_every=0 --val_tokens=4096 --save_every=20 --log_dir=logs/bits"
rm -rf logs/bits
$run --run_id=first > /dev/null
$run --run_id=again > /dev/null
mkdir logs/bits/resumed && cp logs/bits/first/state_step0000000020.pt logs/bits/resumed/
$run --run_id=resumed --resume=auto > /dev/null
grep -h "^device:\|^result" logs/bits/*.txt
python - <<'P'
import torch
first, again, resumed = (torch.load(f"logs/bits/{name}/model.pt", weights_only=True)["model"] for name in ("first", "again", "resumed"))
for name, other in dict(again=again, resumed=resumed).items():
    print(name, sum(not torch.equal(first[key], other[key]) for key in first), "of", len(first), "tensors differ from the first run's")
P
