// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles the account's BPF programs with the host's compiler, and runs them.

use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

/// Replaces libbpf's headers for one simulated CPU; a test defines the helpers for maps and for the CPU.
const HEADERS: &str = r#"
#pragma once
#define SEC(name)
#define __uint(name, value) int (*name)[value]
#define __type(name, value) typeof(value) *name
#define __always_inline inline
#define __noinline
#define __weak __attribute__((weak))
#define __ksym
#define barrier() __asm__ volatile("" ::: "memory")
#define BPF_PROG(name, ...) name(void *ctx, ##__VA_ARGS__)
#ifndef bpf_core_field_exists
#define bpf_core_field_exists(...) 1
#endif
#define bpf_core_type_exists(...) 0
#define bpf_core_enum_value_exists(...) 0
#define bpf_core_enum_value(type, value) value
#define bpf_core_field_offset(...) 0
#define bpf_core_type_size(...) 0
#define bpf_ksym_exists(symbol) 0
#define bpf_core_type_id_kernel(...) 0
#define bpf_core_read(to, size, from) __builtin_memcpy(to, from, size)
#define READ_1(a, b) (a)->b
#define READ_2(a, b, c) (a)->b->c
#define READ_3(a, b, c, d) (a)->b->c->d
#define READ_4(a, b, c, d, e) (a)->b->c->d->e
#define READ_OF(_1, _2, _3, _4, name, ...) name
#define BPF_CORE_READ(from, ...) READ_OF(__VA_ARGS__, READ_4, READ_3, READ_2, READ_1)(from, __VA_ARGS__)
void *bpf_map_lookup_elem(void *map, const void *key);
u64 bpf_ktime_get_ns(void);
u32 bpf_get_smp_processor_id(void);
struct task_struct *bpf_get_current_task_btf(void);
#define BPF_CORE_READ_BITFIELD(from, field) (from)->field
static inline long bpf_task_pt_regs(struct task_struct *task) { return 0; }
#ifdef HAS_MEMORY
long bpf_map_update_elem(void *map, const void *key, const void *value, u64 flags);
long bpf_map_delete_elem(void *map, const void *key);
long bpf_probe_read_kernel(void *to, u32 size, const void *from);
#else
static inline long bpf_map_update_elem(void *map, const void *key, const void *value, u64 flags) { return -1; }
static inline long bpf_map_delete_elem(void *map, const void *key) { return -1; }
static inline long bpf_probe_read_kernel(void *to, u32 size, const void *from) { return -1; }
#endif
static inline long bpf_tail_call(void *ctx, void *map, u32 step) { return -1; }
static inline long bpf_get_stackid(void *ctx, void *map, u64 flags) { return -1; }
static inline long bpf_probe_read_kernel_str(void *to, u32 size, const void *from) { return 0; }
"#;

/// A compiled program that includes the account's BPF source.
pub struct Built {
    directory: TempDir,
}

pub fn build(program: &str) -> Built {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("bpf")).expect("a directory");
    for name in ["bpf_helpers.h", "bpf_tracing.h", "bpf_core_read.h"] {
        fs::write(at("bpf").join(name), HEADERS).expect("a header is written");
    }
    fs::write(at("program.c"), program).expect("the program is written");
    let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
    let status = Command::new("cc")
        // The kernel's types differ from the host's: `bool` and pointer casts follow the BPF programs.
        .args(["-O1", "-w", "-std=gnu11", "-I"])
        .arg(directory.path())
        .arg("-I")
        .arg(sources.join("bpf"))
        .arg("-I")
        .arg(sources.join("src/cpu_account"))
        .args([at("program.c"), "-o".into(), at("program")])
        .status()
        .expect("cc runs");
    assert!(status.success());
    Built { directory }
}

impl Built {
    /// Runs the program, and returns its standard output.
    pub fn run(&self, arguments: &[&str]) -> String {
        let output = Command::new(self.directory.path().join("program")).args(arguments).output().expect("it runs");
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{:?}: {printed}", output.status);
        printed
    }
}
