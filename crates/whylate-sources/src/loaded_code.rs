// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the kernel code lies that was loaded after boot. The kernel's list of symbols has no lengths: an address in
//! unloaded code would be taken for the function before it, which may be anybody's.

use std::fs;
use std::ops::Range;

use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};

/// No function is as long, but the gaps between the kernel's own code and that of modules are longer.
const LONGEST_FUNCTION: u64 = 1 << 20;
/// The kernel makes trampolines of a page each (kernel/bpf/trampoline.c).
const TRAMPOLINE: u64 = 4096;

#[derive(Debug, Default)]
pub(crate) struct LoadedCode {
    modules: Vec<Range<u64>>,
    /// `None` where the kernel does not tell.
    programs: Option<Vec<Range<u64>>>,
}

impl LoadedCode {
    pub(crate) fn now() -> Self {
        // Without modules in the kernel there is no such file.
        let modules = fs::read_to_string("/proc/modules").unwrap_or_default().lines().filter_map(module).collect();
        Self { modules, programs: None }
    }

    /// Whether the function that begins there, as the kernel's list of symbols has it, has code at the address.
    pub(crate) fn belongs(&mut self, address: u64, function: &str, begins: u64) -> bool {
        let mut modules = self.modules.iter().filter(|module| module.contains(&begins)).peekable();
        match function {
            _ if is_program(function) => {
                let programs = self.programs.get_or_insert_with(programs);
                // Without the privilege to ask, there are none.
                programs.is_empty() || programs.iter().any(|program| program.contains(&address))
            }
            _ if function.starts_with("bpf_trampoline_") => address.abs_diff(begins) < TRAMPOLINE,
            _ if address.abs_diff(begins) >= LONGEST_FUNCTION => false,
            // A module's size is that of all its parts, of which the code is the first: some may seem to overlap.
            _ => modules.peek().is_none() || modules.any(|module| module.contains(&address)),
        }
    }
}

/// Whether the name is the kernel's for a BPF program: `bpf_prog_`, 16 digits of tag, its own name (kernel/bpf/core.c).
fn is_program(function: &str) -> bool {
    let tag = function.strip_prefix("bpf_prog_").and_then(|rest| rest.get(..16));
    tag.is_some_and(|tag| tag.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

/// Of a line `name size users of-whom state address`.
fn module(line: &str) -> Option<Range<u64>> {
    let mut words = line.split_ascii_whitespace();
    let size: u64 = words.nth(1)?.parse().ok()?;
    let begins = u64::from_str_radix(words.nth(3)?.strip_prefix("0x")?, 16).ok()?;
    // All zeros where addresses are hidden.
    (begins != 0).then(|| begins..begins.saturating_add(size))
}

fn programs() -> Vec<Range<u64>> {
    let options = ProgInfoQueryOptions::default().include_jited_func_lens(true).include_jited_ksyms(true);
    let functions = |info: libbpf_rs::query::ProgramInfo| {
        let lengths = info.jited_func_lens.into_iter().map(u64::from);
        let begins = info.jited_ksyms.into_iter().map(|begins| begins as u64);
        // A return address may lie just behind a function that ends with a call.
        begins.zip(lengths).map(|(begins, length)| begins..begins + length + 1).collect::<Vec<_>>()
    };
    ProgInfoIter::with_query_opts(options).flat_map(functions).filter(|range| range.start != 0).collect()
}

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    use super::LoadedCode;

    /// What /proc/modules tells, and whether code is of one of them.
    pub(crate) fn modules(text: &str) {
        let modules = text.lines().filter_map(super::module).collect();
        let mut code = LoadedCode { modules, programs: Some(Vec::new()) };
        for begins in code.modules.iter().map(|module| module.start).take(4).collect::<Vec<_>>() {
            code.belongs(begins, text, begins);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAM: &str = "bpf_prog_960b39305044d69d_on_x";

    #[test]
    fn a_gap_is_nobodys() {
        let lines = [
            "ext4 983040 2 - Live 0xffffffffc0400000",
            "crc16 12288 1 ext4, Live 0xffffffffc0300000 (E)",
            "hidden 1 0 - Live 0x0000000000000000",
            "rubbish",
        ];
        let begins = 0xffff_ffff_c000_1000;
        let programs = Some(vec![begins..begins + 0x100, begins + 0x300..begins + 0x400]);
        let mut code = LoadedCode { modules: lines.into_iter().filter_map(module).collect(), programs };
        assert_eq!(code.modules.len(), 2);
        assert!(code.belongs(0xffff_ffff_8100_0010, "schedule", 0xffff_ffff_8100_0000));
        assert!(code.belongs(0xffff_ffff_c030_0210, "crc16", 0xffff_ffff_c030_0200));
        assert!(!code.belongs(0xffff_ffff_c030_3210, "crc16", 0xffff_ffff_c030_0200));
        assert!(code.belongs(0xffff_ffff_c000_1010, PROGRAM, 0xffff_ffff_c000_1000));
        assert!(!code.belongs(0xffff_ffff_c000_1210, PROGRAM, 0xffff_ffff_c000_1000));
        // A function of the kernel's own.
        assert!(code.belongs(0xffff_ffff_8100_1210, "bpf_prog_test_run_syscall", 0xffff_ffff_8100_1200));
        assert!(!code.belongs(0xffff_ffff_c000_1210, "_end", 0xffff_ffff_8300_0000));
    }
}
