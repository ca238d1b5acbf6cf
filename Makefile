# make               look at what is here, build train_gpt2
# make quickstart    install what is missing, build, fine-tune the model in data/: two minutes
# make test          install what is missing, build, run every test; the last line counts them
# make deps          only install what is missing (Debian, Ubuntu)
# make train_gpt2cu  the same program on a GPU: for the one that is here, or, where none is, for sm_80; needs nvcc (13.0 was tried)
# make fat           train_gpt2cu for sm_80, 86, 89, 90a, 100 and 120 at once
# make train_gpt2cu_emu  train_gpt2cu on a CPU, its kernels run by test/emu: for tests and readers, far slower
# make test-emu      only CUDA on the CPU: test/emu/README.md
# make kernel-report what every kernel asks of a GPU, without one; KERNEL=name: line by line; LADDER=name: of a ladder
# make bench         speed of the CPU operations and of a whole training step
# make lint          sections, columns, warnings, C++17, the README's option table
# make format        sets the lines that are too long, and only those (needs clang-format)
# make fuzz          every fuzz target for FUZZ_SECONDS (an hour unless set)
# make options       the README's option table
# make clean
#
# Variables: CC, OPT (optimisation flags), NO_OPENMP=1, CLANG (for fuzzing), FUZZ_SECONDS, NVCC, ARCH (80, 90a, ...),
# JOBS (test programs that run at a time; 2 unless set).

ifeq ($(origin CC),default)
CC = gcc
endif
OPT  ?= -O3 -march=native
WARN  = -Wall -Wextra
LIBS  = -ljansson -lpcre2-8 -lutf8proc -lm
BUILD = build

# A probe compiles and links a small program; what a package list says is not believed.
hash := \#
, := ,
probe = $(shell printf '%s\n' $(1) | $(CC) -x c - -o /dev/null $(2) 2>/dev/null && echo yes)
ifndef NO_OPENMP
HAVE_OPENMP := $(call probe,'$(hash)include <omp.h>' 'int main(void) { return omp_get_max_threads() < 1; }',-fopenmp)
endif
HAVE_LIBS := $(call probe,'$(hash)include <jansson.h>' '$(hash)include <utf8proc.h>' '$(hash)define PCRE2_CODE_UNIT_WIDTH 8' '$(hash)include <pcre2.h>' 'int main(void) { return !json_null() || !utf8proc_version() || !pcre2_compile; }',$(LIBS))
HAVE_TEST := $(call probe,'$(hash)include <stdarg.h>' '$(hash)include <stddef.h>' '$(hash)include <stdint.h>' '$(hash)include <setjmp.h>' '$(hash)include <cmocka.h>' 'int main(void) { return !_cmocka_run_group_tests; }',-lcmocka)

# Square roots without errno become vector code; nothing here reads errno after mathematics.
CFLAGS = -std=gnu11 $(WARN) -g -fno-math-errno
ifeq ($(HAVE_OPENMP),yes)
CFLAGS += -fopenmp
else
CFLAGS += -DSFT_NO_OPENMP -fopenmp-simd -Wno-unknown-pragmas
endif

.PHONY: all probe deps quickstart test test-programs fuzz bench lint format options clean test-emu kernel-report fat
all: probe train_gpt2

probe:
	@echo "compiler   $$($(CC) --version | head -n 1)"
	@echo "OpenMP     $(if $(HAVE_OPENMP),yes,no: one thread)"
	@echo "libraries  $(if $(HAVE_LIBS),jansson$(,) PCRE2$(,) utf8proc,missing: run 'make deps')"

# Every target that starts from a bare machine begins here: one package manager call, only when something is missing.
# What comes after is another make's: this one has probed the machine as it was before, so that no list of what is built
# or run may depend on a package that deps installs.
HAVE_CXX := $(shell echo '$(hash)include <string>' | $(CXX) -x c++ -c - -o /dev/null 2>/dev/null && echo yes)
PACKAGES = libjansson-dev libpcre2-dev libutf8proc-dev libcmocka-dev g++
deps:
ifeq ($(HAVE_LIBS)$(HAVE_TEST)$(HAVE_CXX),yesyesyes)
	@echo "deps: all there"
else
	@command -v apt-get >/dev/null || { echo "error: no apt-get here; install the development files of jansson, PCRE2, utf8proc and cmocka, and g++"; exit 1; }
	@s=$$([ $$(id -u) = 0 ] || echo sudo); $$s apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$s apt-get install -y -qq --no-install-recommends $(PACKAGES)
endif

quickstart: deps
	@$(MAKE) --no-print-directory all
	@./train_gpt2

train_gpt2: train.c tokenizer.c sft.h Makefile
	$(CC) $(CFLAGS) $(OPT) train.c tokenizer.c -o $@ $(LIBS)

