// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders long waits as a flame graph: where each thread waited, its waker, where the waker waited in turn, and what
//! ran during the wait.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use whylate_model::folded::{Frame, Kind, Root, WOKEN_BY, labels, lines_of};
use whylate_model::path::{PathSegment, within};
use whylate_model::sources::count_lost;
use whylate_model::units::format_ns;
use whylate_model::{Cause, LateEvent, Snapshot};

use super::file::Form;
use super::{svg, write_lines};
use crate::render::text::path::{MAX_DEPTH, of_name, waited, who_and_what};
use crate::render::text::why;

/// Maximum number of distinct chains. Later ones are merged per victim.
const MAX_CHAINS: usize = 10_000;
/// Frame in place of chains beyond `MAX_CHAINS`.
const BEYOND: &str = "[beyond the first 10,000 chains]";
/// Frame in place of waits that are not shown.
const OMITTED: &str = "...";

/// Sums up the chains of long waits, in bounded memory.
#[derive(Debug)]
pub struct Chains {
    root: Root,
    over_ns: u64,
    /// Number and total nanoseconds of explained waits.
    explained: (u64, u64),
    /// Number and total nanoseconds of waits added to the graph; equals the sum of all chains.
    added: (u64, u64),
    /// Index of each frame in `frames`: names repeat often.
    numbers: HashMap<Frame, u32>,
    frames: Vec<Frame>,
    chains: HashMap<Vec<u32>, u64>,
}

impl Chains {
    /// Creates the sums for waits of `over_ns` or longer.
    pub fn new(over_ns: u64, root: Root) -> Self {
        let (numbers, frames, chains) = (HashMap::new(), Vec::new(), HashMap::new());
        Chains { root, over_ns, explained: (0, 0), added: (0, 0), numbers, frames, chains }
    }

    /// Counts an explained wait, whether it is added or not.
    pub fn count(&mut self, event: &LateEvent) {
        self.explained.0 += u64::from(!event.causes.is_empty());
        self.explained.1 += event.causes.iter().map(|cause| cause.ns).sum::<u64>();
    }

    /// Adds a wait. A wait without causes adds nothing.
    pub fn add(&mut self, event: &LateEvent) {
        let parts = parts_of(event, self.root);
        self.added.0 += u64::from(!parts.is_empty());
        for (frames, ns) in parts {
            self.added.1 += ns;
            *self.sum_of(frames) += ns;
        }
    }

    fn sum_of(&mut self, mut frames: Vec<Frame>) -> &mut u64 {
        let known: Option<Vec<u32>> = frames.iter().map(|frame| self.numbers.get(frame).copied()).collect();
        let is_known = known.is_some_and(|known| self.chains.contains_key(&known));
        if !is_known && self.chains.len() >= MAX_CHAINS {
            // There may be too many victims, too.
            let has_room = self.chains.len() < 2 * MAX_CHAINS;
            frames.retain(|frame| has_room && frame.kind == Kind::Label);
            frames.push(Frame::new(Kind::Between, BEYOND));
        }
        let numbers = frames.into_iter().map(|frame| self.number_of(frame)).collect();
        self.chains.entry(numbers).or_default()
    }

    fn number_of(&mut self, frame: Frame) -> u32 {
        let next = self.frames.len() as u32;
        *self.numbers.entry(frame).or_insert_with_key(|frame| {
            self.frames.push(frame.clone());
            next
        })
    }

    /// Returns the chains with their nanoseconds.
    fn frames(&self) -> impl Iterator<Item = (Vec<Frame>, u64)> {
        let named = |numbers: &[u32]| numbers.iter().map(|&number| self.frames[number as usize].clone()).collect();
        self.chains.iter().map(move |(numbers, &ns)| (named(numbers), ns)).filter(|&(_, ns)| ns > 0)
    }

