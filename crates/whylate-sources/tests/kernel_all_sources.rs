// SPDX-License-Identifier: MIT OR Apache-2.0
//! All sources at once, on one account of the CPUs, with disturbances of known cause and length. Runs as root.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use support::fixtures::late_work::{blamed_ns, common_ns};
use support::machine::cpus::{TestCpus, pin_to};
use support::machine::lock::lock_machine;
use support::oracles::chance::{by_chance, in_rounds};
use support::workloads::disturbances::{disturb, is, is_unsupported};
use support::{WRONG_BY_CHANCE, is_emulated, wanted_events};
use whylate_model::blame::Evidence;
use whylate_model::sources::{IRQSOFF, TIMERLAT};
use whylate_model::{Cause, CauseKind, LateEvent};
use whylate_sources::inject::disturbance::{Kind, Policy};
use whylate_sources::inject::sqpoll::{Load, Plan};
use whylate_sources::irqsoff::IrqsoffOptions;
use whylate_sources::timerlat::TimerlatOptions;
use whylate_sources::{CommonOptions, Measuring, Session, sources};

/// Length of a disturbance, and the threshold: most of that length.
const LENGTH_NS: u64 = 8_000_000;
const LATE_NS: u64 = 5_000_000;
/// Disturbances per round.
const TIMES: u64 = 60;
const DEADLINE: Duration = Duration::from_secs(300);
/// Reading it queues a work item on each CPU.
const MAKES_ITEMS: &str = "/proc/sys/vm/stat_refresh";

type Sources = Vec<(&'static str, Measuring)>;

/// Attaches every source, to explain what is late on the disturbed CPU.
fn attach(test_cpus: TestCpus, session: &Session) -> Result<Sources> {
    let mut every = sources();
    for source in &mut every {
        // Not as coarse as an overview on a machine with expensive timers, and only where it is disturbed.
        if source.info().card.name == IRQSOFF.name {
            *source = Box::new(IrqsoffOptions { period_ns: Some(1_000_000), ..IrqsoffOptions::default() });
        } else if source.info().card.name == TIMERLAT.name {
            let (backend, cpus) = (Some("bpf".to_owned()), vec![test_cpus.disturbed]);
            *source = Box::new(TimerlatOptions { backend, cpus, ..TimerlatOptions::default() });
        }
    }
    let mut attached = Sources::new();
    for mut source in every {
        source.ask(CommonOptions { explain_over_ns: Some(LATE_NS), keep_evidence: true, ..CommonOptions::default() });
        attached.push((source.info().card.name, source.attach(session)?));
    }
    session.begin()?;
    Ok(attached)
}

/// Maximum memory of the maps of all sources in detail, in bytes: that of the whole machine, for each of the first CPUs
/// (up to which rings of intervals have full length), and for each further CPU.
const MAX_MAP_BYTES: u64 = 40_000_000;
const MAX_MAP_BYTES_PER_CPU: u64 = 4_000_000;
const CPUS_WITH_FULL_RINGS: u64 = 32;
const MAX_MAP_BYTES_PER_FURTHER_CPU: u64 = 300_000;
/// Maximum number of descriptors that all sources open, on a machine and for each CPU (heartbeats, perf events).
const MAX_DESCRIPTORS: u64 = 240;
const MAX_DESCRIPTORS_PER_CPU: u64 = 8;

/// Returns the open descriptors of this process: how many are of which kind.
fn descriptors() -> Result<BTreeMap<String, usize>> {
    let open = std::fs::read_dir("/proc/self/fd")?.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let mut by_kind: BTreeMap<String, usize> = BTreeMap::new();
    for to in open {
        // Sockets and pipes have numbers.
        let kind = to.to_string_lossy().chars().filter(|of| !of.is_ascii_digit()).collect();
        *by_kind.entry(kind).or_default() += 1;
    }
    Ok(by_kind)
}

/// Returns the ID and the bytes of the map that a text in `/proc/self/fdinfo` describes; `None` if it describes no map,
/// or one that grows as it fills (`BPF_F_NO_PREALLOC`): before 6.4, the kernel reports its maximum.
fn map_of(fdinfo: &str) -> Result<Option<(u64, u64)>> {
    let field = |name: &str| fdinfo.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()));
    let (Some(id), Some(memory), Some(flags)) = (field("map_id"), field("memlock"), field("map_flags")) else {
        return Ok(None);
    };
    let flags = u64::from_str_radix(flags.trim_start_matches("0x"), 16)?;
    if flags & u64::from(libbpf_rs::libbpf_sys::BPF_F_NO_PREALLOC) != 0 {
        return Ok(None);
    }
    let (kind, length) = (field("map_type").unwrap_or_default(), field("max_entries").unwrap_or_default());
    let bytes = match memory.parse()? {
        // Before 6.4, for rings: the size of their elements, which is 0, times their length in bytes.
        0 if kind.parse() == Ok(libbpf_rs::libbpf_sys::BPF_MAP_TYPE_RINGBUF) => length.parse()?,
        bytes => bytes,
    };
    Ok(Some((id.parse()?, bytes)))
}

