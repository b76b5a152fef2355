# Two commands for a fresh machine: `make demo` runs the main job, `make test` passes the tests. Each installs
# what it needs into a virtual environment of this checkout. `make -n demo` prints the commands that it runs.
#
#   make demo PYTHON=python3.12                                  another Python (3.11 or later)
#   make demo TORCH='torch --index-url https://download.pytorch.org/whl/cpu'     no CUDA packages (gigabytes)

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# The tests compare with it. Without its dependencies: 60 packages of cloud clients that no test uses, and a
# torchvision that cannot be imported beside a PyTorch for CPUs.
PEER = mosaicml-streaming==0.13.0
# Examples of images need it; in a folder of its own, because the libraries that find it import it.
IMAGES = torchvision==0.28.0

.PHONY: demo test

demo: $(VENV)/.installed-all
	$(VENV)/bin/shardkit demo

test: $(VENV)/.installed-dev
	bash tests/servers/install_rgw.sh || true  # a real S3 server, if this user may install it; else moto alone
	$(VENV)/bin/python -m pytest -n 3  # three on two cores: many tests wait for something

$(VENV)/.installed-torch:
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install $(TORCH)
	touch $@

$(VENV)/.installed-all: pyproject.toml | $(VENV)/.installed-torch
	$(VENV)/bin/pip install -e '.[all]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml Makefile | $(VENV)/.installed-torch
	$(VENV)/bin/pip install -e '.[dev]'
	$(VENV)/bin/pip install --no-deps $(PEER)
	$(VENV)/bin/pip install --no-deps --target $(VENV)/torchvision $(IMAGES)
	touch $@
