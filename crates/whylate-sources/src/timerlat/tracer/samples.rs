// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tracer's samples: up to three per activation, in sequence.

use super::super::missed::{Missed, due_after, overdue};
use super::super::tally::{Kind, Tally};

/// Kind of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Context {
    Irq,
    Thread,
    User,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    pub context: Context,
    pub latency_ns: u64,
}

/// Layout of a sample's record; the kernel assigns event IDs dynamically.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SampleFormat {
    id: u16,
    context_at: usize,
    latency_at: usize,
}

impl SampleFormat {
    /// Parses the event's `format` file.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let id = text.lines().find_map(|line| line.strip_prefix("ID:"))?.trim().parse().ok()?;
        let offset = |field: &str| -> Option<usize> {
            let line = text.lines().find(|line| {
                let declared = line.trim_start().strip_prefix("field:").and_then(|rest| rest.split(';').next());
                declared.and_then(|declared| declared.split_whitespace().next_back()) == Some(field)
            })?;
            line.split(';').find_map(|part| part.trim().strip_prefix("offset:"))?.parse().ok()
        };
        Some(SampleFormat { id, context_at: offset("context")?, latency_at: offset("timer_latency")? })
    }

    /// Parses a record; `None` if it is of another event, or truncated.
    pub(super) fn read(self, data: &[u8]) -> Option<Sample> {
        let id = u16::from_ne_bytes(data.get(..2)?.try_into().ok()?);
        let context = i32::from_ne_bytes(data.get(self.context_at..self.context_at.checked_add(4)?)?.try_into().ok()?);
        let latency_ns =
            u64::from_ne_bytes(data.get(self.latency_at..self.latency_at.checked_add(8)?)?.try_into().ok()?);
        let context = match context {
            0 => Context::Irq,
            1 => Context::Thread,
            2 => Context::User,
            _ => return None,
        };
        (id == self.id).then_some(Sample { context, latency_ns })
    }
}

/// A sample with its timestamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TimedSample {
    pub sample: Sample,
    /// Time of the record, shortly after the latency was measured, compared with a period.
    pub time_ns: u64,
}

impl TimedSample {
    /// Returns when the activation was due, which differs slightly between its samples.
    pub(super) fn due_ns(self) -> u64 {
        self.time_ns.saturating_sub(self.sample.latency_ns)
    }
}

/// Parameters for combining the samples of a CPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    pub period_ns: u64,
    /// Whether an activation ends with the return to user space.
    pub has_user: bool,
    /// Whether the thread may do something else between two activations, without being late.
    pub may_pause: bool,
    /// Activations due before this do not count.
    pub from_ns: u64,
    /// Periods due after this count in the next span.
    pub until_ns: u64,
}

/// Combines the samples of one CPU to activations.
#[derive(Debug, Default)]
pub(super) struct Activations {
    /// The activation in progress.
    current: Option<InProgress>,
    /// Due time of the last complete activation; 0: unknown.
    due_ns: u64,
    /// Time at which its thread was ready.
    ready_ns: u64,
    /// Number of periods after it that are known to be missed.
    skipped: u64,
    missed: Missed,
}

#[derive(Clone, Copy, Debug)]
struct InProgress {
    /// Minimum over the samples: the interrupt's alone may be off by periods if a hypervisor deschedules the vCPU
    /// between the clock reading and the record.
    due_ns: u64,
    irq_ns: u64,
    thread_ns: Option<u64>,
    ready_ns: u64,
    /// Whether the activation counts.
    counts: bool,
}

impl Activations {
    /// Adds a sample, and counts the activation if this was its last one. Returns whether the activation counts.
    pub(super) fn add(&mut self, taken: TimedSample, rules: &Rules, tally: &Tally) -> bool {
        let (latency_ns, due_ns) = (taken.sample.latency_ns, taken.due_ns());
        if taken.sample.context == Context::Irq {
            // The first sample decides whether an activation counts.
            let counts = due_ns >= rules.from_ns;
            let current = InProgress { due_ns, irq_ns: latency_ns, thread_ns: None, ready_ns: 0, counts };
            if let Some(unfinished) = self.current.replace(current) {
                self.end(unfinished, None, rules, tally);
            }
            return counts;
        }
        let is_user = taken.sample.context == Context::User;
        let is_last = is_user || !rules.has_user;
        let Some(current) = &mut self.current else {
            // The interrupt came before tracing started.
            if due_ns.abs_diff(self.due_ns) > rules.period_ns / 2 {
                (self.due_ns, self.skipped) = (due_ns, 0);
            }
            self.ready_ns = taken.time_ns;
            if is_last {
                self.skip_until_there(rules, tally);
            }
            return false;
        };
        current.due_ns = current.due_ns.min(due_ns);
        current.ready_ns = taken.time_ns;
        if !is_user {
            current.thread_ns = Some(latency_ns);
        }
        let current = *current;
        if is_last {
            self.current = None;
            self.end(current, is_user.then_some(latency_ns), rules, tally);
        }
        current.counts
    }

