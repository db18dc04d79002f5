// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares wakeup edges with what the threads know themselves, and with the kernel's own trace. Runs as root.

#[path = "kernel_wakeup_edges/sleeps.rs"]
mod sleeps;
#[path = "kernel_wakeup_edges/stopped.rs"]
mod stopped;
mod support;

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt as _;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use support::machine::lock::lock_machine;
use support::machine::real_time::patching;
use support::oracles::chance::by_chance;
use support::oracles::trace::{Trace, TraceLine};
use support::{amount, file_on_disk, is_emulated};
use whylate_model::path::history::{Blocked, CpuTimeline, Operation, RunSlice, SwitchIn, SwitchOut, Waker};
use whylate_model::wait::Stop;
use whylate_sources::Edges;
use whylate_sources::kernel::clock::monotonic_ns;

/// Maximum share of edges from another waker than the intended one: others send signals, take locks, or preempt.
const MAX_OTHER_WAKERS: f64 = 0.02;

fn tid() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// Returns the run slices of each CPU up to now, oldest first.
fn recorded(edges: &Edges) -> Result<Vec<Vec<RunSlice>>> {
    let mut history = edges.history(monotonic_ns()).context("edges are kept")?;
    let mut cpus: Vec<Vec<RunSlice>> = vec![Vec::new(); history.cpus()];
    for (cpu, slices) in cpus.iter_mut().enumerate() {
        while let Some(slice) = history.previous(cpu) {
            slices.push(slice);
        }
        slices.reverse();
        ensure!(slices.windows(2).all(|pair| pair[0].end_ns == pair[1].start_ns), "CPU {cpu}: a gap or an overlap");
        ensure!(slices.iter().all(|slice| slice.start_ns < slice.end_ns), "CPU {cpu}: a slice without time");
    }
    Ok(cpus)
}

/// One stay of a thread on a CPU, with its switch-in and switch-out, and its names during it.
#[derive(Clone, Debug)]
struct CpuStay {
    start_ns: u64,
    end_ns: u64,
    entry: SwitchIn,
    exit: SwitchOut,
    /// What had stopped the thread before the switch-in.
    stopped: Option<Stop>,
    names: Vec<String>,
}

/// Merges the run slices of a thread, oldest first.
fn stays_of(cpus: &[Vec<RunSlice>], tid: u32) -> Vec<CpuStay> {
    let mut stays: Vec<CpuStay> = Vec::new();
    for slices in cpus {
        let mut stay: Option<CpuStay> = None;
        for slice in slices.iter().filter(|slice| slice.holder.tid() == Some(tid)) {
            let has_been_there = matches!(slice.entry, SwitchIn::GoesOn | SwitchIn::Queued { .. });
            let open = if has_been_there { stay.take() } else { None };
            let mut open = open.unwrap_or(CpuStay {
                start_ns: slice.start_ns,
                end_ns: 0,
                entry: slice.entry,
                exit: SwitchOut::GoesOn,
                stopped: slice.stopped,
                names: Vec::new(),
            });
            (open.end_ns, open.exit) = (slice.end_ns, slice.exit);
            if open.names.last() != Some(&slice.name.text()) {
                open.names.push(slice.name.text());
            }
            match slice.exit {
                SwitchOut::GoesOn => stay = Some(open),
                _ => stays.push(open),
            }
        }
        stays.extend(stay);
    }
    stays.sort_by_key(|stay| stay.start_ns);
    stays
}

/// Checks that almost all of the thread's waits in this system call ended with a wakeup for which `is_it` holds.
/// Returns the number of waits.
fn ensure_woken(what: &str, stays: &[CpuStay], syscall: i64, is_it: impl Fn(u64, Waker) -> bool) -> Result<usize> {
    let waits = stays.windows(2).filter_map(|pair| match (pair[0].exit, pair[1].entry) {
        (SwitchOut::Blocked(Blocked { syscall: Some(number), is_kernel: false, .. }), entry)
            if i64::from(number) == syscall =>
        {
            Some(entry)
        }
        _ => None,
    });
    let waits: Vec<SwitchIn> = waits.collect();
    let is_right = |entry: &&SwitchIn| matches!(**entry, SwitchIn::Woken { at_ns, by, .. } if is_it(at_ns, by));
    let wrong: Vec<_> = waits.iter().filter(|entry| !is_right(entry)).collect();
    println!("{what}: {} waits, {} ended otherwise", waits.len(), wrong.len());
    ensure!(
        wrong.len() <= by_chance(waits.len(), MAX_OTHER_WAKERS),
        "{what}: {} of {}: {wrong:?}",
        wrong.len(),
        waits.len()
    );
    Ok(waits.len())
}

