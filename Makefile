# Everything runs from a virtual environment that `make install` builds; only Python, pip and make are needed before.
PYTHON ?= python3
BIN := .venv/bin
COMMIT ?= $(shell git describe --always --dirty)
STAMP := .venv/.installed
# The tests that run kernels: by Triton's interpreter, or on a GPU as they are.
DEFERRED_MATRIX := tests/test_fault_matrix_deferred.py
INTERPRETED := $(sort $(shell grep -lr --include='test_*.py' '^pytestmark = MARKS' tests))
KERNELS := $(filter-out $(DEFERRED_MATRIX),$(INTERPRETED))

.PHONY: install demo test verify coverage test-full test-gpu test-sanitizer test-mutants test-compile test-triton \
  test-frameworks test-install fuzz lint format chaos chaos-quick bench docs papers-quick clean
.DEFAULT_GOAL := install

install: $(STAMP)

$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' --editable lab
	touch $@

demo: install
	$(BIN)/sparsync demo

# Two at a time: who is done takes over half of what the other has left. Where tests wait for deadlines, three.
TWO := -n 2 --dist worksteal
THREE := -n 3 --dist worksteal
# The laws, the failure cases and whole trainings on real processes; then the kernels, run by Triton's interpreter. What
# is marked slow is left to test-full. What one of their many processes has compiled the others load, whoever forbids it.
test: export PYTHONDONTWRITEBYTECODE =
test: install
	$(BIN)/python -m pytest $(THREE) -m "not slow" $(addprefix --ignore=,$(INTERPRETED))
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(TWO) -m "not slow" $(INTERPRETED)

# Results of the papers, and the generated blocks of README and docs/, made again from the stored trainings.
verify: install
	$(BIN)/sparsync papers verify

