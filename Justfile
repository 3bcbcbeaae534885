# Every command a developer needs. `just` lists them. PYTHON chooses the interpreter for `just setup`.

python := env("PYTHON", "python3")
venv := ".venv"
bin := venv / "bin"

_default:
    @just --list

# Make the virtual environment and install everything.
setup:
    test -d {{venv}} || {{python}} -m venv {{venv}}
    {{bin}}/pip install --quiet --upgrade pip
    {{bin}}/pip install --quiet --editable '.[dev]'

# Serve a model: `just serve --model-path DIR`.
serve *options:
    {{bin}}/python -m serve {{options}}

# Format and sort imports.
fmt:
    {{bin}}/ruff format .
    {{bin}}/ruff check --fix .

# Lint, types, layers.
lint:
    {{bin}}/ruff format --check .
    {{bin}}/ruff check .
    {{bin}}/pyright --pythonpath {{bin}}/python
    {{bin}}/lint-imports

# The default suite, in two processes: `just test -n 0` runs it in one.
test *options:
    {{bin}}/python -m pytest -n 2 --dist loadfile -m 'not slow and not long and not gpu' {{options}}

# What takes longer than about ten seconds each, in two processes; about twenty minutes.
test-slow *options:
    {{bin}}/python -m pytest -n 2 --dist loadfile -m 'slow and not long and not gpu' {{options}}

# What takes minutes each: by hand, before a release or after a change of what they test.
test-long *options:
    {{bin}}/python -m pytest -m 'long and not gpu' {{options}}

# What needs an NVIDIA GPU; without one each test is skipped with the reason.
test-gpu *options:
    {{bin}}/python -m pytest -m gpu -rs {{options}} tests/gpu

# Gather what a GPU machine without a package index lacks, into gpu-bundle.
[positional-arguments]
gpu-bundle *options:
    PYTHONPATH=tests {{bin}}/python -m bench gpu-bundle "$@"

# Prove everything that concerns a GPU, most telling first: `just gpu-contact --budget 540`; here `--device cpu`.
[positional-arguments]
gpu-contact *options:
    PYTHONPATH=.:tests:tests/kit:notebooks {{bin}}/python -m bench gpu-contact "$@"

# Everything but the slow and the long tests. Continuous integration runs this and `test-slow`.
check: lint test

# Benchmarks: `just bench serving --help`.
[positional-arguments]
bench *options:
    {{bin}}/python -m serve.bench "$@"

# Studies for developers, of costs, accuracy, kernels and GPUs: `just study --help`.
[positional-arguments]
study *options:
    PYTHONPATH=tests:tests/kit:notebooks {{bin}}/python -m bench "$@"

# Ours and every installed peer on this machine's CPU, in turns: `just bench-cpu --shapes S --rows 1 2`.
[positional-arguments]
bench-cpu *options:
    PYTHONPATH=tests {{bin}}/python -m bench cpu "$@"

# Install the peers that `bench-cpu` compares with, each in an environment of its own (several GB).
[positional-arguments]
bench-cpu-peers *names:
    PYTHONPATH=tests {{bin}}/python -m bench cpu-peers "$@"

# Break every named thing on purpose: only the touched request fails, nothing leaks (docs/reliability.md, R5).
faults *options:
    {{bin}}/python -m pytest tests/serve/test_faults.py {{options}}

# 100,000 steps of random schedules, then faults put into the scheduler, the caches and the store on purpose.
any-order *options:
    {{bin}}/python -m pytest -m long tests/runtime/scheduler/test_any_order.py tests/runtime/scheduler/test_seeded_faults.py {{options}}

# Requests that come and leave at random: `just soak --requests 10000` (R1, R2, R3).
[positional-arguments]
soak *options:
    PYTHONPATH=tests:notebooks {{bin}}/python -m bench soak "$@"

# Four times as many requests as can be answered: `just overload --seconds 300` (R9).
[positional-arguments]
overload *options:
    PYTHONPATH=tests:notebooks {{bin}}/python -m bench overload "$@"

# Hostile requests on every route, beside seeded streams: `just fuzz --requests 200000` (R4).
[positional-arguments]
fuzz *options:
    PYTHONPATH=tests:tests/kit:notebooks {{bin}}/python -m bench fuzz "$@"

# Clients that read or send slowly, and large requests: what others notice (R10, R11).
[positional-arguments]
slow-clients *options:
    PYTHONPATH=tests:tests/kit:notebooks {{bin}}/python -m bench slow "$@"

# The C++ kernels and their tests under a sanitizer: `just sanitize address`, `undefined` or `thread`.
[positional-arguments]
sanitize *options:
    PYTHONPATH=tests:tests/kit:notebooks {{bin}}/python -m bench sanitize "$@"

# Build a wheel with kernels for every processor of this kind, or `just wheel aarch64`, into dist/. It takes minutes.
wheel kernels="all":
    PENSTOCK_KERNELS={{kernels}} {{bin}}/python -m hatchling build -t wheel

# Run the notebooks from top to bottom.
notebooks:
    {{bin}}/python -m pytest -m notebook tests/notebooks

# Write docs/arguments.md, docs/sampling.md, docs/models.md and docs/monitoring/metrics.md anew from the declarations.
docs:
    {{bin}}/just study documents arguments > docs/arguments.md
    {{bin}}/just study documents sampling > docs/sampling.md
    {{bin}}/just study documents metrics > docs/monitoring/metrics.md
    {{bin}}/just study documents models > docs/models.md

# Write docs/image-models.md anew: serve a tiny model of every image-text architecture. Minutes; needs torchvision.
image-models:
    {{bin}}/just study seeing --markdown > docs/image-models.md

# Train the demo model anew (one to two hours on two cores, minutes on a GPU): `just demo-model --help`.
[positional-arguments]
demo-model *options:
    PYTHONPATH=notebooks {{bin}}/python -m demo_model "$@"