/// Returns the bytes of the maps of this process by ID, without those that grow.
fn map_bytes() -> Result<BTreeMap<u64, u64>> {
    let mut bytes = BTreeMap::new();
    for entry in std::fs::read_dir("/proc/self/fdinfo")? {
        // The descriptor of the directory is closed by the time that it is read.
        let Ok(fdinfo) = std::fs::read_to_string(entry?.path()) else { continue };
        bytes.extend(map_of(&fdinfo)?);
    }
    Ok(bytes)
}

/// Returns the bytes of the rings of intervals and of the shared pages of histograms, which are the largest tables.
fn bytes_of_largest_tables(cpus: u64) -> u64 {
    const INTERVAL: u64 = 64;
    const PAGES: u64 = 32_768 * 128;
    let of_cpu = 1_u64 << ((1_u64 << 20) / cpus).max(1).ilog2().clamp(12, 15);
    cpus * of_cpu * INTERVAL + PAGES
}

/// Returns the maximum memory of the maps of all sources.
fn max_map_bytes(cpus: u64) -> u64 {
    let with_full_rings = cpus.min(CPUS_WITH_FULL_RINGS);
    MAX_MAP_BYTES + with_full_rings * MAX_MAP_BYTES_PER_CPU + (cpus - with_full_rings) * MAX_MAP_BYTES_PER_FURTHER_CPU
}

/// Has work items, and a thread that naps all the time, wait on the disturbed CPU until it is over.
fn wait_there<'scope>(scope: &'scope Scope<'scope, '_>, cpu: u32, over: &'scope AtomicBool) {
    scope.spawn(|| {
        // It shares its CPU with the observer, and each disturbance has to find a waiting item.
        let _ = rustix::process::setpriority_process(None, -15);
        while !over.load(Ordering::Relaxed) {
            // A machine without it has no waiting items, which the test notices.
            let _ = std::fs::read(MAKES_ITEMS);
            thread::sleep(Duration::from_micros(300));
        }
    });
    let sleeper = thread::Builder::new().name("test-sleeper".to_owned());
    let sleeper = sleeper.spawn_scoped(scope, move || {
        pin_to(cpu).expect("a thread may be pinned");
        while !over.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_micros(300));
        }
    });
    sleeper.expect("there is room for a thread");
}

/// Ends the waiting threads, also after a failure.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn span(event: &LateEvent) -> Range<u64> {
    match event.evidence.as_deref() {
        Some(Evidence::Work(of)) => of.queued_ns..of.started_ns,
        Some(Evidence::Timer(of)) => of.due_ns..of.thread_ns,
        Some(Evidence::Tick(of)) => of.due_ns..of.came_ns,
        Some(Evidence::Runnable(of)) => of.runnable_ns..of.running_ns,
        Some(Evidence::Request(of)) => of.submitted_ns..of.completed_ns,
        None => panic!("the evidence was asked for"),
    }
}

fn is_because(event: &LateEvent, made: &[Range<u64>]) -> bool {
    let common: u64 = made.iter().map(|made| common_ns(made, &span(event))).sum();
    common * 20 >= event.latency_ns * 11
}

/// Returns whether each source has somewhat more events than are needed.
fn has_enough(late: &BTreeMap<&'static str, Vec<LateEvent>>, made: &[Range<u64>], touched: &[&str]) -> bool {
    let seen = |name: &&str| late.get(name).map_or(0, |all| all.iter().filter(|event| is_because(event, made)).count());
    touched.iter().all(|name| seen(name) >= wanted_events() * 11 / 10)
}

