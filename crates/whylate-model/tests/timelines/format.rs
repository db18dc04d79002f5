// SPDX-License-Identifier: MIT OR Apache-2.0
//! The text format of a timeline. README.md beside this file describes it.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::Peekable;
use std::str::{FromStr, SplitWhitespace};

use whylate_model::path::Query;
use whylate_model::path::budget::OutsideState;
use whylate_model::path::history::{
    Blocked, Holder, Move, Moves, Name, Operation, Recorded, Request, RunSlice, SwitchIn, SwitchOut, Waker,
};
use whylate_model::path::stolen::Spread;
use whylate_model::path::timer::TimerKind;
use whylate_model::thread::OUTSIDE;
use whylate_model::wait::Stop;

use super::symbols::{CALLS, Symbols};

/// CLOCK_MONOTONIC at the zero of a file, in nanoseconds: an hour after boot.
pub const ZERO_NS: u64 = 3_600_000_000_000;

/// One file.
#[derive(Default)]
pub struct Timeline {
    recorded: Recorded,
    /// What is known of threads besides the timeline.
    pub known: BTreeMap<u32, OutsideState>,
    pub questions: Vec<Question>,
    pub symbols: Symbols,
    /// Threads of the command.
    members: BTreeSet<u32>,
}

/// One line that begins with `ask`.
pub struct Question {
    /// Its line in the file, from 0 on.
    pub line: usize,
    pub kind: Kind,
    /// One thread, or all that a budget is for.
    pub asked: Vec<Query>,
}

/// What an answer is about.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// All that a thread did in a span of time.
    Span,
    /// The last wait of a thread.
    Wait,
    /// The elapsed time of a command.
    Command,
    /// Sums of what threads did.
    Budget,
}

/// The words of one line; panics name the line.
struct Words<'a> {
    line: &'a str,
    words: Peekable<SplitWhitespace<'a>>,
}

impl<'a> Words<'a> {
    fn new(line: &'a str) -> Self {
        Words { line, words: line.split_whitespace().peekable() }
    }

    fn next(&mut self) -> &'a str {
        self.words.next().unwrap_or_else(|| panic!("a word is missing at the end of: {}", self.line))
    }

    /// Takes the next word if it is this one.
    fn takes(&mut self, word: &str) -> bool {
        self.words.next_if(|next| *next == word).is_some()
    }

    fn expect(&mut self, word: &str) {
        let found = self.next();
        assert_eq!(found, word, "in: {}", self.line);
    }

    fn parse<T: FromStr>(&self, word: &str) -> T {
        word.parse().unwrap_or_else(|_| panic!("no number: {word}, in: {}", self.line))
    }

    fn number<T: FromStr>(&mut self) -> T {
        let word = self.next();
        self.parse(word)
    }

    fn cpu(&mut self) -> usize {
        let word = self.next();
        self.parse(word.strip_prefix("cpu").unwrap_or_else(|| panic!("no CPU: {word}, in: {}", self.line)))
    }

    /// A duration in microseconds with up to three decimals, as nanoseconds.
    fn duration_ns(&mut self) -> u64 {
        let word = self.next();
        let (us, decimals) = word.split_once('.').unwrap_or((word, ""));
        let ns: u64 = self.parse(&format!("{decimals:0<3}"));
        self.parse::<u64>(us) * 1_000 + ns
    }

    fn time_ns(&mut self) -> u64 {
        ZERO_NS + self.duration_ns()
    }

    fn one_of<T: Copy>(&mut self, choices: &[(&str, T)]) -> T {
        let word = self.next();
        let choice = choices.iter().find(|choice| choice.0 == word);
        choice.unwrap_or_else(|| panic!("unknown word: {word}, in: {}", self.line)).1
    }

    fn stop(&mut self) -> Stop {
        self.one_of(&[("signal", Stop::Signal), ("tracer", Stop::Tracer), ("freezer", Stop::Freezer)])
    }

    fn syscall(&mut self) -> Option<u16> {
        if self.takes("kernel") || self.takes("fault") {
            return None;
        }
        Some(self.one_of(&CALLS.map(|(number, name)| (name, number))))
    }
}

impl Timeline {
    /// All CPUs from the end backwards, as a live look reads them.
    pub fn past(&self) -> Spread<Recorded> {
        Spread::new(self.recorded.clone())
    }

