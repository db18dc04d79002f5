// SPDX-License-Identifier: MIT OR Apache-2.0
//! Running real-time threads of other processes, which a disturbance could make miss a deadline.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use whylate_model::ActorName;
use whylate_model::own::own;

use crate::kernel::cpus;
use crate::kernel::pid_namespace;
use crate::kernel::proc::{self, numbers};

/// A kernel thread (include/linux/sched.h).
const PF_KTHREAD: u64 = 0x0020_0000;
/// `SCHED_FIFO`, `SCHED_RR` and `SCHED_DEADLINE` (sched(7)).
const POLICIES: [(u64, &str); 3] = [(1, "fifo"), (2, "rr"), (6, "deadline")];

/// Time for which threads are watched to learn which CPUs they use.
const WATCHED: Duration = Duration::from_millis(100);
/// A thread that may use any CPU counts if it runs for at least 1/`MIN_SHARE_DIVISOR` of that time.
const MIN_SHARE_DIVISOR: u32 = 100;
/// Name of the threads of cyclictest, before a number or nothing. Those of rtla have the names of whylate's.
const CYCLICTEST: &str = "cyclictest";

/// A real-time thread that has run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RealtimeThread {
    /// Name and TID of the thread.
    pub name: ActorName,
    /// Scheduling policy, as chrt(1) names it.
    pub policy: &'static str,
    /// CPU time while watched, in nanoseconds.
    pub ran_ns: u64,
    /// CPUs of the thread at the start and the end of the watch.
    pub cpus: Vec<u32>,
    /// CPUs that the thread may use; empty if unreadable.
    pub allowed: Vec<u32>,
}

/// Waits for `during` and returns the threads of other processes that ran in that time; kernel threads do not count.
///
/// # Errors
/// Fails if `/proc` cannot be read.
pub fn active_threads(during: Duration) -> std::io::Result<Vec<RealtimeThread>> {
    ran_since(&all()?, during)
}

fn ran_since(before: &BTreeMap<PathBuf, ThreadState>, during: Duration) -> std::io::Result<Vec<RealtimeThread>> {
    thread::sleep(during);
    let ran = all()?.into_iter().filter_map(|(path, now)| {
        let before = before.get(&path).map(|before| &before.thread);
        // A new thread counts with its total CPU time.
        let ran_ns = now.thread.ran_ns.saturating_sub(before.map_or(0, |before| before.ran_ns));
        let mut cpus = now.thread.cpus;
        cpus.extend(before.iter().flat_map(|before| &before.cpus));
        let status = || proc::text(path.join("status")).ok();
        (ran_ns > 0 || now.is_runnable).then(|| RealtimeThread {
            ran_ns,
            cpus,
            allowed: status().and_then(|status| cpus::allowed_of(&status)).unwrap_or_default(),
            ..now.thread
        })
    });
    Ok(ran.collect())
}

/// Returns which of these CPUs run a real-time thread of another process, with its name and policy. Returns at once if
/// there is no such thread.
pub(crate) fn busy_cpus(of: &[u32]) -> std::io::Result<BTreeMap<u32, String>> {
    let mut before = all()?;
    before.retain(|_, seen| !seen.measures());
    if before.is_empty() || of.is_empty() {
        return Ok(BTreeMap::new());
    }
    let mut ran = ran_since(&before, WATCHED)?;
    ran.retain(|thread| !measures(&thread.name));
    let mut occupied = occupied_by(&ran, of, WATCHED);
    // A thread that is bound to one CPU has it to itself, also while it sleeps for longer than that.
    for (path, seen) in before.iter().filter(|(_, seen)| seen.thread.ran_ns > 0) {
        let allowed = proc::text(path.join("status")).ok().and_then(|status| cpus::allowed_of(&status));
        if let Some([cpu]) = allowed.as_deref().filter(|_| of.len() > 1)
            && of.contains(cpu)
        {
            occupied.entry(*cpu).or_insert_with(|| format!("{} ({})", seen.thread.name, seen.thread.policy));
        }
    }
    Ok(occupied)
}

/// Returns which of these CPUs the threads occupy. A thread that may use all of them is migrated when it has to wait,
/// and many machines have some that hardly run: such a thread counts from one percent of a CPU on.
fn occupied_by(threads: &[RealtimeThread], of: &[u32], watched: Duration) -> BTreeMap<u32, String> {
    let least_ns = (watched / MIN_SHARE_DIVISOR).as_nanos();
    let keeps = |thread: &&RealtimeThread| {
        let is_bound = !thread.allowed.is_empty() && of.iter().any(|cpu| !thread.allowed.contains(cpu));
        is_bound || u128::from(thread.ran_ns) >= least_ns
    };
    let mut occupied = BTreeMap::new();
    for thread in threads.iter().filter(keeps) {
        for cpu in thread.cpus.iter().filter(|cpu| of.contains(cpu)) {
            occupied.entry(*cpu).or_insert_with(|| format!("{} ({})", thread.name, thread.policy));
        }
    }
    occupied
}

/// Tests by name whether a thread measures, or is an injected delay that is to be measured.
fn measures(thread: &ActorName) -> bool {
    let name = thread.comm().unwrap_or_default();
    own(name).is_some() || name.trim_end_matches(|c: char| c.is_ascii_digit()) == CYCLICTEST
}

