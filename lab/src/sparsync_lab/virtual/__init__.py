"""Virtual workers: P workers in one process train one set of weights, with the library's own code.

Every worker has its shard of the data, its residual, its compressor's state and its batch statistics; their messages
are summed by the collective's ``reduce_local``. On a GPU the passes, and the exchange where it can be, are replayed
from CUDA graphs; where the model allows it, ``passes=BatchedPasses`` makes one pass of all. On the CPU, weights equal
those of real processes bit for bit where sums run in rank order: ``VirtualWorkers``.

    def loss_fn(model, batch, carried):        # carried: tensors that a worker carries on from step to step; here none
        x, y = batch
        return nn.functional.cross_entropy(model(x), y), carried

    images, model = load("cifar10"), resnet20().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    virtual = VirtualWorkers(model, loss_fn, optimizer, workers=16, recipe="default")   # options: those of attach
    batches = image_batches(images, workers=16, batch=32, device="cuda", start=virtual.step)
    for batch in islice(batches, 1000):
        virtual.advance(batch)                 # every worker's passes, the exchange, a step of the optimizer
    accuracy(model, images)
    virtual.tally.bytes                        # that one worker has put on the network

In slices: ``torch.save(virtual.state_dict(), path)``; later, on workers made alike,
``virtual.load_state_dict(torch.load(path, weights_only=True))``, then as above.

A language model reads ``token_batches`` and carries its hidden state on::

    def loss_fn(model, batch, carried):        # carried: (h, c), static tensors of this worker, its examples first
        h, c = (tensor.transpose(0, 1).contiguous() for tensor in carried)
        scores, (h, c) = model(batch[0], (h, c))
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten())
        return loss, (h.transpose(0, 1), c.transpose(0, 1))

    zeros = torch.zeros(20, 2, 1500, device="cuda")
    virtual = VirtualWorkers(model, loss_fn, optimizer, 4, carried=(zeros, zeros), passes=BatchedPasses)
    batches = token_batches(text, 4, 20, 35, start=virtual.step)    # then virtual.forget() every epoch_steps(...) steps
"""

from sparsync.simulate.sequential import SequentialPasses
from sparsync.simulate.virtual_units import Tally
from sparsync.simulate.virtual_workers import VirtualWorkers
from sparsync_lab.virtual.batched import BatchedPasses
from sparsync_lab.virtual.evaluate import accuracy, evaluating, perplexity
from sparsync_lab.virtual.supported_layers import can_be_batched
from sparsync_lab.virtual.worker_batches import (
    epoch_steps,
    image_batches,
    random_windows,
    token_batches,
    worker_indices,
)

__all__ = [
    "BatchedPasses",
    "SequentialPasses",
    "Tally",
    "VirtualWorkers",
    "accuracy",
    "can_be_batched",
    "epoch_steps",
    "evaluating",
    "image_batches",
    "perplexity",
    "random_windows",
    "token_batches",
    "worker_indices",
]
