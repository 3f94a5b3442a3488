# `make demo` and `make test` each work as the only command on a fresh clone of a bare machine.
SHELL := bash
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -q
export NO_MKDOCS_2_WARNING := 1
# The GPUs may be others', too: no NVLink multicast in any process we start.
NO_MULTICAST := overweave/hardware/no_multicast.env
include $(NO_MULTICAST)
export $(shell sed '/^#/d; s/=.*//' $(NO_MULTICAST))
# Tests start hundreds of processes: they read what the first has compiled, whatever the machine's habits.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: dist docs docs-serve demo test size newest newest-compiles newest-interprets tiers fast slow torch-test nightly nightly-newest nightly-list adapters-test lint format gpu-test bench clean

demo: .venv/stamp        ## both operators on emulated ranks or on the GPUs at hand, checked, with a picture
	$(BIN)/overweave demo

test: .venv/stamp        ## everything that needs no GPU: lint and types beside both tiers, which are collected once
	$(MAKE) --jobs 2 lint tiers
	$(MAKE) newest

# The newest Triton that is tested, beside the torch of .venv: launches, a dozen configurations, interpreted kernels and arithmetic.
NEWEST := .triton-3.9.0
WITH_NEWEST := PYTHONPATH=$(NEWEST) TRITON_CACHE_DIR=$(NEWEST)/cache $(PYTEST) -p no:cacheprovider -W ignore::UserWarning
newest: $(NEWEST)/triton/__init__.py
	$(MAKE) --jobs 2 newest-compiles newest-interprets

newest-compiles:
	$(WITH_NEWEST) -n 2 --dist worksteal tests/runtime/gpu/test_launcher.py tests/compat

newest-interprets:
	TRITON_INTERPRET=1 $(WITH_NEWEST) --part=1/18 tests/runtime/interpreted_kernels.py tests/runtime/interpreted_table.py
	TRITON_INTERPRET=1 $(WITH_NEWEST) tests/runtime/interpreted_bits.py

$(NEWEST)/triton/__init__.py: .venv/stamp .ci/triton
	@if [ -e .venv/offline ]; then echo "no registry here to install from"; exit 1; fi
	.ci/triton $(NEWEST:.triton-%=%)

# Two workers, one a core. MEASURED: of three each remembers plans of its own and collects all tests: 9 % more work.
tiers: .venv/stamp
	$(PYTEST) -n 2 --dist worksteal -m "not gpu and not nightly"

fast: .venv/stamp        ## the fast tier alone
	$(PYTEST) -n 2 --dist worksteal -m "not slow and not gpu and not nightly"

slow: .venv/stamp        ## the slow tier alone
	$(PYTEST) -n 2 --dist worksteal -m "slow and not gpu and not nightly"

# The long runs whose short versions `make test` has.
NIGHTLY := "exactness --shapes 400" "exactness --depth interpreter --shapes 60" "routings" "moe_exactness" "attention_exactness" "attention_overlap" "wave_partitions" "verify_mutations --per-class 1000" \
  "lock --ptx" "plan_mutations --count 20000" "verify_valid --count 20000" "lost_waits" "hostile_files" "faults --count 500" "lint_all" \
  "heuristic_cases --seed 7" "ficco_tables" "flux_hosts" "graph_fuzz --count 500" "choice_by_machine" \
  "lint_authored" "versions"

# What only nightly tests import: a browser's driver. The browser is playwright's or the machine's.
NIGHTLY_PACKAGES := 'playwright>=1.50'

torch-test: .venv/stamp  ## all that torch asks of operators, layers, styles and replaced ops; no GPU
	$(PYTEST) tests/torch

nightly: .venv/stamp     ## the long runs, some hours on two cores; `make nightly-list` names them
	for campaign in $(NIGHTLY); do $(BIN)/python -m campaigns.$$campaign || exit 1; done
	$(MAKE) nightly-newest
	$(BIN)/python -m pip install --quiet $(NIGHTLY_PACKAGES)
	$(PYTEST) -m nightly -rs

# With the newest Triton: every kernel, what the lint finds in mutants of them, and every interpreted kernel. Torch's
# floor and its roof, each with the Triton that it names and the roof with the newest numpy, are pairs of `versions`.
nightly-newest: $(NEWEST)/triton/__init__.py ## what `make nightly` runs with the newest Triton
	PYTHONPATH=$(NEWEST) $(BIN)/python -m campaigns.lint_all
	$(WITH_NEWEST) tests/compiler/test_lint_compiled.py tests/tools
	TRITON_INTERPRET=1 $(WITH_NEWEST) tests/runtime/interpreted_kernels.py tests/runtime/interpreted_table.py

