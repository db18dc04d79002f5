// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's own trace of events, in a tracefs instance of its own.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use whylate_sources::kernel::tracefs;

use crate::support::machine::real_time::patching;

const NAME: &str = "whylate-test-";
/// Frame that shows that a queued item was dequeued and is queued again.
const MOVES: &str = " => mod_delayed_work_on";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Queue,
    Activate,
    Start,
    End,
}

#[derive(Clone, Debug)]
pub struct Event {
    pub kind: Kind,
    /// CLOCK_MONOTONIC, with a resolution of 1 us.
    pub at_ns: u64,
    /// TID of the thread in the context of which it happened.
    pub tid: u32,
    pub cpu: u32,
    pub item: u64,
    pub handler: String,
    /// Known for `Queue` only.
    pub workqueue: String,
    /// Queued by mod_delayed_work(), which dequeues the item first. Known if stacks are recorded.
    pub moved: bool,
}

pub struct Trace {
    directory: PathBuf,
}

/// Any event, as it was printed.
#[derive(Clone, Debug)]
pub struct TraceLine {
    /// CLOCK_MONOTONIC, with a resolution of 1 us.
    pub at_us: u64,
    /// Name of that thread.
    pub thread: String,
    pub tid: u32,
    pub cpu: u32,
    /// The CPU's context by letters: in the third, `h` and `H` are interrupts, and `s` is a softirq.
    pub flags: String,
    pub event: String,
    /// Text after the event's name.
    pub fields: String,
}

const WORK_ITEMS: [&str; 4] = [
    "workqueue/workqueue_queue_work",
    "workqueue/workqueue_activate_work",
    "workqueue/workqueue_execute_start",
    "workqueue/workqueue_execute_end",
];

impl Trace {
    /// Records every work item from now on.
    pub fn start() -> Result<Self> {
        Self::record(&WORK_ITEMS)
    }

    /// Records these events from now on, each a group or a group and a name.
    pub fn record(events: &[&str]) -> Result<Self> {
        let instances = tracefs::find()?.join("instances");
        remove_leftovers(&instances);
        let directory = instances.join(format!("{NAME}{}", std::process::id()));
        fs::create_dir(&directory).context("cannot create a tracefs instance")?;
        let trace = Self { directory };
        let enable: Vec<String> = events.iter().map(|event| format!("events/{event}/enable")).collect();
        let settings = [("buffer_size_kb", "65536"), ("trace_clock", "mono")];
        let settings = settings.into_iter().chain(enable.iter().map(|file| (file.as_str(), "1")));
        patching(|| {
            settings.into_iter().try_for_each(|(file, value)| {
                fs::write(trace.directory.join(file), value).with_context(|| format!("cannot write {file}"))
            })
        })?;
        // Without it the kernel prints hashes of the addresses, which are distinct too, but for collisions.
        let _ = fs::write(trace.directory.join("options/hash-ptr"), "0");
        Ok(trace)
    }

    /// Also records the stack of the thread that queues an item.
    pub fn with_stacks(self) -> Result<Self> {
        fs::write(self.directory.join("events/workqueue/workqueue_queue_work/trigger"), "stacktrace")?;
        Ok(self)
    }

    /// Returns all recorded events, oldest first. Fails if an event was lost.
    pub fn finish(self) -> Result<Vec<Event>> {
        let mut events: Vec<Event> = Vec::new();
        // A stack follows its event; an interrupt may come in between.
        let mut stack_of = None;
        self.each_line(|line| {
            if let Some(head) = line.strip_suffix(": <stack trace>") {
                let (_, tid, cpu) = parse_head(head).context("a stack without a thread")?;
                stack_of =
                    events.iter().rposition(|event| (event.kind, event.tid, event.cpu) == (Kind::Queue, tid, cpu));
            } else if line == MOVES {
                if let Some(index) = stack_of {
                    events[index].moved = true;
                }
            } else {
                events.extend(parse_event(line));
            }
            Ok(())
        })?;
        Ok(events)
    }

    /// Also records every context switch.
    #[allow(dead_code)]
    pub fn with_switches(self) -> Result<Self> {
        fs::write(self.directory.join("events/sched/sched_switch/enable"), "1")?;
        Ok(self)
    }

    /// Returns the spans in which a thread of this name was on a CPU, by the context switches that the kernel shows.
    #[allow(dead_code)]
    pub fn slices_of(&self, comm: &str) -> Result<Vec<Range<u64>>> {
        let (switched_in, switched_out) = (format!("next_comm={comm} "), format!("prev_comm={comm} "));
        let (mut slices, mut since_ns) = (Vec::new(), None);
        self.each_line(|line| {
            if let Some(line) = parse_line(line).filter(|line| line.event == "sched_switch") {
                if line.fields.contains(&switched_in) {
                    since_ns = Some(line.at_us * 1_000);
                } else if line.fields.contains(&switched_out) {
                    slices.extend(since_ns.take().map(|since_ns| since_ns..line.at_us * 1_000));
                }
            }
            Ok(())
        })?;
        Ok(slices)
    }

    /// Like [`Trace::finish`], for any events.
    pub fn finish_lines(self) -> Result<Vec<TraceLine>> {
        let mut lines = Vec::new();
        self.each_line(|line| {
            lines.push(parse_line(line).with_context(|| format!("cannot read {line:?}"))?);
            Ok(())
        })?;
        Ok(lines)
    }

