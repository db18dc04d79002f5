// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders explained waits of threads, and the ranking of culprits.

use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::culprits::By;
use whylate_model::late::SLEEPER;
use whylate_model::sources::OFFCPU;
use whylate_model::units::{format_ns, format_round_ns, printable};
use whylate_model::{Culprits, LateEvent, Snapshot};

use super::time_of_day::time_of_day;
use super::{path, why};

/// Writes one wait with its causes.
pub fn write(out: &mut dyn Write, event: &LateEvent, zone: &TimeZone) -> io::Result<()> {
    let time = time_of_day(event.at_unix_ns, zone);
    let latency = format_ns(event.latency_ns);
    let class = || event.labels.get("waited").map(|class| format!(" ({})", printable(class)));
    let waited_in = event.labels.get("waited_in").map(|via| format!(" in {}", printable(via)));
    let waited_in = waited_in.or_else(class).unwrap_or_default();
    let thread = printable(&thread_of(event));
    if !event.path.is_empty() {
        match path::stop_of(&event.path) {
            Some(stop) => writeln!(out, "{time}  {thread} was {} for {latency}", stop.words())?,
            None => writeln!(out, "{time}  {thread} waited {latency}{waited_in}")?,
        }
        return path::write_wait(out, &event.path, 4);
    }
    // Such a wait has no path: nothing held up the thread that it was for.
    if let Some(sleeper) = event.labels.get(SLEEPER) {
        let sleeper = printable(sleeper);
        return writeln!(out, "{time}  {thread} waited {latency}{waited_in} for {sleeper}, which waited for a timer");
    }
    let waker = event.labels.get("woken_by").map_or_else(String::new, |by| format!(", woken by {}", printable(by)));
    writeln!(out, "{time}  {thread} waited {latency} for CPU {}{waker}", event.cpu)?;
    why::write_causes(out, event)
}

/// Collects explained waits, and ranks their culprits.
#[derive(Debug)]
pub struct Waits {
    zone: TimeZone,
    over_ns: u64,
    culprits: Culprits,
    /// Number of waits, also of those that have no culprit.
    events: u64,
}

impl Waits {
    /// Creates the collection for waits of `over_ns` or longer, with culprits grouped `by`.
    pub fn new(over_ns: u64, by: By) -> Self {
        Waits { zone: TimeZone::system(), over_ns, culprits: Culprits::by(by), events: 0 }
    }

    pub fn add(&mut self, event: &LateEvent) {
        self.events += 1;
        self.culprits.add(&OFFCPU, event);
    }

    /// Writes the late events of a snapshot, and a line per culprit since the last call.
    pub fn write(&mut self, out: &mut dyn Write, snapshot: &Snapshot) -> io::Result<()> {
        self.culprits.add_unexplained(snapshot.unexplained);
        let ranking = self.culprits.take();
        let over = format_round_ns(self.over_ns);
        let explained = std::mem::take(&mut self.events);
        // How many of these reached the requested threshold is unknown.
        let of_lower = snapshot.unexplained.recorded.map_or(0, |_| snapshot.unexplained.events);
        let events = explained + snapshot.unexplained.events - of_lower;
        if events == 0 && of_lower == 0 {
            return writeln!(out, "\nNo thread waited {over} or longer, for a CPU or for others.");
        }
        let shown = snapshot.late.len();
        match events {
            0 => {}
            _ if shown == 0 => {
                writeln!(out, "\nWaits of {over} or longer, for a CPU or for others: {events}, none with causes")?;
            }
            _ => {
                writeln!(out, "\nWaits of {over} or longer, for a CPU or for others: the {shown} longest of {events}")?
            }
        }
        for event in &snapshot.late {
            writeln!(out)?;
            write(out, event, &self.zone)?;
        }
        if ranking.is_empty() {
            return Ok(());
        }
        writeln!(out)?;
        why::write_ranking(out, &ranking, OFFCPU.words)
    }
}

/// Renders a thread with its TID, and its process if it is not the main thread.
fn thread_of(event: &LateEvent) -> String {
    let label = |name: &str| event.labels.get(name).map_or("?", String::as_str);
    let thread = event.subject.clone();
    if label("tid") == label("pid") { thread } else { format!("{thread} of {}:{}", label("process"), label("pid")) }
}

#[cfg(test)]
mod tests {
    use whylate_model::culprits::By;
    use whylate_model::sources::OFFCPU;
    use whylate_model::{Cause, CauseKind};

    use super::*;

    fn wait(tid: u32, latency_ns: u64) -> LateEvent {
        let cause = |kind, who: &str, ns| Cause::new(kind, who, ns);
        let labels = [
            ("process", "app\x1b[2J".to_owned()),
            ("pid", "77".to_owned()),
            ("tid", tid.to_string()),
            ("woken_by", "main:77".to_owned()),
        ];
        LateEvent {
            subject: format!("worker:{tid}"),
            labels: labels.map(|(name, value)| (name.to_owned(), value)).into(),
            at_unix_ns: 1_795_252_440_123_456_789,
            latency_ns,
            cpu: 1,
            causes: vec![
                cause(CauseKind::Thread, "stress:9", latency_ns - 100_000),
                cause(CauseKind::Irq, "local_timer", 100_000),
            ],
            ..LateEvent::default()
        }
    }

    #[test]
    fn shows_worst_and_ranks_all() {
        let mut waits = Waits { zone: TimeZone::UTC, ..Waits::new(1_000_000, By::Culprit) };
        let all = [wait(77, 9_000_000), wait(78, 4_000_000), wait(79, 2_000_000)];
        all.iter().for_each(|wait| waits.add(wait));
        let mut snapshot = Snapshot::new(OFFCPU.name, "sample", "host", 0);
        snapshot.late = all[..2].to_vec();
        let mut out = Vec::new();
        waits.write(&mut out, &snapshot).expect("a vector takes everything");
        snapshot.late.clear();
        waits.write(&mut out, &snapshot).expect("a vector takes everything");
        insta::assert_snapshot!(String::from_utf8(out).expect("text"));
    }
}
