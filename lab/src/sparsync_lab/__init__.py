"""Trainings on real processes, for the demo and the benchmarks."""
