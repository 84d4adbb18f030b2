"""Hugging Face's Trainer on two processes, sparse by one line; ``--resume`` goes on from the last checkpoint.

torchrun --nproc-per-node=2 examples/transformers/train.py
torchrun --nproc-per-node=2 examples/transformers/train.py --resume
"""

import argparse
from collections.abc import Sequence

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import sparsync


def main(arguments: Sequence[str] | None = None) -> Trainer:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/transformers")
    parser.add_argument("--steps", type=int, help="of the whole training; 100, with --resume 200")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--dense", action="store_true", help="without sparsync, to compare with")
    options = parser.parse_args(arguments)
    steps = options.steps or (200 if options.resume else 100)

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    rows = [(start + stride * torch.arange(32)) % 64 for start in range(64) for stride in range(1, 9)]
    trainer = Trainer(
        model,
        TrainingArguments(
            options.folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=10,
            save_steps=0.5,  # of all steps
            ddp_find_unused_parameters=False,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    if not options.dense:
        sync = sparsync.hosts.transformers.use(trainer)  # the line that makes it sparse
    trainer.train(resume_from_checkpoint=options.resume)

    if not options.dense and trainer.args.world_size > 1 and trainer.is_world_process_zero():
        total = sync.stats().total
        dense = 4 * total.steps * model.num_parameters()  # what a ring of two sends
        print(f"{total.steps} steps, a worker sent {total.traffic / dense:.1%} of dense's bytes")
        print(f"{options.folder} has the checkpoints, in each the residuals of every rank; --resume goes on")
    return trainer


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