    pub fn parse(text: &str) -> Self {
        let mut timeline = Timeline::default();
        for (number, line) in text.lines().enumerate() {
            let mut words = Words::new(line);
            match words.words.next() {
                None => {}
                Some(word) if word.starts_with(['#', '=']) => {}
                Some("members") => timeline.members.extend(words.words.map(|tid| tid.parse::<u32>().expect("a TID"))),
                Some("known") => timeline.take_known(&mut words),
                Some("ask") => timeline.questions.push(question(number, &mut words)),
                Some(_) => timeline.take_slice(&mut Words::new(line)),
            }
        }
        let members = &timeline.members;
        for slices in &mut timeline.recorded.cpus {
            assert!(slices.is_sorted_by(|one, other| one.end_ns <= other.start_ns), "run slices overlap or go back");
            slices.iter_mut().for_each(|slice| *slice = slice.marked(|tid, _| members.contains(&tid)));
        }
        timeline
    }

    /// `known TID COMM [in CALL] [stopped-by SIGNAL] [traced-by TID COMM]`
    fn take_known(&mut self, words: &mut Words<'_>) {
        let (tid, name) = (words.number(), Name::new(words.next()));
        self.symbols.add_thread(tid, name);
        let mut known = OutsideState { name, ..OutsideState::default() };
        while words.words.peek().is_some() {
            match words.next() {
                "in" => known.waits_in = Some(words.next().to_owned()),
                "stopped-by" => known.stop = Some(words.stop()),
                "traced-by" => known.tracer = Some((words.number(), Name::new(words.next()))),
                word => panic!("unknown word: {word}, in: {}", words.line),
            }
        }
        self.known.insert(tid, known);
    }

    /// Parses `cpuN FROM .. TO ACTOR [switch-in] [other facts] [switch-out]`.
    fn take_slice(&mut self, words: &mut Words<'_>) {
        let cpu = words.cpu();
        let start_ns = words.time_ns();
        words.expect("..");
        let end_ns = words.time_ns();
        assert!(start_ns < end_ns, "ends before it begins: {}", words.line);
        let (holder, name) = self.holder(words);
        let mut slice = RunSlice { start_ns, end_ns, holder, name, ..RunSlice::default() };
        while words.words.peek().is_some() {
            self.take_detail(&mut slice, cpu, words);
        }
        while self.recorded.cpus.len() <= cpu {
            self.recorded.cpus.push(Vec::new());
        }
        self.recorded.cpus[cpu].push(slice);
    }

    fn holder(&mut self, words: &mut Words<'_>) -> (Holder, Name) {
        match words.next() {
            "idle" => (Holder::Idle, Name::default()),
            // A thread without a TID in the PID namespace of whylate.
            "thread" if words.takes("outside") => {
                (Holder::Thread(OUTSIDE | words.number::<u32>()), Name::new(words.next()))
            }
            "thread" => (Holder::Thread(words.number()), Name::new(words.next())),
            "work" => {
                let (tid, name) = (words.number(), Name::new(words.next()));
                (Holder::Work { tid, handler: self.symbols.number(words.next()) }, name)
            }
            "irq" => {
                let name = Name::new(words.next());
                let late_ns = if words.takes("late") { words.duration_ns() } else { 0 };
                (Holder::Irq { late_ns }, name)
            }
            "softirq" => (Holder::Softirq, Name::new(words.next())),
            word => panic!("unknown holder: {word}, in: {}", words.line),
        }
    }

    fn take_detail(&mut self, slice: &mut RunSlice, cpu: usize, words: &mut Words<'_>) {
        match words.next() {
            "woken" => {
                let (at_ns, by) = (words.time_ns(), self.waker(words));
                slice.entry = SwitchIn::Woken { at_ns, by, cpu: on_cpu(words) };
            }
            "forked" => {
                let (at_ns, by) = (words.time_ns(), parent(words));
                slice.entry = SwitchIn::Woken { at_ns, by, cpu: on_cpu(words) };
            }
            "queued" => {
                let (at_ns, by) = (words.time_ns(), self.waker(words));
                slice.entry = SwitchIn::Queued { at_ns, by, cpu: on_cpu(words) };
            }
            "runnable-since" => slice.entry = SwitchIn::Preempted { at_ns: words.time_ns() },
            "switch-in-unseen" => slice.entry = SwitchIn::Unseen,
            // A thread that calls execve() gets the TID of its process.
            "renumbered-from" => {
                let (at_ns, by) = (slice.start_ns, Waker::Parent(words.number()));
                slice.entry = SwitchIn::Woken { at_ns, by, cpu: cpu as u32 };
            }
            "moved" => {
                let at_ns = words.time_ns();
                words.expect("from");
                let last = Move { at_ns, from_cpu: words.cpu() as u32 };
                slice.moved = Some(slice.moved.map_or_else(|| Moves::one(last), |moves| moves.and_then(last)));
            }
            "throttled-for" => slice.throttled_ns = words.duration_ns(),
            "was-stopped-by" => slice.stopped = Some(words.stop()),
            "cgroup" => slice.cgroup = Some(self.symbols.number(words.next())),
            "steal" => slice.steal_ns = words.duration_ns(),
            "preempted" => slice.exit = SwitchOut::Preempted,
            "exits" => slice.exit = SwitchOut::Dead,
            "stopped-by" => slice.exit = SwitchOut::Blocked(Blocked { stop: Some(words.stop()), ..blocked(words) }),
            "blocked" => slice.exit = SwitchOut::Blocked(blocked(words)),
            word => panic!("unknown word: {word}, in: {}", words.line),
        }
    }

