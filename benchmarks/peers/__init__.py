"""Steps of twofold's executor beside torch's own parallel parts: same model, batch, degrees, dtypes and weights.

    python -m benchmarks.peers --gpus 1 2 --budget-s 420 --out FOLDER      on a machine of 2 GPUs
    python -m benchmarks.peers --smoke --gpus 2 --out FOLDER               tiny sizes on CPU ranks, compiles nothing

* `cases`: models, and the plans that are compared; `predictions`: both sides' step times, written before any step runs.
* `own`: steps of a plan as this executor runs it. `peer`: the same on torch's parts, which are one file each: `single`
  (the loop over micro-batches), `ddp`, `fsdp`, `tensor`, `pipeline`; the model they share is `model` and `experts`.
* `megatron` is the peer of the set "megatron": Megatron-Core, whose wheel is imported only there.
* `weights`: the weights and tokens of both sides. `timing`: how steps are timed, the same for both.
* `worker` walks the cases on every rank; `launches` starts it once per number of ranks, again where ranks died;
  `table` prints what was found.
"""