    fn end(&mut self, current: InProgress, user_ns: Option<u64>, rules: &Rules, tally: &Tally) {
        self.count_gap(current.due_ns, rules, tally);
        count(current, user_ns, tally);
        (self.due_ns, self.ready_ns, self.skipped) = (current.due_ns, self.ready_ns.max(current.ready_ns), 0);
        self.skip_until_there(rules, tally);
    }

    fn skip_until_there(&mut self, rules: &Rules, tally: &Tally) {
        self.skip(self.ready_ns.saturating_sub(self.due_ns) / rules.period_ns, rules, tally);
    }

    /// Counts the periods without an activation before this one.
    fn count_gap(&mut self, due_ns: u64, rules: &Rules, tally: &Tally) {
        let period_ns = rules.period_ns;
        let periods = (due_ns.saturating_sub(self.due_ns) + period_ns / 2) / period_ns;
        // Periods in which no thread waited for the timer are not missed; the thread may have come just before an
        // expiry.
        let late = match rules.may_pause {
            true => self.ready_ns.saturating_sub(self.due_ns) / period_ns + 1,
            false => u64::MAX,
        };
        if self.due_ns > 0 && periods > 1 {
            self.skip((periods - 1).min(late), rules, tally);
        }
    }

    /// Adds missed periods after the last activation, some of which may be known already.
    fn skip(&mut self, periods: u64, rules: &Rules, tally: &Tally) {
        if periods > self.skipped {
            let first_ns = self.due_ns + (self.skipped + 1) * rules.period_ns;
            self.missed.add(first_ns, periods - self.skipped, self.ready_ns);
            self.skipped = periods;
            self.count_missed(rules, tally);
        }
    }

    /// Counts missed periods that are due.
    pub(super) fn count_missed(&mut self, rules: &Rules, tally: &Tally) {
        self.missed.count(rules.from_ns, rules.until_ns, rules.period_ns, |late_ns| tally.missed_period(late_ns));
    }

    /// Returns the number of activations and periods due until then that have not arrived: the thread is still late.
    pub(super) fn overdue(&self, rules: &Rules) -> u64 {
        // If none has arrived yet, the first one may be due up to a period later.
        let first_ns = rules.from_ns.saturating_add(rules.period_ns);
        let next_due_ns = match (self.current, self.due_ns) {
            (Some(current), _) if current.counts => current.due_ns,
            (Some(current), _) => due_after(current.due_ns, rules.from_ns, rules.period_ns),
            (None, 0) => first_ns,
            (None, due_ns) => due_after(due_ns, self.ready_ns, rules.period_ns).max(first_ns),
        };
        overdue(next_due_ns, rules.until_ns, rules.period_ns)
    }

    /// Ends the activation in progress, of which no more samples arrive. `caused_stop`: it caused the stop.
    pub(super) fn cut_off(&mut self, caused_stop: bool, tally: &Tally) {
        if let Some(current) = self.current.take().filter(|current| current.counts) {
            match current.thread_ns {
                Some(_) => count(current, None, tally),
                None if caused_stop => tally.count(Kind::Irq, current.irq_ns),
                None => {}
            }
        }
    }

    /// Resets the sequence: samples were lost.
    pub(super) fn forget(&mut self) {
        *self = Activations { missed: self.missed, ..Activations::default() };
    }
}