fn attach() -> Result<Edges> {
    Ok(patching(Edges::attach)?)
}

#[test]
fn pipe_and_socket_peers_wake_each_other() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let edges = attach()?;
    let rounds = amount(1_000);
    let (mut from_ping, mut to_pong) = std::io::pipe()?;
    let (mut from_pong, mut to_ping) = std::io::pipe()?;
    let pong = thread::spawn(move || -> Result<u32> {
        for _ in 0..rounds {
            from_ping.read_exact(&mut [0])?;
            to_ping.write_all(&[0])?;
        }
        Ok(tid())
    });
    let ping = tid();
    for _ in 0..rounds {
        to_pong.write_all(&[0])?;
        from_pong.read_exact(&mut [0])?;
    }
    let pong = pong.join().expect("it does not panic")?;
    let cpus = recorded(&edges)?;
    let pings = ensure_woken("ping", &stays_of(&cpus, ping), libc::SYS_read, |_, by| by == Waker::Thread(pong))?;
    let pongs = ensure_woken("pong", &stays_of(&cpus, pong), libc::SYS_read, |_, by| by == Waker::Thread(ping))?;
    // With both threads running, a read may find data without waiting.
    ensure!(pings + pongs >= 100, "{pings} and {pongs} waits at pipes");

    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    let (mut server, _) = listener.accept()?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let serving = thread::spawn(move || -> Result<u32> {
        for _ in 0..rounds {
            server.read_exact(&mut [0])?;
            server.write_all(&[0])?;
        }
        Ok(tid())
    });
    for _ in 0..rounds {
        client.write_all(&[0])?;
        client.read_exact(&mut [0])?;
    }
    let server = serving.join().expect("it does not panic")?;
    let cpus = recorded(&edges)?;
    let (of_server, of_client) = (stays_of(&cpus, server), stays_of(&cpus, ping));
    let served = ensure_woken("server", &of_server, libc::SYS_recvfrom, |_, by| by == Waker::Thread(ping))?;
    let answered = ensure_woken("client", &of_client, libc::SYS_recvfrom, |_, by| by == Waker::Thread(server))?;
    ensure!(served + answered >= 100, "{served} and {answered} waits at sockets");
    Ok(())
}

#[test]
fn timers_wake_sleepers_on_time() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let edges = attach()?;
    let mut slept = Vec::new();
    for _ in 0..100 {
        let began_ns = monotonic_ns();
        thread::sleep(Duration::from_millis(1));
        slept.push((began_ns + 1_000_000, monotonic_ns()));
    }
    let in_time = |at_ns: u64| slept.iter().any(|&(due_ns, over_ns)| (due_ns..=over_ns).contains(&at_ns));
    let stays = stays_of(&recorded(&edges)?, tid());
    let by_timer = |at_ns, by| matches!(by, Waker::Timer(_)) && in_time(at_ns);
    let waits = ensure_woken("sleeper", &stays, libc::SYS_clock_nanosleep, by_timer)?;
    ensure!(waits >= 95, "{waits} waits of 100");
    Ok(())
}

/// Maximum time from the parent's waitpid to the process's last switch-out: it may be preempted.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of tries on a machine that hides context switches.
const MAX_TRIES: usize = 20;

#[test]
fn process_starts_with_parent_wakeup_and_ends_dead() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    for _ in 1..MAX_TRIES {
        let mut edges = attach()?;
        let outcome = processes_begin_and_end(&edges);
        let unseen = edges.take_lost().into_iter().find(|(reason, _)| *reason == "unseen_switches");
        match outcome {
            // If a hidden thread follows the process's last run slice, that switch-out is hidden too.
            Err(error) if unseen.is_some_and(|(_, count)| count > 0) => println!("another try: {unseen:?}, {error:#}"),
            outcome => return outcome,
        }
    }
    processes_begin_and_end(&attach()?)
}

