// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate` without a command: every source that can attach looks at what is late here, and who makes it late.

use std::io::{self, IsTerminal as _, Write};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use whylate_model::look::{Gatherer, Look, Unmeasured};
use whylate_sources::{Asked, Session, sources};

use crate::arguments::Rank;
use crate::commands::program;
use crate::commands::runner::{Feed, Keep, NOW_AND_THEN, wait};
use crate::commands::watch::{Ended, Watch};
use crate::output::json::write_line;
use crate::output::look;
use crate::output::table::terminal_columns;
use crate::values::duration_ns;

/// Back to the line's start, and clear it.
const CLEAR_LINE: &str = "\r\x1b[K";

/// What a look takes.
#[derive(Debug, Args)]
// Of one program, nobody is ranked.
#[command(mut_arg("by", |by| by.conflicts_with_all(["pid", "comm", "cgroup"])))]
pub struct Arguments {
    /// How long to look (e.g. 10s, 1m)
    #[arg(short, long, value_name = "DURATION", value_parser = duration_ns, default_value = "10s")]
    duration: u64,
    #[command(flatten)]
    of: program::Of,
    #[command(flatten)]
    rank: Rank,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// What measures, and what does not, or less well.
struct Sources {
    session: Session,
    looking: Vec<Feed>,
    unmeasured: Vec<Unmeasured>,
    weaker: Vec<Unmeasured>,
}

/// Looks, and prints one screen.
///
/// # Errors
/// When no source can attach, a source fails, or the output cannot be written.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if let Some(program) = arguments.of.program()? {
        return program::run(&program, arguments.duration, arguments.json);
    }
    let watch = Watch::new().context("cannot watch for Ctrl-C")?;
    let progress = Progress::new();
    progress.show("attaching");
    let Some(Sources { session, mut looking, mut unmeasured, weaker }) = attach(&watch)? else {
        progress.clear();
        say!("whylate: interrupted before anything was measured");
        return Ok(());
    };
    // What came in while others were attached has no common span, and is much: taking it now keeps the next one short.
    for feed in &mut looking {
        feed.snapshot()?;
        feed.take_late(&mut |_| Ok(None))?;
    }
    let mut begins = Vec::new();
    for feed in &mut looking {
        begins.push(feed.snapshot()?.ended_ns);
    }
    session.take_lost();
    let began = Instant::now();
    let mut gatherer = Gatherer::of(looking.iter().map(|feed| feed.card).collect(), arguments.rank.into());
    drain(&mut looking, &mut gatherer, |number, at_ns| at_ns >= begins[number])?;
    let end = began.checked_add(Duration::from_nanos(arguments.duration));
    let ended = wait(&watch, end, NOW_AND_THEN, &mut || {
        drain(&mut looking, &mut gatherer, |number, at_ns| at_ns >= begins[number])?;
        progress.show(&format!("{} of {} s", began.elapsed().as_secs(), arguments.duration / 1_000_000_000));
        Ok(false)
    })?;
    if ended == Ended::OutputClosed {
        return Ok(());
    }
    progress.show("detaching");
    let (mut snapshots, mut ends) = (Vec::new(), Vec::new());
    for feed in &mut looking {
        let (card, snapshot) = (feed.card, feed.snapshot()?);
        ends.push(snapshot.ended_ns);
        let has_lost = snapshot.lost.values().any(|&count| count > 0);
        match feed.source.sees_nothing().filter(|_| snapshot.series.is_empty() && !has_lost) {
            Some(reason) => unmeasured.push(Unmeasured { source: card.name.to_owned(), reason: reason.to_owned() }),
            None => snapshots.push((card, snapshot)),
        }
    }
    drain(&mut looking, &mut gatherer, |number, at_ns| (begins[number]..=ends[number]).contains(&at_ns))?;
    let mut lost = session.take_lost();
    lost.retain(|_, count| *count > 0);
    drop((looking, session));
    progress.clear();
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