/// A thread at one read, with its total CPU time.
struct ThreadState {
    thread: RealtimeThread,
    /// Whether the thread is runnable: on a CPU without a tick the kernel updates its CPU time only now and then.
    is_runnable: bool,
}

impl ThreadState {
    fn measures(&self) -> bool {
        measures(&self.thread.name)
    }
}

/// Returns all real-time threads by their directories in `/proc`.
fn all() -> std::io::Result<BTreeMap<PathBuf, ThreadState>> {
    let own = pid_namespace::own_number_in_proc();
    let mut found = BTreeMap::new();
    for pid in numbers("/proc".as_ref())?.into_iter().filter(|&pid| Some(pid) != own) {
        let tasks = PathBuf::from(format!("/proc/{pid}/task"));
        // Processes that have exited are skipped.
        for tid in numbers(&tasks).unwrap_or_default() {
            let directory = tasks.join(tid.to_string());
            let Some((name, policy, is_runnable, cpu)) =
                proc::text(directory.join("stat")).ok().and_then(|text| realtime(&text))
            else {
                continue;
            };
            let schedstat = fs::read_to_string(directory.join("schedstat")).unwrap_or_default();
            let ran_ns = schedstat.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0);
            let (name, cpus) = (ActorName::thread(name, tid), vec![cpu]);
            let thread = RealtimeThread { name, policy, ran_ns, cpus, allowed: Vec::new() };
            found.insert(directory, ThreadState { thread, is_runnable });
        }
    }
    Ok(found)
}

/// Parses name, policy, whether the thread is runnable, and its last CPU (proc_pid_stat(5)); `None` for kernel threads
/// and other policies.
fn realtime(stat: &str) -> Option<(String, &'static str, bool, u32)> {
    // The name may contain blanks and parentheses; the third field follows it.
    let (head, rest) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let (flags, cpu, policy) = (field(9)?, field(39)?, field(41)?);
    let (_, policy) = POLICIES.into_iter().find(|&(number, _)| number == policy)?;
    let name = head.split_once('(').map_or("", |(_, name)| name);
    (flags & PF_KTHREAD == 0).then(|| (name.to_owned(), policy, rest.starts_with('R'), cpu as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(flags: u64, policy: u64) -> String {
        let mut fields = vec!["0".to_owned(); 50];
        (fields[9 - 3], fields[39 - 3], fields[41 - 3]) = (flags.to_string(), "3".to_owned(), policy.to_string());
        format!("42 (a (b) c) {}", fields.join(" "))
    }

    #[test]
    fn parses_real_time_threads_of_processes_only() {
        assert_eq!(realtime(&stat(0, 1)), Some(("a (b) c".to_owned(), "fifo", false, 3)));
        assert_eq!(realtime(&stat(0, 6)).map(|(_, policy, ..)| policy), Some("deadline"));
        assert_eq!(realtime(&stat(0, 0)), None);
        assert_eq!(realtime(&stat(PF_KTHREAD, 1)), None);
        assert_eq!(realtime("garbage"), None);
    }

    #[test]
    fn bound_thread_keeps_its_cpu_and_unbound_one_from_a_percent_on() {
        let thread = |cpus: &[u32], allowed: &[u32], ran_us: u64| RealtimeThread {
            name: ActorName::thread("loop", 7),
            policy: "fifo",
            ran_ns: ran_us * 1_000,
            cpus: cpus.to_vec(),
            allowed: allowed.to_vec(),
        };
        let occupied =
            |thread| occupied_by(&[thread], &[0, 1, 2], Duration::from_millis(100)).into_keys().collect::<Vec<_>>();
        assert_eq!(occupied(thread(&[1], &[1], 3)), [1]);
        assert_eq!(occupied(thread(&[2, 1], &[1, 2], 3)), [1, 2]);
        assert_eq!(occupied(thread(&[1], &[0, 1, 2, 3], 999)), [0_u32; 0]);
        assert_eq!(occupied(thread(&[1], &[0, 1, 2, 3], 1_000)), [1]);
        // A CPU that is not measured anyway.
        assert_eq!(occupied(thread(&[3], &[3], 90_000)), [0_u32; 0]);
        let named = occupied_by(&[thread(&[1], &[1], 3)], &[0, 1], Duration::from_millis(100));
        assert_eq!(named.get(&1).map(String::as_str), Some("loop:7 (fifo)"));
    }

    #[test]
    fn measuring_threads_keep_no_cpu() {
        let measures = |name: &&str| measures(&ActorName::thread(*name, 12));
        let measuring = ["timerlat/0", "timerlat/17", "timerlatu/1", "cyclictest", "whylate-hog", "whylate-irqsoff"];
        let others = ["timerlat/a", "timerlat", "cyclictester", "cyclictest:1", "loop", "a:timerlat/0"];
        assert!(measuring.iter().all(measures) && !others.iter().any(measures));
    }

    #[test]
    fn own_process_does_not_count() -> std::io::Result<()> {
        let own = format!("/proc/{}/", std::process::id());
        assert!(!all()?.keys().any(|directory| directory.starts_with(&own)));
        Ok(())
    }
}