fn processes_begin_and_end(edges: &Edges) -> Result<()> {
    let parent = tid();
    let mut children = Vec::new();
    for _ in 0..20 {
        let mut child = Command::new("true").spawn()?;
        children.push(child.id());
        child.wait()?;
    }
    let is_gone =
        |cpus: &[Vec<RunSlice>], child| stays_of(cpus, child).last().is_some_and(|last| last.exit == SwitchOut::Dead);
    let until = Instant::now() + EXIT_TIMEOUT;
    let mut cpus = recorded(edges)?;
    while !children.iter().all(|&child| is_gone(&cpus, child)) && Instant::now() < until {
        thread::sleep(EXIT_TIMEOUT / 50);
        cpus = recorded(edges)?;
    }
    for &child in &children {
        let stays = stays_of(&cpus, child);
        let (Some(first), Some(last)) = (stays.first(), stays.last()) else { anyhow::bail!("{child} had no CPU") };
        let is_made = matches!(first.entry, SwitchIn::Woken { at_ns, by: Waker::Parent(tid), .. } if tid == parent && at_ns <= first.start_ns);
        ensure!(is_made, "{child}: {first:?}");
        ensure!(last.exit == SwitchOut::Dead, "{child}: {last:?}");
        ensure!(last.names.last().is_some_and(|name| name == "true"), "{child}: {last:?}");
        ensure!(stays[..stays.len() - 1].iter().all(|stay| stay.exit != SwitchOut::Dead), "{child}: {stays:?}");
    }
    let waits = stays_of(&cpus, parent);
    let waits = waits.iter().filter_map(|stay| match stay.entry {
        SwitchIn::Woken { by: Waker::Thread(by), .. } if children.contains(&by) => Some(by),
        _ => None,
    });
    // For the child's execve(), or for its end.
    let mut woken_by: Vec<u32> = waits.collect();
    woken_by.dedup();
    ensure!(woken_by.len() >= 15, "{woken_by:?}");
    Ok(())
}

#[test]
fn fdatasync_waits_match_disk_requests() -> Result<()> {
    let (Some(_lock), Some(file)) = (lock_machine(), file_on_disk()?) else { return Ok(()) };
    // An interrupt over a hidden thread is not seen, and all of a disk's interrupts may go to one CPU.
    for _ in 0..10 {
        if writes_are_attributed_to_disk(&file)? {
            return Ok(());
        }
        println!("another try: the machine hid interrupts");
    }
    bail!("who ended most waits is not seen")
}

/// Bytes per write: too many for most disks to complete before the caller sleeps.
const WRITTEN: usize = 256 << 10;

/// Returns false if less than half of the waits are reported as waits for a disk.
fn writes_are_attributed_to_disk(file: &File) -> Result<bool> {
    let edges = attach()?;
    let mut calls = Vec::new();
    for round in 0..20_u8 {
        // Growing the file makes the sync end with a flush, for its size.
        file.write_all_at(&[round; WRITTEN], u64::from(round / 2) * WRITTEN as u64)?;
        let began_ns = monotonic_ns();
        file.sync_data()?;
        calls.push(began_ns..monotonic_ns());
    }
    let stays = stays_of(&recorded(&edges)?, tid());
    let (mut waits, mut foreign, mut journal, mut reads, mut writes, mut flushes) = (0, 0, 0, 0, 0, 0);
    for pair in stays.windows(2) {
        let SwitchIn::Woken { at_ns, by, .. } = pair[1].entry else { continue };
        let Some(call) = calls.iter().find(|call| call.contains(&at_ns)) else { continue };
        waits += 1;
        // The journal thread of the file system, which writes the file's size.
        journal += usize::from(matches!(by, Waker::Thread(_)));
        let Waker::Disk(request) = by else { continue };
        let times = [call.start, request.queued_ns, request.issued_ns, at_ns, call.end];
        // The kernel's own writeback may submit pages first.
        if request.submitter != tid() {
            foreign += 1;
            continue;
        }
        ensure!(times.is_sorted(), "{times:?}");
        ensure!(request.device != 0, "{request:?}");
        ensure!(
            matches!(pair[0].exit, SwitchOut::Blocked(Blocked { syscall: Some(75), is_uninterruptible: true, .. })),
            "{pair:?}"
        );
        // By the file system, to find free blocks for the growing file.
        reads += usize::from(request.operation == Operation::Read);
        writes += usize::from(request.operation == Operation::Write);
        flushes += usize::from(request.operation == Operation::Flush);
    }
    println!(
        "{waits} waits of {} calls: {writes} writes, {flushes} flushes, {reads} reads, {journal} for a thread",
        calls.len()
    );
    let for_disk = waits - journal - foreign;
    ensure!(foreign <= by_chance(waits, MAX_OTHER_WAKERS), "{foreign} of {waits} requests are of other threads");
    // The disk may have flushed before its caller sleeps: then a call has one wait.
    let has_flushes = 2 * flushes >= calls.len() || for_disk <= calls.len();
    Ok(2 * (reads + writes + flushes) >= for_disk && writes > 0 && has_flushes)
}