    /// Writes the chains in a format.
    ///
    /// # Errors
    /// Fails if the writer does, or if there is nothing to draw.
    pub fn write(&self, out: &mut dyn Write, form: Form, snapshot: &Snapshot) -> io::Result<()> {
        if form == Form::Svg {
            let chains: Vec<(Vec<Frame>, u64)> = self.frames().collect();
            if chains.is_empty() {
                let over = format_ns(self.over_ns);
                let nothing = format!("there is nothing to draw: no wait of {over} or longer was explained");
                return Err(io::Error::other(nothing));
            }
            svg::write_frames(out, "Long waits, and who ended them", &self.summary(snapshot), &chains)?;
        } else {
            let mut sums: BTreeMap<String, u64> = BTreeMap::new();
            for (frames, ns) in self.frames() {
                let names: Vec<String> = frames.into_iter().map(|frame| frame.name).collect();
                *sums.entry(names.join(";")).or_default() += ns;
            }
            write_lines(out, &lines_of(sums))?;
        }
        out.flush()
    }

    /// Renders the coverage of the graph, and what is missing from it.
    fn summary(&self, snapshot: &Snapshot) -> String {
        let (over, (all, all_ns), (added, added_ns)) = (format_ns(self.over_ns), self.explained, self.added);
        let (waits, all_took, took) = (why::counted(all, "wait"), format_ns(all_ns), format_ns(added_ns));
        let total = match added < all {
            true => format!("The {added} longest of {waits} of {over} or longer took {took} of {all_took}."),
            false => format!("{waits} of {over} or longer took {took} in total."),
        };
        let mut sentences = vec![total];
        sentences.extend(why::unexplained(&snapshot.unexplained, all_ns, "wait"));
        let lost = count_lost(&snapshot.source, &snapshot.lost);
        sentences.extend((lost > 0).then(|| format!("{lost} lost.")));
        sentences.join(" ")
    }

    /// Returns the summary if events are unexplained or lost, for formats without a subtitle.
    pub fn gaps(&self, snapshot: &Snapshot) -> Option<String> {
        let has_gaps = !snapshot.unexplained.is_none() || count_lost(&snapshot.source, &snapshot.lost) > 0;
        has_gaps.then(|| self.summary(snapshot))
    }
}

/// Returns the parts of a wait, with frames and nanoseconds that add up to the wait.
pub fn parts_of(event: &LateEvent, root: Root) -> Vec<(Vec<Frame>, u64)> {
    let victim = labels(&event.labels, root);
    if event.path.is_empty() {
        let part = |cause: &Cause| ([victim.clone(), cause_frames(event, cause)].concat(), cause.ns);
        return event.causes.iter().map(part).collect();
    }
    let parts = event.path.iter().zip(within(&event.path)).map(|(segment, waits)| {
        let mut frames = victim.clone();
        if let Some((own, deeper)) = waits.split_first() {
            frames.extend(place(Kind::Kernel, &event.stack, own.and_then(|wait| wait.via.as_deref())));
            for wait in deeper.iter().take(MAX_DEPTH) {
                frames.push(Frame::new(Kind::Between, WOKEN_BY));
                frames.extend(waiter(*wait));
            }
            frames.push(Frame::new(Kind::Between, if deeper.len() > MAX_DEPTH { OMITTED } else { WOKEN_BY }));
        }
        frames.extend(ending(&of_name(segment), !waits.is_empty()));
        (frames, segment.ns)
    });
    parts.collect()
}

/// Returns the frames of a cause of a run-queue wait, with the cause's stack, if any.
fn cause_frames(event: &LateEvent, cause: &Cause) -> Vec<Frame> {
    let ready = Some(event.subject.as_str().into());
    let segment = PathSegment { kind: cause.kind, who: cause.who.clone(), ready, ..PathSegment::default() };
    let mut frames = ending(&of_name(&segment), false);
    frames.extend(cause.stack.iter().rev().map(|name| Frame::new(Kind::Waker, name)));
    frames
}

/// Returns the frames of a waker that waited in turn.
fn waiter(wait: Option<&PathSegment>) -> Vec<Frame> {
    let Some(wait) = wait else { return vec![Frame::new(Kind::Between, OMITTED)] };
    let mut frames = vec![Frame::new(Kind::Waker, &wait.waiter_name().by_name().to_string())];
    frames.extend(match wait.stop {
        Some(_) => vec![Frame::new(Kind::Waker, &waited(wait))],
        None => place(Kind::Waker, &wait.stack, wait.via.as_deref()),
    });
    frames
}

/// Returns the frames of a wait's stack, outermost first, or of its system call if it has no stack.
fn place(kind: Kind, stack: &[String], via: Option<&str>) -> Vec<Frame> {
    match via {
        Some(via) if stack.is_empty() => vec![Frame::new(kind, &format!("waited in {via}"))],
        _ => stack.iter().rev().map(|name| Frame::new(kind, name)).collect(),
    }
}

