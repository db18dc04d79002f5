// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders `offcpu --blocked`: threads in long waits, and the holders of their locks as far as the kernel records them.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Write};

use whylate_model::folded::{stopped, waiting};
use whylate_model::holders::{Chain, End, Holder, Link, Lock};
use whylate_model::thread;
use whylate_model::units::{format_ns, printable};
use whylate_model::wait::thaw_that_is_awaited;
use whylate_model::{Histogram, Series, Snapshot, Stack, WaitClass};

use super::flat;
use super::threads::{UNINTERRUPTIBLE, is_blocked, is_idle};
use crate::render::text::pad::Spaces;

/// Maximum number of waiters that are named per lock.
const MAX_NAMES: usize = 8;
/// Maximum number of lines of holders and objects, unless all are asked for.
const MAX_LINES: usize = 16;

/// Adds the TIDs of threads in uninterruptible sleep to their stacks.
fn with_numbers(snapshot: &Snapshot) -> Cow<'_, Snapshot> {
    if snapshot.uninterruptible.is_empty() || snapshot.stacks.iter().all(|stack| stack.labels.contains_key("tid")) {
        return Cow::Borrowed(snapshot);
    }
    let mut snapshot = snapshot.clone();
    for stack in snapshot.stacks.iter_mut().filter(|stack| stack.state == UNINTERRUPTIBLE) {
        let label = |name: &str| stack.labels.get(name).map_or("", String::as_str);
        let (thread, process) = (label("thread"), format!("{}:{}", label("process"), label("pid")));
        let number = snapshot.uninterruptible.iter().find_map(|sleeper| {
            let is_it = sleeper.who.comm() == Some(thread)
                && sleeper.process.as_ref().map_or_else(|| sleeper.who == process, |of| *of == process)
                && sleeper.waits_in.as_ref() == stack.kernel.first();
            sleeper.who.tid().filter(|_| is_it)
        });
        if let Some(number) = number {
            stack.labels.entry("tid".to_owned()).or_insert(thread::number(number));
        }
    }
    Cow::Owned(snapshot)
}

/// What is shown.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    /// Leaves out threads that are idle by design.
    pub hide_idle: bool,
    /// Shortest wait that is shown.
    pub least_ns: u64,
    /// Whether the user has selected threads: then objects of idle ones are shown too.
    pub is_selected: bool,
    /// Whether all lines are shown.
    pub is_verbose: bool,
}

/// Writes the threads that have been off CPU for at least `shown.least_ns`, the holders and objects that they wait for
/// before, or why there are none. Threads that are idle by design are only counted.
pub fn write(out: &mut dyn Write, snapshot: &Snapshot, shown: &Shown, columns: Option<usize>) -> io::Result<()> {
    let Shown { hide_idle, least_ns, .. } = *shown;
    let snapshot = &*with_numbers(snapshot);
    let threads = || waiting(snapshot, hide_idle).filter(|stack| !is_idle(stack));
    let idle = || waiting(snapshot, hide_idle).filter(|stack| is_blocked(stack, least_ns) && is_idle(stack));
    let blocked = || threads().filter(|stack| is_blocked(stack, least_ns));
    if blocked().next().is_none() {
        let has_idle = waiting(snapshot, hide_idle).any(|stack| is_blocked(stack, 0) && is_idle(stack));
        write_none(out, threads(), has_idle, least_ns)?;
        write_idle(out, idle())?;
        let lines = if shown.is_selected { objects(idle()) } else { Vec::new() };
        if lines.is_empty() {
            return Ok(());
        }
        writeln!(out)?;
        return write_lines(out, &lines, shown.is_verbose);
    }
    let of_selected = idle().filter(|_| shown.is_selected);
    let mut lines = chains(blocked());
    lines.extend(objects(blocked().chain(of_selected)));
    if !lines.is_empty() {
        write_lines(out, &lines, shown.is_verbose)?;
        writeln!(out)?;
    }
    write_frozen(out, blocked())?;
    writeln!(out, "Threads that have waited {} or longer:\n", format_ns(least_ns))?;
    flat::table(snapshot, hide_idle, Some(least_ns)).write(out, columns)?;
    write_idle(out, idle())?;
    // Stopped threads wait for no holder.
    if lines.is_empty() && !blocked().all(|stack| stopped(stack).is_some()) {
        writeln!(
            out,
            "\nThe holders are not known: no thread waits for a lock with a holder that this kernel records, or for a work item that runs"
        )?;
    }
    let is_for_disk = |stack: &Stack| stack.wait.as_ref().is_some_and(|wait| wait.class == WaitClass::Disk);
    if blocked().any(is_for_disk) {
        write_requests(out, snapshot)?;
    }
    Ok(())
}

