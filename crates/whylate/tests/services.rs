// SPDX-License-Identifier: MIT OR Apache-2.0
//! Services with known causes of slowness, beside ones that are idle by design, as the overview reports them.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/oracles/chance.rs"]
mod chance;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;
use whylate_model::CauseKind::{self, Disk, DiskQueue, IrqsOff, Running, Thread, Throttled, Timer};
use whylate_model::overview::Overview;
use whylate_model::programs::HeldUpProgram;
use whylate_sources::inject::disturbance::{Kind, Plan, run};

use chance::in_rounds;
use lock::lock_machine;
use running::whylate;

const MS_NS: u64 = 1_000_000;

/// A kind of service in `services/service.py`.
struct Slow {
    kind: &'static str,
    /// Whether the printed lines name the cause.
    is_explained: fn(&str) -> bool,
    /// Expected culprit in the overview: kinds of causes, and a prefix of the name. Without a kind, the name is among
    /// the waited-for sleepers.
    culprit: (&'static [CauseKind], &'static str),
    /// Expected main cause of the time for which the service is held up, by a prefix of its name. `None`: the waits are long,
    /// or the service is not held up, so that `culprit` is enough.
    held_up_by: Option<&'static str>,
}

/// A service whose single waits are too short to be late.
const fn short(kind: &'static str, is_explained: fn(&str) -> bool, held_up_by: &'static str) -> Slow {
    Slow { kind, is_explained, culprit: (&[], "nobody"), held_up_by: Some(held_up_by) }
}

const SERVICES: [Slow; 19] = [
    Slow {
        kind: "fifo",
        is_explained: |text| text.contains("behind fifo-hog:"),
        culprit: (&[Thread], "fifo-hog:"),
        held_up_by: None,
    },
    Slow {
        kind: "flock",
        is_explained: |text| text.contains("flock-holder:"),
        culprit: (&[Timer], "flock-holder:"),
        held_up_by: None,
    },
    Slow {
        kind: "disk",
        is_explained: |text| text.contains(" disk "),
        culprit: (&[Disk, DiskQueue], ""),
        held_up_by: None,
    },
    Slow {
        kind: "peer",
        is_explained: |text| text.contains("peer-peer:"),
        culprit: (&[], "peer-peer:"),
        held_up_by: None,
    },
    Slow {
        kind: "niced",
        is_explained: |text| text.contains("behind niced-spinner:"),
        culprit: (&[Thread], "niced-spinner:"),
        held_up_by: None,
    },
    Slow {
        kind: "quota",
        is_explained: |text| text.contains("CPU quota"),
        culprit: (&[Throttled], "cgroup /whylate-trial"),
        held_up_by: None,
    },
    Slow {
        kind: "irqsoff",
        is_explained: |text| text.contains("had interrupts off"),
        culprit: (&[IrqsOff], "whylate-irqsoff:"),
        held_up_by: None,
    },
    Slow {
        kind: "interpreter",
        is_explained: |text| text.contains("futex") && text.contains("behind service:"),
        // A thread releases the lock once another has waited for 5 ms.
        culprit: (&[], "service:"),
        held_up_by: None,
    },
    Slow { kind: "own", is_explained: is_mostly_on_cpu, culprit: (&[Running], "service:"), held_up_by: None },
    Slow {
        kind: "worker",
        is_explained: |text| text.contains("worker-worker:"),
        culprit: (&[Running], "worker-worker:"),
        held_up_by: None,
    },
    Slow {
        kind: "record",
        is_explained: |text| text.contains("record-holder:"),
        culprit: (&[Running], "record-holder:"),
        held_up_by: None,
    },
    Slow {
        kind: "child",
        is_explained: |text| text.contains("child-child"),
        culprit: (&[Running], "child-child"),
        held_up_by: None,
    },
    short("indexer", |text| text.contains("indexer-holder:"), "indexer-holder:"),
    short("journal", |text| text.contains("journal-holder:"), "journal-holder:"),
    short("chatty", |text| text.contains("chatty-worker:"), "chatty-worker:"),
    short("chained", |text| text.contains("chained-back:"), "chained-back:"),
    short("socket_peer", |text| text.contains("socket-peer:"), "socket-peer:"),
    short("logger", |text| text.contains("logger-reader:"), "logger-reader:"),
    short("period", |text| text.contains("CPU quota"), "cgroup /whylate-trial"),
];