/// Runs a bit of everything that wakes threads, for a while.
fn all_kinds_of_load() -> Result<()> {
    let mut threads: Vec<thread::JoinHandle<Result<()>>> = Vec::new();
    let rounds = amount(3_000);
    let (mut from, mut to) = std::io::pipe()?;
    threads.push(thread::spawn(move || Ok((0..rounds).try_for_each(|_| from.read_exact(&mut [0]))?)));
    threads.push(thread::spawn(move || Ok((0..rounds).try_for_each(|_| to.write_all(&[0]))?)));
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    let (mut server, _) = listener.accept()?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    threads.push(thread::spawn(move || {
        Ok((0..rounds).try_for_each(|_| server.read_exact(&mut [0]).and_then(|()| server.write_all(&[0])))?)
    }));
    threads.push(thread::spawn(move || {
        Ok((0..rounds).try_for_each(|_| client.write_all(&[0]).and_then(|()| client.read_exact(&mut [0])))?)
    }));
    threads.push(thread::spawn(|| {
        (0..200).for_each(|_| thread::sleep(Duration::from_millis(1)));
        Ok(())
    }));
    threads.push(thread::spawn(|| {
        let file: File = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR"))?;
        for round in 0..50_u8 {
            file.write_all_at(&[round; 4096], 0)?;
            file.sync_data()?;
        }
        Ok(())
    }));
    for _ in 0..20 {
        Command::new("true").status()?;
    }
    threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
}

fn field(line: &TraceLine, key: &str) -> Option<u32> {
    // From the right, as the thread's name, which may contain anything, precedes its TID.
    line.fields.rsplit(' ').find_map(|word| word.strip_prefix(key)?.parse().ok())
}

/// Returns whether the reported waker matches the trace line's thread and context.
fn is_same(line: &TraceLine, by: Waker) -> bool {
    let is_thread = by == Waker::Thread(line.tid);
    match line.flags.chars().nth(2) {
        Some('h' | 'H' | 'z' | 'Z') => matches!(by, Waker::Timer(_) | Waker::Irq | Waker::Disk(_)),
        // Packets over loopback are delivered in a softirq, on behalf of the sending thread.
        Some('s') => {
            is_thread || matches!(by, Waker::Timer(_) | Waker::Network | Waker::Rcu | Waker::Softirq | Waker::Disk(_))
        }
        // Idle polling does what an interrupt would have done.
        _ if line.tid == 0 => matches!(by, Waker::Timer(_) | Waker::Irq | Waker::Disk(_)),
        // Interrupts wake these after their handlers, in no thread's context.
        _ if line.fields.contains("comm=ksoftirqd/") => is_thread || by == Waker::Softirq,
        _ if line.fields.contains("comm=irq/") => is_thread || by == Waker::Irq,
        _ if line.fields.contains("comm=ktimers/") => is_thread || matches!(by, Waker::Timer(_)),
        _ => is_thread,
    }
}

