// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate selftest`: injects known delays, and checks what the sources report.

mod disks;
mod disturbed;
mod loads;
mod sleepers;

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use clap::Args;
use whylate_model::Card;
use whylate_model::selftest::{Check, Selftest, Verdict};
use whylate_model::sources::{BLOCK, IRQSOFF, OFFCPU, SQPOLL, TIMERLAT, WQ};
use whylate_sources::inject::disturbance;
use whylate_sources::kernel::clock;
use whylate_sources::kernel::cpu_choice;
use whylate_sources::kernel::cpus::{self, Machine};
use whylate_sources::kernel::host;
use whylate_sources::kernel::realtime::{self, RealtimeThread};
use whylate_sources::wq::WqOptions;
use whylate_sources::{AttachError, Session, Source as _};

use crate::cli::values::source;
use crate::cli::{SUCCESS, UsageError};
use crate::engine::watch::stop_at_signal;
use crate::json::write_line;
use crate::render::text::fit::{Fit, terminal_columns};
use crate::render::text::selftest;

/// Maximum number of tries of a check: other load on the machine disturbs it.
const TRIES: u32 = 3;
/// Maximum number of tries on an emulated CPU, which stops whenever the host runs something else.
const EMULATED_TRIES: u32 = 5;
/// Time for which running real-time threads are watched for.
const WATCHED: Duration = Duration::from_millis(500);
/// Exit status if a check failed.
const FAILED: u8 = 1;

/// Prove on this machine that the figures are right
///
/// The self-test causes known delays (work items, disabled interrupts, softirqs, a real-time thread that hogs a CPU,
/// sleeping threads, an io_uring submission thread, disk reads), and checks what each source reports and which culprit
/// it names.
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # disturb the last CPU for some 20 s in total
    whylate selftest
    # disturb CPU 2
    whylate selftest --cpu 2")]
pub struct Arguments {
    /// Disturb this CPU, not the last one
    #[arg(long, value_name = "N")]
    cpu: Option<u32>,
    /// Run even if real-time threads are active
    #[arg(long)]
    force: bool,
    /// Check only these sources, e.g. wq,offcpu
    #[arg(long, value_name = "SOURCES", value_delimiter = ',', value_parser = source)]
    sources: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Be the process of threads that sleep
    #[arg(long, hide = true)]
    sleepers: bool,
}

impl Arguments {
    /// Returns whether this is the process of sleeping threads that another whylate measures.
    pub fn is_subject(&self) -> bool {
        self.sleepers
    }
}

/// CPUs, lengths and tolerances of the checks.
pub(crate) struct Setup<'a> {
    /// CPU that is disturbed.
    cpu: u32,
    /// Another CPU, or the same if there is only one.
    other: u32,
    /// Length of a disturbance; longer on an emulated CPU, which is late by milliseconds by itself.
    length_ns: u64,
    /// Tolerance between an expected and a measured time.
    apart_ns: u64,
    is_emulated: bool,
    stop: &'a AtomicBool,
}

type Try = fn(&Setup<'_>) -> Result<Vec<Check>, AttachError>;

/// All checks, in the order of the cards: source, what is injected, and the check.
const CHECKS: [(&Card, &str, Try); 8] = [
    (&WQ, loads::WORK, loads::work),
    (&TIMERLAT, disturbed::IRQS_OFF, disturbed::timer_and_irqs_off),
    (&TIMERLAT, disturbed::SOFTIRQ, disturbed::timer_and_softirq),
    (&TIMERLAT, disturbed::HOG, disturbed::timer_and_hog),
    (&IRQSOFF, disturbed::IRQS_OFF, disturbed::windows),
    (&OFFCPU, loads::SLEEP, loads::sleep),
    (&SQPOLL, loads::DUTY, loads::duty),
    (&BLOCK, disks::READS, disks::reads),
];

/// Runs the checks, prints the result and returns the exit status.
///
/// # Errors
/// Fails if the run is refused, no check can run, or the output cannot be written.
pub fn run(arguments: &Arguments) -> anyhow::Result<u8> {
    if arguments.is_subject() {
        return sleepers::be().map(|()| SUCCESS);
    }
    let (stop, by) = stop_at_signal()?;
    let setup = setup(arguments, &stop)?;
    if !arguments.force {
        refuse(&realtime::active_threads(WATCHED).context("cannot find out whether real-time threads are active")?)?;
    }
    if let Err(error @ AttachError::NotPermitted) = WqOptions::default().attach(&Session::of_one()) {
        return Err(anyhow!(error).context("cannot run the self-test"));
    }
    disturbance::is_alone()?;
    announce(&setup);
    let start_unix_ns = clock::unix_ns();
    let mut checks = Vec::new();
    let is_asked = |card: &Card| arguments.sources.is_empty() || arguments.sources.iter().any(|name| name == card.name);
    for (card, injected, attempt) in CHECKS.into_iter().filter(|(card, ..)| is_asked(card)) {
        let tried = tried(card, injected, attempt, &setup)?;
        if stop.load(Ordering::Relaxed) {
            break;
        }
        checks.extend(tried);
    }
    let host = host::name();
    let result = Selftest::new(&host, start_unix_ns, setup.cpu, checks);
    let mut out = Fit::stdout(!arguments.json);
    if arguments.json {
        write_line(&mut out, &result)?;
    } else {
        selftest::write(&mut out, &result, terminal_columns())?;
    }
    out.flush()?;
    if stop.load(Ordering::Relaxed) {
        say!("whylate: interrupted before it was done");
        return Ok(128 + by.load(Ordering::Relaxed) as u8);
    }
    if result.passed + result.failed == 0 {
        return Err(AttachError::Unsupported("nothing could be tried here".to_owned()).into());
    }
    Ok(if result.failed > 0 { FAILED } else { SUCCESS })
}

fn setup<'a>(arguments: &Arguments, stop: &'a AtomicBool) -> anyhow::Result<Setup<'a>> {
    let online = cpus::online().context("cannot list the CPUs")?;
    let usable: Vec<u32> = cpu_choice::usable().context("cannot list the usable CPUs")?;
    let cpu = arguments.cpu.or_else(|| usable.last().or(online.last()).copied()).context("there is no CPU")?;
    if !online.contains(&cpu) {
        let reason = format!("CPU {cpu} is offline or not there: choose one of {}", cpus::list(&online));
        return Err(UsageError(anyhow!(reason)).into());
    }
    let is_emulated = Machine::this() == Machine::Emulated;
    let other = usable.into_iter().find(|&other| other != cpu).unwrap_or(cpu);
    let (length_ns, apart_ns) = if is_emulated { (45_000_000, 20_000_000) } else { (10_000_000, 300_000) };
    Ok(Setup { cpu, other, length_ns, apart_ns, is_emulated, stop })
}