/// Writes the number of threads that are idle by design.
fn write_idle<'a>(out: &mut dyn Write, idle: impl Iterator<Item = &'a Stack>) -> io::Result<()> {
    let mut age = Histogram::default();
    idle.for_each(|stack| age.merge(&stack.age));
    if age.is_empty() {
        return Ok(());
    }
    let (threads, wait) = if age.count() == 1 { ("thread", "waits") } else { ("threads", "wait") };
    writeln!(
        out,
        "Not listed: {} {threads} that {wait} by design (idle, asleep, or for events), for up to {} (--json lists them)",
        age.count(),
        format_ns(age.max_ns())
    )
}

/// Writes which threads wait for a frozen file system, which nothing else shows.
fn write_frozen<'a>(out: &mut dyn Write, threads: impl Iterator<Item = &'a Stack>) -> io::Result<()> {
    let waits = threads.filter(|stack| thaw_that_is_awaited(&stack.kernel).is_some());
    let names: BTreeSet<String> = waits.map(name_of).collect();
    if names.is_empty() {
        return Ok(());
    }
    let mut named = names.iter().take(MAX_NAMES).map(printable).collect::<Vec<_>>().join(", ");
    if names.len() > MAX_NAMES {
        named.push_str(&format!(" and {} more", names.len() - MAX_NAMES));
    }
    let [write, wait] = if names.len() > 1 { ["write", "wait"] } else { ["writes", "waits"] };
    writeln!(
        out,
        "{named} {write} to a file system that is frozen, and {wait} until it is thawed (fsfreeze -u, or the end of the snapshot or backup that froze it)\n"
    )
}

/// Writes the disk requests in flight.
fn write_requests(out: &mut dyn Write, snapshot: &Snapshot) -> io::Result<()> {
    let of_disk = |series: &Series| {
        let of = |kind: &str| {
            let count = *series.values.get(&format!("{kind}s_in_progress"))?;
            (count > 0.0).then(|| format!("{count} {kind}{}", if count == 1.0 { "" } else { "s" }))
        };
        let requests: Vec<String> = ["read", "write"].into_iter().filter_map(of).collect();
        Some(format!("{} {}", printable(series.labels.get("disk")?), requests.join(" and ")))
    };
    let disks: Vec<String> = snapshot.series.iter().filter_map(of_disk).collect();
    let has_disk_counts = snapshot.series.iter().any(|series| series.values.contains_key("busy_disks"));
    if disks.is_empty() && has_disk_counts {
        return writeln!(
            out,
            "\nNo disk has requests in flight: these threads wait above the driver (file system, I/O scheduler, io.max), or are between two requests"
        );
    }
    if disks.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nDisk requests in flight, from all threads: {}", disks.join(", "))
}

fn write_none<'a>(
    out: &mut dyn Write,
    threads: impl Iterator<Item = &'a Stack>,
    has_idle: bool,
    least_ns: u64,
) -> io::Result<()> {
    write!(out, "No thread has waited {} or longer: ", format_ns(least_ns))?;
    let ages: Vec<&Histogram> = threads.filter(|stack| is_blocked(stack, 0)).map(|stack| &stack.age).collect();
    match ages.iter().map(|age| age.max_ns()).max() {
        None if has_idle => writeln!(out, "those off CPU are idle by design"),
        None => writeln!(out, "no selected thread was off CPU"),
        Some(most_ns) => {
            let count: u64 = ages.iter().map(|age| age.count()).sum();
            let were = if count == 1 { "thread was" } else { "threads were" };
            writeln!(out, "{count} {were} off CPU, the longest for {}", format_ns(most_ns))
        }
    }
}

