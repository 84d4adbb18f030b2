"""The numbers that the papers print."""

from __future__ import annotations

from sparsync_lab.report import Row, Table

# P1, Table 1: model, parameters, initialisation, activation, batch per worker, learning rate, data.
P1_MODELS = (
    ("fnn3", "FNN-3", 199_210, "Xavier", "ReLU", 128, 0.01, "MNIST"),
    ("lenet5", "LeNet-5", 61_706, "Xavier", "ReLU", 128, 0.01, "MNIST"),
    ("resnet20", "ResNet-20", 269_722, "Xavier, Kaiming", "ReLU", 32, 0.1, "CIFAR10"),
    ("vgg16", "VGG-16", 14_728_266, "Kaiming", "ReLU", 128, 0.1, "CIFAR10"),
    ("lstm-ptb", "LSTM-PTB", 66_034_000, "Uniform", "Tanh", 20, 22.0, "PTB"),
    ("lstm-an4", "LSTM-AN4", 27_569_568, "Xavier", "Tanh", 4, 0.0002, "AN4"),
)

# P1, Table 2: model, million parameters, iteration time in seconds and scaling efficiency in % of Dense, TopK, DGC and
# Gaussian; 16 V100 in 4 machines, 10 Gbit/s Ethernet, batch 128 each.
P1_STEP_TIMES = (
    ("alexnet", "AlexNet", 61, (0.571, 0.891, 0.369, 0.245), (14.1, 9.0, 21.8, 32.8)),
    ("vgg16-imagenet", "VGG-16", 138, (2.068, 3.010, 1.540, 1.311), (54.2, 37.2, 72.8, 85.5)),
    ("resnet50", "ResNet-50", 25, (0.699, 0.810, 0.655, 0.586), (65.8, 56.8, 70.2, 78.5)),
    ("inception4", "Inception-V4", 42, (1.022, 1.268, 0.916, 0.787), (67.5, 54.4, 75.3, 87.7)),
)

# P2, Table 1: scheme, test accuracy in % with 1, 2, 4 and 8 workers, entries chosen layer by layer, then globally.
P2_ACCURACY = {
    "standard": ("Standard SGD", (94.50, 94.53, 94.40, 94.30), (94.50, 94.53, 94.40, 94.30)),
    "topk": ("Top-k", (93.63, 93.70, 93.68, 93.41), (91.45, 91.51, 91.75, 91.50)),
    "random+allgather": ("Random-k (allGather)", (93.43, 93.30, 93.12, 92.54), (91.73, 91.76, 91.16, 91.45)),
    "random+shared": ("Random-k (allReduce)", (93.43, 93.20, 93.15, 92.43), (91.73, 91.66, 91.26, 91.25)),
    "block+allgather": ("Block-random-k (allGather)", (93.16, 93.10, 93.12, 93.10), (91.18, 91.05, 91.11, 90.45)),
    "block+shared": ("Block-random-k (allReduce)", (93.16, 92.50, 90.80, 90.63), (91.18, 88.20, 79.00, 78.11)),
}
P2_WORKERS = (1, 2, 4, 8)


def p1_table1() -> Table:
    rows = [
        Row([title, f"{count:,}", init, activation, str(batch), f"{rate:g}", data])
        for _, title, count, init, activation, batch, rate, data in P1_MODELS
    ]
    return Table(
        "Published: P1, Table 1. All trained by SGD with momentum 0.9",
        ["model", "parameters", "initialisation", "activation", "batch", "learning rate", "data"],
        rows,
    )


def p1_table2() -> Table:
    methods = ("Dense", "TopK", "DGC", "Gaussian")
    rows = [
        Row([title, f"{size} M", *(f"{t:.3f} s" for t in times), *(f"{e:.1f} %" for e in efficiencies)])
        for _, title, size, times, efficiencies in P1_STEP_TIMES
    ]
    headings = ["model", "parameters", *(f"{m} iteration" for m in methods), *(f"{m} efficiency" for m in methods)]
    return Table("Published: P1, Table 2. 16 V100 in 4 machines, 10 Gbit/s Ethernet, batch 128 each", headings, rows)


def p2_table1() -> Table:
    rows = [
        Row([title, *(f"{a:.2f} %" for a in layer), *(f"{a:.2f} %" for a in whole)])
        for title, layer, whole in P2_ACCURACY.values()
    ]
    headings = ["scheme", *(f"{scope}, W = {w}" for scope in ("layer", "global") for w in P2_WORKERS)]
    return Table("Published: P2, Table 1. Test accuracy, ResNet-18 on CIFAR-10, k = 1 %, 300 epochs", headings, rows)