# On a GPU: kernels.cu by nvcc, the rest as above. Hopper's tensor cores need code for sm_90a.
# Warning 177 is of functions that nobody calls: elsewhere, those for Hopper alone.
NVCC ?= nvcc
ARCH ?= $(or $(subst 90,90a,$(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1))),80)
CUDA_PROGRAM = $(BUILD)/cuda/train.o $(BUILD)/tokenizer.o
CUDA_LINK = $(NVCC) $^ -o train_gpt2cu $(LIBS) $(if $(HAVE_OPENMP),-lgomp)
define cuda_kernels # folder, architectures
$(BUILD)/$(1)/kernels.o: kernels.cu sft.h Makefile
	@mkdir -p $$(@D)
	$$(NVCC) -O3 -std=c++17 -diag-suppress 177 $$(foreach a,$(2),-gencode arch=compute_$$(a),code=sm_$$(a)) -c $$< -o $$@
endef
$(eval $(call cuda_kernels,cuda,$$(ARCH)))
$(eval $(call cuda_kernels,fat,80 86 89 90a 100 120))
$(BUILD)/cuda/train.o: train.c sft.h Makefile
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(OPT) -DSFT_CUDA -c $< -o $@
train_gpt2cu: $(CUDA_PROGRAM) $(BUILD)/cuda/kernels.o
	$(CUDA_LINK)
fat: $(CUDA_PROGRAM) $(BUILD)/fat/kernels.o
	$(CUDA_LINK)

# What test/gpu_check.sh runs: every op on the GPU against float64, and its speed, beside cuBLAS's where that links.
$(BUILD)/cuda/test_ops.o: test/test_ops.c sft.h test/test.h Makefile
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -Wno-clobbered -O2 -DSFT_TEST_CUDA -c $< -o $@
$(BUILD)/cuda/test_ops: $(BUILD)/cuda/test_ops.o test/gpu.cu $(BUILD)/tokenizer.o $(BUILD)/cuda/kernels.o
	$(NVCC) -O3 -std=c++17 $^ -o $@ $(LIBS) -lcmocka $(if $(HAVE_OPENMP),-lgomp)
BENCH_CUDA = test/bench.cu $(BUILD)/sft.o $(BUILD)/tokenizer.o $(BUILD)/cuda/kernels.o
$(BUILD)/cuda/bench: $(BENCH_CUDA) test/cases.h
	$(NVCC) -O3 -std=c++17 -DCUBLAS $(BENCH_CUDA) -o $@ $(LIBS) $(if $(HAVE_OPENMP),-lgomp) -lcublas 2>$@.log || \
	    $(NVCC) -O3 -std=c++17 $(BENCH_CUDA) -o $@ $(LIBS) $(if $(HAVE_OPENMP),-lgomp)

# Tests: every test/test_NAME.c is a program; it is built twice, as it is and under AddressSanitizer + UBSan.
TESTS := $(patsubst test/%.c,%,$(wildcard test/test_*.c))
SANITIZE = -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
$(BUILD)/%: test/%.c tokenizer.c sft.h test/test.h Makefile
	@mkdir -p $(BUILD)
	$(CC) $(CFLAGS) -Wno-clobbered $(OPT) $< tokenizer.c -o $@ $(LIBS) -lcmocka
$(BUILD)/asan_%: test/%.c tokenizer.c sft.h test/test.h Makefile
	@mkdir -p $(BUILD)
	$(CC) $(CFLAGS) -Wno-clobbered $(SANITIZE) $< tokenizer.c -o $@ $(LIBS) -lcmocka

