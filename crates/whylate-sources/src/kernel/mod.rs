// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel access that every source needs: BPF programs and maps, tracefs, symbols, cgroups, CPUs, clocks, and
//! settings that are restored.

pub mod attach;
pub mod cgroups;
pub mod clock;
pub mod cpu_choice;
pub mod cpus;
pub mod credentials;
pub(crate) mod demangle;
pub(crate) mod distribution;
pub(crate) mod elements;
pub(crate) mod error;
pub(crate) mod first_thread;
pub(crate) mod heartbeat;
pub mod host;
pub(crate) mod in_flight;
pub mod least_privilege;
pub(crate) mod loaded_code;
pub(crate) mod lock;
pub(crate) mod lock_owners;
pub mod mapped;
pub mod memory;
pub(crate) mod mounts;
pub(crate) mod need;
pub mod passed_sockets;
pub(crate) mod percpu;
pub(crate) mod perf_event;
pub mod pid_namespace;
pub mod pressure;
pub(crate) mod priority;
pub(crate) mod proc;
pub(crate) mod process_memory;
pub mod realtime;
pub(crate) mod records;
pub mod restore;
pub mod symbols;
pub(crate) mod syscalls;
pub(crate) mod thread_iterator;
pub mod tracefs;
pub(crate) mod whole_map;