/// Returns the frames of a segment; names the thread if it is not the victim.
fn ending(segment: &PathSegment, is_anothers: bool) -> Vec<Frame> {
    let (who, clauses) = who_and_what(segment);
    let who = who.filter(|_| is_anothers);
    // Only run-queue waits have several clauses.
    let kind = if clauses.len() > 1 { Kind::Runnable } else { Kind::WhileWaiting };
    let mut frames: Vec<Frame> = who.iter().map(|who| Frame::new(Kind::Waker, who)).collect();
    frames.extend(clauses.iter().map(|clause| Frame::new(kind, clause)));
    frames
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use whylate_model::ActorName;
    use whylate_model::CauseKind::{
        self, Disk, IdleExit, Irq, IrqsOff, Outside, Running, Softirq, Steal, Thread, Timer, Unknown, Work,
    };

    use super::super::sample::EVIL;
    use super::*;

    fn names(names: &str) -> Vec<String> {
        names.split_whitespace().map(str::to_owned).collect()
    }

    fn late(path: Vec<PathSegment>, causes: Vec<Cause>) -> LateEvent {
        let labels = [("process", "app"), ("pid", "77"), ("thread", "client;"), ("tid", "78"), ("cgroup", "/a")];
        let causes_of_path: Vec<Cause> =
            path.iter().map(|part| Cause::new(part.kind, part.who.clone(), part.ns)).collect();
        let causes = if path.is_empty() { causes } else { causes_of_path };
        LateEvent {
            subject: "client;:78".to_owned(),
            labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            latency_ns: causes.iter().map(|cause| cause.ns).sum(),
            causes,
            path,
            ..LateEvent::default()
        }
    }

    fn part(us: u64, depth: u32, waiter: &str, kind: CauseKind, who: &str) -> PathSegment {
        let waiter = (depth > 0).then(|| waiter.parse().expect("any text"));
        PathSegment {
            ns: us * 1_000,
            kind,
            who: who.parse().expect("any text"),
            waiter,
            depth,
            ..PathSegment::default()
        }
    }

    /// Returns a wait of a client for a server that waits for a disk and then for a CPU.
    fn request() -> LateEvent {
        let fsync = |part| PathSegment { stack: names("io_schedule do_fsync"), ..part };
        let server = || Some(ActorName::thread("server", 5));
        let path = vec![
            fsync(part(400, 2, "server:5", Disk, "254:0 (write by jbd2/vda-8:80)")),
            PathSegment {
                via: Some("read (pipe)".to_owned()),
                ..part(8_000, 3, "jbd2/vda-8:80", Running, "helper 7:9")
            },
            fsync(part(20, 2, "server:5", Running, "jbd2/vda-8:80")),
            PathSegment { ready: server(), ..part(3, 1, "client;:78", Thread, "hog:6") },
            PathSegment { ready: server(), ..part(5_000, 1, "client;:78", Thread, "hog:7") },
            part(60_000, 1, "client;:78", Running, "server:5"),
            part(100_000, 2, "helper:8", Timer, "timer"),
            PathSegment { ready: Some(ActorName::thread("client;", 78)), ..part(700_000, 0, "", Thread, "hog:6") },
        ];
        LateEvent { stack: names("unix_stream_read_generic __x64_sys_recvfrom"), ..late(path, Vec::new()) }
    }

    fn written(chains: &Chains, form: Form, snapshot: &Snapshot) -> String {
        crate::render::text::text_of(|out| chains.write(out, form, snapshot))
    }

    fn chains_of(root: Root, events: &[LateEvent]) -> Chains {
        let mut chains = Chains::new(5_000_000, root);
        for event in events {
            chains.count(event);
            chains.add(event);
        }
        chains
    }

    fn folded(root: Root, events: &[LateEvent]) -> Vec<String> {
        let lines = written(&chains_of(root, events), Form::Folded, &empty());
        lines.lines().map(str::to_owned).collect()
    }

    fn empty() -> Snapshot {
        Snapshot::new("offcpu", "sample", "host", 0)
    }

    fn sum(lines: &[String]) -> u64 {
        let us = |line: &String| line.rsplit_once(' ').and_then(|(_, us)| us.parse::<u64>().ok()).expect("a time");
        lines.iter().map(us).sum()
    }

    #[test]
    fn nested_waits_follow_outer_wait() {
        let recv = "app;__x64_sys_recvfrom;unix_stream_read_generic;--";
        let fsync = "server;do_fsync;io_schedule;--";
        assert_eq!(
            folded(Root::Process, &[request()]),
            [
                format!("{recv};helper;--;until a timer expired 100000"),
                format!("{recv};{fsync};at disk 254:0 (write by jbd2/vda-8) 400"),
                format!("{recv};{fsync};jbd2/vda-8;waited in read (pipe);--;helper 7;worked 8000"),
                format!("{recv};{fsync};jbd2/vda-8;worked 20"),
                format!("{recv};server;waited for a CPU;behind hog 5003"),
                format!("{recv};server;worked 60000"),
                "app;waited for a CPU;behind hog 700000".to_owned(),
            ]
        );
        let begins = |root| folded(root, &[request()])[0].split_once(";__x64").map(|(begin, _)| begin.to_owned());
        let begins = [Root::Thread, Root::Cgroup].map(begins);
        assert_eq!(begins, ["app;client:;78", "/a;app"].map(|begin| Some(begin.to_owned())));
    }

    #[test]
    fn renders_waits_without_stack_or_segment() {
        let mut event = late(vec![part(1, 3, "c:3", Outside, "outside this PID namespace")], Vec::new());
        assert_eq!(
            folded(Root::Process, &[event.clone()]),
            ["app;--;...;--;c;--;for a thread outside this PID namespace 1"]
        );
        event
            .path
            .push(PathSegment { via: Some("futex".to_owned()), ..part(2, 1, "client;:78", Unknown, "not recorded") });
        let lines = ["...;--;c;--;for a thread outside this PID namespace 1", "unknown: not recorded 2"];
        assert_eq!(folded(Root::Process, &[event]), lines.map(|line| format!("app;waited in futex;--;{line}")));
        let deep = (1..40).map(|depth| part(1, depth, &format!("t{depth}:1"), Running, "z:1")).rev().collect();
        let deepest = folded(Root::Process, &[late(deep, Vec::new())]);
        let ends: Vec<&String> = deepest.iter().filter(|line| line.contains(";t13;...;z;worked ")).collect();
        assert_eq!((ends.len(), sum(&deepest)), (1, 39), "{deepest:?}");
        assert!(ends[0].ends_with(";z;worked 26"), "{ends:?}");
    }

    #[test]
    fn run_queue_wait_has_stack_of_cause() {
        let off = Cause {
            stack: names("spin_unlock console_unlock"),
            ..Cause::new(IrqsOff, ActorName::thread("dd", 4242), 7_000)
        };
        let causes = vec![off, Cause::new(Work, "wb_workfn", 1_000), Cause::new(CauseKind::Nmi, "NMI", 2_000)];
        let begin = "app;waited for a CPU";
        assert_eq!(
            folded(Root::Process, &[late(Vec::new(), causes)]),
            [
                format!("{begin};behind an NMI 2"),
                format!("{begin};behind work item wb_workfn 1"),
                format!("{begin};while dd had interrupts off;console_unlock;spin_unlock 7"),
            ]
        );
        assert!(folded(Root::Process, &[LateEvent { latency_ns: 7, ..late(Vec::new(), Vec::new()) }]).is_empty());
    }

    #[test]
    fn summary_has_unexplained_and_lost() {
        let second = late(Vec::new(), vec![Cause::new(Thread, ActorName::thread("worker 5", 9), 126_577_000)]);
        let all = chains_of(Root::Process, &[request(), second.clone()]);
        let mut snapshot = empty();
        assert_eq!(all.summary(&snapshot), "2 waits of 5.00ms or longer took 1.00s in total.");
        assert_eq!(all.gaps(&snapshot), None);
        snapshot.unexplained =
            whylate_model::snapshot::Unexplained { events: 3, total_ns: 1_000_000_000, recorded: None };
        snapshot.lost.insert("unseen_sleeps".to_owned(), 4);
        let rest = "That is 50.0% of the late time: 3 more late waits (1.00s in total) exceeded the budget for \
                    explanations. 4 lost.";
        assert_eq!(all.gaps(&snapshot), Some(format!("2 waits of 5.00ms or longer took 1.00s in total. {rest}")));
        let svg = written(&all, Form::Svg, &snapshot);
        assert!(svg.contains(rest) && svg.contains("behind worker_5 (127ms,") && svg.contains("all (1.00s,"));
        let mut worst = Chains::new(5_000_000, Root::Process);
        [&request(), &second].into_iter().for_each(|event| worst.count(event));
        worst.add(&request());
        let expected = "The 1 longest of 2 waits of 5.00ms or longer took 873ms of 1.00s.";
        assert_eq!(worst.summary(&empty()), expected);
        let nothing = Chains::new(5_000_000, Root::Process);
        let error = nothing.write(&mut Vec::new(), Form::Svg, &empty()).expect_err("nothing is not drawn");
        assert!(error.to_string().contains("no wait of 5.00ms or longer was explained"), "{error}");
        assert!(written(&nothing, Form::Folded, &empty()).is_empty());
    }

    #[test]
    fn merges_chains_beyond_limit() {
        let mut chains = Chains::new(1, Root::Process);
        let total = 3 * MAX_CHAINS as u64;
        for number in 0..total {
            let process = if number < 2 * MAX_CHAINS as u64 { "app".to_owned() } else { format!("app{number}") };
            let mut event = late(vec![part(1, 1, "client:78", Irq, &format!("irq{number}"))], Vec::new());
            event.labels.insert("process".to_owned(), process);
            chains.add(&event);
        }
        let lines: Vec<String> = written(&chains, Form::Folded, &empty()).lines().map(str::to_owned).collect();
        assert_eq!(sum(&lines), total);
        assert_eq!(lines.len(), 2 * MAX_CHAINS + 1);
        assert!(lines.contains(&format!("app;{BEYOND} {MAX_CHAINS}")) && lines.contains(&format!("{BEYOND} 1")));
    }

    /// Generates segments of any order and depth, with hostile thread names.
    fn any_event() -> impl Strategy<Value = LateEvent> {
        let kinds = [Running, Thread, Disk, Timer, Softirq, Steal, IdleExit, Unknown];
        let name = prop::sample::select(vec!["a:1", "b 5:2", "", EVIL, "--", ";:3", "x\n 7"]);
        let any_part =
            (0u64..9_000_000_000, 0u32..20, prop::sample::select(kinds.to_vec()), [name.clone(), name.clone(), name]);
        prop::collection::vec((any_part, any::<[bool; 3]>()), 0..30).prop_map(|parts| {
            let of =
                |((us, depth, kind, names), [ready, via, stack]): ((u64, u32, CauseKind, [&str; 3]), [bool; 3])| {
                    let text = |wanted: bool, name: &str| wanted.then(|| name.to_owned());
                    PathSegment {
                        ready: text(ready, names[0]).map(|name| name.parse().expect("any text")),
                        via: text(via, names[1]),
                        stack: text(stack, names[2]).into_iter().collect(),
                        ..part(us, depth, names[1], kind, names[2])
                    }
                };
            LateEvent { stack: names("f g"), ..late(parts.into_iter().map(of).collect(), Vec::new()) }
        })
    }

    proptest! {
        #[test]
        fn chains_add_up_to_the_waits(events in prop::collection::vec(any_event(), 1..6)) {
            let chains = chains_of(Root::Thread, &events);
            let lines: Vec<String> = written(&chains, Form::Folded, &empty()).lines().map(str::to_owned).collect();
            let total: u64 = events.iter().map(|event| event.latency_ns).sum();
            prop_assert_eq!(sum(&lines) * 1_000, total);
            prop_assert_eq!((chains.added.1, chains.explained.1), (total, total));
            for line in &lines {
                let (frames, _) = line.rsplit_once(' ').expect("a time");
                prop_assert!(frames.split(';').all(|frame| !frame.is_empty()), "{}", line);
                prop_assert!(frames.starts_with("app;client:;78;") && line.chars().all(whylate_model::units::is_printable), "{}", line);
                let last = frames.trim_end().rsplit(' ').next().unwrap_or_default();
                prop_assert!(!frames.contains(' ') || last.parse::<u64>().is_err(), "{}", line);
            }
        }
    }
}