/// Returns, by source, what was late on the disturbed CPU mostly by a disturbance, once each of `touched` has enough.
fn late_because(
    kind: Kind,
    test_cpus: TestCpus,
    touched: &[&'static str],
) -> Result<BTreeMap<&'static str, Vec<LateEvent>>> {
    pin_to(test_cpus.tool)?;
    let session = Session::of_several();
    let mut sources = attach(test_cpus, &session)?;
    // The submission thread spins, which is a load for all that wait there.
    let load =
        Load::start(&Plan { sq_cpu: Some(test_cpus.disturbed), app_cpu: Some(test_cpus.tool), ..Plan::default() })?;
    let over = AtomicBool::new(false);
    let mut late: BTreeMap<&'static str, Vec<LateEvent>> = BTreeMap::new();
    let mut made = Vec::new();
    let outcome = thread::scope(|scope| {
        let _ended = Ended(&over);
        wait_there(scope, test_cpus.disturbed, &over);
        let began = Instant::now();
        let mut outcome = Ok(());
        while outcome.is_ok() && !has_enough(&late, &made, touched) && began.elapsed() < DEADLINE {
            let round = scope.spawn(|| disturb(kind, test_cpus.disturbed, LENGTH_NS, TIMES, 3 * LENGTH_NS));
            while !round.is_finished() {
                drain(&mut sources, test_cpus, &mut late)?;
                thread::sleep(Duration::from_millis(50));
            }
            drain(&mut sources, test_cpus, &mut late)?;
            outcome = round.join().expect("disturbing does not panic").map(|round| made.extend(round));
        }
        outcome
    });
    drop(load);
    outcome?;
    let lost: BTreeMap<_, _> = session.take_lost();
    println!("{} disturbances; the account has lost {lost:?}", made.len());
    for (name, source) in &mut sources {
        let (all, mine) = (late[name].len(), late[name].iter().filter(|event| is_because(event, &made)).count());
        println!("{name}: {mine} of {all} late events are because of them; lost {:?}", source.snapshot()?.lost);
    }
    late.values_mut().for_each(|events| events.retain(|event| is_because(event, &made)));
    Ok(late)
}

fn drain(sources: &mut Sources, test_cpus: TestCpus, late: &mut BTreeMap<&'static str, Vec<LateEvent>>) -> Result<()> {
    for (name, source) in sources {
        let events = late.entry(name).or_default();
        source.drain_late(Duration::ZERO, &mut |event| {
            if event.cpu == test_cpus.disturbed {
                assert!(!event.subject.is_empty(), "{name} does not say what was late");
                events.push(event);
            }
        })?;
    }
    Ok(())
}

/// Checks that each of these sources has enough events, names the cause in almost all, and that all use the same name.
fn is_blamed_by(kind: Kind, touched: &[&'static str], is_true: impl Fn(&Cause) -> bool) -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    if is_emulated() {
        println!("skipped: an emulated CPU has other causes too, and each source has a test of its own there");
        return Ok(());
    }
    in_rounds(|| {
        let late = match late_because(kind, test_cpus, touched) {
            Err(error) if is_unsupported(&error) => return Ok(()),
            late => late?,
        };
        let mut names = BTreeSet::new();
        for &name in touched {
            let events = late.get(name).with_context(|| format!("{name} has seen nothing"))?;
            for event in events {
                let sum: u64 = event.causes.iter().map(|cause| cause.ns).sum();
                ensure!(sum == event.latency_ns, "the causes add up to {sum}: {event:?}");
            }
            let (right, wrong): (Vec<_>, Vec<_>) =
                events.iter().partition(|event| event.causes.first().is_some_and(&is_true));
            let total_ns: u64 = events.iter().map(|event| event.latency_ns).sum();
            let unknown_ns: u64 = events.iter().map(|event| blamed_ns(event, &[CauseKind::Unknown], "")).sum();
            println!(
                "{name}: {} of {} name the true cause; unknown: {unknown_ns} of {total_ns} ns",
                right.len(),
                events.len()
            );
            for event in wrong.iter().take(3) {
                println!("another cause: {:?} of {:?}", event.causes, event.labels);
            }
            ensure!(events.len() >= wanted_events(), "{name}: only {} late events", events.len());
            ensure!(wrong.len() <= by_chance(events.len(), WRONG_BY_CHANCE), "{name}: too few are right");
            ensure!(unknown_ns * 100 <= total_ns * 5, "{name}: too much is unknown");
            names.extend(right.iter().map(|event| event.causes[0].who.by_name()));
        }
        ensure!(names.len() == 1, "one disturbance has several names: {names:?}");
        Ok(())
    })
}

