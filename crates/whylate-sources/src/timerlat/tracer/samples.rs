// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tracer's samples: three of an activation at most, which come one after the other.

use super::super::tally::{Kind, Tally};

/// What a sample is of.
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

/// Where a sample's fields are in its record; the kernel numbers its events as it likes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SampleFormat {
    id: u16,
    context_at: usize,
    latency_at: usize,
}

impl SampleFormat {
    /// From the text of the event's `format`.
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

    /// `None` where the record is another event's, or cut short.
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

/// Makes activations of the samples of one CPU.
#[derive(Debug, Default)]
pub(super) struct Activations {
    /// The one that is not over yet.
    open: Option<Open>,
    /// When the one before was due; 0: it is not known.
    due_ns: u64,
    /// When the thread was there the last time.
    there_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    irq_ns: u64,
    thread_ns: Option<u64>,
}

impl Activations {
    /// Adds a sample that was taken then, and counts the activation if that was the last one of it.
    pub(super) fn add(&mut self, sample: Sample, time_ns: u64, period_ns: u64, has_user: bool, tally: &Tally) {
        match (sample.context, &mut self.open) {
            (Context::Irq, open) => {
                if let Some(unfinished) = open.replace(Open { irq_ns: sample.latency_ns, thread_ns: None }) {
                    count(unfinished, None, tally);
                }
                // The record is made a little after the clock was read, which is little beside a period.
                let due_ns = time_ns.saturating_sub(sample.latency_ns);
                let periods = (due_ns.saturating_sub(self.due_ns) + period_ns / 2) / period_ns;
                // Where nobody waited for the timer, nobody was late; the thread may have been there just before a period was over.
                let late = self.there_ns.saturating_sub(self.due_ns) / period_ns + 1;
                if self.due_ns > 0 && periods > 1 {
                    tally.missed_periods(self.due_ns, self.there_ns, (periods - 1).min(late), period_ns);
                }
                self.due_ns = due_ns;
            }
            // The interrupt was before the measurement began, or its sample is lost.
            (_, None) => {}
            (Context::Thread, Some(open)) => {
                open.thread_ns = Some(sample.latency_ns);
                self.there_ns = time_ns;
                if !has_user {
                    self.finish(None, tally);
                }
            }
            (Context::User, Some(_)) => {
                self.there_ns = time_ns;
                self.finish(Some(sample.latency_ns), tally);
            }
        }
    }

    /// Whether an activation is not over yet.
    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    fn finish(&mut self, user_ns: Option<u64>, tally: &Tally) {
        if let Some(open) = self.open.take() {
            count(open, user_ns, tally);
        }
    }

    /// No more samples come of the activation that is not over. The interrupt may have been what was too late.
    pub(super) fn cut_off(&mut self, is_told: bool, tally: &Tally) {
        if let Some(open) = self.open.take() {
            match open.thread_ns {
                Some(_) => count(open, None, tally),
                None if is_told => tally.count(Kind::Irq, open.irq_ns),
                None => {}
            }
        }
    }