/// Returns the lines of the chains of lock holders, each with its waiters by name.
fn chains<'a>(threads: impl Iterator<Item = &'a Stack>) -> Vec<String> {
    let mut chains: Vec<(&Chain, Vec<String>)> = Vec::new();
    let mut known: HashMap<&Chain, usize> = HashMap::new();
    for stack in threads {
        let Some(chain) = &stack.waits_for else { continue };
        let index = *known.entry(chain).or_insert(chains.len());
        if index == chains.len() {
            chains.push((chain, Vec::new()));
        }
        chains[index].1.push(name_of(stack));
    }
    // Chains with most waiters come first.
    chains.sort_by_key(|(_, waiters)| Reverse(waiters.len()));
    chains.iter().flat_map(|(chain, waiters)| lines_of(chain, waiters)).collect()
}

/// Returns a line for each object that threads wait for: objects with stopped peers first, then other objects with peers
/// (pipes last), and objects of idle threads at the end.
fn objects<'a>(threads: impl Iterator<Item = &'a Stack>) -> Vec<String> {
    let mut objects: BTreeMap<(bool, bool, bool, bool, String), Vec<String>> = BTreeMap::new();
    for stack in threads {
        let Some(object) = stack.object.as_ref().filter(|_| stack.waits_for.is_none()) else { continue };
        let is_pipe = stack.wait.as_ref().is_some_and(|wait| wait.class == WaitClass::Pipe);
        let key = (is_idle(stack), !object.has_stopped_peer(), is_pipe, !object.has_peer(), object.to_string());
        objects.entry(key).or_default().push(name_of(stack));
    }
    let mut sorted: Vec<_> = objects.into_iter().collect();
    sorted.sort_by_key(|((is_idle, is_running, is_pipe, has_no_peer, _), waiters)| {
        (*is_idle, *is_running, *is_pipe, *has_no_peer, Reverse(waiters.len()))
    });
    sorted.into_iter().map(|((.., object), waiters)| format!("{} for {object}", who_waits(&waiters))).collect()
}

fn write_lines(out: &mut dyn Write, lines: &[String], is_verbose: bool) -> io::Result<()> {
    writeln!(out, "Holders and objects, as far as they are known:\n")?;
    let shown = if is_verbose || lines.len() <= MAX_LINES + 1 { lines.len() } else { MAX_LINES };
    lines[..shown].iter().try_for_each(|line| writeln!(out, "{line}"))?;
    if shown < lines.len() {
        writeln!(out, "... ({} more lines with -v)", lines.len() - shown)?;
    }
    Ok(())
}

fn name_of(stack: &Stack) -> String {
    let label = |name: &str| stack.labels.get(name).map_or("?", String::as_str);
    format!("{}:{}", label("thread"), label("tid"))
}

/// Renders the waiters, and the verb that follows.
fn who_waits(waiters: &[String]) -> String {
    let mut names = waiters[..waiters.len().min(MAX_NAMES)].join(", ");
    if waiters.len() > MAX_NAMES {
        names.push_str(&format!(" and {} more", waiters.len() - MAX_NAMES));
    }
    format!("{} {}", printable(&names), if waiters.len() > 1 { "wait" } else { "waits" })
}

fn lines_of(chain: &Chain, waiters: &[String]) -> Vec<String> {
    let mut who = who_waits(waiters);
    let mut lines = Vec::new();
    for (depth, link) in chain.links.iter().enumerate() {
        lines.push(format!("{}{who} for {}", Spaces(depth * 2), what(link)));
        who = format!("{} waits", printable(&link.holder.who));
    }
    let indent = Spaces(chain.links.len() * 2);
    // The cycle names only its members, not all waiters.
    let cycle = printable(&chain.cycle(&waiters[0]).join(" -> "));
    match chain.end {
        End::Free => {}
        End::Cycle => lines.push(format!("{indent}cycle: {cycle}")),
        End::PerhapsCycle => {
            lines.push(format!("{indent}cycle, unless one of them has released its lock since: {cycle}"));
        }
        End::Cut => lines.push(format!("{indent}..")),
    }
    lines
}