#[test]
fn wakers_match_sched_waking_trace() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let trace = Trace::record(&[
        "sched/sched_waking",
        "sched/sched_switch",
        "workqueue/workqueue_queue_work",
        "workqueue/workqueue_execute_start",
    ])?;
    let mut edges = attach()?;
    let began_us = monotonic_ns() / 1_000;
    all_kinds_of_load()?;
    let ended_us = monotonic_ns() / 1_000;
    let cpus = recorded(&edges)?;
    let lost = edges.take_lost();
    patching(|| drop(edges));
    let lines = trace.finish_lines()?;

    // Nothing is known from before the oldest run slice.
    let oldest_ns = cpus.iter().filter_map(|slices| slices.first()).map(|slice| slice.start_ns).max().unwrap_or(0);
    let began_us = began_us.max(oldest_ns / 1_000 + 1);
    let mut taken: HashMap<u32, Vec<(u64, Waker, u32)>> = HashMap::new();
    for slice in cpus.iter().flatten() {
        if let (Some(tid), SwitchIn::Woken { at_ns, by, cpu }) = (slice.holder.tid(), slice.entry) {
            taken.entry(tid).or_default().push((at_ns / 1_000, by, cpu));
        }
    }
    let unseen = cpus
        .iter()
        .flatten()
        .filter(|slice| slice.entry == SwitchIn::Unseen && slice.start_ns / 1_000 > began_us)
        .count();
    // The last wakeup of each thread that has not been switched out since.
    let mut waking: HashMap<u32, &TraceLine> = HashMap::new();
    let (mut compared, mut missing, mut wrong) = (0_usize, Vec::new(), Vec::new());
    let within: Vec<&TraceLine> = lines.iter().filter(|line| (began_us..ended_us).contains(&line.at_us)).collect();
    ensure_items_are_queued_by(&within, &cpus)?;
    for line in within.into_iter().filter(|line| line.event.starts_with("sched_")) {
        if line.event == "sched_waking" {
            waking.extend(field(line, "pid=").map(|tid| (tid, line)));
            continue;
        }
        let left = field(line, "prev_pid=").filter(|_| line.fields.contains("prev_state=R"));
        // It did not block, or was not asleep when it was woken.
        left.and_then(|tid| waking.remove(&tid));
        let Some((tid, line)) = field(line, "next_pid=").and_then(|tid| waking.remove_entry(&tid)) else { continue };
        compared += 1;
        let of = taken.get(&tid).into_iter().flatten();
        let near = of.filter(|(at_us, _, cpu)| at_us.abs_diff(line.at_us) <= APART_US && *cpu == line.cpu);
        match near.min_by_key(|(at_us, ..)| at_us.abs_diff(line.at_us)) {
            None => missing.push(line),
            Some(&(_, by, _)) if !is_same(line, by) => wrong.push((line, by)),
            Some(_) => {}
        }
    }
    println!("{compared} wakings, {} missing, {} otherwise; {unseen} unseen; {lost:?}", missing.len(), wrong.len());
    let off = missing.len() + wrong.len();
    let tolerated = by_chance(compared, if is_emulated() { 0.01 } else { 0.001 });
    ensure!(
        compared >= 1_000 && off <= tolerated,
        "{off} of {compared}: {:?} {:?}",
        missing.iter().take(20),
        wrong.iter().take(20)
    );
    Ok(())
}

/// Checks that each work item's queuer matches the trace.
fn ensure_items_are_queued_by(lines: &[&TraceLine], cpus: &[Vec<RunSlice>]) -> Result<()> {
    // `work struct=00000000de996d5a function=…`, and `work struct 00000000de996d5a: function …`.
    let item = |line: &TraceLine| {
        let rest = line.fields.split_once("work struct")?.1.trim_start_matches(['=', ' ']);
        Some(rest.split([':', ' ']).next()?.to_owned())
    };
    let mut queued: HashMap<String, &TraceLine> = HashMap::new();
    // An emulated CPU may stop between the two.
    let apart_us = if is_emulated() { 20 * APART_US } else { APART_US };
    let (mut compared, mut missing, mut wrong) = (0_usize, Vec::new(), Vec::new());
    for line in lines.iter().filter(|line| line.event.starts_with("workqueue_")) {
        let Some(item) = item(line) else { continue };
        if line.event == "workqueue_queue_work" {
            queued.insert(item, line);
            continue;
        }
        // Some items run in softirqs.
        let is_in_softirq = line.flags.chars().nth(2) == Some('s');
        let Some(by) = queued.remove(&item).filter(|_| !is_in_softirq) else { continue };
        compared += 1;
        let of = cpus.get(line.cpu as usize).into_iter().flatten();
        let of = of.filter(|slice| slice.holder.tid() == Some(line.tid));
        let near = of.filter(|slice| (slice.start_ns / 1_000).abs_diff(line.at_us) <= apart_us);
        let entries: Vec<SwitchIn> = near.map(|slice| slice.entry).collect();
        let is_it = |entry: &SwitchIn| match *entry {
            SwitchIn::Queued { at_ns, by: queuer, cpu } => {
                (at_ns / 1_000).abs_diff(by.at_us) <= apart_us && cpu == by.cpu && is_same(by, queuer)
            }
            _ => false,
        };
        if entries.iter().any(is_it) {
            continue;
        }
        let has_one = entries.iter().any(|entry| matches!(entry, SwitchIn::Queued { .. }));
        if has_one { wrong.push((by, entries)) } else { missing.push(by) }
    }
    println!("{compared} items, {} without a queuer, {} with another one", missing.len(), wrong.len());
    // Two items that are queued at a time may share a slot.
    let tolerated = by_chance(compared, if is_emulated() { 0.02 } else { 0.01 });
    ensure!(
        compared >= if is_emulated() { 3 } else { 20 } && missing.len() + wrong.len() <= tolerated,
        "{:?} {:?}",
        missing.iter().take(20).collect::<Vec<_>>(),
        wrong.iter().take(20).collect::<Vec<_>>()
    );
    Ok(())
}

/// Maximum time between a BPF program and the kernel's trace of one event, in microseconds.
const APART_US: u64 = 50;
