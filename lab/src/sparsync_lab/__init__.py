"""The laboratory of Sparsync: models, data, trainings, benchmarks, and the figures and tables of the papers."""
