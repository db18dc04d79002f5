# SPDX-License-Identifier: MIT OR Apache-2.0

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

PREFIX ?= /usr/local
DESTDIR ?=
CARGO ?= cargo
# rustup's directory is on the PATH of login shells only, and its Rust is newer than the distribution's.
export PATH := $(HOME)/.cargo/bin:$(PATH)

target := $(or $(CARGO_TARGET_DIR),target)
binary := $(target)/release/whylate
static_triple := x86_64-unknown-linux-gnu
# `emulated` builds in half the time of `release`, and is slower: for programs that only tests in virtual machines run.
STATIC_PROFILE ?= release
arm64_triple := aarch64-unknown-linux-gnu
# A static binary is the same wherever it was built: paths of this machine in it are replaced.
cargo_home := $(or $(CARGO_HOME),$(HOME)/.cargo)
static_flags = -C target-feature=+crt-static \
    --remap-path-prefix=$(CURDIR)=/whylate --remap-path-prefix=$(cargo_home)=/cargo \
    --remap-path-prefix=$$(rustc --print sysroot)/lib/rustlib/src/rust=/rustc/$$(rustc -vV | sed -n 's/^commit-hash: //p')
static_cflags := -ffile-prefix-map=$(CURDIR)=/whylate -ffile-prefix-map=$(cargo_home)=/cargo

bindir := $(DESTDIR)$(PREFIX)/bin
mandir := $(DESTDIR)$(PREFIX)/share/man/man1
formatdir := $(DESTDIR)$(PREFIX)/share/man/man5
bashdir := $(DESTDIR)$(PREFIX)/share/bash-completion/completions
zshdir := $(DESTDIR)$(PREFIX)/share/zsh/site-functions
fishdir := $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
unitdir := $(DESTDIR)$(PREFIX)/lib/systemd/system

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

.PHONY: deps
deps: ## install what is missing to build and test
	@scripts/install-deps

.PHONY: build
build: ## build the program (release): target/release/whylate
	@# A build that fails on a fresh machine mostly fails for a package.
	@$(CARGO) build --release -p whylate || { scripts/install-deps --check >/dev/null || true; exit 1; }

.PHONY: demo
demo: deps build ## install what is missing, build, and show the overview of this machine while it is disturbed
	@scripts/demo

# One test, or one program of tests: `make test T=name`.
T ?=
# One kernel of the matrix: `make test-matrix K=6_12_rt`.
K ?=

.PHONY: unit
unit: ## the tests that need neither root nor this kernel (T=NAME: one test)
	@scripts/install-deps browser metrics pages
	@scripts/check-tests unit $(T)

.PHONY: test
test: ## all tests on this kernel (T=NAME: one test); those that need root are skipped without it
ifneq ($(filter short_% whole_% matrix,$(T)),)
	@$(MAKE) in-machines TESTS=$(patsubst matrix,whole_,$(T))
else
	@scripts/install-deps browser terminal debugger disks metrics pages
	@scripts/check-tests $(T)
endif

.PHONY: lint
lint: ## check formatting, lints and documentation; fails on any warning
	@scripts/install-deps
	$(CARGO) fmt --all --check
	$(CARGO) clippy --quiet --workspace --all-targets -- -D warnings
	$(CARGO) clippy --quiet --workspace --test matrix -- -D warnings
	RUSTDOCFLAGS=-Dwarnings $(CARGO) doc --quiet --workspace --no-deps --document-private-items

.PHONY: test-short
test-short: ## the static program and one comparison a source, on four other kernels (K=6_12_rt: on one)
	@$(MAKE) in-machines TESTS=short_$(K)

.PHONY: test-matrix
test-matrix: ## everything on five other kernels (K=6_12_rt: one part)
	@$(MAKE) in-machines TESTS=whole_$(K)

# The kernels that the chosen tests need; all if none is named.
kernels := 6_1_cloud 6_12_cloud 6_12_rt 6_12_tracers 6_12_arm64
kernels_of_tests = $(subst _,-,$(patsubst 6_%,6.%,$(foreach kernel,$(kernels),$(if $(findstring $(kernel),$(TESTS)),$(kernel)))))