fn count(activation: InProgress, user_ns: Option<u64>, tally: &Tally) {
    if !activation.counts {
        return;
    }
    match activation.thread_ns {
        Some(thread_ns) => {
            tally.count(Kind::Irq, activation.irq_ns);
            tally.count(Kind::Thread, thread_ns);
        }
        None => tally.count_unseen(),
    }
    if let Some(user_ns) = user_ns {
        tally.count(Kind::User, user_ns);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FORMAT: &str = "name: timerlat\nID: 17\nformat:\n\
        \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
        \tfield:unsigned int seqnum;\toffset:8;\tsize:4;\tsigned:0;\n\
        \tfield:int context;\toffset:12;\tsize:4;\tsigned:1;\n\
        \tfield:u64 timer_latency;\toffset:16;\tsize:8;\tsigned:0;\n\nprint fmt: \"\"\n";

    fn record(id: u16, context: i32, latency_ns: u64) -> Vec<u8> {
        let mut data = id.to_ne_bytes().to_vec();
        data.resize(12, 0);
        data.extend(context.to_ne_bytes());
        data.extend(latency_ns.to_ne_bytes());
        data
    }

    #[test]
    fn reads_samples_by_format() {
        let format = SampleFormat::parse(FORMAT).expect("a format");
        assert_eq!(format, SampleFormat { id: 17, context_at: 12, latency_at: 16 });
        assert_eq!(format.read(&record(17, 1, 99)), Some(Sample { context: Context::Thread, latency_ns: 99 }));
        assert_eq!(format.read(&record(18, 1, 99)), None);
        assert_eq!(format.read(&record(17, 3, 99)), None);
        assert_eq!(format.read(&record(17, 1, 99)[..20]), None);
        assert_eq!(SampleFormat::parse("ID: 17\n"), None);
    }

    const MS_NS: u64 = 1_000_000;

    fn taken(context: Context, due_ns: u64, latency_ns: u64) -> TimedSample {
        TimedSample { sample: Sample { context, latency_ns }, time_ns: due_ns + latency_ns + 200 }
    }

    fn rules(has_user: bool, from_ns: u64, until_ns: u64) -> Rules {
        Rules { period_ns: MS_NS, has_user, may_pause: true, from_ns, until_ns }
    }

    fn counted(has_user: bool, samples: &[(Context, u64, u64)]) -> ([u64; 3], u64) {
        let (tally, mut activations) = (Tally::new(None), Activations::default());
        for &(context, due_ns, latency_ns) in samples {
            activations.add(taken(context, due_ns, latency_ns), &rules(has_user, 1, u64::MAX), &tally);
        }
        let taken = tally.take(has_user);
        let [irq, thread] = ["irq", "thread"].map(|kind| taken.series.histograms[kind].count());
        assert_eq!(irq, thread, "an activation has both");
        ([irq, taken.series.histograms["thread_corrected"].count(), taken.series.values["missed"] as u64], taken.unseen)
    }

    #[test]
    fn counts_complete_activations() {
        use Context::{Irq, Thread, User};
        let of_kernel = [(Irq, MS_NS, 10), (Thread, MS_NS, 30), (Irq, 2 * MS_NS, 10)];
        assert_eq!(counted(false, &of_kernel), ([1, 1, 0], 0));
        let of_user =
            [(Irq, MS_NS, 10), (Thread, MS_NS, 30), (User, MS_NS, 50), (Irq, 2 * MS_NS, 5), (Thread, 2 * MS_NS, 9)];
        assert_eq!(counted(true, &of_user), ([1, 1, 0], 0));
        // Samples before the first interrupt are of an earlier activation.
        assert_eq!(counted(true, &[&[(Thread, 5, 9), (User, 5, 50)], &of_user[..3]].concat()), ([1, 1, 0], 0));
        // The thread's sample is missing.
        assert_eq!(counted(false, &[(Irq, MS_NS, 10), (Irq, 2 * MS_NS, 10), (Thread, 2 * MS_NS, 30)]), ([1, 1, 0], 1));
    }

    #[test]
    fn counts_cut_off_activation_that_caused_the_stop() {
        for (samples, caused_stop, counts) in [
            (&[(Context::Irq, 10), (Context::Thread, 500)][..], true, [1, 1]),
            (&[(Context::Irq, 500)], true, [1, 0]),
            (&[(Context::Irq, 10)], false, [0, 0]),
        ] {
            let (tally, mut activations) = (Tally::new(None), Activations::default());
            for &(context, latency_ns) in samples {
                activations.add(taken(context, MS_NS, latency_ns), &rules(true, 1, u64::MAX), &tally);
            }
            activations.cut_off(caused_stop, &tally);
            let series = tally.take(true).series;
            assert_eq!(["irq", "thread"].map(|kind| series.histograms[kind].count()), counts);
        }
    }

    #[test]
    fn pausing_thread_misses_no_periods() {
        use Context::{Irq, Thread};
        let gap = [(Irq, MS_NS, 10), (Thread, MS_NS, 50), (Irq, 601 * MS_NS, 10), (Thread, 601 * MS_NS, 20)];
        assert_eq!(counted(false, &gap), ([2, 3, 1], 0));
        // A thread that never pauses was delayed.
        let (tally, mut activations) = (Tally::new(None), Activations::default());
        for (context, due_ns, latency_ns) in gap {
            let rules = Rules { may_pause: false, ..rules(false, 1, u64::MAX) };
            activations.add(taken(context, due_ns, latency_ns), &rules, &tally);
        }
        assert_eq!(tally.take(false).series.values["missed"], 599.0);
    }

    #[test]
    fn counts_periods_between_interrupts_as_missed() {
        use Context::{Irq, Thread};
        let late = [(Irq, MS_NS, 10), (Thread, MS_NS, 3 * MS_NS + 50), (Irq, 5 * MS_NS, 10), (Thread, 5 * MS_NS, 20)];
        assert_eq!(counted(false, &late), ([2, 5, 3], 0));
    }

    #[test]
    fn counts_missed_periods_by_due_time() {
        use Context::{Irq, Thread, User};
        let (tally, mut activations) = (Tally::new(None), Activations::default());
        let mut add = |context, due_ns, latency_ns, until_ns| {
            let rules = rules(true, 2 * MS_NS, until_ns);
            activations.add(taken(context, due_ns, latency_ns), &rules, &tally);
            activations.count_missed(&rules, &tally);
            (activations.overdue(&rules), tally.take(true).series.values["missed"])
        };
        // For an activation due before the measurement, only the periods that it made its thread miss count.
        assert_eq!(add(Irq, MS_NS, 10, 2 * MS_NS), (0, 0.0));
        assert_eq!(add(Thread, MS_NS, 20, 3 * MS_NS), (1, 0.0));
        assert_eq!(add(User, MS_NS, 3 * MS_NS + 50, 3 * MS_NS), (0, 1.0));
        assert_eq!(add(Irq, 5 * MS_NS, 10, 5 * MS_NS + 500), (1, 2.0));
        assert_eq!(add(Thread, 5 * MS_NS, 20, 5 * MS_NS + 600), (1, 0.0));
        assert_eq!(add(User, 5 * MS_NS, 40, 6 * MS_NS - 1), (0, 0.0));
        // The next samples lack their interrupt, as tracing started after it.
        activations.forget();
        assert_eq!(activations.overdue(&rules(true, 2 * MS_NS, 3 * MS_NS - 1)), 0);
        assert_eq!(activations.overdue(&rules(true, 2 * MS_NS, 3 * MS_NS)), 1);
    }

    #[test]
    fn delayed_record_is_no_missed_period() {
        let (tally, mut activations) = (Tally::new(None), Activations::default());
        for due in 1..=4 {
            let of_irq = taken(Context::Irq, due * MS_NS, 10);
            // The clock was read long before the record was made.
            let stopped_ns = if due == 2 { 3 * MS_NS / 4 } else { 0 };
            let of_irq = TimedSample { time_ns: of_irq.time_ns + stopped_ns, ..of_irq };
            let of_thread = taken(Context::Thread, due * MS_NS, 4 * MS_NS / 5);
            for taken in [of_irq, of_thread] {
                activations.add(taken, &rules(false, 1, u64::MAX), &tally);
            }
        }
        let series = tally.take(false).series;
        assert_eq!((series.histograms["thread"].count(), series.values["missed"]), (4, 0.0));
    }

    #[test]
    fn activation_without_interrupt_sample_misses_periods() {
        use Context::{Irq, Thread};
        let late = [(Thread, MS_NS, 2 * MS_NS + 50), (Irq, 4 * MS_NS, 10), (Thread, 4 * MS_NS, 20)];
        assert_eq!(counted(false, &late), ([1, 3, 2], 0));
    }

    proptest! {
        #[test]
        fn never_panics_on_arbitrary_input(
            cut in 0..FORMAT.len(), inserted in "[ID:offset;0-9\\n-]{0,12}", data in prop::collection::vec(any::<u8>(), 0..40), at in 0..48_usize
        ) {
            let text = format!("{}{inserted}{}", &FORMAT[..cut], &FORMAT[cut..]);
            let _ = SampleFormat::parse(&text);
            let _ = SampleFormat { id: 17, context_at: at, latency_at: at / 2 }.read(&data);
        }
    }
}
