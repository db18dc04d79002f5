// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate` without a command: one look at this machine by every source that can attach, what was late, and who made it late.

use std::io::{self, IsTerminal as _, Write};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use whylate_model::look::{Gatherer, Look, Unmeasured, late_from_ns};
use whylate_model::{LateEvent, Snapshot};
use whylate_sources::irqsoff::IrqsoffOptions;
use whylate_sources::offcpu::{Offcpu, OffcpuOptions};
use whylate_sources::sqpoll::SqpollOptions;
use whylate_sources::timerlat::TimerlatOptions;
use whylate_sources::wq::Wq;
use whylate_sources::{AttachError, Attached, Options, Source as _, Together, irqsoff, sqpoll, timerlat};

use crate::cli::duration_ns;
use crate::commands::watch::{Ended, Watch};
use crate::output::json::write_line;
use crate::output::look;
use crate::output::table::terminal_columns;

/// How often late events are taken in, and the progress is shown.
const ROUND: Duration = Duration::from_millis(200);
/// Back to the line's start, and clear it.
const CLEAR_LINE: &str = "\r\x1b[K";

/// What a look takes.
#[derive(Debug, Args)]
pub struct Arguments {
    /// How long to look (e.g. 10s, 1m)
    #[arg(short, long, value_name = "DURATION", value_parser = duration_ns, default_value = "10s")]
    duration: u64,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Threads whose waits for a CPU `wq` and `sqpoll` tell.
const OF_OTHERS: [&str; 2] = ["kworker/", "iou-sqp-"];

/// A source by its name, and how it is attached so that it explains what is late.
type Attach = fn(u64) -> Result<Box<dyn Attached>, AttachError>;

/// The first has timers of its own on each CPU, which the common account goes by. Measured threads come last: what attaching does to others
/// is over then.
const SOURCES: [(&str, Attach); 5] = [
    ("irqsoff", |over_ns| {
        irqsoff::attach(&IrqsoffOptions { explain_over_ns: Some(over_ns), ..IrqsoffOptions::default() })
    }),
    ("wq", |over_ns| Wq.attach(&Options { explain_over_ns: Some(over_ns), phases: true, ..Options::default() })),
    ("offcpu", |over_ns| {
        let backend = Some("sample".to_owned());
        Offcpu.attach_with(&OffcpuOptions { backend, explain_over_ns: Some(over_ns), ..OffcpuOptions::default() })
    }),
    ("sqpoll", |over_ns| {
        Ok(Box::new(sqpoll::attach(&SqpollOptions { explain_over_ns: Some(over_ns), ..SqpollOptions::default() })?))
    }),
    // The kernel's tracer is one for everybody, who may be using it; programs measure the same.
    ("timerlat", |over_ns| {
        let backend = Some("bpf".to_owned());
        Ok(Box::new(timerlat::attach(&TimerlatOptions {
            backend,
            is_frugal: true,
            explain_over_ns: Some(over_ns),
            ..TimerlatOptions::default()
        })?))
    }),
];

struct Looking {
    name: &'static str,
    source: Box<dyn Attached>,
}

/// What measures, and what does not, or less well.
#[derive(Default)]
struct Sources {
    looking: Vec<Looking>,
    unmeasured: Vec<Unmeasured>,
    weaker: Vec<Unmeasured>,
    /// Their common account of the CPUs.
    account: Together,
}

/// Looks, and prints one screen.
///
/// # Errors
/// When no source can attach, a source fails, or the output cannot be written.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let watch = Watch::new().context("cannot watch for Ctrl-C")?;
    let progress = Progress::new();
    progress.show("attaching");
    let Sources { mut looking, mut unmeasured, weaker, account } = attach()?;
    // What came in while others were attached is of no common span. Much has: the second time takes no longer than an ordinary one.
    for Looking { source, .. } in &mut looking {
        source.snapshot()?;
        source.drain_late(Duration::ZERO, &mut |_| ())?;
    }
    let mut begins = Vec::new();
    for Looking { source, .. } in &mut looking {
        begins.push(end_unix_ns(&source.snapshot()?));
    }
    account.take_lost();
    let began = Instant::now();
    let mut gatherer = Gatherer::default();
    drain(&mut looking, &mut gatherer, |number, at_unix_ns| at_unix_ns >= begins[number])?;
    let end = began.checked_add(Duration::from_nanos(arguments.duration));
    loop {
        let round = Instant::now() + ROUND;
        let ended = watch.until(Some(end.map_or(round, |end| end.min(round))))?;
        drain(&mut looking, &mut gatherer, |number, at_unix_ns| at_unix_ns >= begins[number])?;
        if ended == Ended::OutputClosed {
            return Ok(());
        }
        if ended == Ended::Signal || end.is_some_and(|end| Instant::now() >= end) {
            break;
        }
        progress.show(&format!("{} of {} s", began.elapsed().as_secs(), arguments.duration / 1_000_000_000));
    }
    progress.show("detaching");
    let mut snapshots: Vec<Snapshot> = Vec::new();
    for Looking { source, .. } in &mut looking {
        snapshots.push(source.snapshot()?);
    }
    let ends: Vec<u64> = snapshots.iter().map(end_unix_ns).collect();
    drain(&mut looking, &mut gatherer, |number, at_unix_ns| (begins[number]..=ends[number]).contains(&at_unix_ns))?;
    let mut lost = account.take_lost();
    lost.retain(|_, count| *count > 0);
    drop((looking, account));
    progress.clear();
    snapshots.retain(|snapshot| {
        let has_lost = snapshot.lost.values().any(|&count| count > 0);
        let sees_any = snapshot.source != "sqpoll" || !snapshot.series.is_empty() || has_lost;
        if !sees_any {
            let reason = "no io_uring submission thread is there (a ring set up with IORING_SETUP_SQPOLL has one)";
            unmeasured.push(Unmeasured { source: "sqpoll".to_owned(), reason: reason.to_owned() });
        }
        sees_any
    });
    let look = Look { weaker, lost, ..gatherer.finish(&snapshots, unmeasured) };
    let mut out = io::BufWriter::new(io::stdout().lock());
    if arguments.json {
        write_line(&mut out, &look)?;
    } else {
        look::write(&mut out, &look, terminal_columns())?;
    }
    out.flush()?;
    Ok(())
}