    /// `by WAKER`
    fn waker(&mut self, words: &mut Words<'_>) -> Waker {
        words.expect("by");
        match words.next() {
            "timer" => Waker::Timer(TimerKind::Other),
            "dirty-throttling" => Waker::Timer(TimerKind::DirtyThrottling),
            "network" => Waker::Network,
            "rcu" => Waker::Rcu,
            "softirq" => Waker::Softirq,
            "irq" => Waker::Irq,
            "disk" => Waker::Disk(self.request(words)),
            "outside" => Waker::Thread(OUTSIDE | words.number::<u32>()),
            // Any function of a timer that the kernel calls.
            word if word.starts_with(|first: char| first.is_ascii_alphabetic()) => {
                let is_known = TimerKind::FUNCTIONS.iter().any(|(function, _)| *function == word);
                assert!(is_known, "unknown waker: {word}, in: {}", words.line);
                Waker::Timer(TimerKind::of_function(word))
            }
            tid => Waker::Thread(words.parse(tid)),
        }
    }

    /// `OPERATION DEVICE inserted AT issued AT [submitted-by TID]`, or `overwritten`.
    fn request(&mut self, words: &mut Words<'_>) -> Request {
        if words.takes("overwritten") {
            return Request::default();
        }
        let operation = words.one_of(&[
            ("read", Operation::Read),
            ("write", Operation::Write),
            ("flush", Operation::Flush),
            ("discard", Operation::Other),
        ]);
        let device = self.symbols.number(words.next()) as u32;
        words.expect("inserted");
        let queued_ns = words.time_ns();
        words.expect("issued");
        let issued_ns = words.time_ns();
        let submitter = if words.takes("submitted-by") { words.number() } else { 0 };
        Request { queued_ns, issued_ns, device, operation, submitter }
    }
}

/// `by TID`
fn parent(words: &mut Words<'_>) -> Waker {
    words.expect("by");
    Waker::Parent(words.number())
}

/// `on cpuN`
fn on_cpu(words: &mut Words<'_>) -> u32 {
    words.expect("on");
    words.cpu() as u32
}

/// `in CALL [S|D] [iowait]`, where CALL is `kernel` for a kernel thread and `fault` for a wait outside system calls.
fn blocked(words: &mut Words<'_>) -> Blocked {
    words.expect("in");
    let is_kernel = words.words.peek() == Some(&"kernel");
    let syscall = words.syscall();
    let is_uninterruptible = words.takes("D");
    // Most sleeps are interruptible: the letter may be left out.
    words.takes("S");
    Blocked { syscall, is_uninterruptible, in_iowait: words.takes("iowait"), is_kernel, stop: None }
}

/// `ask TID[,TID...] from AT to AT [wait|command|budget]`
fn question(line: usize, words: &mut Words<'_>) -> Question {
    let tids: Vec<u32> = words.next().split(',').map(|tid| words.parse(tid)).collect();
    words.expect("from");
    let from_ns = words.time_ns();
    words.expect("to");
    let to_ns = words.time_ns();
    let kind = match words.words.next() {
        None => Kind::Span,
        Some("wait") => Kind::Wait,
        Some("command") => Kind::Command,
        Some("budget") => Kind::Budget,
        Some(word) => panic!("unknown question: {word}, in: {}", words.line),
    };
    assert!(tids.len() == 1 || kind == Kind::Budget, "one thread only: {}", words.line);
    let (is_wait, is_command) = (kind == Kind::Wait, kind == Kind::Command);
    let asked = tids.into_iter().map(|tid| Query { tid, from_ns, to_ns, is_wait, is_command }).collect();
    Question { line, kind, asked }
}
