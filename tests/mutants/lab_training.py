"""Seeded defects in lab_training."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "a method that misses dense is not shown so",
        "lab/src/sparsync_lab/training/compare.py",
        "return self.gap > TOLERANCE",
        "return False",
        "tests/lab/test_compare.py::test_more_than_a_point_under_dense_misses_it[0.0101-True]",
    ),
    Mutant(
        "two trainings may work in one run folder",
        "lab/src/sparsync_lab/training/loop.py",
        "on_rank_0(lambda: held.enter_context(hold_lock(run_folder.folder)))",
        "on_rank_0(lambda: run_folder.folder.mkdir(parents=True, exist_ok=True))",
        "tests/lab/test_run_folders.py::test_every_rank_is_told_that_the_folder_is_in_use",
    ),
    Mutant(
        "workers need a temporary folder with a short name",
        "lab/src/sparsync_lab/training/local_workers.py",
        """        tempfile.tempdir = "/tmp"\n""",
        "        pass\n",
        "tests/lab/test_train.py::test_workers_start_where_the_temporary_folder_has_a_long_name",
    ),
    Mutant(
        "a checkpoint counts before its files are on the disk",
        "lab/src/sparsync_lab/training/durable.py",
        "            os.fsync(file.fileno())",
        "            pass",
        "tests/lab/test_run_folders.py::test_a_checkpoint_is_on_the_disk_before_it_counts",
    ),
    Mutant(
        "a checkpoint counts before its names are on the disk",
        "lab/src/sparsync_lab/training/checkpoints.py",
        "        sync_folder(part)\n",
        "",
        "tests/lab/test_run_folders.py::test_a_checkpoint_is_on_the_disk_before_it_counts",
    ),
    Mutant(
        "one checkpoint is kept",
        "lab/src/sparsync_lab/training/checkpoints.py",
        "KEPT = 2",
        "KEPT = 1",
        "tests/lab/test_run_folders.py::test_a_checkpoint_is_on_the_disk_before_it_counts",
    ),
    Mutant(
        "each rank resumes from what it can read itself",
        "lab/src/sparsync_lab/training/checkpoints.py",
        "in gather(self._damage(step, rank, workers)) if",
        "in [self._damage(step, rank, workers)] if",
        "tests/lab/test_run_folders.py::test_all_ranks_take_the_checkpoint_that_each_can_read",
    ),
    Mutant(
        "half a checkpoint stays on a full disk",
        "lab/src/sparsync_lab/training/checkpoints.py",
        "                if rank == 0:\n                    shutil",
        "                if rank < 0:\n                    shutil",
        "tests/lab/test_run_folders.py::test_a_checkpoint_that_cannot_be_written_is_said_by_all_ranks",
    ),
    Mutant(
        "workers that are started again meet the addresses of those before",
        "lab/src/sparsync_lab/training/process_group.py",
        "os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')",
        "0",
        "tests/lab/test_run_folders.py::test_torchrun_recovers_from_a_killed_rank[first]",
    ),
]
