// SPDX-License-Identifier: MIT OR Apache-2.0
//! Backend `tracer`: the kernel's `irqsoff` and `preemptoff` in an instance of our own (kernel/trace/trace_irqsoff.c).
//! They keep only the trace of the longest section: a thread reads it at once, and resets the tracer.

mod maxima;

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use whylate_model::{Labels, LateEvent, Series, Snapshot};

use self::maxima::{Maxima, Maximum};
use super::wanted::wanted_cpus;
use super::{INFO, IrqsoffOptions, TRACER, What};
use crate::kernel::clock;
use crate::kernel::tracefs;
use crate::kernel::tracefs::instance::Instance;
use crate::source::session::{Session, Span};
use crate::source::{AttachError, Attached};

/// Tracers of which only one can be in use, in one instance, at a time.
const TRACERS: [&str; 3] = ["irqsoff", "preemptoff", "preemptirqsoff"];
/// Ring buffer size for sections of four records and a stack.
const BUFFER_KB: &str = "64";
/// Ring buffer size with function records, some ten thousand in a millisecond.
const BUFFER_WITH_FUNCTIONS_KB: &str = "8192";
/// Poll period of the maximum, which takes microseconds. Only the longest section of a period is reported.
const POLL_PERIOD: Duration = Duration::from_millis(2);
/// Maximum wait for late events at a time.
const WAIT: Duration = Duration::from_millis(20);
/// The kernel drops a section during which it noted one of another CPU (trace_irqsoff.c, max_sequence). Before 6.16,
/// CPUs outside tracing_cpumask noted none; since then only their records are left out (tracing_set_cpumask).
const LIMITATION: &str = "of each 2 ms, the tracer reports only the longest section, and none during which another CPU (before Linux 6.16: another \
                      one of -c) ended one of --min or longer: choose CPUs, or raise --min to what matters";

pub(super) struct AttachedTracer {
    maxima: Maxima,
    options: IrqsoffOptions,
    /// Maxima since the last snapshot.
    taken: Vec<Maximum>,
    /// Number of `taken` that were emitted as late events.
    drained: usize,
    cpus: usize,
    span: Span,
}

impl AttachedTracer {
    pub(super) fn new(options: &IrqsoffOptions, session: &Session) -> Result<Self, AttachError> {
        let directory = tracefs::find().map_err(|error| AttachError::Unsupported(format!("tracefs is {error}")))?;
        let tracer = match options.what {
            What::Irqs => TRACERS[0],
            What::Preemption => TRACERS[1],
        };
        match fs::read_to_string(directory.join("available_tracers")) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => return Err(AttachError::NotPermitted),
            Ok(tracers) if tracers.split_whitespace().any(|there| there == tracer) => {}
            _ => return Err(AttachError::Unsupported(format!("tracer {tracer} is not in this kernel"))),
        }
        if let Some((other, theirs)) = other_user(&directory) {
            return Err(AttachError::Unsupported(in_use(&theirs, &other)));
        }
        let wanted = wanted_cpus(&options.cpus)?;
        let instance = Instance::new(&directory, "")?;
        set_up(&directory, &instance, options)?;
        // Another user may have taken it in between.
        instance.write("current_tracer", tracer).map_err(|error| match error.downcast_ref::<std::io::Error>() {
            Some(refused) if refused.kind() == ErrorKind::ResourceBusy => match other_user(&directory) {
                Some((other, theirs)) => AttachError::Unsupported(in_use(&theirs, &other)),
                None => AttachError::Unsupported(format!("somebody else uses the {tracer} tracer: end that first")),
            },
            _ => AttachError::Failed(error),
        })?;
        Ok(AttachedTracer {
            maxima: Maxima::start(instance, options.from_ns, POLL_PERIOD)?,
            options: options.clone(),
            taken: Vec::new(),
            drained: 0,
            cpus: wanted.len(),
            span: Span::begin(INFO.card, session),
        })
    }

    fn take(&mut self) -> anyhow::Result<()> {
        self.taken.extend(self.maxima.take()?);
        Ok(())
    }
}

impl Attached for AttachedTracer {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        self.take()?;
        let mut snapshot = self.span.end(TRACER);
        let measured_ns = (snapshot.duration_ns as f64 * self.cpus as f64).max(1.0);
        snapshot.series = series(&self.taken, measured_ns);
        // Nothing is lost here: a caller that wants late events drains them before the snapshot.
        self.taken.clear();
        self.drained = 0;
        snapshot.lost.insert("traces".to_owned(), self.maxima.take_lost());
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        if self.maxima.is_empty() {
            std::thread::sleep(wait.min(WAIT));
        }
        self.take()?;
        let from_ns = self.options.worst.map_or(self.options.late_from_ns(), |_| 0);
        let late = self.taken[self.drained..].iter().filter(|maximum| maximum.trace.latency_ns >= from_ns);
        late.for_each(|maximum| {
            each(LateEvent { at_ns: maximum.at_ns, ..maximum.trace.event(clock::unix_ns_of(maximum.at_ns)) })
        });
        self.drained = self.taken.len();
        Ok(())
    }

    fn limitations(&self) -> Option<&str> {
        Some(LIMITATION)
    }
}

