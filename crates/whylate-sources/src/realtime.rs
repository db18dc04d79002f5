// SPDX-License-Identifier: MIT OR Apache-2.0
//! Real-time threads of processes that are at work, for whom a disturbance would be a missed deadline.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use crate::pid_namespace;
use crate::sqpoll::numbers;

/// A kernel thread (include/linux/sched.h).
const PF_KTHREAD: u64 = 0x0020_0000;
/// `SCHED_FIFO`, `SCHED_RR` and `SCHED_DEADLINE` (sched(7)).
const POLICIES: [(u64, &str); 3] = [(1, "fifo"), (2, "rr"), (6, "deadline")];

/// One that has run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RealtimeThread {
    /// Its name and number.
    pub name: String,
    /// Its policy, as chrt(1) names it.
    pub policy: &'static str,
    /// How long it had a CPU meanwhile, in nanoseconds.
    pub ran_ns: u64,
}

/// Those of other processes that had a CPU within that time, which passes meanwhile; kernel threads do not count.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn at_work(during: Duration) -> std::io::Result<Vec<RealtimeThread>> {
    let before = all()?;
    thread::sleep(during);
    let after = all()?;
    let ran = after.into_iter().filter_map(|(path, now)| {
        // One that is new has run for as long as it has in all.
        let ran_ns = now.thread.ran_ns.saturating_sub(before.get(&path).map_or(0, |before| before.thread.ran_ns));
        (ran_ns > 0 || now.is_runnable).then_some(RealtimeThread { ran_ns, ..now.thread })
    });
    Ok(ran.collect())
}

/// One at one moment, and how long it has run in all.
struct Seen {
    thread: RealtimeThread,
    /// It has a CPU or wants one: on a CPU without a tick the kernel counts its time up now and then only.
    is_runnable: bool,
}

/// By their folders.
fn all() -> std::io::Result<BTreeMap<PathBuf, Seen>> {
    let own = pid_namespace::own_number_in_proc();
    let mut found = BTreeMap::new();
    for pid in numbers("/proc".as_ref())?.into_iter().filter(|&pid| Some(pid) != own) {
        let tasks = PathBuf::from(format!("/proc/{pid}/task"));
        // Those that are gone meanwhile disturb nobody.
        for tid in numbers(&tasks).unwrap_or_default() {
            let folder = tasks.join(tid.to_string());
            let Some((name, policy, is_runnable)) =
                fs::read_to_string(folder.join("stat")).ok().and_then(|text| realtime(&text))
            else {
                continue;
            };
            let schedstat = fs::read_to_string(folder.join("schedstat")).unwrap_or_default();
            let ran_ns = schedstat.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0);
            let thread = RealtimeThread { name: format!("{name}:{tid}"), policy, ran_ns };
            found.insert(folder, Seen { thread, is_runnable });
        }
    }
    Ok(found)
}

/// Name, policy and whether it is runnable (proc_pid_stat(5)); `None` for kernel threads and other policies.
fn realtime(stat: &str) -> Option<(String, &'static str, bool)> {
    // The name may have blanks and parentheses in it; the third field comes after it.
    let (head, rest) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let (flags, policy) = (field(9)?, field(41)?);
    let (_, policy) = POLICIES.into_iter().find(|&(number, _)| number == policy)?;
    (flags & PF_KTHREAD == 0)
        .then(|| (head.split_once('(').map_or("", |(_, name)| name).to_owned(), policy, rest.starts_with('R')))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(flags: u64, policy: u64) -> String {
        let mut fields = vec!["0".to_owned(); 50];
        (fields[9 - 3], fields[41 - 3]) = (flags.to_string(), policy.to_string());
        format!("42 (a (b) c) {}", fields.join(" "))
    }

    #[test]
    fn only_real_time_threads_of_processes_count() {
        assert_eq!(realtime(&stat(0, 1)), Some(("a (b) c".to_owned(), "fifo", false)));
        assert_eq!(realtime(&stat(0, 6)).map(|(_, policy, _)| policy), Some("deadline"));
        assert_eq!(realtime(&stat(0, 0)), None);
        assert_eq!(realtime(&stat(PF_KTHREAD, 1)), None);
        assert_eq!(realtime("garbage"), None);
    }

    #[test]
    fn this_process_does_not_count() -> std::io::Result<()> {
        let own = format!("/proc/{}/", std::process::id());
        assert!(!all()?.keys().any(|folder| folder.starts_with(&own)));
        Ok(())
    }
}