/// Every source that can attach, and why others cannot.
fn attach() -> anyhow::Result<Sources> {
    let (mut attached, mut first) = (Sources::default(), None);
    for (name, attach) in SOURCES {
        let told = |reason| Unmeasured { source: name.to_owned(), reason };
        match attached.account.attach(|| attach(late_from_ns(name))) {
            Ok(source) => {
                // What is weaker of the account is told once.
                for weaker in source.weaker().into_iter().chain(source.chosen()) {
                    if attached.weaker.iter().all(|told| told.reason != weaker) {
                        attached.weaker.push(told(weaker.to_owned()));
                    }
                }
                attached.looking.push(Looking { name, source });
            }
            Err(error) => {
                // An account that goes by the timers of a source that is not there would go by none.
                if attached.looking.is_empty() {
                    attached.account = Together::default();
                }
                attached.unmeasured.push(told(error.to_string()));
                first.get_or_insert(error);
            }
        }
    }
    match first {
        Some(error) if attached.looking.is_empty() => {
            Err(anyhow::Error::from(error).context("cannot attach any source"))
        }
        _ => {
            attached.account.begin().context("cannot keep the account of the CPUs")?;
            Ok(attached)
        }
    }
}

fn end_unix_ns(snapshot: &Snapshot) -> u64 {
    snapshot.start_unix_ns + snapshot.duration_ns
}

/// Takes in late events that are within the span of their source, by its number: those from before it and after it are of no span.
fn drain(
    looking: &mut [Looking],
    gatherer: &mut Gatherer,
    is_within: impl Fn(usize, u64) -> bool,
) -> anyhow::Result<()> {
    for (number, Looking { name, source }) in looking.iter_mut().enumerate() {
        source.drain_late(Duration::ZERO, &mut |event: LateEvent| {
            // Waits that another source tells as its own count once.
            let is_others = *name == "offcpu"
                && event.labels.get("thread").is_some_and(|thread| OF_OTHERS.iter().any(|own| thread.starts_with(own)));
            if is_within(number, event.at_unix_ns) && !is_others {
                gatherer.add(name, event);
            }
        })?;
    }
    Ok(())
}

/// One line that is written again and again, on a terminal.
struct Progress {
    is_shown: bool,
}

impl Progress {
    fn new() -> Self {
        Progress { is_shown: io::stderr().is_terminal() }
    }

    fn show(&self, text: &str) {
        if self.is_shown {
            // Whoever does not see it misses nothing.
            let _ = write!(io::stderr(), "{CLEAR_LINE}Looking at this machine: {text} ...");
        }
    }

    fn clear(&self) {
        if self.is_shown {
            let _ = write!(io::stderr(), "{CLEAR_LINE}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}
