# Each target sets up what it needs. `make demo` and `make test` work on a fresh machine with Python 3.11 to 3.14, pip and make.
#
#   make setup                                    the first good Python on the PATH, and PyPI's torch, which has CUDA
#   make setup PYTHON=python3.12                  another Python: a command, a path or a version
#   make setup TORCH=cpu TORCH_INDEX_URL=URL      torch without CUDA, several GB less, from an index that has it
PYTHON ?=
TORCH ?=
TORCH_INDEX_URL ?=
export PYTHON TORCH TORCH_INDEX_URL
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := all,huggingface,lightning,bench,dev
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Container images set this variable: every process would then compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Parts joined by + run at the same time: the others use the processors while the integration tests wait.
PARTS := lint tools docs+types+layers+unit+integration
# What `make nightly` runs beside the other Pythons: targets of this file.
NIGHTLY := rare bounds reference
UNIT := tests/unit tests/stateful tests/simulation tests/fuzz tests/mutants tests/architecture tests/contract/test_memory.py

.PHONY: setup demo test check nightly bounds tools lint docs types layers unit integration rare faults gpu reference campaign fuzz mutants soak hosts power-cuts tensorflow dashboards pictures format promises instructions pins image clean again

setup: $(STAMP)
	@case "$$SHELL" in \
		*/fish) use="source $(BIN)/activate.fish" ;; \
		*/csh | */tcsh) use="source $(BIN)/activate.csh" ;; \
		*) use=". $(BIN)/activate" ;; \
	esac; echo "orch is in $(VENV): type \`$$use\` once in each shell, then \`orch\`; or $(CURDIR)/$(BIN)/orch in any"

# A choice on make's own line is carried out also where the environment is up to date.
$(STAMP): pyproject.toml constraints.txt $(if $(findstring command line,$(origin PYTHON) $(origin TORCH)),again)
	.ci/environment $(VENV) $(EXTRAS)
	touch $(STAMP)

again:

demo: $(STAMP)
	@$(BIN)/orch demo

# pytest-xdist fails when a process that ran one of its last tests is lost and replaced: without replacements it ends and reports the loss.
XDIST := --dist loadfile --max-worker-restart 0

# Every part runs, whatever failed before it; the failed parts are listed at the end.
test: $(STAMP)
	@MAKE='$(MAKE)' .ci/parts $(PARTS)

check: test

# The same on every other Python from 3.11 to 3.14 that is found, on the lower bounds of pyproject.toml, and what takes too long for each change.
nightly: $(STAMP)
	@MAKE='$(MAKE)' .ci/parts $(addprefix python-,$(shell .ci/python --versions)) $(NIGHTLY)

# In an environment of its own, which is several GB with CUDA and is removed.
python-%:
	rm -rf .venv-$*
	PYTHON=$* .ci/environment .venv-$* $(EXTRAS) && export PATH="$(CURDIR)/.venv-$*/bin:$$PATH" \
		&& orch demo && python -m pytest -q -n 2 $(XDIST) $(UNIT); status=$$?; rm -rf .venv-$*; exit $$status

# Runs the demo on the oldest version of each package that pyproject.toml allows, with the torch that pip finds of that version.
bounds: $(STAMP)
	rm -rf .venv-bounds
	"$$(.ci/python)" -m venv .venv-bounds
	.venv-bounds/bin/python -m pip install --quiet "torch==$$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)" \
		&& uv pip install --python .venv-bounds/bin/python --resolution lowest-direct --editable '.[all]' \
		&& .venv-bounds/bin/orch demo; status=$$?; rm -rf .venv-bounds; exit $$status

tools: $(STAMP)
	.ci/install-test-tools

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tests.architecture.test_budgets

# The documents as a site, in out/site.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

# Each test process imports all tested modules: no more processes than processors.
unit: $(STAMP)
	.ci/install-test-tools
	$(BIN)/python -m pytest -q -n 2 $(XDIST) -m 'not rare' $(UNIT)

integration: $(STAMP)
	.ci/install-test-tools
	$(BIN)/python -m pytest -q -n 3 $(XDIST) -m 'not rare' --no-loadscope-reorder tests/integration tests/acceptance tests/faults

# Rare faults, variants of what other tests show, the contract of runtimes on Ray, other tools' installers, and whole examples: part of `make nightly`, not of `make test`.
rare: $(STAMP)
	.ci/install-test-tools
	$(BIN)/python -m pytest -q -n 2 $(XDIST) -m rare $(UNIT) tests/integration tests/acceptance tests/faults

# Only the tests that kill real processes; they are part of integration too.
faults: $(STAMP)
	$(BIN)/python -m pytest -q tests/faults

# Jobs, faults and readings on a real NVIDIA GPU; skipped without one. Needs a torch built for CUDA in .venv.
gpu: $(STAMP)
	$(BIN)/python -m pytest -q tests/gpu tests/integration/test_trainer_gpu.py

# Compares ten thousand random decisions of the scheduler with those of a naive one.
reference: $(STAMP)
	$(BIN)/python -m tests.unit.core.scheduler.reference 10000

# Takes the daemon through a million simulated faults: hours, in any number of runs. Continues where tests/simulation/results.json ends,
# and adds to it. make campaign FIRST=N FAULTS=10000: other histories, which are not recorded.
FIRST ?=
FAULTS ?= 1000000
PROCESSES ?= $(shell nproc)
campaign: $(STAMP)
	$(BIN)/python -m tests.simulation run --faults $(FAULTS) --processes $(PROCESSES) $(if $(FIRST),--first $(FIRST),--results tests/simulation/results.json)

