// SPDX-License-Identifier: MIT OR Apache-2.0
//! The threads of one program, by its number, its name or its cgroup.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::{attach, first_thread, pid_namespace, syscalls};

/// What all threads of a process wait for, whatever they were doing.
const CORE_DUMP: &str = "the core dump of its process";

/// What makes threads a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Program {
    /// Those of this process.
    Process(u32),
    /// Those of processes of this name, as far as the kernel keeps it.
    Name(String),
    /// Those in the cgroup of this path, or below.
    Cgroup(String),
}

/// A thread of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its process.
    pub process: u32,
    /// The process's name.
    pub name: String,
    /// The thread's.
    pub thread_name: String,
    /// The system call that it waits in, where it waits in one and that may be known.
    pub waits_in: Option<String>,
    /// It waits outside of system calls.
    pub is_outside_calls: bool,
    /// It is a thread of the kernel, and never in a system call, whatever its file says.
    pub is_kernel: bool,
}

impl Program {
    /// Its threads now, by their numbers.
    ///
    /// # Errors
    /// When `/proc` cannot be read, or has other numbers than this process.
    pub fn threads(&self) -> std::io::Result<BTreeMap<u32, Member>> {
        self.threads_but(&BTreeMap::new())
    }

    /// Its threads now, without those that are known already, whose files are not read again.
    ///
    /// # Errors
    /// As of [`Program::threads`].
    pub fn threads_but(&self, known: &BTreeMap<u32, Member>) -> std::io::Result<BTreeMap<u32, Member>> {
        if let Some(why) = pid_namespace::lacks_proc() {
            return Err(std::io::Error::other(why));
        }
        let own = std::process::id();
        let mut threads = BTreeMap::new();
        for entry in fs::read_dir("/proc")? {
            let Some(process) = number(&entry?.file_name()).filter(|&process| process != own) else { continue };
            let folder = format!("/proc/{process}");
            let Ok(name) = fs::read_to_string(format!("{folder}/comm")) else { continue };
            let name = name.trim_end_matches('\n').to_owned();
            if !self.has(process, &name) {
                continue;
            }
            let status = fs::read_to_string(format!("{folder}/status")).unwrap_or_default();
            let is_dumping = status.lines().any(|line| line == "CoreDumping:\t1");
            // It waits for nothing: it is there until the others have exited too.
            let exited = first_thread::has_exited(process).then_some(process);
            // It may end meanwhile.
            for task in fs::read_dir(format!("{folder}/task")).into_iter().flatten().flatten() {
                let tid = number(&task.file_name()).filter(|tid| Some(*tid) != exited && !known.contains_key(tid));
                let Some(tid) = tid else { continue };
                let of_thread = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
                let thread_name = of_thread("comm").trim_end_matches('\n').to_owned();
                let is_kernel = is_of_kernel(&of_thread("stat"));
                // The word `running` of one that has a CPU, or could have; -1 of one outside a system call.
                let syscall = of_thread("syscall");
                let number = syscall.split(' ').next().and_then(|number| number.parse().ok()).filter(|_| !is_kernel);
                let waits_in = if is_dumping { Some(CORE_DUMP.to_owned()) } else { number.and_then(syscalls::name) };
                let is_outside_calls = number == Some(-1);
                let name = name.clone();
                threads.insert(tid, Member { process, name, thread_name, waits_in, is_outside_calls, is_kernel });
            }
        }
        Ok(threads)
    }

    fn has(&self, process: u32, name: &str) -> bool {
        match self {
            Program::Process(wanted) => *wanted == process,
            Program::Name(wanted) => is_same_name(wanted, name),
            Program::Cgroup(wanted) => {
                let shown = first_thread::shown_as(process);
                let cgroups = fs::read_to_string(format!("/proc/{shown}/cgroup")).unwrap_or_default();
                let mut paths = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
                paths.any(|path| is_within(path, wanted))
            }
        }
    }
}

/// Whether two names are one, as far as the kernel keeps them.
pub fn is_same_name(one: &str, other: &str) -> bool {
    attach::kept_name(one) == attach::kept_name(other)
}

/// Whether a cgroup is that one, or below it; the root, which has all of them, is no program.
pub fn is_within(cgroup: &str, wanted: &str) -> bool {
    let wanted = Path::new(wanted);
    wanted != Path::new("/") && Path::new(cgroup).starts_with(wanted)
}

/// Whether a thread is one of the kernel, or one that works in the kernel for a process, by its file `stat`.
fn is_of_kernel(stat: &str) -> bool {
    // PF_KTHREAD, PF_USER_WORKER and PF_IO_WORKER (include/linux/sched.h).
    const OF_KERNEL: u64 = 0x20_0000 | 0x4000 | 0x10;
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let flags = fields.split_whitespace().nth(6).and_then(|flags| flags.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & OF_KERNEL != 0)
}

fn number(name: &std::ffi::OsStr) -> Option<u32> {
    name.to_str()?.parse().ok()
}

/// A thread's nice value, or its real-time priority, in words; `None` where it is neither, or the thread has ended.
pub fn priority(tid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{tid}/stat")).ok()?;
    // Names may hold anything, a closing parenthesis too. Fields: proc(5), the third is the first after the name.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<i64>().ok();
    match (field(41)?, field(40)?, field(19)?) {
        (1, priority, _) => Some(format!("FIFO {priority}")),
        (2, priority, _) => Some(format!("RR {priority}")),
        (6, ..) => Some("deadline".to_owned()),
        (5, ..) => Some("idle class".to_owned()),
        (_, _, nice) => Some(format!("nice {nice}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_the_kernel_are_in_no_system_call() {
        let stat = |flags: u64| format!("14 (a) b) S 2 0 0 0 -1 {flags} 0 0");
        assert_eq!([0x20_8040, 0x40_4000, 0x40_0050].map(|flags| is_of_kernel(&stat(flags))), [true; 3]);
        assert!(!is_of_kernel(&stat(0x40_0140)) && !is_of_kernel(""));
        let kthreadd = Program::Process(2).threads().expect("/proc");
        assert!(kthreadd.values().all(|member| member.is_kernel && member.waits_in.is_none()), "{kthreadd:?}");
    }
    use crate::first_thread::tests::Headless;

    #[test]
    fn own_threads_are_nobodys_program_and_others_are_found() {
        let own = Program::Process(std::process::id());
        assert!(own.threads().expect("/proc").is_empty());
        let parent = std::os::unix::process::parent_id();
        let threads = Program::Process(parent).threads().expect("/proc");
        assert_eq!(threads.get(&parent).map(|member| member.process), Some(parent));
        // One thread of it is the one that made this one, and waits until it ends.
        assert!(threads.values().all(|member| !member.thread_name.is_empty()));
        assert!(Program::Name(threads[&parent].name.clone()).threads().expect("/proc").contains_key(&parent));
    }

    #[test]
    fn a_first_thread_that_has_exited_is_none_of_the_program() {
        let process = Headless::start();
        let threads = Program::Process(process.0).threads().expect("/proc");
        let shown = first_thread::shown_as(process.0);
        assert_eq!(threads.iter().map(|(tid, of)| (*tid, of.process)).collect::<Vec<_>>(), [(shown, process.0)]);
    }

    #[test]
    fn priorities_are_told_in_words() {
        assert!(priority(std::process::id()).is_some_and(|told| told.starts_with("nice ")));
        assert_eq!(priority(u32::MAX), None);
    }
}
