// SPDX-License-Identifier: MIT OR Apache-2.0
//! The threads of one program, by PID, name or cgroup.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::kernel::proc;
use crate::kernel::{attach, first_thread, pid_namespace, syscalls};

/// Shown for all threads of a process that dumps core.
const CORE_DUMP: &str = "the core dump of its process";

/// Selects the threads of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Program {
    /// Threads of the process with this PID.
    Process(u32),
    /// Threads of processes with this name, compared up to the kernel's length limit.
    Name(String),
    /// Threads in the cgroup with this path, or below it.
    Cgroup(String),
}

/// A thread of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// PID of the thread's process.
    pub process: u32,
    /// Name of the thread's process.
    pub name: String,
    /// Name of the thread.
    pub thread_name: String,
    /// System call that the thread waits in, if it does and the call is readable.
    pub waits_in: Option<String>,
    /// The thread waits outside of system calls.
    pub is_outside_calls: bool,
    /// The thread is a kernel thread, and never in a system call, whatever its file says.
    pub is_kernel: bool,
}

impl Program {
    /// Returns the program's threads now, by TID.
    ///
    /// # Errors
    /// Fails if `/proc` cannot be read, or belongs to another PID namespace.
    pub fn threads(&self) -> std::io::Result<BTreeMap<u32, Member>> {
        self.threads_but(&BTreeMap::new())
    }

