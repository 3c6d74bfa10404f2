# make demo | docs | test | test-vllm | models | test-next | test-lmcache | test-sglang | test-wheel | wheel | manifests | fuzz | soak | install | check
#      VENV=.venv VLLM_VENV=.venv-vllm VLLM_TESTS=tests/vllm NEXT_VENV=.venv-next LMCACHE_VENV=.venv-lmcache SGLANG_VENV=.venv-sglang PYTHON=python3 JOBS=6
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
VLLM_TESTS ?= tests/vllm
NEXT_VENV ?= .venv-next
LMCACHE_VENV ?= .venv-lmcache
SGLANG_VENV ?= .venv-sglang
PYTHON ?= python3
# of `make test`: more than cores, because tests wait for something most of the time; a job takes 2 GiB, and there are ports for six
JOBS ?= 6
INPUTS ?= 20000
MINUTES ?= 10
SEED ?= $(shell date +%s)
BIN := $(VENV)/bin

# the tests start hundreds of processes: each would compile our sources again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install manifests demo docs test install-vllm test-vllm models install-next test-next install-lmcache test-lmcache install-sglang test-sglang wheel test-wheel fuzz soak check format clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml tools/install.sh tools/system-packages.sh
	PYTHON=$(PYTHON) VENV=$(VENV) bash tools/install.sh
	touch $@

demo: install
	$(BIN)/pd-cache demo

# links and anchors are strict; the pages keep their places, so that links are the same on the site as in a clone
docs: install
	rm -rf build/pages
	mkdir -p build/pages
	cp -r --parents *.md LICENSE configs deploy docs examples build/pages
	$(BIN)/zensical build --strict

test: install
	bash tools/system-packages.sh test
	VENV=$(VENV) bash tools/deploy-tools.sh
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder  # a file's tests share servers

install-vllm: $(VLLM_VENV)/.installed

$(VLLM_VENV)/.installed: pyproject.toml tools/install.sh tools/install-vllm.sh
	PYTHON=$(PYTHON) VLLM_VENV=$(VLLM_VENV) bash tools/install-vllm.sh
	touch $@

test-vllm: install-vllm
	$(VLLM_VENV)/bin/python -m pytest tests/contracts/test_adapters.py -k vllm-tier  # apart: tests/vllm changes Mooncake's patience
	$(VLLM_VENV)/bin/python -m pytest -o timeout=1800 -o faulthandler_timeout=0 $(VLLM_TESTS)  # a server has 15 minutes to start

# an hour or two; what build/models has results of is not run again
models: install-vllm
	$(VLLM_VENV)/bin/python -m tests.vllm.models build/models --page docs/models.md

install-next: $(NEXT_VENV)/.installed

$(NEXT_VENV)/.installed: $(VLLM_VENV)/.installed tools/install-next.sh
	VLLM_VENV=$(VLLM_VENV) NEXT_VENV=$(NEXT_VENV) bash tools/install-next.sh
	touch $@

# the releases to come: what calls Mooncake, also in a pool of the other version; and what LMCache and vLLM call
MIXED := -n 2 --dist loadfile tests/transfer/test_lookup_rpc.py tests/transfer/test_direct_reads.py
test-next: install-next
	$(NEXT_VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder tests/transfer tests/contracts/test_tiers.py \
		tests/contracts/test_lookup.py tests/pd_cache/test_end_to_end.py tests/pd_cache/test_outages.py tests/launch/test_pool.py tests/launch/test_status.py
	$(NEXT_VENV)/bin/python -m pytest tests/contracts/test_adapters.py tests/lmcache/test_units.py -k lmcache
	POOL_PYTHON=$(VLLM_VENV)/bin/python $(NEXT_VENV)/bin/python -m pytest $(MIXED)
	POOL_PYTHON=$(NEXT_VENV)/bin/python $(VLLM_VENV)/bin/python -m pytest $(MIXED)
	$(NEXT_VENV)/bin/python -m pytest -o faulthandler_timeout=0 tests/vllm/test_units.py tests/vllm/test_random_histories.py tests/vllm/test_tier.py

install-lmcache: $(LMCACHE_VENV)/.installed

$(LMCACHE_VENV)/.installed: pyproject.toml tools/install.sh tools/install-vllm.sh tools/install-lmcache.sh
	PYTHON=$(PYTHON) LMCACHE_VENV=$(LMCACHE_VENV) bash tools/install-lmcache.sh
	touch $@

test-lmcache: install-lmcache
	$(LMCACHE_VENV)/bin/python -m pytest -o faulthandler_timeout=0 tests/lmcache tests/contracts/test_adapters.py

install-sglang: $(SGLANG_VENV)/.installed

$(SGLANG_VENV)/.installed: pyproject.toml tools/install.sh tools/install-sglang.sh
	PYTHON=$(PYTHON) SGLANG_VENV=$(SGLANG_VENV) bash tools/install-sglang.sh
	touch $@

test-sglang: install-sglang
	$(SGLANG_VENV)/bin/python -m pytest tests/sglang tests/contracts/test_adapters.py -k sglang

# setuptools would take along what an earlier build has left
wheel:
	rm -rf build dist
	$(PYTHON) -m pip --disable-pip-version-check -q wheel --no-deps -w dist .

test-wheel: wheel
	PYTHON=$(PYTHON) bash tools/test-wheel.sh

manifests: install
	VENV=$(VENV) bash tools/deploy-tools.sh
	PATH="$(abspath $(BIN)):$$PATH" bash tools/render-manifests.sh

fuzz: install
	FUZZ_EXAMPLES=$(INPUTS) $(BIN)/python -m pytest -o timeout=0 tests/fuzz --hypothesis-seed=$(SEED)

soak: install
	bash tools/system-packages.sh test
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED)

check: install docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(NEXT_VENV) $(SGLANG_VENV) $(LMCACHE_VENV) build dist *.egg-info .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