/// Mostly on-CPU, not counting the time that other threads occupy its CPU.
fn is_mostly_on_cpu(text: &str) -> bool {
    let share = |state: &str| {
        let row = text.lines().find(|line| line.starts_with(state))?;
        row.split_whitespace().find_map(|cell| cell.strip_suffix('%'))?.parse::<f64>().ok()
    };
    let ready = share("waiting for a CPU ").unwrap_or(0.0);
    share("on CPU ").is_some_and(|percent| percent > (100.0 - ready) / 2.0)
}

/// Running services, stopped on drop.
struct Services {
    _directory: TempDir,
    program: Child,
}

impl Services {
    /// Returns `None` and prints why if they cannot run.
    fn start(kinds: &[&str]) -> Result<Option<Self>> {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let mut command = Command::new("python3");
        command.args(["-c", include_str!("services/service.py")]).arg(directory.path()).args(kinds);
        let Ok(mut program) = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn()
        else {
            println!("skipped: there is no python3");
            return Ok(None);
        };
        let mut line = String::new();
        BufReader::new(program.stdout.take().context("a pipe")?).read_line(&mut line)?;
        let services = Services { _directory: directory, program };
        ensure!(line == "ready\n", "{kinds:?} do not start");
        Ok(Some(services))
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        drop(self.program.stdin.take());
        let _ = self.program.wait();
    }
}

fn look(duration: &str) -> Result<Overview> {
    let output = whylate(&["--json", "-d", duration]).output()?;
    ensure!(output.status.code() == Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("it printed no look")
}

/// Returns the culprit's total delay.
fn blamed_ns(look: &Overview, (kinds, name): (&[CauseKind], &str)) -> u64 {
    let of = look
        .culprits
        .iter()
        .filter(|culprit| kinds.contains(&culprit.kind) && culprit.who.to_string().starts_with(name));
    of.map(|culprit| culprit.total_ns).sum()
}

/// Returns whether the overview says that `culprit` is the main cause that holds up a program with this name or prefix.
fn is_held_up(look: &Overview, program: &str, culprit: &str) -> bool {
    let of = look.programs.held_up.iter().filter(|held_up| held_up.program().to_string().starts_with(program));
    let causes = of.filter_map(|held_up| held_up.parts.first()?.causes.first());
    causes.into_iter().any(|cause| cause.who.to_string().starts_with(culprit))
}

/// Every service's culprit is listed, and idle services are never late.
#[test]
fn overview_names_culprits_of_slow_services_and_ignores_idle_ones() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(_services) = Services::start(&["flock", "own", "niced", "worker", "indexer", "idle"])? else {
        return Ok(());
    };
    let truth: [(&[CauseKind], &str); 4] = [
        (&[Timer], "flock-holder:"),
        (&[Running], "own-service:"),
        (&[Thread], "niced-spinner:"),
        (&[Running], "worker-worker:"),
    ];
    in_rounds(|| {
        let look = look("3s")?;
        let offcpu = look.sources.iter().find(|source| source.held_up.is_some()).context("none follows waits")?;
        println!("{:?}, lost {:?} {:?}", offcpu.held_up, offcpu.lost, look.lost);
        for culprit in truth {
            let ns = blamed_ns(&look, culprit);
            println!("{culprit:?}: {ns} ns");
            ensure!(ns >= 100 * MS_NS, "{culprit:?} has {ns} ns of {:?}", look.culprits);
        }
        let programs = &look.programs;
        ensure!(is_held_up(&look, "indexer-service", "indexer-holder:"), "the indexer is not named: {programs:?}");
        let is_idle = |program: &HeldUpProgram| program.program().to_string().starts_with("idle-");
        ensure!(!programs.held_up.iter().any(is_idle), "what is idle by design is held up: {programs:?}");
        let idle_ns = blamed_ns(&look, (&[Timer], "idle-"));
        ensure!(idle_ns == 0, "what is idle by design counts as late by {idle_ns} ns: {:?}", look.culprits);
        let attributed: u64 = look.culprits.iter().map(|culprit| culprit.total_ns).sum();
        let late: u64 = look.sources.iter().map(|source| source.late_ns).sum();
        ensure!(
            attributed + look.unexplained().total_ns == late,
            "{attributed} ns are blamed on somebody, and {late} ns were late"
        );
        Ok(())
    })
}

