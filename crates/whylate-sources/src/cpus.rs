// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which CPUs there are, and of what kind.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity};

/// The largest number that a CPU can have; numbers may be left out below it.
///
/// # Errors
/// When the kernel does not tell.
pub fn highest_possible() -> io::Result<u32> {
    read("possible")?.into_iter().max().ok_or_else(|| io::Error::other("the kernel names no CPU"))
}

/// Those that run.
///
/// # Errors
/// When the kernel does not tell.
pub fn online() -> io::Result<Vec<u32>> {
    read("online")
}

/// Those that run, that this thread may use, and that are not set apart for somebody (`isolcpus`, `nohz_full`).
///
/// # Errors
/// When the kernel does not tell.
pub fn usable() -> io::Result<Vec<u32>> {
    let allowed = sched_getaffinity(None)?;
    let apart: Vec<u32> =
        ["isolated", "nohz_full"].into_iter().flat_map(|which| read(which).unwrap_or_default()).collect();
    let is_usable = |cpu: &u32| {
        let index = *cpu as usize;
        index < CpuSet::MAX_CPU && allowed.is_set(index) && !apart.contains(cpu)
    };
    Ok(online()?.into_iter().filter(is_usable).collect())
}

fn read(which: &str) -> io::Result<Vec<u32>> {
    let text = std::fs::read_to_string(format!("/sys/devices/system/cpu/{which}"))?;
    numbers(&text).ok_or_else(|| io::Error::other(format!("the kernel's list of {which} CPUs makes no sense")))
}

/// From the kernel's form, `0-3,8`; `None` where it is another one.
pub fn numbers(list: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for range in list.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        // No kernel has more CPUs than this.
        if last < first || last > 0xffff {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// In the kernel's form, `0-3,8`, from ascending numbers.
pub fn list(cpus: &[u32]) -> String {
    let ranges = cpus.chunk_by(|one, next| one + 1 == *next);
    let named = ranges.filter_map(|range| match (range.first()?, range.last()?) {
        (first, last) if first == last => Some(first.to_string()),
        (first, last) => Some(format!("{first}-{last}")),
    });
    named.collect::<Vec<_>>().join(",")
}

/// What runs the kernel, as far as the CPU says so (x86).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// Nothing else.
    Bare,
    /// A hypervisor, which may take a CPU away.
    Virtual,
    /// QEMU, which makes up each instruction: a CPU may stop for milliseconds between any two of them.
    Emulated,
}

impl Machine {
    /// The one this runs on.
    pub fn this() -> Self {
        Self::of(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
    }

    /// Of the text of `/proc/cpuinfo`.
    fn of(cpus: &str) -> Self {
        let has = |field: &str, word: &str| {
            cpus.lines().any(|line| line.starts_with(field) && line.split_whitespace().any(|found| found == word))
        };
        // QEMU calls it so in its own model names, and in those that it borrows it does not.
        match () {
            () if has("model name", "TCG") => Machine::Emulated,
            () if has("flags", "hypervisor") => Machine::Virtual,
            () => Machine::Bare,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_read() {
        assert_eq!(numbers("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(numbers("\n"), Some(vec![]));
        assert_eq!(numbers("0-x"), None);
        assert_eq!(numbers("3-1"), None);
        assert_eq!(numbers("0-4000000000"), None);
        assert_eq!(list(&[0, 1, 2, 3, 8]), "0-3,8");
        assert_eq!(list(&[]), "");
    }

    #[test]
    fn a_machine_is_told_by_its_processor() {
        let told = |model: &str, flags: &str| Machine::of(&format!("model name\t: {model}\nflags\t\t: fpu {flags}\n"));
        assert_eq!(told("QEMU TCG CPU version 2.5+", "hypervisor apic"), Machine::Emulated);
        assert_eq!(told("AMD EPYC", "apic hypervisor"), Machine::Virtual);
        assert_eq!(told("AMD EPYC", "apic"), Machine::Bare);
        assert_eq!(Machine::of(""), Machine::Bare);
    }
}
