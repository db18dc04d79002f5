// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel features that backends need.

/// A backend: one way to measure.
#[derive(Clone, Copy, Debug)]
pub struct BackendInfo {
    /// Name, as `--backend` takes it.
    pub name: &'static str,
    /// Kernel features that the backend needs.
    pub needs: &'static [Need],
    /// Limitation compared with the best backend; empty for the best.
    pub limitations: &'static str,
}

/// A kernel feature that a backend needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// BTF of the running kernel in `/sys/kernel/btf/vmlinux`.
    Btf,
    /// BPF programs on tracepoints with BTF (`tp_btf`).
    TpBtfPrograms,
    /// A tracepoint, `group:name`.
    Tracepoint(&'static str),
    /// A tracepoint that few kernels have, and which kernels do.
    RareTracepoint(&'static str, &'static str),
    /// A kernel function in BTF that can run programs at its entry (`fentry`).
    Function(&'static str),
    /// This kernel version or later. Distributions backport, so the version is recognized by a function that came with
    /// it.
    Since {
        /// The version.
        version: &'static str,
        /// The function, which no compiler inlines.
        function: &'static str,
    },
    /// A BPF map type.
    Map(MapKind),
    /// This process is in the initial PID namespace, so that its PIDs are the kernel's own.
    KernelsNumbers,
    /// /proc has the PIDs of this process's namespace.
    Proc,
    /// One of ftrace's tracers.
    Tracer(&'static str),
}

/// The BPF map types in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapKind {
    /// `BPF_MAP_TYPE_ARRAY`
    Array,
    /// `BPF_MAP_TYPE_RINGBUF`
    RingBuf,
    /// `BPF_MAP_TYPE_STACK_TRACE`
    StackTrace,
}