/// Every source that can attach, and why others cannot. `None` when told to stop meanwhile: on a busy machine it may take
/// far longer than somebody waits who has seen enough.
fn attach(watch: &Watch) -> anyhow::Result<Option<Sources>> {
    let (mut session, mut first) = (Session::of_several(), None);
    let (mut looking, mut unmeasured, mut weaker) = (Vec::new(), Vec::new(), Vec::<Unmeasured>::new());
    for mut source in sources() {
        if watch.until(Some(Instant::now()))? != Ended::Time {
            return Ok(None);
        }
        let card = source.info().card;
        let told = |reason| Unmeasured { source: card.name.to_owned(), reason };
        source.ask(Asked {
            explain_over_ns: Some(card.events().late_from_ns),
            explain_held_up_over_ns: card.held_up.map(|judged| judged.late_from_ns),
            ..Asked::default()
        });
        match source.attach(&session) {
            Ok(source) => {
                // What is weaker of the account is told once.
                for reason in source.weaker().into_iter().chain(source.chosen()) {
                    if weaker.iter().all(|told| told.reason != reason) {
                        weaker.push(told(reason.to_owned()));
                    }
                }
                looking.push(Feed::new(card, source, Keep::Nothing));
            }
            Err(error) => {
                // An account that goes by the timers of a source that is not there would go by none.
                if looking.is_empty() {
                    session = Session::of_several();
                }
                unmeasured.push(told(error.to_string()));
                first.get_or_insert(error);
            }
        }
    }
    match first {
        Some(error) if looking.is_empty() => Err(anyhow::Error::from(error).context("cannot attach any source")),
        _ => {
            session.begin().context("cannot keep the account of the CPUs")?;
            Ok(Some(Sources { session, looking, unmeasured, weaker }))
        }
    }
}

/// Takes in late events that are within the span of their source, by its number: those before and after have no span.
fn drain(looking: &mut [Feed], gatherer: &mut Gatherer, is_within: impl Fn(usize, u64) -> bool) -> anyhow::Result<()> {
    for (number, feed) in looking.iter_mut().enumerate() {
        let card = feed.card;
        feed.take_late(&mut |event| {
            if is_within(number, event.at_ns) {
                gatherer.add(card, event);
            }
            Ok(None)
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use whylate_model::sources::WQ;
    use whylate_model::{Cause, CauseKind, LateEvent, Snapshot};
    use whylate_sources::{Attached, Measuring};

    use super::*;

    /// Late events of one moment each, on a machine whose clock is set back all the time.
    struct SetBack(Vec<u64>);

    impl Attached for SetBack {
        fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
            Ok(Snapshot::new(WQ.name, "made", "host", 0))
        }

        fn drain_late(&mut self, _wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
            for (number, at_ns) in self.0.drain(..).enumerate() {
                let cause = Cause::new(CauseKind::Thread, "a:1", 1 << 30);
                let at_unix_ns = 1_000_000 - number as u64;
                each(LateEvent { at_ns, at_unix_ns, latency_ns: 1 << 30, causes: vec![cause], ..LateEvent::default() });
            }
            Ok(())
        }
    }

    #[test]
    fn what_is_late_within_a_look_counts_whoever_sets_the_clock() {
        let attached: Box<dyn Attached> = Box::new(SetBack(vec![99, 100, 150, 200, 201]));
        let feed = Feed::new(&WQ, Measuring { backend: "made", fallback_reason: None, attached }, Keep::Nothing);
        let mut gatherer = Gatherer::default();
        drain(&mut [feed], &mut gatherer, |_, at_ns| (100..=200).contains(&at_ns)).expect("it measures");
        let look = gatherer.finish(&[(&WQ, Snapshot::new(WQ.name, "made", "host", 0))], Vec::new());
        assert_eq!(look.sources[0].late, 3);
    }
}