.PHONY: in-machines
in-machines:
	@scripts/install-deps static vm tracers
	@# Where there is no network, machines without their kernel or compiler are skipped.
	@$(if $(filter whole_ whole_6_12_arm64,$(TESTS)),scripts/install-deps static arm64 || true)
	@$(CARGO) xtask kernels $(kernels_of_tests) >/dev/null || true
	@scripts/check-tests matrix $(TESTS)

.PHONY: torture
torture: ## kill, starve and mislead it, here and in a virtual machine; ends with a table of zeros (as root)
	@scripts/install-deps
	@# Without a virtual machine its rows say why they are skipped.
	@scripts/install-deps static vm || true
	@$(CARGO) xtask kernels 6.12-cloud >/dev/null || true
	@mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing
	@CARGO=$(CARGO) scripts/torture

# The number of waits of each kind, and of runs of each service: `make trial RUNS=3`.
RUNS ?= 100

.PHONY: trial
trial: ## how often the true cause is named, in RUNS waits of each kind and RUNS runs of twelve slow services; and PostgreSQL (as root)
	@scripts/install-deps programs
	WHYLATE_ROUNDS=$(RUNS) $(CARGO) test -q -p whylate-sources --test kernel_paths -- --nocapture --test-threads=1
	WHYLATE_TRIAL=$(RUNS) $(CARGO) test -q -p whylate --test real_programs -- --nocapture
	WHYLATE_TRIAL=$(RUNS) $(CARGO) test -q -p whylate --test pid_namespace selftest -- --nocapture
	WHYLATE_TRIAL=$(RUNS) $(CARGO) test -q -p whylate --test run thousands -- --nocapture
	WHYLATE_TRIAL=$(RUNS) $(CARGO) test -q -p whylate --test diff what_is_injected -- --nocapture
	WHYLATE_TRIAL=$(RUNS) $(CARGO) test -q -p whylate --test services in_a_trial -- --nocapture --test-threads=1

# The seconds per parser: `make fuzz FOR=600`; or the inputs per parser: `make fuzz INPUTS=10000000`.
FOR ?= 60
INPUTS ?=

.PHONY: fuzz
fuzz: ## fuzz each parser of foreign data, FOR seconds each, or INPUTS
	@scripts/install-deps
	@INPUTS=$(INPUTS) scripts/fuzz $(FOR)

.PHONY: fleet
fleet: ## 50 exporters and recordings, and the engines that find their culprits: Prometheus, ClickHouse, DuckDB
	@scripts/fleet/run

.PHONY: bench-wq
bench-wq: ## what `whylate wq` costs, compared with existing tools (as root)
	@scripts/install-deps bench
	$(CARGO) run --release -p whylate-bench -- wq

# Other builds of the tools to compare with: `make bench-block BIOSNOOP=PATH BIOLATENCY=PATH`.
BIOSNOOP ?= biosnoop
BIOLATENCY ?= biolatency

.PHONY: bench-block
bench-block: ## what `whylate block` costs per request, compared with biolatency and biosnoop (as root)
	@scripts/install-deps bench
	$(CARGO) run --release -p whylate-bench -- block --biosnoop $(BIOSNOOP) --biolatency $(BIOLATENCY)

.PHONY: bench-occupancy
bench-occupancy: ## what the CPU account behind `--why` costs per context switch (as root)
	@scripts/install-deps bench
	$(CARGO) run --release -p whylate-bench -- occupancy

.PHONY: bench-timerlat
bench-timerlat: ## what `whylate timerlat` reports and costs, compared with cyclictest (as root)
	@scripts/install-deps bench
	$(CARGO) run --release -p whylate-bench -- timerlat

.PHONY: bench-irqsoff
bench-irqsoff: ## how much `whylate irqsoff` slows a scheduler benchmark down, compared with bpftrace and the kernel's tracer (as root)
	@scripts/install-deps bench static vm tracers
	@$(CARGO) xtask kernels 6.12-tracers >/dev/null
	$(CARGO) run --release -p whylate-bench -- irqsoff --rounds 60
	$(CARGO) run --release -p whylate-bench -- irqsoff-vm-cost --rounds 5

