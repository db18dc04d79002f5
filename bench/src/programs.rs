// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the BPF programs of a process have cost so far.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;

use libbpf_rs::btf::Btf;
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions, ProgramInfo};

/// What the kernel counts of one program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub name: String,
    pub runs: u64,
    pub run_ns: u64,
    /// How often it was not run because it was running on the same CPU already.
    pub missed: u64,
}

impl Counts {
    fn since(&self, before: &Self) -> Self {
        Self {
            name: self.name.clone(),
            runs: self.runs - before.runs,
            run_ns: self.run_ns - before.run_ns,
            missed: self.missed - before.missed,
        }
    }

    /// Mean run time.
    pub fn mean_ns(&self) -> f64 {
        self.run_ns as f64 / self.runs.max(1) as f64
    }
}

/// By the program's number, which is the order in which they were loaded.
pub type Programs = BTreeMap<u32, Counts>;

/// The programs that a process holds, itself or through a link: another tool's programs are never counted.
pub fn of_process(pid: u32) -> io::Result<Programs> {
    let mut ids = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        // A descriptor may be closed meanwhile.
        ids.extend(fs::read_to_string(entry?.path()).ok().as_deref().and_then(program_id));
    }
    let with_functions = ProgInfoQueryOptions::default().include_func_info(true);
    let ours = ProgInfoIter::with_query_opts(with_functions).filter(|program| ids.contains(&program.id));
    Ok(ours
        .map(|program| {
            let name = full_name(&program).unwrap_or_else(|| program.name.to_string_lossy().into_owned());
            let counts =
                Counts { name, runs: program.run_cnt, run_ns: program.run_time_ns, missed: program.recursion_misses };
            (program.id, counts)
        })
        .collect())
}

/// The name of its main function, where it has type information; its own is cut after 15 characters.
fn full_name(program: &ProgramInfo) -> Option<String> {
    let main = program.func_info.first()?;
    let types = Btf::from_prog_id(program.id).ok()?;
    let function: libbpf_rs::btf::BtfType<'_> = types.type_by_id(main.type_id.into())?;
    Some(function.name()?.to_string_lossy().into_owned())
}

/// What each of the programs has done since `before`.
pub fn difference(before: &Programs, after: &Programs) -> Vec<Counts> {
    after.iter().map(|(id, after)| after.since(before.get(id).unwrap_or(&Counts::default()))).collect()
}

/// The number in the text of `/proc/PID/fdinfo/FD` of a program or a link.
fn program_id(fdinfo: &str) -> Option<u32> {
    fdinfo.lines().find_map(|line| line.strip_prefix("prog_id:")).and_then(|id| id.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_and_links_tell_their_program() {
        assert_eq!(program_id("pos:\t0\nprog_type:\t26\nprog_id:\t41\nrun_cnt:\t7\n"), Some(41));
        assert_eq!(program_id("pos:\t0\nmap_id:\t41\n"), None);
    }

    #[test]
    fn the_difference_has_every_program_of_now() {
        let counts = |runs, run_ns| Counts { name: "p".to_owned(), runs, run_ns, missed: 0 };
        let before = Programs::from([(1, counts(10, 1000)), (2, counts(5, 100))]);
        let after = Programs::from([(1, counts(30, 5000)), (3, counts(4, 40))]);
        let difference = difference(&before, &after);
        assert_eq!(difference, [counts(20, 4000), counts(4, 40)]);
        assert!((difference[0].mean_ns() - 200.0).abs() < 1e-9);
    }
}
