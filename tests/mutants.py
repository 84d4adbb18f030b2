"""Seeded defects: each is planted into a copy of the source and must turn a named test red.

``make test-mutants`` runs them all; ``python -m tests.mutants NAME ...`` some. A defect whose test stays green, or
whose place in the source is gone, ends the run with exit code 1. The same tests are first run without a defect, and
must pass.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    good: str
    bad: str
    test: str
    interpreted: bool = False  # its test runs kernels in Triton's interpreter


LAW_1 = "tests/test_laws.py::test_law_1_nothing_is_lost_on_one_worker"
VELOCITY = "tests/test_laws.py::test_law_1_under_momentum_correction_and_clipping"
WORKERS = "tests/test_laws.py::test_law_1_nothing_is_lost_over_the_workers"
TRAINING = "tests/test_training.py::test_laws_1_and_2_hold_in_training"
DDP = "tests/test_failures_ddp.py"
DATA = "tests/test_failures_data.py"
DEFERRED = "tests/test_deferred.py"
ACTIVATIONS = "tests/lab/test_activations.py"
RELU = f"{ACTIVATIONS}::test_models_of_images_have_relu"
AN4_CUT_OFF = f"{ACTIVATIONS}::test_lstm_an4_has_tanh_and_relu_cut_off_at_20_round_it"
FROM_A_FAILURE_ON = f"{DEFERRED}::test_from_a_failed_exchange_on_nothing_is_applied_and_all_is_kept[header]"

MUTANTS = [
    Mutant(
        "two of four levels look alike on the wire",
        "src/sparsync/wire/values.py",
        "(exponent >> plane & 1)",
        "(exponent & 1)",
        "tests/test_wire.py::test_round_trip[torch.float32-levels-int]",
    ),
    Mutant(
        "the largest level is forgotten on the device",
        "src/sparsync/kernels/candidates/triton.py",
        "level = tl.where(size > 3.0 * scale, 4 * scale, level)",
        "level = level",
        "tests/test_kernel_topk.py::test_half_precision[topk-torch.float32-levels]",
        interpreted=True,
    ),
    Mutant(
        "an owner forgets what it leaves out",
        "src/sparsync/collectives/partition.py",
        "(self.place(rows, owner)[None], left[None])",
        "(self.place(rows, owner)[None], 0 * left[None])",
        f"{WORKERS}[topk-balanced]",
    ),
    Mutant(
        "what a message has no room for is lost",
        "src/sparsync/collectives/partition.py",
        "torch.from_numpy(values[stay]), torch",
        "torch.from_numpy(0 * values[stay]), torch",
        f"{WORKERS}[topk-balanced]",
    ),
    Mutant(
        "neighbours have one owner",
        "src/sparsync/collectives/partition.py",
        "return (rows * MIXER & 0xFFFFFFFF) >> 15",
        "return 0 * rows",
        "tests/test_collectives.py::test_balanced_messages_are_of_one_size_whatever_the_order_of_the_tensors[16-IndexPartition]",
    ),
    Mutant(
        "on the host neighbours have other owners",
        "src/sparsync/collectives/partition.py",
        "turn >>= np.uint32(15)",
        "turn >>= np.uint32(14)",
        "tests/test_collectives.py::test_balanced_the_host_cuts_as_a_device_does[100003-3]",
    ),
    Mutant(
        "what owners send is not counted",
        "src/sparsync/collectives/balanced.py",
        "(wire.bytes(there) + wire.bytes(back))",
        "wire.bytes(there)",
        "tests/test_virtual.py::test_every_message_of_balanced_sums_is_encoded_and_compared[balanced-recipe-3]",
    ),
    Mutant(
        "what comes home twice may come in any order on a GPU",
        "src/sparsync/collectives/partition.py",
        "return replace(stays, indices=indices, values=values, count=torch.tensor(indices.numel()))\n\n    def _turn(",
        "return replace(stays, indices=indices.view(-1), values=values.view(-1))\n\n    def _turn(",
        "tests/test_collectives.py::test_balanced_what_comes_home_twice_does_so_in_one_order[IndexPartition]",
    ),
    Mutant(
        "gTop-k forgets what it drops",
        "src/sparsync/collectives/gtopk.py",
        "left = torch.where(sums.isfinite(), sums - sent, 0)",
        "left = 0 * sums",
        f"{WORKERS}[topk-gtopk]",
    ),
    Mutant(
        "gTop-k prefers the last of equals",
        "src/sparsync/collectives/gtopk.py",
        "order = torch.sort(size, dim=1, descending=True, stable=True).indices",
        "order = torch.sort(size.flip(1), dim=1, descending=True, stable=True).indices.neg().add(size.shape[1] - 1)",
        "tests/test_gtopk.py::test_a_merge_is_the_slow_one",
    ),
    Mutant(
        "of a spoilt step what was sent comes home before what was dropped leaves",
        "src/sparsync/simulate/exchange.py",
        "                if result.rejected is not None:  # first",
        "                worker.feedback.restore_to_residual(part.unit.key, sent)\n"
        "                sent = replace(sent, values=0 * sent.values)\n"
        "                if result.rejected is not None:  # first",
        "tests/test_virtual.py::test_a_gradient_that_is_not_finite_comes_home_as_in_processes[gtopk]",
    ),
    Mutant(
        "velocity not cleared where sent",
        "src/sparsync/compressors/selecting.py",
        "speed.index_copy_(0, indices, torch.where(goes, 0, speed.index_select(0, indices)))",
        "pass",
        f"{VELOCITY}[topk]",
    ),
    Mutant(
        "a last row that is not full is turned as a full one",
        "src/sparsync/kernels/random_indices/reference.py",
        "height - (torch.arange(width) >= last).long()",
        "height - (torch.arange(width) > last).long()",
        "tests/test_random_indices.py::test_entries_are_distinct_and_of_their_segment",
    ),
    Mutant(
        "rows are turned once only",
        "src/sparsync/kernels/random_indices/reference.py",
        "TURNS = 4",
        "TURNS = 1",
        "tests/test_random_indices.py::test_every_set_of_a_few_is_drawn_equally_often[17-2]",
    ),
    Mutant(
        "all ranks draw alike",
        "src/sparsync/compressors/random.py",
        "0 if ctx.shared else ctx.rank",
        "0",
        "tests/test_random_indices.py::test_only_what_is_shared_is_drawn_alike[random]",
    ),
    Mutant(
        "a graph draws in every step what it drew in the first",
        "src/sparsync/compressors/random.py",
        "key_of(ctx) if ctx.key is None else ctx.key",
        "key_of(ctx)",
        "tests/test_virtual_random.py::test_the_same_operators_on_the_same_tensors_exchange_the_same_bits[random]",
    ),
    Mutant(
        "what belongs to nobody is added",
        "src/sparsync/kernels/accumulate/reference.py",
        "            good &= mine[a:b]\n",
        "",
        "tests/test_random_indices.py::test_a_pass_that_waits_for_nothing_is_the_same_pass",
    ),
    Mutant(
        "gradient not clipped",
        "src/sparsync/kernels/clip/reference.py",
        "return clip / norm if norm > clip else 1.0",
        "return 1.0",
        f"{VELOCITY}[topk]",
    ),
    Mutant(
        "on the device, what is not finite counts in the norm",
        "src/sparsync/kernels/clip/triton.py",
        "wide = tl.where(nonfinite, 0.0, g).to(tl.float64)",
        "wide = g.to(tl.float64)",
        "tests/test_kernel_clip.py::test_what_is_not_finite_is_left_out[inf]",
        interpreted=True,
    ),
    Mutant(
        "block does not wrap round",
        "src/sparsync/wire/indices.py",
        "(start[segment] + number - first[segment]) % length[segment]",
        "(start[segment] + number - first[segment])",
        "tests/test_wire.py::test_of_a_block_only_the_start_travels[fp32-layer]",
    ),
    Mutant(
        "carried threshold never follows",
        "src/sparsync/kernels/threshold/reference.py",
        "down = min(missing * (NEAR << FINE) // near, OCTAVE // 4)",
        "down = 0",
        "tests/test_laws.py::test_threshold_holds_the_count_near_k[0.001-normal]",
    ),
    Mutant(
        "rejected entries dropped",
        "src/sparsync/engine/reducer.py",
        "self.feedback.restore_to_residual(unit.key, reduced.rejected)",
        "pass",
        f"{TRAINING}[topk-dropping-3]",
    ),
    Mutant(
        "residual not added",
        "src/sparsync/kernels/accumulate/reference.py",
        "torch.add(old, came, out=u)",
        "u.copy_(came)",
        f"{LAW_1}[float32-topk]",
    ),
    Mutant(
        "residual not cleared",
        "src/sparsync/kernels/accumulate/reference.py",
        "    after.index_copy_(0, indices, values - sent)\n",
        "",
        f"{LAW_1}[float32-topk]",
    ),
    Mutant(
        "numba: a non-finite entry enters the residual",
        "src/sparsync/kernels/accumulate/cpu.py",
        "            u[i] = before[i]\n",
        "",
        "tests/test_numba.py::test_accumulate[1]",
    ),
    Mutant(
        "numba: of equals, the higher index wins",
        "src/sparsync/kernels/topk/cpu.py",
        "equal = size[i] == kth and ties > 0",
        "equal = size[i] == kth and ties > 0 and i > 2",
        "tests/test_numba.py::test_above_and_largest[1]",
    ),
    Mutant(
        "rounding error not kept",
        "src/sparsync/kernels/accumulate/reference.py",
        "rest = values - sent",
        "rest = values * 0",
        "tests/test_laws.py::test_rounding_keeps_hardly_anything_from_being_sent[fp16-topk]",
    ),
    Mutant(
        "inexact entries sent",
        "src/sparsync/kernels/accumulate/reference.py",
        "stays = (rest + sent != values) | (values - rest != sent)",
        "stays = rest != rest",
        "tests/test_laws.py::test_law_1_beyond_the_range_of_the_wire[10000000000000.0-fp16-topk]",
    ),
    Mutant(
        "residuals keyed by bucket index",
        "src/sparsync/feedback/residual.py",
        "self.arenas[key].spans != spans",
        "self._arenas[key].committed.numel() != numel",
        f"{DDP}::test_02_rebuild_with_equal_sizes_reversed",
    ),
    Mutant(
        "residuals lost at a rebuild",
        "src/sparsync/feedback/residual.py",
        "place.copy_(self._view(span.name))",
        "pass",
        f"{DDP}::test_01_rebuild_keeps_residuals",
    ),
    Mutant(
        "order of the sum depends on the rank",
        "src/sparsync/collectives/allgather.py",
        "for row in rows]",
        "for row in rows.roll(-channel.rank, 0)]",
        "tests/test_collectives.py::test_law_2_reduce_is_reduce_local_bit_for_bit[topk-allgather-3]",
    ),
    Mutant(
        "index through a float",
        "src/sparsync/wire/indices.py",
        "sent.indices.to(torch.int32)",
        "sent.indices.float().to(torch.int32)",
        f"{DATA}::test_46_indices_are_not_floats",
    ),
    Mutant(
        "header ignored",
        "src/sparsync/collectives/comm/channel.py",
        "if len(set(said)) > 1:",
        "if False:",
        "tests/test_collectives.py::test_law_4_ranks_at_different_buckets_all_raise",
    ),
    Mutant(
        "failure of a rank ignored",
        "src/sparsync/collectives/comm/channel.py",
        "if header.flags & FAILED:",
        "if False:",
        f"{DDP}::test_08_one_rank_fails_and_all_raise",
    ),
    Mutant(
        "non-finite flag ignored",
        "src/sparsync/collectives/base.py",
        "if header.flags & NONFINITE]",
        "if False]",
        f"{DDP}::test_15_nan_on_one_rank_is_named_on_all",
    ),
    Mutant(
        "non-finite entries enter the residual",
        "src/sparsync/kernels/accumulate/reference.py",
        "torch.where(bad, old, u, out=u)",
        "pass",
        "tests/test_laws.py::test_law_5_a_bad_gradient_never_enters_the_residual[float32-topk]",
    ),
    Mutant(
        "what does not fit is dropped",
        "src/sparsync/compressors/threshold.py",
        "        return sent\n",
        "        u[found] = torch.where(torch.isin(found, sent), u[found], 0)\n        return sent\n",
        f"{LAW_1}[float32-threshold]",
    ),
    Mutant(
        "wrong divisor",
        "src/sparsync/collectives/allgather.py",
        "divisor=len(rows)",
        "divisor=max(1, len(rows) - 1)",
        f"{TRAINING}[topk-allgather-3]",
    ),
    Mutant(
        "divided by a little more",
        "src/sparsync/sparse.py",
        "out[touched] = quotients = out[touched] / divisor",
        "out[touched] = quotients = out[touched] / (divisor * 1.0000001)",
        "tests/test_laws.py::test_law_3_density_1_is_dense[topk-allgather]",
    ),
    Mutant(
        "mask off by one",
        "src/sparsync/kernels/topk/reference.py",
        "(index < stop[row])",
        "(index < stop[row] - 1)",
        "tests/test_laws.py::test_topk_is_torch_topk[float32]",
    ),
    Mutant(
        "stale threshold",
        "src/sparsync/compressors/threshold.py",
        "            own[name].fill_(value)\n",
        "            own[name].fill_(value if own[name] == 0 else own[name].item())\n",
        "tests/test_laws.py::test_threshold_holds_the_count_near_k[0.01-normal]",
    ),
    Mutant(
        "overflow favours low indices",
        "src/sparsync/kernels/topk/reference.py",
        "found.roll(-start)[:capacity]",
        "found[:capacity]",
        "tests/test_laws.py::test_threshold_overflow_favours_no_index",
    ),
    Mutant(
        "a bad step is committed",
        "src/sparsync/engine/reducer.py",
        "(undo or self._bad or self.error is not None)",
        "(undo or self.error is not None)",
        f"{DDP}::test_14_overflow_rolls_the_whole_step_back",
    ),
    Mutant(
        "rollback keeps the step",
        "src/sparsync/feedback/residual.py",
        "            arena.rollback()",
        "            arena.commit()",
        f"{DDP}::test_18_skipped_step_is_rolled_back",
    ),
    Mutant(
        "loss scale ignored",
        "src/sparsync/engine/reducer.py",
        "ratio = scale / self.last_scale",
        "ratio = 1.0",
        f"{DDP}::test_17_residual_follows_the_loss_scale",
    ),
    Mutant(
        "unused parameters are sent from",
        "src/sparsync/engine/bucketing.py",
        "        if self.may_skip:\n",
        "        if False:\n",
        f"{DDP}::test_20_unused_on_every_rank",
    ),
    Mutant(
        "exchange on backward's thread",
        "src/sparsync/engine/reducer.py",
        "CommThread(threaded=channel.group is not None and not channel.deferred)",
        "CommThread(threaded=False)",
        "tests/test_training.py::test_an_exchange_starts_before_backward_ends",
    ),
    Mutant(
        "thresholds not in the checkpoint",
        "src/sparsync/engine/reducer.py",
        " for name, bag in compressor.items()}",
        " for name, bag in ()}",
        "tests/test_training.py::test_kill_and_resume_gives_the_same_weights[threshold-layer]",
    ),
    Mutant(
        "half-precision residual",
        "src/sparsync/feedback/residual.py",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return dtype",
        f"{DATA}::test_27_bf16_training",
    ),
    Mutant(
        "a method that misses dense is not shown so",
        "lab/src/sparsync_lab/training/compare.py",
        "return self.gap > TOLERANCE",
        "return False",
        "tests/lab/test_compare.py::test_more_than_a_point_under_dense_misses_it[0.0101-True]",
    ),
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
    Mutant(
        "a page does not escape what it is given",
        "lab/src/sparsync_lab/report/page.py",
        "autoescape=True",
        "autoescape=False",
        "tests/lab/test_report.py::test_a_page_names_no_other_place_and_escapes_what_it_is_given",
    ),
    Mutant(
        "a wide table widens the page",
        "report/page.html.jinja",
        ".scroll { overflow-x: auto;",
        ".scroll {",
        "tests/lab/test_report.py::test_a_page_does_not_scroll_sideways_and_loads_nothing[360]",
    ),
    Mutant(
        "sums on the device not divided",
        "src/sparsync/kernels/message/triton.py",
        "mean = tl.div_rn(total, divisor)",
        "mean = total",
        "tests/test_kernel_message.py::test_the_mean_is_that_of_the_wire[fp32-torch.float32-int-3]",
        True,
    ),
    Mutant(
        "messages that disagree are applied",
        "src/sparsync/kernels/message/triton.py",
        "count = tl.where(tl.load(failed_exchange) == 0, count, 0)",
        "count += 0",
        "tests/test_kernel_message.py::test_the_mean_is_that_of_the_wire[fp32-torch.float32-int-3]",
        True,
    ),
    Mutant(
        "marks of a message stay for the next",
        "src/sparsync/kernels/message/triton.py",
        "tl.store(bitmap + (index >> 5), tl.zeros([BLOCK], tl.int32), mask=real)",
        "tl.store(bitmap + (index >> 5), tl.zeros([BLOCK], tl.int32), mask=real & (index < 0))",
        "tests/test_kernel_message.py::test_the_message_is_that_of_the_wire[fp32-global-int-odd]",
        True,
    ),
    Mutant(
        "what was sent does not come home on the device",
        "src/sparsync/engine/reducer.py",
        "device_status.bring_home(residual, given.sent, given.number)",
        "pass",
        "tests/test_deferred.py::test_what_is_sent_comes_home_when_a_gradient_is_not_finite",
        True,
    ),
    Mutant(
        "the optimizer does not see a bad step on the device",
        "src/sparsync/engine/reducer.py",
        "device_status.poison(unit.grad, self._starts(unit, layout), self.feedback.transactional)",
        "pass",
        "tests/test_deferred.py::test_the_same_steps[('a', nan)-plain]",
        True,
    ),
    Mutant(
        "a failed exchange is forgotten by the next on the device",
        "src/sparsync/kernels/status/triton.py",
        "tl.where(first_wrong != 0, first_wrong, tl.where(wrong > 0, number, 0))",
        "tl.where(wrong > 0, number, 0)",
        FROM_A_FAILURE_ON,
        True,
    ),
    Mutant(
        "what a failed exchange sent is lost on the device",
        "src/sparsync/kernels/status/triton.py",
        "return (tl.load(nonfinite_step) != 0) | ((first_wrong != 0) & (first_wrong <= number))",
        "return tl.load(nonfinite_step) != 0",
        FROM_A_FAILURE_ON,
        True,
    ),
    Mutant(
        "what was applied before a failed exchange comes home too",
        "src/sparsync/kernels/status/triton.py",
        "(first_wrong != 0) & (first_wrong <= number)",
        "first_wrong != 0",
        FROM_A_FAILURE_ON,
        True,
    ),
    Mutant(
        "what was rejected comes home twice from a failed exchange",
        "src/sparsync/engine/reducer.py",
        "self._in_flight.insert(-1, InFlight(unit, replace(reduced.rejected, values=-reduced.rejected.values)))",
        "pass",
        f"{DEFERRED}::test_what_a_failed_exchange_sent_comes_home_bit_for_bit_and_once[None-rejected]",
        True,
    ),
    Mutant(
        "a failed exchange hides that the step is bad",
        "src/sparsync/kernels/status/triton.py",
        "tl.load(nonfinite_step) + UNDONE != 0",
        "UNDONE != 0",
        f"{DEFERRED}::test_a_step_that_fails_and_is_not_finite_is_not_applied_at_all[a]",
        True,
    ),
    Mutant(
        "the optimizer does not see that a failed step is undone",
        "src/sparsync/kernels/status/triton.py",
        "tl.load(nonfinite_step) + UNDONE != 0",
        "tl.load(nonfinite_step) != 0",
        f"{DEFERRED}::test_a_failed_step_that_can_be_undone_is_undone_as_a_whole[header]",
        True,
    ),
    Mutant(
        "who hears of a failure first keeps it to itself",
        "src/sparsync/engine/reducer.py",
        "told = self.channel.monitor.broadcast_error(error)",
        "told = error",
        f"{DEFERRED}::test_a_rank_that_hears_of_a_failure_first_tells_the_others",
        True,
    ),
    Mutant(
        "Gaussian-k's loop accepts too few on the device",
        "src/sparsync/kernels/gaussian/triton.py",
        "few2 = 3 * at2 < 2 * k",
        "few2 = 3 * at2 < k",
        "tests/test_kernel_gaussian.py",
        True,
    ),
    Mutant(
        "a list that is too long is refined only when it is much too long",
        "src/sparsync/kernels/gaussian/triton.py",
        "(many > capacity)",
        "(many > 2 * capacity)",
        "tests/test_kernel_gaussian_refine.py::test_at_the_edges_of_what_is_right",
        True,
    ),
    Mutant(
        "once a list is full nobody counts on",
        "src/sparsync/kernels/gaussian/triton.py",
        'sem="relaxed") <= capacity',
        'sem="relaxed") < capacity',
        "tests/test_kernel_gaussian_refine.py::test_a_full_list_is_not_all_there_is",
        True,
    ),
    Mutant(
        "none of the next bin fills up on the device",
        "src/sparsync/kernels/threshold/triton.py",
        "(in_line <= free)",
        "(in_line < 0)",
        "tests/test_kernel_threshold.py::test_the_same_entries_step_after_step",
        True,
    ),
]


def run(tests: list[str], source: Path, interpreted: bool) -> bool:
    """Whether the tests pass on this source."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = (
        os.environ
        | {"PYTHONPATH": f"{source / 'src'}:{source / 'lab/src'}"}
        | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    )
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run {tests}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.returncode == 0


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    started = time.monotonic()
    for interpreted in (False, True):
        tests = sorted({mutant.test for mutant in chosen if mutant.interpreted == interpreted})
        if tests and not run(tests, ROOT, interpreted):
            print("the tests fail without any defect")
            return 1
    survivors = 0
    for mutant in chosen:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder)
            for part in ("src", "lab/src"):
                shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
            path = source / mutant.file
            text = path.read_text()
            if text.count(mutant.good) != 1:
                print(f"GONE      {mutant.name}: its place in {mutant.file} occurs {text.count(mutant.good)} times")
                survivors += 1
                continue
            path.write_text(text.replace(mutant.good, mutant.bad))
            survived = run([mutant.test], source, mutant.interpreted)
            survivors += survived
            print(f"{'SURVIVED' if survived else 'found   '}  {mutant.name}: {mutant.test}", flush=True)
    seconds = time.monotonic() - started
    print(f"{len(chosen)} seeded defects, {len(chosen) - survivors} found, {survivors} not, in {seconds:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