/// Results of the service's overview and of the machine's.
struct Trial {
    is_explained: bool,
    is_blamed: bool,
    /// The overview said that nothing was late, although something was.
    is_silent: bool,
}

#[test]
fn explains_each_slow_service() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    // A third of the kinds; `make trial` runs all.
    for slow in SERVICES.into_iter().step_by(3) {
        in_rounds(|| {
            let Some(explained) = trial(&slow, "2s")? else { return Ok(()) };
            let Trial { is_explained, is_blamed, is_silent } = explained;
            println!("{}: told {is_explained}, blamed {is_blamed}, silent {is_silent}", slow.kind);
            ensure!(is_explained && is_blamed && !is_silent, "{} is not told why", slow.kind);
            Ok(())
        })?;
    }
    Ok(())
}

/// Repeats each kind many times; `make trial` sets how often.
#[test]
fn explains_slow_services_in_a_trial() -> Result<()> {
    let Some(runs) = std::env::var("WHYLATE_TRIAL").ok().and_then(|runs| runs.parse::<u32>().ok()) else {
        println!("skipped: that is what `make trial` does");
        return Ok(());
    };
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let (mut explained, mut blamed, mut all, mut silent) = (0, 0, 0, 0);
    for slow in SERVICES {
        let mut of_kind = [0; 2];
        for _ in 0..runs {
            let Some(of_run) = trial(&slow, "10s")? else { return Ok(()) };
            of_kind[0] += u32::from(of_run.is_explained);
            of_kind[1] += u32::from(of_run.is_blamed);
            silent += u32::from(of_run.is_silent);
        }
        println!("{:<12} {:>3} of {runs} by --comm, {:>3} by the look", slow.kind, of_kind[0], of_kind[1]);
        (explained, blamed, all) = (explained + of_kind[0], blamed + of_kind[1], all + runs);
    }
    println!("{explained} of {all} by --comm, {blamed} by the look, which saw nothing late {silent} times");
    ensure!(explained * 100 >= all * 95, "{explained} of {all} are told why");
    ensure!(blamed * 100 >= all * 95, "of {blamed} of {all} the culprit is named");
    ensure!(silent == 0, "{silent} looks say that nothing was late");
    Ok(())
}

/// Takes both overviews at once.
fn trial(slow: &Slow, duration: &str) -> Result<Option<Trial>> {
    let Some(_services) = Services::start(&[slow.kind])? else { return Ok(None) };
    let over = AtomicBool::new(false);
    let (program, look) = thread::scope(|scope| {
        if slow.kind == "irqsoff" {
            let cpu = whylate_sources::kernel::cpus::online()?.last().copied();
            let plan = Plan { kind: Kind::IrqsOff, length_ns: 40 * MS_NS, times: 1_000, every_ns: 80 * MS_NS, cpu };
            let over = &over;
            // A kernel that cannot trace this counts as a miss.
            scope.spawn(move || run(&plan, over, &mut |_| Ok(())));
        }
        let program = scope.spawn(|| whylate(&["--comm", "service", "-d", duration]).output());
        let look = look(duration);
        over.store(true, Ordering::Relaxed);
        anyhow::Ok((program.join().expect("starting a program does not panic"), look))
    })?;
    let (program, look) = (program?, look?);
    let screen = String::from_utf8(program.stdout)?;
    let is_explained = (slow.is_explained)(&screen);
    if !is_explained {
        println!("{} is not explained:\n{screen}", slow.kind);
    }
    let (kinds, name) = slow.culprit;
    let held_up = look.sources.iter().filter_map(|source| source.held_up.as_ref());
    let sleepers: Vec<_> = held_up.flat_map(|held_up| &held_up.for_sleepers).collect();
    let slept_ns: u64 = sleepers.iter().filter(|of| of.sleeper.starts_with(name)).map(|of| of.total_ns).sum();
    let ns = if kinds.is_empty() { slept_ns } else { blamed_ns(&look, slow.culprit) };
    let is_blamed = slow.held_up_by.map_or(ns >= 100 * MS_NS, |culprit| is_held_up(&look, "service", culprit));
    if !is_blamed {
        println!("{} is not blamed on its culprit: {:?}", slow.kind, look.programs);
    }
    let says_late = look.sources.iter().any(|source| source.is_late);
    Ok(Some(Trial { is_explained, is_blamed, is_silent: !says_late && (!kinds.is_empty() || slept_ns == 0) }))
}
