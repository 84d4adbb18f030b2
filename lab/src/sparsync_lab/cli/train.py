"""``sparsync train``: one training on several processes, that can be interrupted and resumed."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsync_lab import models
from sparsync_lab.cli.checked_training import (
    WORKERS,
    CheckedTraining,
    check_launched,
    check_training,
    default_folder,
    refuse_diverged,
)
from sparsync_lab.cli.training_progress import TrainingProgress, show_cursor, summary
from sparsync_lab.data import load
from sparsync_lab.training.all_ranks import on_rank_0
from sparsync_lab.training.local_workers import PRELOAD, LocalWorkers, Worker, WorkerFailed
from sparsync_lab.training.loop import train as train_here
from sparsync_lab.training.process_group import launched, process_group, run_launched
from sparsync_lab.training.settings import RATES, Training, dense_bytes, rates_text

DEFAULT = Training()


def train(
    method: Annotated[
        str | None,
        typer.Option(
            help="How gradients are exchanged: 'dense' (plain DDP); a recipe ('default', 'auto', 'balanced', 'paper', "
            "'dgc'); a compressor ('topk', ...: 'sparsync info' lists them); a compressor and a collective "
            "('random+shared').",
            show_default=DEFAULT.method,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="'digits' (8 x 8, comes with scikit-learn), 'mnist', 'cifar10', or 'cifar10-half', the first half of "
            "every class (see --data-dir).",
            show_default=DEFAULT.data,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="'mlp' (three layers; 85,002 parameters on digits, 199,210 on MNIST) or 'lenet5' (61,706); on "
            "CIFAR-10 'resnet20', 'vgg16' or 'resnet18'; on MNIST 'fnn3', the mlp with Xavier's first weights.",
            show_default=DEFAULT.model,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Worker processes on this machine; each gets its own share of the images. More than there are CPU "
            "cores works, slowly. Under torchrun its --nproc-per-node decides.",
            show_default=str(WORKERS),
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps of the optimizer. A few hundred teach digits; give more with --resume to train on.",
            show_default=str(DEFAULT.steps),
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Images per worker and step, 8 to 256.", show_default=str(DEFAULT.batch))
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="'sgd', or 'adamw', whose updates our recipes exchange.", show_default=DEFAULT.optimizer),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Learning rate, reached in 10 steps and then constant. Lower it if the loss does not fall.",
            show_default=rates_text(),
        ),
    ] = None,
    momentum: Annotated[
        float | None,
        typer.Option(
            help="Momentum of SGD (see --momentum-mode), or AdamW's first beta, in [0, 1).",
            show_default=str(DEFAULT.momentum),
        ),
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(
            help="Share of the gradient entries to send, in (0, 1]: 0.01 is safe for small models, 0.001 is usual for "
            "large ones.",
            show_default="the method's own",
        ),
    ] = None,
    scope: Annotated[
        str | None,
        typer.Option(
            help="Where the largest entries are looked for: 'layer', 'bucket' or 'global', the whole model.",
            show_default="the method's own",
        ),
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(
            help="How values travel: 'fp32', 'fp16', 'bf16', 'sign' or 'levels'; what is cut off is sent later.",
            show_default="the method's own",
        ),
    ] = None,
    indices: Annotated[
        str | None,
        typer.Option(
            help="How indices travel: 'int'; 'ef', which takes about a third of the bits and some time; 'block', a "
            "block's start alone.",
            show_default="the method's own",
        ),
    ] = None,
    momentum_mode: Annotated[
        str | None,
        typer.Option(
            help="What becomes of SGD's momentum m: 'keep' leaves it, which harms short sparse trainings; 'move' makes "
            "it 0 and steps with rate / (1 - m); 'correct' lets momentum act before entries are chosen.",
            show_default="the method's own",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the weights, the order of the images and random methods.", show_default="0"),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the four MNIST files (*-ubyte.gz) or of CIFAR-10's archive, or with subfolders mnist and "
            "cifar10 that have them.",
            show_default="$SPARSYNC_DATA",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder: configuration, metrics, checkpoints, outcome. On several machines it must be shared.",
            show_default="runs/DATA-MODEL-METHOD",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the last checkpoint in --out. Options are taken from there; --steps and --workers may "
            "be changed.",
        ),
    ] = False,
) -> None:
    """Train a small network on several processes of this machine.

    \b
    sparsync train                                       the default recipe on scikit-learn's digits
    sparsync train --method dense                        plain DDP, to compare with
    sparsync train --method topk --density 0.01 --momentum-mode move
    sparsync train --optimizer adamw
    sparsync train --data mnist --model lenet5 --data-dir ~/data --steps 1000
    sparsync train --out runs/digits-mlp-default --resume --steps 600

    Ctrl-C stops it; --resume then goes on, and ends with the same weights as if nothing had happened. Several
    machines, or processes of your own making: torchrun --nproc-per-node 2 -m sparsync_lab train ...; with its
    --max-restarts, workers that are started again go on from the last checkpoint.
    """
    given = {
        "method": method, "data": data, "model": model, "density": density, "scope": scope, "values": values,
        "indices": indices, "momentum_mode": momentum_mode, "seed": seed, "steps": steps, "batch": batch,
        "rate": rate, "momentum": momentum, "optimizer": optimizer,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    if optimizer in RATES and not resume:
        given.setdefault("rate", RATES[optimizer])
    if launched():
        run_launched(_as_launched, given, out, data_dir, resume)
        return
    folder = out or default_folder(given)
    checked = check_training(given, workers, folder, data_dir, resume)
    preload = [*PRELOAD, __name__] + (["sklearn.datasets"] if checked.training.data == "digits" else [])
    try:
        with LocalWorkers(checked.workers, preload) as local_workers:
            local_workers.run(_work, checked)
    except WorkerFailed as failure:
        if not (checked.folder / "config.json").exists():
            raise
        hint = f"go on with: sparsync train --out {checked.folder} --resume"
        raise WorkerFailed(f"{failure}\n{hint}" if "\n" in str(failure) else f"{failure}; {hint}") from None
    finally:
        if sys.stderr.isatty():
            show_cursor()


def _as_launched(worker: Worker, given: dict[str, Any], out: Path | None, data_dir: Path | None, resume: bool) -> None:
    """Run the whole command as one of the workers that torchrun has started."""
    if not resume:
        Training(**given)  # what is wrong with it is said before anybody waits for the others
    folder = out or default_folder(given)
    with process_group():
        checked = on_rank_0(lambda: check_launched(given, worker.count, folder, data_dir, resume))
        if checked is not None:
            _train(worker, checked)


def _work(worker: Worker, checked: CheckedTraining) -> None:
    """Train on one of the local workers."""
    with process_group():
        _train(worker, checked)


def _train(worker: Worker, checked: CheckedTraining) -> None:
    """Train on one worker of the process group; rank 0 shows the progress."""
    training, rank, workers = checked.training, worker.rank, worker.count
    images = load(training.data, checked.data_folder)
    warnings.showwarning = _warn  # type: ignore[assignment]
    if rank:
        warnings.simplefilter("ignore")  # rank 0 says it for all
    with TrainingProgress(
        rank, training, dense_bytes(models.parameter_count(training.model, images), workers)
    ) as shown:
        outcome = train_here(
            rank,
            workers,
            training,
            images,
            folder=checked.folder,
            resume=checked.resume,
            launch=checked.launch,
            on_point=shown.on_point,
            on_step=shown.on_step,
        )
    if outcome is not None:
        print(f"{summary(outcome)}\nrun: {checked.folder}", flush=True)
        refuse_diverged(outcome)


def _warn(message: Any, *_: Any) -> None:
    print(f"sparsync: {message}", file=sys.stderr)