fn series(maxima: &[Maximum], measured_ns: f64) -> Vec<Series> {
    let mut lengths: BTreeMap<Labels, Vec<u64>> = BTreeMap::new();
    for Maximum { trace, .. } in maxima {
        lengths.entry(trace.labels()).or_default().push(trace.latency_ns);
    }
    let series = lengths.into_iter().map(|(labels, lengths_ns)| {
        let share = lengths_ns.iter().sum::<u64>() as f64 / measured_ns;
        Series {
            labels,
            histograms: [("length".to_owned(), lengths_ns.into_iter().collect())].into(),
            values: [("share".to_owned(), share)].into(),
            ..Series::default()
        }
    });
    series.collect()
}

/// Sets up the instance before the tracer starts.
fn set_up(directory: &Path, instance: &Instance, options: &IrqsoffOptions) -> anyhow::Result<()> {
    // The tracer takes a section's start from the main instance's clock, and shows no older record.
    let clocks = fs::read_to_string(directory.join("trace_clock")).unwrap_or_default();
    if let Some(clock) = clocks.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(clock, _)| clock) {
        instance.write("trace_clock", clock)?;
    }
    // Only with CONFIG_FUNCTION_TRACER.
    if instance.path("options/function-trace").exists() {
        instance.write("options/function-trace", if options.functions { "1" } else { "0" })?;
    }
    for (option, is_on) in
        [("print-parent", "1"), ("sym-offset", "0"), ("sym-addr", "0"), ("verbose", "0"), ("display-graph", "0")]
    {
        if instance.path(&format!("options/{option}")).exists() {
            instance.write(&format!("options/{option}"), is_on)?;
        }
    }
    instance.write("buffer_size_kb", if options.functions { BUFFER_WITH_FUNCTIONS_KB } else { BUFFER_KB })?;
    if !options.cpus.is_empty() {
        instance.write("tracing_cpumask", &mask(&options.cpus))?;
    }
    Ok(())
}

/// Formats a CPU mask as the kernel reads it: 32-bit words in hexadecimal, highest first.
fn mask(cpus: &[u32]) -> String {
    let highest = cpus.iter().max().map_or(0, |cpu| cpu / 32);
    let word =
        |number: u32| cpus.iter().filter(|&cpu| cpu / 32 == number).fold(0_u32, |word, cpu| word | 1 << (cpu % 32));
    (0..=highest).rev().map(|number| format!("{:08x}", word(number))).collect::<Vec<_>>().join(",")
}

fn in_use(theirs: &str, other: &Path) -> String {
    format!(
        "{} uses the {theirs} tracer, and only one can: end that first (echo nop >{})",
        other.display(),
        other.join("current_tracer").display()
    )
}

/// Returns an instance that uses one of these tracers, and the tracer's name.
fn other_user(directory: &Path) -> Option<(PathBuf, String)> {
    let instances = fs::read_dir(directory.join("instances")).into_iter().flatten().flatten().map(|entry| entry.path());
    std::iter::once(directory.to_owned()).chain(instances).find_map(|directory| {
        let current = fs::read_to_string(directory.join("current_tracer")).unwrap_or_default();
        let current = current.trim();
        TRACERS.contains(&current).then(|| (directory, current.to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use whylate_model::ftrace::LatencyTrace;

    use super::*;

    #[test]
    fn formats_cpu_mask_as_kernel_reads_it() {
        assert_eq!(mask(&[0, 1]), "00000003");
        assert_eq!(mask(&[0, 33]), "00000002,00000001");
        assert_eq!(mask(&[64]), "00000001,00000000,00000000");
    }

    #[test]
    fn merges_maxima_of_one_call_site_into_series() {
        let maximum = |ended_at: &str, latency_ns| {
            let mut trace = LatencyTrace::default();
            (trace.tracer, trace.latency_ns, trace.ended_at) = ("irqsoff".to_owned(), latency_ns, ended_at.to_owned());
            Maximum { trace, at_ns: 0 }
        };
        let series = series(&[maximum("a", 5_000), maximum("b", 7_000), maximum("a", 15_000)], 1e6);
        let counts: Vec<_> = series
            .iter()
            .map(|series| (series.labels["function"].as_str(), series.histograms["length"].count()))
            .collect();
        assert_eq!(counts, [("a", 2), ("b", 1)]);
        assert_eq!(series[0].histograms["length"].max_ns(), 15_000);
        assert!((series[0].values["share"] - 0.02).abs() < 1e-9);
    }

    #[test]
    fn finds_instance_that_uses_tracer() {
        let directory = tempfile::tempdir().expect("a directory");
        let other = directory.path().join("instances/other");
        fs::create_dir_all(&other).expect("made");
        fs::write(directory.path().join("current_tracer"), "nop\n").expect("written");
        fs::write(other.join("current_tracer"), "preemptirqsoff\n").expect("written");
        assert_eq!(other_user(directory.path()), Some((other, "preemptirqsoff".to_owned())));
    }
}