# Fuzzes every reader of foreign bytes, some seconds each; an input that shows a defect is kept in tests/fuzz/corpus.
SECONDS ?= 300
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

# Ten thousand kills, stops, freezes and terminations of all kinds of processes, and a thousand kills of the daemon while users submit, pause,
# resume and cancel: hours. The first program continues from the newest result, for at most SITTING seconds, in PLACES of one node and CLUSTERS
# of three at the same time. Shorter: make soak KILLS=20 DISTURBANCES=20.
KILLS ?= 1000
HOST_FAULTS ?= 200
DISTURBANCES ?= 10000
SITTING ?= inf
PLACES ?= 1
CLUSTERS ?= 1
DISTURBED = $(lastword $(sort $(wildcard benchmarks/results/*-disturbances.json)))
soak: $(STAMP)
	$(BIN)/python -m benchmarks.disturbances --disturbances $(DISTURBANCES) --seconds $(SITTING) --places $(PLACES) --clusters $(CLUSTERS) \
		$(DISTURBED:%=--before %) --json benchmarks/results/$$(date +%F)-disturbances.json
	$(BIN)/python -m benchmarks.soak --kills $(KILLS) --json benchmarks/results/$$(date +%F)-soak.json

# Each promise as a figure with its limit (docs/figures.md), on an idle machine: half an hour; with LONG=--long hours. make promises
# BARS=start,recovery: some of them. AGAINST=COMMIT: that commit's figures as well, side by side.
BARS ?=
AGAINST ?=
LONG ?=
promises: $(STAMP)
	$(BIN)/python -m benchmarks.promises $(BARS:%=--bars %) $(AGAINST:%=--against %) $(LONG)

# Faults of whole hosts and of the network between three of them, which are namespaces of this machine; needs root. Shorter: make hosts
# HOST_FAULTS=20. make rare has a short form with two hosts (tests/integration/test_two_hosts.py).
hosts: $(STAMP)
	$(BIN)/python -m pytest -q tests/hosts
	$(BIN)/python -m benchmarks.hosts --faults $(HOST_FAULTS) --json benchmarks/results/$$(date +%F)-hosts.json

# Power cuts of the disk below a home, at every point of a job's life; needs root and loop devices: some minutes for ten cuts.
# Shorter: make power-cuts CUTS=8, as make rare does; make test has two cuts (tests/faults/test_power_cuts.py).
CUTS ?= 200
power-cuts: $(STAMP)
	$(BIN)/python -m benchmarks.power_cuts --cuts $(CUTS) --json benchmarks/results/$$(date +%F)-power_cuts.json

# Seeds bugs into the fold, the loop, the stores, the gangs and the scheduler, each in a copy, and reports the test that catches each: an hour.
# Bugs in tests/mutants/caught.json are not tried again; python -m tests.mutants --again tries them too.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

# Compares the instruction counts of the hot paths with the newest committed ones; takes some minutes with valgrind.
instructions: $(STAMP)
	$(BIN)/python -m benchmarks.instructions --compare

# The TensorFlow example with real kills, in an interpreter of its own with TensorFlow, torch and orch (2 GB). ORCH_TEST_TENSORFLOW names
# another interpreter, and makes `make rare` run the example as well.
tensorflow: $(STAMP) $(if $(ORCH_TEST_TENSORFLOW),,.venv-tensorflow)
	ORCH_TEST_TENSORFLOW=$${ORCH_TEST_TENSORFLOW:-$(CURDIR)/.venv-tensorflow/bin/python} \
		$(BIN)/python -m pytest -q tests/integration/test_trainer_examples.py -k tensorflow

.venv-tensorflow: constraints.txt
	.ci/environment $@ train && $@/bin/python -m pip install --quiet --no-compile 'tensorflow-cpu>=2.21' || { rm -rf $@; exit 1; }

dashboards: $(STAMP)
	$(BIN)/python -m dashboards.build

# Takes the pictures of the page in docs/pictures with chromium; a test fails when they are out of date.
pictures: $(STAMP)
	$(BIN)/python -m tests.support.page_pictures

# Hashes of what the image is built with and of what it contains, after a change of pyproject.toml or constraints.txt. torch, whose build is the
# user's choice, and its libraries of CUDA are left to the pins of constraints.txt and of torch. Versions that constraints.txt does not name
# stay as they are in the files: make pins UPGRADE=--upgrade takes the newest.
UPGRADE ?=
IN_IMAGE := daemon runtime-env stacks
OF_CUDA := cuda-bindings cuda-toolkit nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvshmem-cu13 triton
PIN := $(BIN)/uv pip compile --quiet --no-config --universal --python-version 3.11 --constraint constraints.txt --generate-hashes \
	--no-annotate --custom-compile-command 'make pins'
pins: $(STAMP)
	printf '%s\n' $(OF_CUDA) | $(PIN) $(UPGRADE) $(addprefix --extra ,$(IN_IMAGE)) --excludes - --no-emit-package torch \
		--output-file deploy/requirements.txt pyproject.toml
	printf '%s\n' hatchling cyclonedx-bom | $(PIN) $(UPGRADE) --output-file deploy/build-requirements.txt -

# The image orch:cpu or orch:cuda, with docker, and its bill of materials as out/image/sbom.cdx.json.
VARIANT ?= cpu
BUILD_IMAGE = docker build --build-arg VARIANT=$(VARIANT) --build-arg TORCH_INDEX_URL=$(TORCH_INDEX_URL)
image:
	$(BUILD_IMAGE) --tag orch:$(VARIANT) .
	$(BUILD_IMAGE) --target sbom --output out/image .

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-* .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build