.PHONY: bench-irqsoff-vm
bench-irqsoff-vm: ## what each backend of `whylate irqsoff` reports of known delays, in a virtual machine
	@scripts/install-deps bench static vm tracers
	@$(CARGO) xtask kernels 6.12-tracers >/dev/null
	$(CARGO) run --release -p whylate-bench -- irqsoff-vm

.PHONY: bench-sqpoll
bench-sqpoll: ## accuracy and cost of `whylate sqpoll`, compared with fdinfo and fio (as root)
	@scripts/install-deps bench
	$(CARGO) run --release -p whylate-bench -- sqpoll

.PHONY: bench-sqpoll-vm
bench-sqpoll-vm: ## accuracy of `whylate sqpoll --precise`, compared with the kernel's function tracer, in a virtual machine
	@scripts/install-deps bench static vm
	@$(CARGO) xtask kernels 6.12-cloud >/dev/null
	$(CARGO) run --release -p whylate-bench -- sqpoll-vm

.PHONY: bench-offcpu
bench-offcpu: ## what `whylate offcpu` costs per thread and per switch, compared with /proc and offcputime (as root)
	@scripts/install-deps bench
	$(CARGO) run --release -p whylate-bench -- offcpu

.PHONY: bench-why
bench-why: ## what the overview costs, compared with perf sched record and offcputime; then bench-run (as root)
	@scripts/install-deps bench
	$(CARGO) run --release -p whylate-bench -- why
	$(CARGO) run --release -p whylate-bench -- run

.PHONY: bench-run
bench-run: ## what `whylate run` adds to a build, how much memory ten minutes take, and what explaining a wait costs (as root)
	@scripts/install-deps bench
	$(CARGO) run --release -p whylate-bench -- run

.PHONY: bench-record
bench-record: ## disk, CPU and memory use of `whylate record`, compared with perf sched record (as root)
	@scripts/install-deps bench
	$(CARGO) run --release -p whylate-bench -- record

.PHONY: bench-report
bench-report: ## time, memory and size of `whylate report` for a recording of a day (as root)
	@scripts/install-deps bench
	$(CARGO) run --release -p whylate-bench -- report --rounds 3

.PHONY: bench-top
bench-top: ## CPU and memory use of `whylate top`, and how soon it shows figures (as root)
	@scripts/install-deps bench
	$(CARGO) run --release -p whylate-bench -- top

.PHONY: bench-serve
bench-serve: ## CPU, memory and descriptors of `whylate serve`, of a scrape, and beside stuck clients (as root)
	@scripts/install-deps bench
	$(CARGO) run --release -p whylate-bench -- serve --rounds 3

.PHONY: bench-timerlat-vm
bench-timerlat-vm: ## what `whylate timerlat` reports and costs, compared with rtla, in a virtual machine
	@scripts/install-deps bench static vm
	@$(CARGO) xtask kernels 6.12-rt >/dev/null
	$(CARGO) run --release -p whylate-bench -- timerlat-vm