# Fuzz targets: every test/fuzz_NAME.c, built with clang where it has libFuzzer; test/fuzz.sh runs what was built.
CLANG ?= clang
HAVE_FUZZ := $(shell echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' | $(CLANG) -x c - -fsanitize=fuzzer,address,undefined -o /dev/null 2>/dev/null && echo yes)
FUZZERS := $(if $(HAVE_FUZZ),$(patsubst test/%.c,%,$(wildcard test/fuzz_*.c)))
$(BUILD)/fuzz_%: test/fuzz_%.c tokenizer.c sft.h test/fuzz.h Makefile
	@mkdir -p $(BUILD)
	$(CLANG) -std=gnu11 -g -O1 -w -DSFT_NO_OPENMP -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined $< tokenizer.c -o $@ $(LIBS)

# CUDA on the CPU: any X.cu becomes $(BUILD)/emu_MODE/X.o; with $(BUILD)/emu_MODE/emu.a and EMU_LINK_MODE it is a program.
EMU = $(CXX) -std=gnu++17 -g -Wall -Wextra -Wno-unknown-pragmas -Wno-psabi -Wno-unused-parameter -D__CUDACC__ -include cuda_runtime.h -Itest/emu/include
EMU_HEADERS = $(wildcard test/emu/include/*.h) Makefile
define emu_mode # name, flags of kernels, flags of the engine, flags of the linker
EMU_LINK_$(1) = $(4)
$(BUILD)/emu_$(1)/%.o: %.cu sft.h test/emu/rewrite.pl $$(EMU_HEADERS)
	@mkdir -p $$(@D)
	perl test/emu/rewrite.pl $$< >$$(@:.o=.cpp) && $$(EMU) $(2) -I$$(<D) -c $$(@:.o=.cpp) -o $$@
$(BUILD)/emu_$(1)/%.o: test/emu/%.cc $$(wildcard test/emu/*.h) $$(EMU_HEADERS)
	@mkdir -p $$(@D)
	$$(EMU) -O3 -fopenmp $(3) -c $$< -o $$@
$(BUILD)/emu_$(1)/emu.a: $$(patsubst test/emu/%.cc,$(BUILD)/emu_$(1)/%.o,$$(wildcard test/emu/*.cc))
	$$(AR) rcs $$@ $$^
$(BUILD)/emu_$(1)_test_emu: $(BUILD)/emu_$(1)/test/emu/test_emu.o $(BUILD)/emu_$(1)/emu.a
	$$(CXX) $$^ -o $$@ $$(EMU_LINK_$(1))
$(BUILD)/emu_$(1)_test_ops: $(BUILD)/cuda/test_ops.o $(BUILD)/emu_$(1)/test/gpu.o $(BUILD)/emu_$(1)/kernels.o $(BUILD)/tokenizer.o $(BUILD)/emu_$(1)/emu.a
	$$(CXX) $$^ -o $$@ $(LIBS) -lcmocka $$(EMU_LINK_$(1))
# A ladder, from an operation's formula to its kernel; it has its own test and its own bench.
$(patsubst test/%.cu,$(BUILD)/emu_$(1)/test/%.o,$(wildcard test/ladder/*.cu)): test/ladder/ladder.h
$(BUILD)/emu_$(1)_ladder_%: $(BUILD)/emu_$(1)/test/ladder/%.o $(BUILD)/emu_$(1)/kernels.o $(BUILD)/sft.o $(BUILD)/tokenizer.o $(BUILD)/emu_$(1)/emu.a
	$$(CXX) $$^ -o $$@ $(LIBS) $$(EMU_LINK_$(1))
# Kernels broken on purpose, which the detectors must catch.
$(BUILD)/emu_$(1)/$(BUILD)/mutated.o: test/mutations.cc
$(BUILD)/emu_$(1)_mutations: $(BUILD)/emu_$(1)/$(BUILD)/mutated.o $(BUILD)/sft.o $(BUILD)/tokenizer.o $(BUILD)/emu_$(1)/emu.a
	$$(CXX) $$^ -o $$@ $(LIBS) $$(EMU_LINK_$(1))
endef
$(eval $(call emu_mode,fast,-O2 -march=native,-march=native,-fopenmp))
# Kernels are much code: checks that AddressSanitizer makes anyway (null pointers, sizes of objects) are left out, its own
# are calls, and debuggers are not told where variables are; g++ takes a third of the time then.
EMU_ASAN = $(SANITIZE) -fno-sanitize=null,object-size,vptr,pointer-overflow --param asan-instrumentation-with-call-threshold=0 -fno-var-tracking
$(eval $(call emu_mode,asan,$(EMU_ASAN),-DEMU_ASAN,-fopenmp $(SANITIZE)))
# DWARF 4: addr2line 2.40 takes the first file of DWARF 5 for another.
$(eval $(call emu_mode,trace,-O1 -gdwarf-4 -fno-var-tracking -fno-tree-sra -fno-ipa-sra -DEMU_TRACE -fsanitize=thread -fsanitize-coverage=trace-pc -fno-pie,-DEMU_TRACE -fno-pie,-fopenmp -no-pie))
# What kernels move, counted; and what ptxas gave them, where there is an nvcc. The logs stay until kernels.cu changes.
$(BUILD)/emu_trace/test/kernel_report.o: test/cases.h
$(BUILD)/emu_trace_kernel_report: $(BUILD)/emu_trace/test/kernel_report.o $(BUILD)/emu_trace/kernels.o $(BUILD)/sft.o $(BUILD)/tokenizer.o $(BUILD)/emu_trace/emu.a
	$(CXX) $^ -o $@ $(LIBS) $(EMU_LINK_trace)
PTXAS_LOGS := $(if $(shell command -v $(NVCC)),$(patsubst %,$(BUILD)/ptxas_sm_%.log,80 89 90a))
$(BUILD)/ptxas_sm_%.log: kernels.cu sft.h
	@mkdir -p $(BUILD)
	$(NVCC) -O3 -std=c++17 -diag-suppress 177 -cubin -arch=sm_$* -Xptxas -v $< -o $@.cubin 2>$@.tmp || { cat $@.tmp; exit 1; }
	@rm $@.cubin && mv $@.tmp $@
$(BUILD)/kernel_gates: $(BUILD)/emu_trace_kernel_report $(PTXAS_LOGS)
	printf '#!/bin/sh\nexec $< gates $(PTXAS_LOGS)\n' >$@ && chmod +x $@
kernel-report: deps
ifdef LADDER
	@$(MAKE) --no-print-directory -s $(BUILD)/emu_trace_ladder_$(LADDER)
	@$(BUILD)/emu_trace_ladder_$(LADDER) report
else
	@$(MAKE) --no-print-directory -s -j2 $(BUILD)/emu_trace_kernel_report $(if $(KERNEL),,$(PTXAS_LOGS))
	@$(BUILD)/emu_trace_kernel_report $(if $(KERNEL),'KERNEL=$(KERNEL)',$(PTXAS_LOGS))
endif
$(BUILD)/mutated.cu: test/mutate.pl test/mutations.txt kernels.cu
	@mkdir -p $(BUILD)
	perl $^ >$@.tmp && mv $@.tmp $@
train_gpt2cu_emu: $(BUILD)/cuda/train.o $(BUILD)/tokenizer.o $(BUILD)/emu_fast/kernels.o $(BUILD)/emu_fast/emu.a
	$(CXX) $^ -o $@ $(LIBS) $(EMU_LINK_fast)
test/train_cuda.sh: train_gpt2 train_gpt2cu_emu
EMU_TESTS := test/train_cuda.sh $(BUILD)/kernel_gates $(foreach mode,trace asan fast,$(BUILD)/emu_$(mode)_test_ops) \
    $(BUILD)/emu_trace_mutations $(BUILD)/emu_asan_mutations $(foreach mode,fast asan trace,$(BUILD)/emu_$(mode)_test_emu) \
    $(patsubst test/ladder/%.cu,$(BUILD)/emu_trace_ladder_%,$(wildcard test/ladder/*.cu))
$(BUILD)/sft.o: sft.h Makefile
	@mkdir -p $(BUILD)
	printf '%s\n' '$(hash)define SFT_IMPLEMENTATION' '$(hash)include "sft.h"' | $(CC) $(CFLAGS) $(OPT) -I. -x c -c - -o $@
$(BUILD)/tokenizer.o: tokenizer.c sft.h Makefile
	@mkdir -p $(BUILD)
	$(CC) $(CFLAGS) $(OPT) -c $< -o $@
test-emu:
	@$(MAKE) --no-print-directory deps
	@$(MAKE) --no-print-directory -j2 $(EMU_TESTS)
	@sh test/run.sh $(EMU_TESTS)

test-programs: train_gpt2 $(EMU_TESTS) $(TESTS:%=$(BUILD)/%) $(TESTS:%=$(BUILD)/asan_%) $(FUZZERS:%=$(BUILD)/%)
test: deps
	@$(MAKE) --no-print-directory -j2 test-programs
	@sh test/run.sh test/lint.sh test/commands.sh $(TESTS:%=$(BUILD)/%) $(TESTS:%=$(BUILD)/asan_%) $(EMU_TESTS) test/fuzz.sh

fuzz: $(FUZZERS:%=$(BUILD)/%)
	@FUZZ_SECONDS=$${FUZZ_SECONDS:-3600} sh test/fuzz.sh

lint:
	@CC="$(CC)" sh test/lint.sh

# Tables between clang-format off and on, and the banners of sections, stay as they are.
format:
	@for f in sft.h train.c tokenizer.c kernels.cu test/*.[ch]; do [ -f $$f ] || continue; \
	    lines=$$(awk '/clang-format off/ { off = 1 } /clang-format on/ { off = 0 } !off && length > 120 && !/^(\/\*|  ) =+( \*\/)?$$/ { print "--lines=" FNR ":" FNR }' $$f); \
	    [ -z "$$lines" ] || clang-format -i $$lines $$f; done

options:
	@mkdir -p $(BUILD)
	@printf '%s\n' '$(hash)define SFT_IMPLEMENTATION' '$(hash)include "sft.h"' 'int main(void) { sft_help_markdown(stdout); }' | $(CC) $(CFLAGS) -I. -x c - -x none tokenizer.c -o $(BUILD)/options $(LIBS) && $(BUILD)/options

$(BUILD)/bench: test/bench.c test/cases.h tokenizer.c sft.h Makefile
	@mkdir -p $(BUILD)
	$(CC) $(CFLAGS) $(OPT) $< tokenizer.c -o $@ $(LIBS)
bench: deps $(BUILD)/bench
	$(BUILD)/bench

clean:
	rm -rf $(BUILD) train_gpt2 train_gpt2cu train_gpt2cu_emu