    /// Returns the trace as the kernel prints it.
    #[allow(dead_code)]
    pub fn finish_text(self) -> Result<String> {
        let mut text = String::new();
        self.each_line(|line| {
            text += line;
            text.push('\n');
            Ok(())
        })?;
        Ok(text)
    }

    fn each_line(&self, mut each: impl FnMut(&str) -> Result<()>) -> Result<()> {
        fs::write(self.directory.join("tracing_on"), "0")?;
        for line in BufReader::new(fs::File::open(self.directory.join("trace"))?).lines() {
            let line = line?;
            if let Some((_, counts)) = line.split_once("entries-in-buffer/entries-written:") {
                let counts = counts.split_whitespace().next().unwrap_or_default();
                match counts.split_once('/') {
                    Some((kept, written)) if kept == written => {}
                    _ => bail!("the trace is not whole: {counts}"),
                }
            }
            if !line.starts_with('#') {
                each(&line)?;
            }
        }
        Ok(())
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        patching(|| {
            let _ = fs::remove_dir(&self.directory);
        });
    }
}

/// Removes the instances of killed tests.
fn remove_leftovers(instances: &Path) {
    for entry in fs::read_dir(instances).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(NAME)?.parse::<u32>().ok());
        if owner.is_some_and(|pid| pid == std::process::id() || !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// ` kworker/1:1-24536   [001] .....  4035.327833: workqueue_execute_start: work struct 00000000fe0f3e51: function …`
fn parse_event(line: &str) -> Option<Event> {
    let (head, event) = line.split_at(line.find(": workqueue_")?);
    let (name, fields) = event.trim_start_matches(": ").split_once(' ')?;
    let (at_ns, tid, cpu) = parse_head(head)?;
    let words: Vec<&str> = fields.split([' ', '=']).collect();
    let after = |key: &str| words.iter().position(|&word| word == key).and_then(|index| words.get(index + 1).copied());
    let item = after("struct")?.trim_end_matches(':').trim_start_matches("0x");
    Some(Event {
        kind: match name {
            "workqueue_queue_work:" => Kind::Queue,
            "workqueue_activate_work:" => Kind::Activate,
            "workqueue_execute_start:" => Kind::Start,
            "workqueue_execute_end:" => Kind::End,
            _ => return None,
        },
        at_ns,
        tid,
        cpu,
        item: u64::from_str_radix(item, 16).ok()?,
        handler: after("function").unwrap_or_default().to_owned(),
        workqueue: after("workqueue").unwrap_or_default().to_owned(),
        moved: false,
    })
}

/// `     whylate-hog-812     [001] d..2.  4035.327833: sched_switch: prev_comm=whylate-hog prev_pid=812 …`
fn parse_line(line: &str) -> Option<TraceLine> {
    // A thread name may contain a colon and a space too.
    let (name_at, _) = line.match_indices(": ").find(|&(index, _)| parse_head(&line[..index]).is_some())?;
    let (at_ns, tid, cpu) = parse_head(&line[..name_at])?;
    let (event, fields) = line[name_at + 2..].split_once(':')?;
    let thread = line[..line.find(&format!("-{tid} "))?].trim_start();
    Some(TraceLine {
        at_us: at_ns / 1000,
        thread: thread.to_owned(),
        tid,
        cpu,
        flags: line[..name_at].rsplit(' ').filter(|word| !word.is_empty()).nth(1).unwrap_or_default().to_owned(),
        event: event.to_owned(),
        fields: fields.trim_start().to_owned(),
    })
}

/// Parses the timestamp, TID and CPU; the thread's name may contain spaces.
fn parse_head(head: &str) -> Option<(u64, u32, u32)> {
    let mut words = head.rsplit(' ').filter(|word| !word.is_empty());
    let (stamp, _flags, cpu, task) = (words.next()?, words.next()?, words.next()?, words.next()?);
    let (seconds, fraction) = stamp.split_once('.')?;
    let at_us = seconds.parse::<u64>().ok()? * 1_000_000 + fraction.parse::<u64>().ok()?;
    Some((at_us * 1000, task.rsplit_once('-')?.1.parse().ok()?, cpu.trim_matches(['[', ']']).parse().ok()?))
}

/// Returns when the items of one handler were queued and when they started, in microseconds.
pub fn times_us(events: &[Event], handler: &str) -> (Vec<u64>, Vec<u64>) {
    let times = |kind: Kind| {
        let ours = events.iter().filter(|event| event.kind == kind && event.handler == handler);
        ours.map(|event| event.at_ns / 1000).collect()
    };
    (times(Kind::Queue), times(Kind::Start))
}

/// Groups the events by item, in order, each with the previous event in its thread's context.
pub fn by_item(events: &[Event]) -> HashMap<u64, Vec<(&Event, Option<&Event>)>> {
    let mut items: HashMap<u64, Vec<(&Event, Option<&Event>)>> = HashMap::new();
    let mut last_of_thread: HashMap<(u32, u32), &Event> = HashMap::new();
    for event in events {
        // The idle threads of all CPUs have TID 0.
        let thread = (event.tid, if event.tid == 0 { event.cpu } else { 0 });
        let before = last_of_thread.insert(thread, event);
        items.entry(event.item).or_default().push((event, before));
    }
    items
}
