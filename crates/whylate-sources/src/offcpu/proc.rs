// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backend without BPF: reads `/proc/PID/task/TID/stack` of each thread, which takes some 20 µs per thread.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use whylate_model::import::kernel_frame;
use whylate_model::wait::{Classes, InFlight, State, WaitEvidence, classify};
use whylate_model::{LateEvent, Series, Snapshot, Stack};

use super::stack::plain;
use super::walk_timer::WalkTimer;
use super::watchdog::Worker;
use super::{INFO, KernelThreads, OffcpuOptions, PROC};
use crate::kernel::clock;
use crate::kernel::pid_namespace;
use crate::source::session::Session;
use crate::source::{AttachError, Attached};

const PF_KTHREAD: u64 = 0x20_0000;

/// The attached source, which reads on a thread of its own.
pub(super) struct AttachedProc {
    reader: Worker<Snapshot>,
}

impl AttachedProc {
    pub(super) fn new(options: &OffcpuOptions, session: &Session) -> Result<Self, AttachError> {
        // If this thread's own stack may not be read, none may.
        fs::read("/proc/self/stack").map_err(|_| {
            AttachError::Unsupported(
                "not permitted to read stacks in /proc (run as root, or grant CAP_SYS_ADMIN; the other backends need CAP_BPF and CAP_PERFMON)"
                    .to_owned(),
            )
        })?;
        let (options, host) = (options.clone(), session.host().to_owned());
        let reader = Worker::start(move || Walker::new(&options, &host), |mut walker, asked| walker.run(asked))?;
        Ok(AttachedProc { reader })
    }
}

impl Attached for AttachedProc {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        self.reader.ask()
    }

    fn drain_late(&mut self, wait: Duration, _each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        // This source reports no late events.
        thread::sleep(wait);
        Ok(())
    }
}

/// Aggregation key of time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct StackKey {
    pid: u32,
    /// 0 unless `by_thread` is set.
    tid: u32,
    process: String,
    thread: String,
    is_kernel: bool,
    state: char,
    syscall: Option<i32>,
    kernel: Vec<String>,
}

/// Fields of a thread's `stat` (proc_pid_stat(5)).
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stat {
    name: String,
    state: char,
    is_kernel: bool,
    /// Start time since boot, which distinguishes a thread from an earlier one with its TID.
    started: u64,
}

struct Walker {
    options: OffcpuOptions,
    host: String,
    /// Bit mask of the selected states.
    states: u32,
    sums: HashMap<StackKey, (u64, u64)>,
    /// Time up to which a thread's time is counted, by TID and start time.
    counted_ns: HashMap<(u32, u64), u64>,
    since_ns: u64,
    walks: u64,
    threads: u64,
    took_ns: u64,
    took_cpu_ns: u64,
    /// Stacks that could not be read though the thread existed, mostly of processes protected from ptrace.
    unreadable: u64,
    timer: WalkTimer,
}

impl Walker {
    fn new(options: &OffcpuOptions, host: &str) -> Result<Self, AttachError> {
        let mut walker = Walker {
            options: options.clone(),
            host: host.to_owned(),
            states: super::state::mask(&options.states)?,
            sums: HashMap::new(),
            counted_ns: HashMap::new(),
            since_ns: clock::monotonic_ns(),
            walks: 0,
            threads: 0,
            took_ns: 0,
            took_cpu_ns: 0,
            unreadable: 0,
            timer: WalkTimer::new(options, clock::monotonic_ns()),
        };
        walker.walk();
        // Time before the first walk is not counted.
        walker.sums.clear();
        walker.walks = 0;
        Ok(walker)
    }

