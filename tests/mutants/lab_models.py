"""Seeded defects in lab_models."""

from tests.mutants import Mutant

ACTIVATIONS = "tests/lab/test_activations.py"
RELU = f"{ACTIVATIONS}::test_models_of_images_have_relu"
AN4_CUT_OFF = f"{ACTIVATIONS}::test_lstm_an4_has_tanh_and_relu_cut_off_at_20_round_it"

MUTANTS = [
    Mutant(
        "FNN-3 has tanh",
        "lab/src/sparsync_lab/models/fnn_lenet.py",
        "nn.Linear(wide, narrow), nn.ReLU()",
        "nn.Linear(wide, narrow), nn.Tanh()",
        f"{RELU}[fnn3]",
    ),
    Mutant(
        "FNN-3 ends in ReLU",
        "lab/src/sparsync_lab/models/fnn_lenet.py",
        "nn.Sequential(*layers[:-1])",
        "nn.Sequential(*layers)",
        f"{RELU}[fnn3]",
    ),
    Mutant(
        "LeNet-5 has tanh after its first convolution",
        "lab/src/sparsync_lab/models/fnn_lenet.py",
        "nn.ReLU(),\n        nn.MaxPool2d(2),\n        nn.Conv2d",
        "nn.Tanh(),\n        nn.MaxPool2d(2),\n        nn.Conv2d",
        f"{RELU}[lenet5]",
    ),
    Mutant(
        "LeNet-5 has nothing after its second convolution",
        "lab/src/sparsync_lab/models/fnn_lenet.py",
        "nn.ReLU(),\n        nn.MaxPool2d(2),\n        nn.Flatten",
        "nn.MaxPool2d(2),\n        nn.Flatten",
        f"{RELU}[lenet5]",
    ),
    Mutant(
        "VGG-16 has tanh",
        "lab/src/sparsync_lab/models/convolutional.py",
        "nn.BatchNorm2d(width), nn.ReLU()",
        "nn.BatchNorm2d(width), nn.Tanh()",
        f"{RELU}[vgg16]",
    ),
    Mutant(
        "ResNet-20 has tanh after its first layer",
        "lab/src/sparsync_lab/models/convolutional.py",
        "nn.BatchNorm2d(widths[0]), nn.ReLU()",
        "nn.BatchNorm2d(widths[0]), nn.Tanh()",
        f"{RELU}[resnet20]",
    ),
    Mutant(
        "ResNet-20's blocks have tanh inside",
        "lab/src/sparsync_lab/models/convolutional.py",
        "self.first_norm(self.first(x)).relu()",
        "self.first_norm(self.first(x)).tanh()",
        f"{RELU}[resnet20]",
    ),
    Mutant(
        "ResNet-18's blocks have nothing after their sum",
        "lab/src/sparsync_lab/models/convolutional.py",
        "return x.relu()",
        "return x",
        f"{RELU}[resnet18]",
    ),
    Mutant(
        "LSTM-PTB has ReLU after its LSTM",
        "lab/src/sparsync_lab/models/recurrent.py",
        "self.decoder(self.dropout(hidden))",
        "self.decoder(self.dropout(hidden).relu())",
        f"{ACTIVATIONS}::test_lstm_ptb_has_tanh_and_no_other",
    ),
    Mutant(
        "LSTM-AN4's convolutions have tanh",
        "lab/src/sparsync_lab/models/recurrent.py",
        "norm(convolution(x), real).clamp(0, 20)",
        "norm(convolution(x), real).tanh()",
        AN4_CUT_OFF,
    ),
    Mutant(
        "LSTM-AN4's convolutions are not cut off",
        "lab/src/sparsync_lab/models/recurrent.py",
        "norm(convolution(x), real).clamp(0, 20)",
        "norm(convolution(x), real).relu()",
        AN4_CUT_OFF,
    ),
    Mutant(
        "LSTM-AN4 has nothing after its look-ahead",
        "lab/src/sparsync_lab/models/recurrent.py",
        "self.look_ahead(ahead).clamp(0, 20)",
        "self.look_ahead(ahead)",
        AN4_CUT_OFF,
    ),
    Mutant(
        "LSTM-AN4 has ReLU before its look-ahead",
        "lab/src/sparsync_lab/models/recurrent.py",
        "(x * real.unsqueeze(2))",
        "(x * real.unsqueeze(2)).relu()",
        AN4_CUT_OFF,
    ),
    Mutant(
        "GPT has ReLU",
        "lab/src/sparsync_lab/models/gpt.py",
        "nn.functional.gelu(",
        "nn.functional.relu(",
        f"{ACTIVATIONS}::test_gpt_has_gelu",
    ),
]