#[test]
fn bounds_of_maps_hold_their_largest_tables_on_any_machine() {
    let tables = [1, 2, 32, 64, 256].map(bytes_of_largest_tables);
    assert_eq!(tables, [6_291_456, 8_388_608, 71_303_168, 71_303_168, 71_303_168]);
    assert_eq!([1, 2, 32, 132].map(max_map_bytes), [44_000_000, 48_000_000, 168_000_000, 198_000_000]);
    for cpus in [1, 2, 16, 17, 32, 33, 128, 240, 256, 1_024, 8_192] {
        assert!(bytes_of_largest_tables(cpus) < max_map_bytes(cpus), "{cpus} CPUs");
    }
}

#[test]
fn fdinfo_has_the_bytes_of_a_map() {
    let fdinfo = |kind: u32, flags: &str, memory: u64| {
        format!(
            "pos:\t0\nflags:\t02000002\nmap_type:\t{kind}\nkey_size:\t0\nmax_entries:\t4096\nmap_flags:\t{flags}\n\
             memlock:\t{memory}\nmap_id:\t17\nfrozen:\t0\n"
        )
    };
    let map = |kind, flags, memory| map_of(&fdinfo(kind, flags, memory)).expect("it is a map's");
    assert_eq!(map(2, "0x400", 8192), Some((17, 8192)));
    // A ring on recent kernels, and before 6.4.
    assert_eq!((map(27, "0x0", 12_888), map(27, "0x0", 0)), (Some((17, 12_888)), Some((17, 4096))));
    // Other maps have no memory of their own then, and a map that grows is left out.
    assert_eq!((map(3, "0x0", 0), map(1, "0x1", 8192)), (Some((17, 0)), None));
    assert_eq!(map_of("pos:\t0\nflags:\t02\n").expect("it is no map's"), None);
}

#[test]
fn maps_and_descriptors_of_all_sources_stay_few() -> Result<()> {
    let Some(_machine) = lock_machine() else { return Ok(()) };
    let (before, open_before) = (map_bytes()?, descriptors()?);
    let session = Session::of_several();
    let mut attached = Sources::new();
    for mut source in sources() {
        source.ask(CommonOptions { explain_over_ns: Some(LATE_NS), in_detail: true, ..CommonOptions::default() });
        attached.push((source.info().card.name, source.attach(&session)?));
    }
    session.begin()?;
    let open = descriptors()?;
    let count = |open: &BTreeMap<String, usize>| open.values().sum::<usize>() as u64;
    let opened = count(&open).saturating_sub(count(&open_before));
    let maps = map_bytes()?.into_iter().filter(|(id, _)| !before.contains_key(id));
    let (maps, bytes) = maps.fold((0, 0), |(count, sum), (_, bytes)| (count + 1, sum + bytes));
    let cpus = u64::from(whylate_sources::kernel::cpus::highest_possible()?) + 1;
    let (least, most) = (bytes_of_largest_tables(cpus), max_map_bytes(cpus));
    println!(
        "{} sources: {opened} descriptors, {maps} maps with {bytes} bytes on {cpus} CPUs, of at most {most}",
        attached.len()
    );
    ensure!(bytes > least, "the maps take {bytes} bytes, less than their largest tables with {least}");
    ensure!(bytes <= most, "the maps take {bytes} bytes, and may take {most}");
    let most = MAX_DESCRIPTORS + cpus * MAX_DESCRIPTORS_PER_CPU;
    ensure!(opened <= most, "{opened} descriptors were opened, and {most} may be; open are {open:?}");
    Ok(())
}

#[test]
fn each_source_blames_interrupts_off() -> Result<()> {
    let touched = ["irqsoff", "wq", "sqpoll", "timerlat"];
    is_blamed_by(Kind::IrqsOff, &touched, |cause| is(cause, CauseKind::IrqsOff, "whylate-irqsoff:"))
}

#[test]
fn each_source_blames_thread_of_higher_priority() -> Result<()> {
    let touched = ["wq", "offcpu", "sqpoll", "timerlat"];
    is_blamed_by(Kind::Hog(Policy::Fifo(98)), &touched, |cause| is(cause, CauseKind::Thread, "whylate-hog:"))
}

#[test]
fn each_source_blames_softirq() -> Result<()> {
    let touched = ["wq", "offcpu", "timerlat"];
    is_blamed_by(Kind::Softirq, &touched, |cause| is(cause, CauseKind::Softirq, "hrtimer"))
}