nightly-list:            ## what `make nightly` runs
	@printf 'python -m campaigns.%s\n' $(NIGHTLY); echo 'python -m pytest -m nightly -rs'

TRANSFORMERS_TESTS := tests/torch/test_transformers_experts.py tests/torch/test_transformers_attention.py
TEST_ADAPTER := python -m pytest -q -p no:cacheprovider tests/torch

# What vLLM imports for a layer, of all that it installs.
VLLM_NEEDS := aiohttp cachetools cbor2 cloudpickle einops 'fastapi<0.137' llguidance openai openai_harmony \
  partial_json_parser prometheus-client psutil py-cpuinfo pybase64 pyzmq regex 'transformers<5.21' uvloop xgrammar

# What megatron-core needs from 0.17 on. Where it is not there, the last that an older Python takes stands for it.
PYTHON_3_12 ?= python3.12

# The newest of each, and the oldest: overweave/adapters/packages.py names both.
# Of torchtitan's own tests, which its package leaves out: TORCHTITAN_TESTS=<its repository>/tests/unit_tests.
adapters-test: .venv/stamp ## adapters against the packages that they adapt, each in an environment of its own
	.ci/adapter transformers 'transformers>=5.24,<6' peft 'torchao>=0.18,<0.19'
	.venv-transformers/bin/$(TEST_ADAPTER)/test_transformers.py $(TRANSFORMERS_TESTS)
	.venv-transformers/bin/$(TEST_ADAPTER)/situations -k layers_of_other_packages
	.ci/adapter transformers-first 'transformers==5.17.*' peft
	.venv-transformers-first/bin/$(TEST_ADAPTER)/test_transformers.py $(TRANSFORMERS_TESTS)
	if $(PYTHON_3_12) -V; then PYTHON=$(PYTHON_3_12) .ci/adapter megatron 'megatron-core>=0.19,<0.20'; \
	  else .ci/adapter megatron 'megatron-core>=0.16,<0.17'; fi
	.venv-megatron/bin/$(TEST_ADAPTER)/test_megatron.py
	.ci/adapter megatron-first 'megatron-core==0.15.*'
	.venv-megatron-first/bin/$(TEST_ADAPTER)/test_megatron.py
	.ci/adapter deepspeed 'deepspeed>=0.19,<0.20'
	.venv-deepspeed/bin/$(TEST_ADAPTER)/test_deepspeed.py
	.ci/adapter torchtitan 'torchtitan>=0.3,<0.4' expecttest
	.venv-torchtitan/bin/$(TEST_ADAPTER)/test_torchtitan.py
	.ci/adapter vllm --no-deps 'vllm>=0.33,<0.34'  # its torch is built for CUDA, and is not asked here
	.ci/adapter vllm $(VLLM_NEEDS)
	.venv-vllm/bin/$(TEST_ADAPTER)/test_vllm.py

lint: .venv/stamp        ## ruff, ruff format, mypy
	@if [ -e .venv/offline ]; then echo "lint left out: no registry here to install from:$$(cat .venv/offline)"; else \
	set -ex; $(BIN)/ruff check .; $(BIN)/ruff format --check .; $(BIN)/mypy; fi

format: .venv/stamp      ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/stamp        ## the documentation, built strictly into build/site
	$(BIN)/mkdocs build

docs-serve: .venv/stamp  ## the documentation, shown in a browser and built again at each change
	$(BIN)/mkdocs serve

DIST := dist

dist: .venv/stamp        ## a wheel and a source distribution, built into dist
	$(BIN)/python -m build --no-isolation --outdir $(DIST)

gpu-test: .venv/stamp    ## the tests that need NVIDIA GPUs, one or more; nothing else is collected, or asks for its packages
	$(PYTEST) -o addopts="--strict-markers --import-mode=importlib" -m gpu tests/gpu tests/cli/commands/test_demo.py

bench: .venv/stamp       ## both operators on every GPU at hand, shapes of mlp.*.json
	$(BIN)/overweave bench all_gather_matmul --shapes mlp
	$(BIN)/overweave bench matmul_reduce_scatter --shapes mlp

# There is no release yet: a revision of this repository, which a shallow clone may lack.
SINCE := 7e83ba7
size: .venv/stamp        ## lines, files and classes of each room, beside those of a revision: SINCE=
	$(BIN)/python -m campaigns.size --beside $(SINCE)

clean:                   ## the virtual environment and every cache
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/stamp: pyproject.toml .ci/venv
	.ci/venv
	@touch $@