/// Renders a lock, its holder, and the holder's activity.
fn what(link: &Link) -> String {
    let (who, does) = (printable(&link.holder.who), does(&link.holder, link.lock));
    match link.lock {
        Lock::Mutex => format!("a mutex held by {who} ({does})"),
        Lock::Rwsem => format!("an rwsem held by a writer: {who} ({does})"),
        Lock::RwsemReaders => format!("an rwsem last held by a reader: {who} ({does})"),
        Lock::Semaphore => format!("a semaphore last held by {who} ({does})"),
        Lock::RtMutex => format!("an rt_mutex held by {who} ({does})"),
        Lock::PiFutex => format!("a PI futex held by {who} ({does})"),
        Lock::FileLock => {
            let file = link.file.as_ref().map_or_else(String::new, |file| format!(" of {}", printable(file)));
            format!("a file lock{file}, held by {who} ({does})")
        }
        Lock::WorkItem => {
            let item = printable(link.holder.handler.as_deref().unwrap_or("?"));
            format!("work item {item}, which {who} runs ({does})")
        }
    }
}

fn does(holder: &Holder, lock: Lock) -> String {
    let item = holder.handler.as_ref().filter(|_| lock != Lock::WorkItem);
    let item = item.map_or_else(String::new, |item| format!("work item {}, ", printable(item)));
    let activity = holder.activity();
    if activity.is_empty() { "one of its threads".to_owned() } else { format!("{item}{activity}") }
}

#[cfg(test)]
mod tests {
    use whylate_model::ActorName;
    use whylate_model::object::{Object, ObjectKind, Peer};
    use whylate_model::snapshot::Sleeper;

    use super::super::sample;
    use super::*;

    fn holder(who: &str, state: &str, off_cpu_ns: u64, syscall: Option<&str>, handler: Option<&str>) -> Holder {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        Holder { who: who.into(), state: state.into(), off_cpu_ns, syscall: owned(syscall), handler: owned(handler) }
    }

    /// Returns threads that have waited for a minute, with these chains.
    fn snapshot(chains: Vec<(&str, Chain)>) -> Snapshot {
        let mut snapshot = sample::snapshot();
        let stack = snapshot.stacks[2].clone();
        snapshot.stacks = Vec::new();
        for (name, chain) in chains {
            let mut stack =
                Stack { waits_for: Some(chain), age: [60_000_000_000].into_iter().collect(), ..stack.clone() };
            let (thread, tid) = name.split_once(':').expect("a name and a number");
            stack.labels.extend([("thread", thread), ("tid", tid)].map(|(k, v)| (k.to_owned(), v.to_owned())));
            snapshot.stacks.push(stack);
        }
        snapshot
    }