    fn run(&mut self, asked: &Receiver<Sender<Snapshot>>) {
        let mut due = Instant::now() + self.timer.interval();
        loop {
            match asked.recv_timeout(due.saturating_duration_since(Instant::now())) {
                // The caller may have timed out.
                Ok(answer) => drop(answer.send(self.snapshot())),
                Err(RecvTimeoutError::Timeout) => {
                    self.walk();
                    // At most half of a CPU.
                    let earliest = Instant::now() + Duration::from_nanos(self.took_ns);
                    due = (due + self.timer.interval()).max(earliest);
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn walk(&mut self) {
        let (began, began_cpu_ns) = (Instant::now(), clock::thread_cpu_ns());
        self.threads = 0;
        let mut seen = HashMap::with_capacity(self.counted_ns.len());
        let processes: Vec<u32> = match self.options.threads.process {
            Some(pid) => vec![pid],
            None => numeric_entries(Path::new("/proc")),
        };
        let own = pid_namespace::own_number_in_proc();
        for pid in processes.into_iter().filter(|&pid| Some(pid) != own) {
            let directory = format!("/proc/{pid}/task");
            let process = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
            let process = String::from_utf8_lossy(&process);
            if !is_named(process.trim_end_matches('\n'), self.options.threads.process_name.as_deref()) {
                continue;
            }
            for tid in numeric_entries(Path::new(&directory)) {
                // The thread may have exited.
                let _ = self.visit(pid, tid, process.trim_end_matches('\n'), &mut seen);
            }
        }
        self.counted_ns = seen;
        self.walks += 1;
        self.took_ns = began.elapsed().as_nanos() as u64;
        self.took_cpu_ns = clock::thread_cpu_ns() - began_cpu_ns;
        self.timer.add_cost(self.took_cpu_ns);
    }

    fn visit(&mut self, pid: u32, tid: u32, process: &str, seen: &mut HashMap<(u32, u64), u64>) -> Option<()> {
        let directory = format!("/proc/{pid}/task/{tid}");
        let stat = parse_stat(&String::from_utf8_lossy(&fs::read(format!("{directory}/stat")).ok()?))?;
        let wanted = match self.options.kernel_threads {
            KernelThreads::Yes => true,
            KernelThreads::No => !stat.is_kernel,
            KernelThreads::Only => stat.is_kernel,
        };
        if !wanted || !is_named(&stat.name, self.options.threads.name.as_deref()) {
            return None;
        }
        // An exited thread waits for nothing; the BPF backends skip it too.
        if matches!(stat.state, 'Z' | 'X') {
            return None;
        }
        let text = fs::read_to_string(format!("{directory}/stack"));
        if text.as_ref().is_err_and(has_ended) {
            return None;
        }
        self.threads += 1;
        self.unreadable += u64::from(text.is_err());
        let kernel: Vec<String> =
            text.unwrap_or_default().lines().filter_map(kernel_frame).map(|name| plain(&name).to_owned()).collect();
        let syscall = fs::read_to_string(format!("{directory}/syscall")).unwrap_or_default();
        let syscall = syscall.split(' ').next().and_then(|number| number.parse().ok()).filter(|&number| number >= 0);
        let now_ns = clock::monotonic_ns();
        // A thread created since the last walk has no earlier time.
        let before_ns = self.counted_ns.get(&(tid, stat.started)).copied().unwrap_or(now_ns);
        seen.insert((tid, stat.started), now_ns);
        let state = state_of(stat.state, &kernel);
        if self.states & super::state::bit(state) == 0 {
            return None;
        }
        let key = StackKey {
            pid,
            tid: if self.options.by_thread { tid } else { 0 },
            process: process.to_owned(),
            thread: stat.name,
            is_kernel: stat.is_kernel,
            state: stat.state,
            syscall,
            kernel: kernel.into_iter().take(self.options.max_depth as usize).collect(),
        };
        let sum = self.sums.entry(key).or_default();
        sum.0 += now_ns - before_ns;
        sum.1 += 1;
        Some(())
    }

    fn snapshot(&mut self) -> Snapshot {
        let ended_ns = clock::monotonic_ns();
        self.walk();
        let began_ns = std::mem::replace(&mut self.since_ns, ended_ns);
        let mut snapshot = Snapshot::new(INFO.card.name, PROC, &self.host, clock::unix_ns_of(began_ns));
        snapshot.pid_namespace = pid_namespace::own();
        (snapshot.duration_ns, snapshot.ended_ns) = (ended_ns - began_ns, ended_ns);
        let sums = std::mem::take(&mut self.sums).into_iter();
        snapshot.stacks = sums.map(|(key, sum)| stack_of(key, sum, &self.options.classes)).collect();
        snapshot.stacks.sort_by_key(|stack| std::cmp::Reverse(stack.weight_ns));
        snapshot.lost.insert("unreadable".to_owned(), std::mem::take(&mut self.unreadable));
        let walks = std::mem::take(&mut self.walks) as f64;
        let values = [
            ("walks", walks),
            ("rate_hz", walks * 1e9 / snapshot.duration_ns.max(1) as f64),
            ("threads", self.threads as f64),
            ("walk_ns", self.took_ns as f64),
            ("walk_cpu_ns", self.took_cpu_ns as f64),
        ];
        snapshot.series =
            vec![Series { values: values.map(|(name, value)| (name.to_owned(), value)).into(), ..Series::default() }];
        snapshot
    }
}

/// Returns whether a comm is the wanted one, of which the kernel keeps the first 15 bytes.
fn is_named(name: &str, wanted: Option<&str>) -> bool {
    wanted.is_none_or(|wanted| wanted.bytes().take(15).eq(name.bytes()))
}

/// The thread's directory no longer exists, or the thread exited while its file was open (proc_pid_stack() returns
/// ESRCH).
fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

fn numeric_entries(directory: &Path) -> Vec<u32> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

pub(super) fn parse_stat(text: &str) -> Option<Stat> {
    // The comm may contain parentheses and spaces.
    let (begin, end) = (text.find('(')?, text.rfind(')')?);
    let fields: Vec<&str> = text.get(end + 1..)?.split_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some(Stat {
        name: text.get(begin + 1..end)?.to_owned(),
        state: fields.first()?.chars().next()?,
        is_kernel: number(6)? & PF_KTHREAD != 0,
        started: number(19)?,
    })
}

/// Returns the state of a thread. The kernel shows no stack of a thread that is on a CPU.
fn state_of(letter: char, kernel: &[String]) -> State {
    match letter {
        'R' if kernel.is_empty() => State::OnCpu,
        'R' => State::Ready,
        'S' => State::Sleeping,
        'D' => State::Uninterruptible,
        'I' => State::Idle,
        'T' => State::Stopped,
        't' => State::Traced,
        'P' => State::Parked,
        _ => State::Other,
    }
}

fn stack_of(key: StackKey, (weight_ns, samples): (u64, u64), classes: &Classes) -> Stack {
    let state = state_of(key.state, &key.kernel);
    let syscall = key.syscall.and_then(crate::kernel::syscalls::name);
    let seen = WaitEvidence {
        state,
        in_iowait: false,
        is_kernel: key.is_kernel,
        syscall: syscall.as_deref(),
        kernel: &key.kernel,
        user: &[],
        in_flight: InFlight::Unknown,
    };
    let wait = classify(&seen, classes);
    let mut labels: whylate_model::Labels = [
        ("thread".to_owned(), key.thread),
        ("process".to_owned(), key.process),
        ("pid".to_owned(), key.pid.to_string()),
    ]
    .into();
    if key.tid != 0 {
        labels.insert("tid".to_owned(), key.tid.to_string());
    }
    if key.is_kernel {
        labels.insert("kernel".to_owned(), "yes".to_owned());
    }
    labels.extend(syscall.map(|call| ("syscall".to_owned(), call)));
    Stack {
        labels,
        state: state.letter().to_string(),
        samples,
        weight_ns,
        wait: Some(wait),
        kernel: key.kernel,
        ..Stack::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_comm_with_parentheses() {
        let flags = PF_KTHREAD | 0x40;
        let text = format!("7 (a) b (c) S 2 0 0 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0\n");
        let stat = Stat { name: "a) b (c".to_owned(), state: 'S', is_kernel: true, started: 4711 };
        assert_eq!(parse_stat(&text), Some(stat));
        assert_eq!(parse_stat("7 (a"), None);
    }

    #[test]
    fn thread_without_stack_is_on_cpu() {
        assert_eq!(state_of('R', &[]), State::OnCpu);
        assert_eq!(state_of('R', &["irqentry_exit".to_owned()]), State::Ready);
    }
}