    /// Returns the program's current threads without `known` ones, to avoid reading their files again.
    ///
    /// # Errors
    /// See [`Program::threads`].
    pub fn threads_but(&self, known: &BTreeMap<u32, Member>) -> std::io::Result<BTreeMap<u32, Member>> {
        if let Some(why) = pid_namespace::lacks_proc() {
            return Err(std::io::Error::other(why));
        }
        let own = std::process::id();
        let mut threads = BTreeMap::new();
        for entry in fs::read_dir("/proc")? {
            let Some(process) = number(&entry?.file_name()).filter(|&process| process != own) else { continue };
            let directory = format!("/proc/{process}");
            let Ok(name) = fs::read_to_string(format!("{directory}/comm")) else { continue };
            let name = name.trim_end_matches('\n').to_owned();
            if !self.has(process, &name) {
                continue;
            }
            let status = fs::read_to_string(format!("{directory}/status")).unwrap_or_default();
            let is_dumping = status.lines().any(|line| line == "CoreDumping:\t1");
            // An exited first thread stays until the others have exited too.
            let exited = first_thread::has_exited(process).then_some(process);
            // The process may exit concurrently.
            for task in fs::read_dir(format!("{directory}/task")).into_iter().flatten().flatten() {
                let tid = number(&task.file_name()).filter(|tid| Some(*tid) != exited && !known.contains_key(tid));
                let Some(tid) = tid else { continue };
                let of_thread = |file| proc::text(task.path().join(file)).unwrap_or_default();
                let thread_name = of_thread("comm").trim_end_matches('\n').to_owned();
                let is_kernel = is_of_kernel(&of_thread("stat"));
                // `running` if the thread is runnable; -1 if it is outside a system call.
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

    /// Returns whether the program has a process now, other than this one.
    ///
    /// # Errors
    /// See [`Program::threads`].
    pub fn is_running(&self) -> std::io::Result<bool> {
        if let Some(why) = pid_namespace::lacks_proc() {
            return Err(std::io::Error::other(why));
        }
        let own = std::process::id();
        for entry in fs::read_dir("/proc")? {
            let Some(process) = number(&entry?.file_name()).filter(|&process| process != own) else { continue };
            let name = proc::text(format!("/proc/{process}/comm"));
            if name.is_ok_and(|name| self.has(process, name.trim_end_matches('\n'))) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the number of child processes that are left out because a single process was chosen. Counts only children
    /// of its first thread, where servers start them. Returns 0 if the kernel does not list children
    /// (`CONFIG_PROC_CHILDREN`).
    pub fn children(&self) -> u64 {
        let Program::Process(process) = self else { return 0 };
        let listed = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
        let has_exited = |pid: &&str| {
            let stat = proc::text(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, fields)| fields.starts_with(['Z', 'X']))
        };
        listed.split_whitespace().filter(|pid| !has_exited(pid)).count() as u64
    }

    fn has(&self, process: u32, name: &str) -> bool {
        match self {
            Program::Process(wanted) => *wanted == process,
            Program::Name(wanted) => is_same_name(wanted, name),
            Program::Cgroup(wanted) => {
                let shown = first_thread::shown_as(process);
                let cgroups = proc::text(format!("/proc/{shown}/cgroup")).unwrap_or_default();
                let mut paths = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
                paths.any(|path| is_within(path, wanted))
            }
        }
    }
}

/// Compares two names up to the kernel's length limit.
pub fn is_same_name(one: &str, other: &str) -> bool {
    attach::kept_name(one) == attach::kept_name(other)
}

/// Tests whether a cgroup is `wanted` or below it. The root, which contains all cgroups, matches none.
pub fn is_within(cgroup: &str, wanted: &str) -> bool {
    let wanted = Path::new(wanted);
    wanted != Path::new("/") && Path::new(cgroup).starts_with(wanted)
}

/// Tests whether a thread is a kernel thread, or works in the kernel for a process, by its file `stat`.
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

/// Returns a thread's nice value or real-time priority as text; `None` if the thread has exited.
pub fn priority(tid: u32) -> Option<String> {
    let stat = proc::text(format!("/proc/{tid}/stat")).ok()?;
    // Names may contain a closing parenthesis. Fields: proc(5); the first after the name is the third.
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
    use std::io;

    use rustix::process::{Signal, kill_process};

    use super::*;

    #[test]
    fn threads_of_the_kernel_are_in_no_system_call() {
        let stat = |flags: u64| format!("14 (a) b) S 2 0 0 0 -1 {flags} 0 0");
        assert_eq!([0x20_8040, 0x40_4000, 0x40_0050].map(|flags| is_of_kernel(&stat(flags))), [true; 3]);
        assert!(!is_of_kernel(&stat(0x40_0140)) && !is_of_kernel(""));
        let kthreadd = Program::Process(2).threads().expect("/proc");
        assert!(kthreadd.values().all(|member| member.is_kernel && member.waits_in.is_none()), "{kthreadd:?}");
    }
    use crate::kernel::first_thread::tests::Headless;

    #[test]
    fn finds_threads_of_other_processes_only() {
        let own = Program::Process(std::process::id());
        assert!(own.threads().expect("/proc").is_empty());
        let parent = std::os::unix::process::parent_id();
        let threads = Program::Process(parent).threads().expect("/proc");
        assert_eq!(threads.get(&parent).map(|member| member.process), Some(parent));
        // One of its threads has created this process, and waits until it ends.
        assert!(threads.values().all(|member| !member.thread_name.is_empty()));
        assert!(Program::Name(threads[&parent].name.clone()).threads().expect("/proc").contains_key(&parent));
    }

    #[test]
    fn exited_first_thread_is_left_out() {
        let process = Headless::start();
        let threads = Program::Process(process.0).threads().expect("/proc");
        let shown = first_thread::shown_as(process.0);
        assert_eq!(threads.iter().map(|(tid, of)| (*tid, of.process)).collect::<Vec<_>>(), [(shown, process.0)]);
    }

    #[test]
    fn describes_priorities() {
        assert!(priority(std::process::id()).is_some_and(|text| text.starts_with("nice ")));
        assert_eq!(priority(u32::MAX), None);
    }

    #[test]
    fn children_of_a_shell_are_counted() {
        // The first line says that the child was started.
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "sleep 60 & echo $!; wait"]).stdout(std::process::Stdio::piped());
        let mut shell = shell.spawn().expect("a shell");
        let mut line = String::new();
        let _ = io::BufRead::read_line(&mut io::BufReader::new(shell.stdout.take().expect("a pipe")), &mut line);
        let children = Program::Process(shell.id()).children();
        let has_list = fs::exists(format!("/proc/{0}/task/{0}/children", shell.id())).unwrap_or(false);
        for pid in [line.trim().parse().ok(), i32::try_from(shell.id()).ok()].into_iter().flatten() {
            let _ = rustix::process::Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
        }
        let _ = shell.wait();
        assert_eq!(children, u64::from(has_list));
        assert_eq!(Program::Name("sh".to_owned()).children(), 0);
    }
}