    fn written(snapshot: &Snapshot, least_ns: u64) -> String {
        let mut out = Vec::new();
        let shown = Shown { hide_idle: false, least_ns, is_selected: false, is_verbose: true };
        write(&mut out, snapshot, &shown, None).expect("a vector takes everything");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn disk_waits_show_requests_in_flight() {
        let mut snapshot = snapshot(vec![("a:1", Chain::default())]);
        snapshot.stacks[0].wait.as_mut().expect("it waits").class = WaitClass::Lock;
        assert!(!written(&snapshot, 1).contains("in flight"));
        snapshot.stacks[0].wait.as_mut().expect("it waits").class = WaitClass::Disk;
        assert!(!written(&snapshot, 1).contains("in flight"));
        let counts = Series { values: [("busy_disks".to_owned(), 0.0)].into(), ..Series::default() };
        snapshot.series.push(counts);
        assert!(written(&snapshot, 1).contains("\nNo disk has requests in flight: "));
        let disk = |name: &str, reads, writes| Series {
            labels: [("disk".to_owned(), name.to_owned())].into(),
            values: [("reads_in_progress".to_owned(), reads), ("writes_in_progress".to_owned(), writes)].into(),
            ..Series::default()
        };
        snapshot.series.extend([disk("sda", 0.0, 1.0), disk("vda", 2.0, 31.0)]);
        let expected = "\nDisk requests in flight, from all threads: sda 1 write, vda 2 reads and 31 writes\n";
        assert!(written(&snapshot, 1).ends_with(expected), "{}", written(&snapshot, 1));
    }

    #[test]
    fn idle_threads_are_counted_and_uninterruptible_come_first() {
        let mut snapshot = snapshot(vec![]);
        let mut add = |name: &str, state: &str, class, age_s: u64| {
            let mut stack = sample::snapshot().stacks[2].clone();
            let labels = [("process", name), ("thread", name), ("pid", "7")];
            stack.labels = labels.map(|(label, value)| (label.to_owned(), value.to_owned())).into();
            stack.wait.as_mut().expect("it waits").class = class;
            stack.kernel = vec!["f".to_owned()];
            (stack.state, stack.age) = (state.to_owned(), [age_s * 1_000_000_000].into_iter().collect());
            snapshot.stacks.push(stack);
        };
        add("redis", "S", WaitClass::Idle, 900);
        add("sleep", "S", WaitClass::Timer, 800);
        add("reader", "S", WaitClass::Pipe, 700);
        add("mem-waiter", "D", WaitClass::Memory, 5);
        snapshot.uninterruptible.push(Sleeper {
            who: ActorName::thread("mem-waiter", 71),
            process: Some("mem-waiter:7".to_owned()),
            asleep_ns: 5_000_000_000,
            waits_in: Some("f".to_owned()),
            class: WaitClass::Memory,
        });
        let text = written(&snapshot, 1_000_000_000);
        let rows: Vec<Vec<&str>> = text.lines().skip(3).map(|line| line.split_whitespace().collect()).collect();
        // A thread name that repeats the process name is left out.
        assert_eq!(rows[0][..4], ["D", "memory", "mem-waiter", "71"], "{text}");
        assert_eq!(rows[1][..3], ["S", "pipe", "reader"], "{text}");
        let idle = "\nNot listed: 2 threads that wait by design (idle, asleep, or for events), for up to 900s";
        assert!(text.contains(idle) && !text.contains("redis"), "{text}");
        snapshot.stacks.truncate(2);
        let text = written(&snapshot, 1_000_000_000);
        let expected = "No thread has waited 1.00s or longer: those off CPU are idle by design\nNot listed: 2 threads";
        assert!(text.starts_with(expected), "{text}");
    }

    #[test]
    fn stopped_holder_does_not_wait_in_system_call() {
        let rendered = |state| does(&holder("server:7", state, 12_400_000_000, Some("futex"), None), Lock::Mutex);
        let expected = [
            "in futex for 12.4s",
            "stopped by a signal for 12.4s",
            "stopped by a tracer for 12.4s",
            "frozen for 12.4s",
        ];
        assert_eq!(["S", "T", "t", "F"].map(rendered), expected);
    }

    #[test]
    fn reports_frozen_file_system_but_no_holders_of_stopped_threads() {
        let mut snapshot = snapshot(vec![("a:1", Chain::default()), ("b:2", Chain::default())]);
        for stack in &mut snapshot.stacks {
            stack.waits_for = None;
            stack.kernel = ["percpu_rwsem_wait", "vfs_write"].map(str::to_owned).to_vec();
        }
        assert!(written(&snapshot, 1).contains("a:1, b:2 write to a file system that is frozen, and wait until it is"));
        assert!(written(&snapshot, 1).contains("The holders are not known"));
        for stack in &mut snapshot.stacks {
            stack.kernel = vec!["do_signal_stop".to_owned()];
            stack.state = "T".to_owned();
            stack.wait.as_mut().expect("it waits").class = WaitClass::Stopped;
        }
        let text = written(&snapshot, 1);
        assert!(!text.contains("frozen") && !text.contains("Holders"), "{text}");
    }

    #[test]
    fn objects_of_stopped_peers_come_first_and_those_of_idle_threads_last() {
        let object = |kind, who: &str, state: &str| {
            let process = Holder { who: who.to_owned(), state: state.to_owned(), ..Holder::default() };
            Object { peers: vec![Peer { process, others: 0 }], ..Object::new(kind) }
        };
        let mut snapshot = snapshot(["a:1", "b:2", "c:3", "d:4"].map(|name| (name, Chain::default())).to_vec());
        let objects = [
            Object::with_path(ObjectKind::File, "/srv/x"),
            object(ObjectKind::Pipe, "gzip:88", "S"),
            object(ObjectKind::UnixSocket, "db:9", "T"),
            object(ObjectKind::Process, "make:7", "S"),
        ];
        for (stack, object) in snapshot.stacks.iter_mut().zip(objects) {
            (stack.waits_for, stack.object, stack.state) = (None, Some(object), "S".to_owned());
            stack.wait.as_mut().expect("it waits").class = WaitClass::Pipe;
        }
        snapshot.stacks[3].wait.as_mut().expect("it waits").class = WaitClass::Idle;
        let shown = Shown { hide_idle: false, least_ns: 1, is_selected: true, is_verbose: false };
        let text = |shown: &Shown| {
            let mut out = Vec::new();
            write(&mut out, &snapshot, shown, None).expect("a vector takes everything");
            String::from_utf8(out).expect("text")
        };
        let expected = "Holders and objects, as far as they are known:

c:3 waits for a Unix socket, peer db:9 (stopped by a signal)
b:2 waits for a pipe, other end held by gzip:88 (asleep)
a:1 waits for file /srv/x
";
        let selected = text(&shown);
        assert!(
            selected.starts_with(&format!("{expected}d:4 waits for the end of a process, namely make:7")),
            "{selected}"
        );
        let all = text(&Shown { is_selected: false, ..shown });
        assert!(all.starts_with(&format!("{expected}\nThreads that have waited 1ns or longer:")), "{all}");
    }

    #[test]
    fn renders_lock_and_holder_per_line() {
        let s = 1_000_000_000;
        let link = |lock, holder| Link { lock, file: None, holder };
        let server = link(Lock::Mutex, holder("server:7", "S", 12 * s, Some("fdatasync"), None));
        let worker = link(Lock::WorkItem, holder("kworker/u8:1:70", "D", 2 * s, None, Some("wb_workfn")));
        let behind = Chain { links: vec![server.clone(), worker], end: End::Free };
        let [a, b] = ["a:1", "b:2"].map(|who| link(Lock::RtMutex, holder(who, "S", 9 * s, Some("futex"), None)));
        let alone = |link| Chain { links: vec![link], end: End::Free };
        let reader = link(Lock::RwsemReaders, holder("reader\x1b:3", "R", 0, None, None));
        let taken = link(Lock::Semaphore, holder("taker:outside", "R", s, None, None));
        let mut chains = vec![
            ("c:3", Chain { links: vec![a.clone(), b.clone(), a.clone()], end: End::Cycle }),
            ("a:1", Chain { links: vec![b, Link { lock: Lock::Semaphore, ..a }], end: End::PerhapsCycle }),
            ("mapper:8", alone(reader)),
            ("down:9", alone(taken)),
        ];
        let names: Vec<String> = (10..20).map(|number| format!("client:{number}")).collect();
        let mut locked = link(Lock::FileLock, holder("backup.sh:21", "S", 0, Some("wait4"), None));
        locked.file = Some("/var/lib/app/lock".to_owned());
        chains.push(("report-gen:22", alone(locked)));
        chains.extend(names.iter().map(|name| (name.as_str(), behind.clone())));
        let mut snapshot = snapshot(chains);
        let text = written(&snapshot, 10 * s);
        let (holders, table) = text.split_once("\nThreads that").expect("holders, and a table");
        assert_eq!(table.lines().count(), 18, "a heading and a row for each: {table}");
        insta::assert_snapshot!(holders);
        let none = "No thread has waited 61.0s or longer: ";
        let text = written(&snapshot, 61 * s);
        assert_eq!(text, format!("{none}15 threads were off CPU, the longest for 60.0s\n"));
        snapshot.stacks.truncate(1);
        snapshot.stacks[0].waits_for = None;
        let text = written(&snapshot, 61 * s);
        assert_eq!(text, format!("{none}1 thread was off CPU, the longest for 60.0s\n"));
        assert!(written(&snapshot, 10 * s).contains("\n\nThe holders are not known: "));
        snapshot.stacks.clear();
        assert_eq!(written(&snapshot, 61 * s), format!("{none}no selected thread was off CPU\n"));
    }
}