/// Refuses to run while real-time threads run, as the checks would delay them.
fn refuse(at_work: &[RealtimeThread]) -> Result<(), AttachError> {
    let Some(busiest) = at_work.iter().max_by_key(|thread| thread.ran_ns) else { return Ok(()) };
    Err(AttachError::Unsupported(format!(
        "{} real-time thread{} active here, above all {} ({}), and would be disturbed: stop them first, or use --force",
        at_work.len(),
        if at_work.len() == 1 { " is" } else { "s are" },
        busiest.name,
        busiest.policy
    )))
}

fn announce(setup: &Setup<'_>) {
    let Setup { cpu, other, length_ns, .. } = setup;
    let disturbances = 4 * disturbed::TIMES;
    // A failed write of this notice does not matter.
    let _ = writeln!(
        io::stderr(),
        "whylate: about 20 s, longer on a busy machine. What is injected:\n\
         \x20 CPU {cpu}: blocked {disturbances} times for {} ms, by disabled interrupts, a softirq or a real-time thread\n\
         \x20 CPU {cpu}: 50 work items of 1 ms each\n\
         \x20 CPU {cpu}: a submission thread that works for a third of 3 s; a real-time thread on CPU {other} watches it\n\
         \x20 disk: 16 threads that write for about 1 s",
        length_ns / 1_000_000
    );
}

/// Repeats a check until it passes, up to the maximum number of tries.
fn tried(card: &Card, injected: &str, attempt: Try, setup: &Setup<'_>) -> anyhow::Result<Vec<Check>> {
    let (mut tries, mut failed) = (0, None);
    let most = if setup.is_emulated { EMULATED_TRIES } else { TRIES };
    loop {
        tries += 1;
        let mut checks = match attempt(setup) {
            Ok(checks) => checks,
            Err(AttachError::NotPermitted) => return Err(AttachError::NotPermitted.into()),
            // Unsupported after a failed try: the failure counts.
            Err(AttachError::Unsupported(reason)) => {
                return Ok(failed.unwrap_or_else(|| vec![Check::skipped(card.name, injected, reason)]));
            }
            Err(error) => {
                let reason = format!("{:#}", anyhow!(error));
                vec![Check { reason, ..Check::new(card.name, "", injected, "") }]
            }
        };
        checks.iter_mut().for_each(|check| check.tries = tries);
        let is_right = checks.iter().all(|check| check.verdict == Verdict::Pass);
        if is_right || tries == most || setup.stop.load(Ordering::Relaxed) {
            return Ok(checks);
        }
        failed = Some(checks);
    }
}

#[cfg(test)]
mod tests {
    use whylate_model::ActorName;

    use super::*;

    #[test]
    fn refuses_while_real_time_threads_run() {
        assert!(refuse(&[]).is_ok());
        let thread = |name: &str, tid, ran_ns| RealtimeThread {
            name: ActorName::thread(name, tid),
            policy: "fifo",
            ran_ns,
            cpus: vec![0],
            allowed: vec![0],
        };
        let said = refuse(&[thread("jackd", 7, 5), thread("rt", 8, 9)]).map_err(|error| error.to_string());
        let expected = "2 real-time threads are active here, above all rt:8 (fifo), and would be disturbed: stop them first, or use --force";
        assert_eq!(said, Err(expected.to_owned()));
    }
}