    /// The samples that follow are not those that follow in time.
    pub(super) fn forget(&mut self) {
        *self = Activations::default();
    }
}

fn count(activation: Open, user_ns: Option<u64>, tally: &Tally) {
    match activation.thread_ns {
        Some(thread_ns) => {
            tally.count(Kind::Irq, activation.irq_ns);
            tally.count(Kind::Thread, thread_ns);
        }
        None => tally.is_unseen(),
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
    fn samples_are_read_where_the_format_says() {
        let format = SampleFormat::parse(FORMAT).expect("a format");
        assert_eq!(format, SampleFormat { id: 17, context_at: 12, latency_at: 16 });
        assert_eq!(format.read(&record(17, 1, 99)), Some(Sample { context: Context::Thread, latency_ns: 99 }));
        assert_eq!(format.read(&record(18, 1, 99)), None);
        assert_eq!(format.read(&record(17, 3, 99)), None);
        assert_eq!(format.read(&record(17, 1, 99)[..20]), None);
        assert_eq!(SampleFormat::parse("ID: 17\n"), None);
    }

    const MS_NS: u64 = 1_000_000;

    fn counted(has_user: bool, samples: &[(Context, u64, u64)]) -> ([u64; 3], u64) {
        let (tally, mut activations) = (Tally::new(None), Activations::default());
        for &(context, due_ns, latency_ns) in samples {
            let sample = Sample { context, latency_ns };
            activations.add(sample, due_ns + latency_ns + 200, MS_NS, has_user, &tally);
        }
        let taken = tally.take(has_user);
        let [irq, thread] = ["irq", "thread"].map(|kind| taken.series.histograms[kind].count());
        assert_eq!(irq, thread, "an activation has both");
        ([irq, taken.series.histograms["thread_corrected"].count(), taken.series.values["missed"] as u64], taken.unseen)
    }

    #[test]
    fn an_activation_counts_when_it_is_over() {
        use Context::{Irq, Thread, User};
        let of_kernel = [(Irq, MS_NS, 10), (Thread, MS_NS, 30), (Irq, 2 * MS_NS, 10)];
        assert_eq!(counted(false, &of_kernel), ([1, 1, 0], 0));
        let of_user =
            [(Irq, MS_NS, 10), (Thread, MS_NS, 30), (User, MS_NS, 50), (Irq, 2 * MS_NS, 5), (Thread, 2 * MS_NS, 9)];
        assert_eq!(counted(true, &of_user), ([1, 1, 0], 0));
        // What came in before the first interrupt is of an activation before.
        assert_eq!(counted(true, &[&[(Thread, 5, 9), (User, 5, 50)], &of_user[..3]].concat()), ([1, 1, 0], 0));
        // A thread whose sample is not there.
        assert_eq!(counted(false, &[(Irq, MS_NS, 10), (Irq, 2 * MS_NS, 10), (Thread, 2 * MS_NS, 30)]), ([1, 1, 0], 1));
    }

    #[test]
    fn what_a_stop_cuts_off_is_counted_where_it_made_the_stop() {
        for (samples, is_told, counts) in [
            (&[(Context::Irq, 10), (Context::Thread, 500)][..], true, [1, 1]),
            (&[(Context::Irq, 500)], true, [1, 0]),
            (&[(Context::Irq, 10)], false, [0, 0]),
        ] {
            let (tally, mut activations) = (Tally::new(None), Activations::default());
            for &(context, latency_ns) in samples {
                activations.add(Sample { context, latency_ns }, MS_NS + latency_ns, MS_NS, true, &tally);
            }
            activations.cut_off(is_told, &tally);
            let series = tally.take(true).series;
            assert_eq!(["irq", "thread"].map(|kind| series.histograms[kind].count()), counts);
        }
    }

    #[test]
    fn nobody_is_late_who_does_not_wait() {
        use Context::{Irq, Thread};
        let gap = [(Irq, MS_NS, 10), (Thread, MS_NS, 50), (Irq, 60_001 * MS_NS, 10), (Thread, 60_001 * MS_NS, 20)];
        assert_eq!(counted(false, &gap), ([2, 3, 1], 0));
    }

    #[test]
    fn periods_between_two_interrupts_are_missed() {
        use Context::{Irq, Thread};
        let late = [(Irq, MS_NS, 10), (Thread, MS_NS, 3 * MS_NS + 50), (Irq, 5 * MS_NS, 10), (Thread, 5 * MS_NS, 20)];
        assert_eq!(counted(false, &late), ([2, 5, 3], 0));
    }

    proptest! {
        #[test]
        fn no_format_and_no_record_makes_it_panic(
            cut in 0..FORMAT.len(), inserted in "[ID:offset;0-9\\n-]{0,12}", data in prop::collection::vec(any::<u8>(), 0..40), at in 0..48_usize
        ) {
            let text = format!("{}{inserted}{}", &FORMAT[..cut], &FORMAT[cut..]);
            let _ = SampleFormat::parse(&text);
            let _ = SampleFormat { id: 17, context_at: at, latency_at: at / 2 }.read(&data);
        }
    }
}