.PHONY: install
install: ## install program, man pages, completions and units, which stay disabled (PREFIX=/usr/local, DESTDIR=)
	@# Under sudo, cargo would be another user's, or leave root-owned files in the build directory.
	@if [ -z "$${SUDO_USER:-}" ]; then $(MAKE) build; fi
	@test -x $(binary) || { echo 'install: there is no $(binary): run `make build` first' >&2; exit 1; }
	@made=$$(mktemp -d); trap 'rm -rf "$$made"' EXIT; \
	$(binary) generate man --to "$$made/man"; \
	$(binary) generate completions --to "$$made/completions"; \
	install -d $(bindir) $(mandir) $(formatdir) $(bashdir) $(zshdir) $(fishdir) $(unitdir); \
	install -m 755 $(binary) $(bindir)/whylate; \
	install -m 644 "$$made"/man/*.1 $(mandir)/; \
	install -m 644 "$$made"/man/*.5 $(formatdir)/; \
	install -m 644 "$$made/completions/whylate.bash" $(bashdir)/whylate; \
	install -m 644 "$$made/completions/_whylate" $(zshdir)/_whylate; \
	install -m 644 "$$made/completions/whylate.fish" $(fishdir)/whylate.fish; \
	for unit in whylate-exporter whylate-recorder; do \
	    sed 's|/usr/bin/whylate|$(PREFIX)/bin/whylate|' packaging/$$unit.service >"$$made/$$unit.service"; \
	    install -m 644 "$$made/$$unit.service" $(unitdir)/; \
	done; \
	install -m 644 packaging/whylate-exporter.socket $(unitdir)/
	@echo 'installed $(bindir)/whylate'

.PHONY: uninstall
uninstall: ## remove what `make install` put there
	rm -f $(bindir)/whylate $(mandir)/whylate.1 $(mandir)/whylate-*.1 $(formatdir)/whylate-recording.5
	rm -f $(bashdir)/whylate $(zshdir)/_whylate $(fishdir)/whylate.fish
	rm -f $(unitdir)/whylate-exporter.service $(unitdir)/whylate-exporter.socket $(unitdir)/whylate-recorder.service

.PHONY: static
static: ## a static x86-64 binary: target/static/whylate
	@scripts/install-deps static
	@# A static glibc can load no NSS module, so nothing in whylate may look up a user or a host by name.
	@# With --target, the flag holds for the program alone and not for build scripts and derive macros.
	RUSTFLAGS="$(static_flags)" CFLAGS="$(static_cflags)" \
	    $(CARGO) build --profile $(STATIC_PROFILE) -p whylate --features static --target $(static_triple)
	@$(MAKE) static-program FROM=$(target)/$(static_triple)/$(STATIC_PROFILE)/whylate TO=$(target)/static/whylate

.PHONY: static-arm64
static-arm64: ## the same for arm64, cross-built: target/static/whylate-arm64
	@scripts/install-deps static arm64-build
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	    RUSTFLAGS="$(static_flags)" CFLAGS="$(static_cflags)" \
	    $(CARGO) build --profile $(STATIC_PROFILE) -p whylate --features static --target $(arm64_triple)
	@$(MAKE) static-program FROM=$(target)/$(arm64_triple)/$(STATIC_PROFILE)/whylate TO=$(target)/static/whylate-arm64

.PHONY: static-program
static-program:
	@install -D -m 755 $(FROM) $(TO)
	@needs=$$(readelf --dynamic $(TO) | sed -n 's/.*(NEEDED)//p'); \
	if [ -n "$$needs" ]; then echo "static: the binary still needs: $$needs" >&2; exit 1; fi
	@echo "$(TO): $$(stat -c %s $(TO)) bytes, needs no shared library"

.PHONY: packages
packages: static ## .deb, .rpm and .tar.gz for x86-64 and arm64, bills of materials and checksums: target/packages
	@scripts/install-deps static packages
	@# The arm64 files are left out, with a word about it, where the cross compiler or Rust's library for it cannot be had.
	@rm -f $(target)/static/whylate-arm64
	@if scripts/install-deps static arm64-build; then $(MAKE) static-arm64; fi
	@scripts/packages

.PHONY: test-packages
test-packages: ## install, upgrade and purge the packages in clean Debian 12 and 13, check their contents, and measure from them (as root)
	@test -s $(target)/packages/SHA256SUMS || $(MAKE) packages
	@scripts/install-deps packages chroots metrics
	@scripts/check-packages

.PHONY: check-reproducible
check-reproducible: ## build the packages a second time, elsewhere, and compare
	@test -s $(target)/packages/SHA256SUMS || $(MAKE) packages
	@scripts/check-reproducible

.PHONY: deny
deny: ## check licenses, advisories and origins of all dependencies
	@cargo-deny --version >/dev/null 2>&1 || \
	    { echo 'deny: cargo-deny is not installed: `cargo install cargo-deny --locked` builds it' >&2; exit 1; }
	$(CARGO) deny check

.PHONY: fmt
fmt: ## format the Rust code
	$(CARGO) fmt --all

.PHONY: clean
clean: ## remove everything that was built
	$(CARGO) clean