# The tests one after another, with the coverage of all of them; without the fault matrix, which takes an hour or more.
coverage: install
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest $(addprefix --ignore=,tests/test_fault_matrix.py $(DEFERRED_MATRIX))
	TRITON_INTERPRET=1 $(BIN)/coverage run -m pytest $(KERNELS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Every test, many more examples of every law, and the fault matrix as a whole, several cells at a time.
test-full: export PYTHONDONTWRITEBYTECODE =
test-full: install
	HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest $(THREE) $(addprefix --ignore=,tests/test_fault_matrix.py $(INTERPRETED))
	HYPOTHESIS_PROFILE=full TRITON_INTERPRET=1 $(BIN)/python -m pytest $(TWO) $(KERNELS)
	$(BIN)/python -m tests.matrix --jobs 4 --output runs/fault-matrix.csv
	TRITON_INTERPRET=1 $(BIN)/python -m tests.matrix --jobs 3 --output runs/fault-matrix.csv

# Seeded defects: each must turn a named test red. SINCE=commit: only those of rooms that changed since then.
test-mutants: install
	$(BIN)/python -m tests.mutants $(if $(SINCE),--since $(SINCE))

# Every kernel, with the types that the interpreter's tests launch it with, compiled for a GPU that need not be there.
test-compile: install
	rm -rf runs/launches
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(TWO) -q -p tests.compile_kernels --launches runs/launches -m "not slow" $(KERNELS)
	$(BIN)/python -m tests.compile_kernels runs/launches

# The kernels under the interpreters of several releases of Triton, each in a folder of its own before the other packages.
TRITONS := 3.6.0 3.7.1 newest
test-triton: install
	for version in $(TRITONS); do \
	  if [ $$version = newest ] || [ ! -d .triton/$$version ]; then \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target .triton/$$version \
	      triton$$(echo ==$$version | sed 's/==newest//') || exit 1; \
	  fi; \
	  PYTHONPATH=$(CURDIR)/.triton/$$version $(BIN)/python -c "import triton; print('triton', triton.__version__)" && \
	  PYTHONPATH=$(CURDIR)/.triton/$$version TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 $(KERNELS) || exit 1; \
	done

# Every framework of tests/frameworks/versions.txt (or some: FRAMEWORKS="lightning==2.5.6 lightning"), its slow tests
# included, in an environment of its own that takes torch and all else from .venv. The newest is looked for each time.
FRAMEWORKS ?= $(shell grep -v '^\#' tests/frameworks/versions.txt)
test-frameworks: install
	mkdir -p .frameworks && grep -E '^(torch|numpy)==' constraints.txt > .frameworks/constraints.txt
	packages=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"); status=0; \
	for framework in $(FRAMEWORKS); do \
	  name=$$(echo $$framework | sed 's/==.*//; s/\[.*//'); place=.frameworks/$$(echo $$framework | sed 's/\[.*\]//; s/==/-/'); \
	  if [ ! -e $$place/.made ]; then \
	    $(BIN)/python -m venv --without-pip $$place && \
	    echo "import site; site.addsitedir('$$packages')" > $$(ls -d $$place/lib/python*/site-packages)/beside.pth && \
	    touch $$place/.made || exit 1; \
	  fi; \
	  $$place/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --constraint .frameworks/constraints.txt \
	    "$$framework" || exit 1; \
	  $$place/bin/python -c "from importlib.metadata import version; print('$$name', version('$$name'))"; \
	  $$place/bin/python -m pytest -q tests/frameworks/test_$$name.py || status=1; \
	done; exit $$status

# What is pinned resolves with the public index alone: no wheel folder, no extra index. May download gigabytes.
test-install: install
	env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null $(BIN)/python -m pip install --disable-pip-version-check \
	  --dry-run --ignore-installed --no-cache-dir --progress-bar off --constraint constraints.txt '.[dev,docs]' ./lab

# On a machine with a GPU and torch: needs nothing installed but torch and pytest. Several files at a time.
GPU_TEST = PYTHONPATH=src:lab/src:. $(PYTHON) -m pytest -c /dev/null --rootdir . --noconftest -v --no-header -W ignore -p no:cacheprovider
test-gpu:
	$(PYTHON) -c "import datetime, sys, torch; print(datetime.date.today(), torch.cuda.get_device_name(), 'torch', torch.__version__, 'python', sys.version.split()[0], 'commit', '$(COMMIT)')" > results/test-gpu.txt
	$(GPU_TEST) -n 14 --dist worksteal tests/test_gpu.py tests/test_outer_loop_gpu.py tests/test_virtual_graphs.py $(KERNELS) >> results/test-gpu.txt 2>&1; \
	  status=$$?; grep -E "FAILED|ERROR| passed| failed" results/test-gpu.txt | tail -12; exit $$status

# The kernels' memory accesses, watched by NVIDIA's compute-sanitizer; some tests of every file.
SANITIZED := half_precision or momentum or not_finite or mean_is or rejects or foreign
test-sanitizer:
	rm -rf runs/sanitizer && mkdir -p runs/sanitizer
	for tool in memcheck racecheck; do for file in $(KERNELS); do echo $$tool $$file; done; done | xargs -P 10 -L 1 sh -c \
	  'PYTHONPATH=src:lab/src:. compute-sanitizer --tool $$0 $(PYTHON) -m pytest -c /dev/null --rootdir . --noconftest -q -W ignore \
	  -p no:cacheprovider -k "$(SANITIZED)" $$1 > runs/sanitizer/$$0-$$(basename $$1).txt 2>&1'; \
	  status=$$?; head -1 results/test-gpu.txt > results/test-sanitizer.txt; \
	  grep -E "SUMMARY|passed|failed" runs/sanitizer/*.txt | sed 's|^runs/sanitizer/||' >> results/test-sanitizer.txt; \
	  cat results/test-sanitizer.txt; exit $$status

# Hostile messages and checkpoints, by atheris, which looks for those that reach new code; MINUTES for each of TARGETS. What
# it has found is kept in .fuzz/corpus, beside atheris itself; a failure's input in .fuzz; a row of each in results/fuzz.csv.
MINUTES ?= 5
TARGETS ?= messages owners peer parts lengths checkpoints
fuzz: install
	[ -d .fuzz/atheris ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .fuzz atheris
	PYTHONPATH=$(CURDIR)/.fuzz $(BIN)/python -m tests.fuzz $(MINUTES) $(TARGETS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Thousands of steps under faults and restarts, half an hour on two cores; other STEPS, SEED and OUT if you like.
STEPS ?= 10000
SEED ?= 0
OUT ?= results/lab-chaos.csv
chaos: install
	$(BIN)/sparsync lab chaos --steps $(STEPS) --seed $(SEED) --out $(OUT)

# Two minutes of it.
chaos-quick: install
	$(BIN)/sparsync lab chaos --minutes 2 --seed $(SEED) --out runs/lab-chaos.csv

bench: install
	$(BIN)/sparsync bench step --out results

# The site, into runs/site; first the numbers of README and docs/, and the pictures, from results/.
docs: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m sparsync_lab.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir runs/site

# Every figure and table of the papers in a tiny setting; $SPARSYNC_DATA is the folder of the data sets.
papers-quick: install
	$(BIN)/sparsync papers run all --quick --output runs/papers-quick --no-resume
	$(BIN)/sparsync papers report --output runs/papers-quick

clean:
	rm -rf .venv .triton .frameworks .fuzz .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* runs
