"""Virtual workers: P workers in one process train one set of weights, with the library's own code.

Every worker has its shard of the data, its residual, its compressor's state and its batch statistics; their messages
are summed by the collective's ``reduce_local``. On a GPU the forward and backward passes are replayed from a CUDA
graph. On the CPU, weights equal those of real processes bit for bit where sums run in rank order: ``VirtualWorkers``.

    def loss_fn(model, batch, carried):        # carried: tensors that a worker carries on from step to step; here none
        x, y = batch
        return nn.functional.cross_entropy(model(x), y), carried

    model = make_model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    team = VirtualWorkers(model, loss_fn, optimizer, workers=16, recipe="default")   # options: those of attach
    batches = image_batches(train_x.cuda(), train_y.cuda(), workers=16, batch=32)
    curve = train(team, batches, steps=1000, evaluate=lambda: accuracy(model, test_x, test_y))
    team.tally.bytes                           # that one worker has put on the network

In slices: ``train(..., seconds=500)``, ``torch.save(team.state_dict(), path)``; later, on a team made alike,
``team.load_state_dict(torch.load(path, weights_only=True))`` and ``image_batches(..., start=team.step)``.
"""

from sparsync.experiments.virtual.exchange import Tally
from sparsync.experiments.virtual.loop import Point, accuracy, image_batches, perplexity, token_batches, train, windows
from sparsync.experiments.virtual.team import VirtualWorkers

__all__ = [
    "Point",
    "Tally",
    "VirtualWorkers",
    "accuracy",
    "image_batches",
    "perplexity",
    "token_batches",
    "train",
    "windows",
]
