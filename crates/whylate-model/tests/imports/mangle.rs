// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ways in which people and programs alter a tool's output on its way into a report, and a check that its import is
//! still right. Random bytes choose the manglings.

use std::collections::BTreeSet;

use whylate_model::ftrace::timeline::Trace;
use whylate_model::ftrace::{ImportOptions, import};
use whylate_model::import::{Imported, Names, Order};
use whylate_model::path::history::{Name, RunSlice};

/// Tool outputs, each with the importer that reads it.
pub const TEXTS: [(Kind, &str); 13] = [
    (Kind::Stacks, PROCSTAT),
    (Kind::Stacks, PROCSTAT_OFFSETS),
    (Kind::Stacks, DUMP),
    (Kind::Stacks, DUMPS_IN_A_ROW),
    (Kind::Stacks, FOLDED),
    (Kind::Trace, include_str!("../traces/tracefs.txt")),
    (Kind::Trace, include_str!("../traces/perf-script.txt")),
    (Kind::Trace, TRACE_CMD),
    (Kind::Trace, LATENCY_FORMAT),
    (Kind::Irqs, include_str!("../ftrace/irqsoff-5.4.txt")),
    (Kind::Irqs, include_str!("../ftrace/irqsoff-2.6.txt")),
    (Kind::Irqs, include_str!("../ftrace/trace-pipe-5.4.txt")),
    (Kind::Irqs, IRQS),
];
/// Maximum number of lines taken of a long output.
const LINES: usize = 60;

const PROCSTAT: &str = "\
  PID    TID COMM             TDNAME           KSTACK                       
    0 100000 kernel           swapper          mi_switch sleepq_timedwait _sleep swapper btext 
    0 100023 kernel           firmware taskq   mi_switch sleepq_wait _sleep taskqueue_thread_loop fork_exit fork_trampoline 
  812 100110 nginx            -                mi_switch sleepq_catch_signals sleepq_wait_sig _sleep kern_kevent sys_kevent amd64_syscall fast_syscall_common 
  813 100111 nginx            -                mi_switch sleepq_catch_signals sleepq_wait_sig _sleep kern_kevent sys_kevent amd64_syscall fast_syscall_common 
";
const PROCSTAT_OFFSETS: &str = "\
  PID    TID COMM             TDNAME           KSTACK                       
   12 100023 kernel           aiod_bio taskq   mi_switch+0xbc _sleep+0x1e1 taskqueue_thread_loop+0xb1 fork_exit+0x7e fork_trampoline+0xe 
  812 100110 proxyd           -                mi_switch+0xbc sleepq_catch_signals+0x27d sleepq_wait_sig+0x9 _sleep+0x29b kqueue_scan+0xa11 kern_kevent_generic+0xdf sys_kevent+0x61 amd64_syscall+0x126 fast_syscall_common+0xf8 
";
const DUMP: &str = "\
==> /proc/812/stack <==
[<ffffffff810f7a56>] futex_wait_queue_me+0xc6/0x130
[<ffffffff810fa7ff>] SyS_futex+0x7f/0x180
[<ffffffff81841eb2>] entry_SYSCALL_64_fastpath+0x16/0x71
[<ffffffffffffffff>] 0xffffffffffffffff

==> /proc/909/stack <==
[<ffffffffc02d4d51>] cv_wait_common+0x111/0x130 [compat]
[<ffffffff8120fad5>] SyS_write+0x55/0xc0
[<ffffffffffffffff>] 0xffffffffffffffff
";
/// `cat /proc/*/stack`.
const DUMPS_IN_A_ROW: &str = "\
[<0>] futex_wait_queue+0x6a/0xa0
[<0>] __futex_wait+0x14e/0x1c0
[<0>] __x64_sys_futex+0x8c/0x1d0
[<0>] entry_SYSCALL_64_after_hwframe+0x76/0x7e
[<0>] worker_thread+0xab/0x3a0
[<0>] kthread+0xd2/0x100
[<0>] ret_from_fork+0x34/0x50
[<0>] ret_from_fork_asm+0x1a/0x30
[<0>] do_wait+0x51/0xf0
[<0>] kernel_wait4+0xa9/0x140
[<0>] entry_SYSCALL_64_after_hwframe+0x76/0x7e
";
const FOLDED: &str = "\
nginx;entry_SYSCALL_64;ep_poll;schedule 12
my server;entry_SYSCALL_64;do_futex;futex_wait;schedule 3
kworker/0:1;ret_from_fork;worker_thread;schedule 250
";
const TRACE_CMD: &str = "\
cpus=2
          <idle>-0     [000]   100.000000: sched_switch:         swapper/0:0 [120] R ==> my job:10 [120]
          my job-10    [000]   100.010000: sched_switch:         my job:10 [120] S ==> swapper/0:0 [120]
          <idle>-0     [001]   100.010020: sched_switch:         swapper/1:0 [120] R ==> helper:20 [120]
          helper-20    [001]   100.040000: sched_waking:         comm=my job pid=10 prio=120 target_cpu=000
          <idle>-0     [000]   100.040030: sched_switch:         swapper/0:0 [120] R ==> my job:10 [120]
          helper-20    [001]   100.045000: sched_switch:         helper:20 [120] S ==> swapper/1:0 [120]
          my job-10    [000]   100.050030: sched_switch:         my job:10 [120] X ==> swapper/0:0 [120]
";
const LATENCY_FORMAT: &str = "\
cpus=2
  <idle>-0       0d..2   100.000000: sched_switch:         swapper/0:0 [120] R ==> my job:10 [120]
  my job-10      0d..2   100.010000: sched_switch:         my job:10 [120] S ==> swapper/0:0 [120]
  <idle>-0       1d..2   100.010020: sched_switch:         swapper/1:0 [120] R ==> helper:20 [120]
  helper-20      1d..3   100.040000: sched_waking:         comm=my job pid=10 prio=120 target_cpu=000
  <idle>-0       0d..2   100.040030: sched_switch:         swapper/0:0 [120] R ==> my job:10 [120]
  helper-20      1d..2   100.045000: sched_switch:         helper:20 [120] S ==> swapper/1:0 [120]
";
const IRQS: &str = "\
          worker-31    [001] d..1   100.438504: hrtimer_start:        hrtimer=0xffff888012345620 function=tick/0x0 expires=100440000000 softexpires=100440000000
          worker-31    [001] d..1   100.439700: irq_disable:          caller=chip_flush+0x3c parent=chip_ioctl+0x90
          worker-31    [001] d..1   100.443990: irq_enable:           caller=chip_flush+0xa4 parent=chip_ioctl+0x90
          <idle>-0     [001] d.h1   100.444000: hrtimer_expire_entry: hrtimer=0xffff888012345620 now=100444000000 function=tick/0x0
          <idle>-0     [001] d.h1   100.444013: hrtimer_expire_exit:  hrtimer=0xffff888012345620
";

/// An importer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Stacks,
    Trace,
    Irqs,
}

/// Result of an import: the comparable output, the names in it, and the number of unused records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The imported text.
    text: String,
    pub answer: String,
    pub names: BTreeSet<String>,
    pub dropped: u64,
}

pub fn imported(kind: Kind, bytes: &[u8]) -> Result<Outcome, String> {
    let text = String::from_utf8_lossy(bytes).into_owned();
    match kind {
        Kind::Stacks => {
            let read = whylate_model::text::read(bytes).map_err(|error| error.to_string())?;
            let read = Imported::read(&read, Names::Thread).map_err(|error| error.to_string())?;
            let lines = read.lines(Order::RootFirst);
            let names = lines.iter().filter_map(|line| Some(line.rsplit_once(' ')?.0.to_owned())).collect();
            Ok(Outcome { text, answer: lines.join("\n"), names, dropped: read.unread + read.too_long + read.cut })
        }
        Kind::Trace => {
            let trace = Trace::read(bytes).map_err(|error| error.to_string())?;
            // A line break in a name replaces all but one of several blanks.
            let squeezed = |name: Name| name.text().split_whitespace().collect::<Vec<_>>().join(" ");
            let named = trace.lives().iter().flat_map(|life| life.names.iter().map(|name| (life.tid, squeezed(*name))));
            let names = named.map(|(tid, name)| format!("{name}:{tid}")).collect();
            let cpus = trace.history().cpus.iter();
            let slices = |cpu: &Vec<RunSlice>| -> Vec<RunSlice> {
                cpu.iter().map(|slice| RunSlice { name: Name::new(&squeezed(slice.name)), ..*slice }).collect()
            };
            let cpus: Vec<Vec<RunSlice>> = cpus.map(slices).collect();
            Ok(Outcome { text, answer: format!("{cpus:?}"), names, dropped: trace.lost.values().sum() })
        }
        Kind::Irqs => {
            let mut late = Vec::new();
            let options = ImportOptions { late_over_ns: None, worst: 20 };
            let (snapshot, _) =
                import(bytes, "", options, &mut |event| late.push(event)).map_err(|error| error.to_string())?;
            let labels = late.iter().flat_map(|event| &event.labels).filter(|(label, _)| *label != "kind");
            let names = labels.map(|(_, name)| name.clone()).collect();
            let answer = format!("{:?} {late:?}", snapshot.series);
            Ok(Outcome { text, answer, names, dropped: snapshot.lost.values().sum() })
        }
    }
}

/// Returns some lines of a text, usually from its first line on.
pub fn some_lines(text: &str, choose: &mut dyn FnMut() -> u8) -> String {
    let lines: Vec<&str> = text.lines().take(LINES).collect();
    // A text is rarely truncated.
    let kept = if choose() < 40 { 1 + usize::from(choose()) % lines.len() } else { lines.len() };
    let skipped = if choose() < 20 { usize::from(choose()) % kept } else { 0 };
    lines[skipped..kept].iter().map(|line| format!("{line}\n")).collect()
}

/// Applies one to three manglings to a text; returns their names as well.
pub fn mangle(text: &str, choose: &mut dyn FnMut() -> u8) -> (Vec<u8>, Vec<&'static str>) {
    let (mut text, mut done) = (text.to_owned(), Vec::new());
    for _ in 0..=choose() % 3 {
        let (name, mangle) = WAYS[usize::from(choose()) % WAYS.len()];
        // A blank at the start of a line that mail software wrapped belongs to the text. Of two kinds of wrapping, only
        // one is undone.
        let breaks = ["wrapped", "cut at the edge"];
        let is_broken = done.iter().any(|done| breaks.contains(done) || *done == "quoted-printable");
        // A terminal shows tabs as blanks, and neither colors nor byte order marks nor page source.
        let is_unseen = |done: &&str| {
            ["tabs", "colors", "a byte order mark", "HTML", "entities with numbers", "a page"].contains(done)
        };
        if name == "cut at the edge" && done.iter().any(is_unseen)
            || name == "tabs" && done.contains(&"cut at the edge")
        {
            continue;
        }
        if name == "without leading blanks" && done.contains(&"quoted-printable") || is_broken && breaks.contains(&name)
        {
            continue;
        }
        // Text that lacks its ends or is partly quoted is not wrapped as well.
        let is_last = |name: &str| name.starts_with("cut off") || name == "half quoted";
        let is_break = |name: &str| breaks.contains(&name) || name == "quoted-printable" || is_last(name);
        if is_last(name) && done.iter().any(|done| is_break(done))
            || is_break(name) && done.iter().any(|done| is_last(done))
        {
            continue;
        }
        text = mangle(&text, choose());
        done.push(name);
    }
    let bytes = match choose() {
        0..8 => {
            done.push("UTF-16");
            [0xfeff].into_iter().chain(text.encode_utf16()).flat_map(u16::to_le_bytes).collect()
        }
        _ => text.into_bytes(),
    };
    (bytes, done)
}

type Way = fn(&str, u8) -> String;

/// Manglings by name; the argument selects the variant.
pub const WAYS: [(&str, Way); 30] = [
    ("quoted", |text, how| {
        each(text, |line| format!("{}{line}", ["> ", ">> ", "> > ", "| ", ">", " > "][usize::from(how) % 6]))
    }),
    ("wrapped", |text, how| {
        wrapped(text, [72, 76, 78, 80, 100][usize::from(how) % 5], [0, 4, 0, 8][usize::from(how / 8) % 4])
    }),
    ("cut at the edge", |text, how| cut(text, [72, 80, 80, 100, 132][usize::from(how) % 5])),
    ("without leading blanks", |text, _| each(text, |line| line.trim_start().to_owned())),
    ("without trailing blanks", |text, _| each(text, |line| line.trim_end().to_owned())),
    ("quoted-printable", |text, _| quoted_printable(text)),
    ("CRLF", |text, _| text.replace('\n', "\r\n")),
    ("tabs", |text, _| each(text, tabbed)),
    ("HTML", |text, _| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")),
    ("colors", |text, _| each(text, |line| format!("\x1b[01;31m\x1b[K{line}\x1b[m\x1b[K"))),
    ("a kernel's log", |text, how| each(text, |line| format!("[ {:4}.{:06}] {line}", how, 4711))),
    ("a journal", |text, _| each(text, |line| format!("Nov 28 15:39:22 host kernel: {line}"))),
    ("stamps", |text, _| each(text, |line| format!("2026-11-28T15:39:22.123+00:00 {line}"))),
    ("line numbers", |text, how| numbered(text, [":", "\t", " | ", ": "][usize::from(how) % 4])),
    ("a byte order mark", |text, _| format!("\u{feff}{text}")),
    ("spaces that do not break", |text, _| text.replace(' ', "\u{a0}")),
    ("without comments", |text, _| {
        text.lines().filter(|line| !line.starts_with("# ")).map(|line| format!("{line}\n")).collect()
    }),
    ("prose around it", |text, _| format!("Hello,\n\nthis is what I see:\n\n{text}\nAny idea?\n")),
    ("a fence", |text, _| format!("```\n{}\n```\n", text.trim_end_matches('\n'))),
    ("cut off", |text, how| {
        let width = [72, 80, 100, 64][usize::from(how) % 4];
        // A single long line does not reveal the width.
        match text.lines().filter(|line| line.trim_end().chars().count() > width).count() {
            0 | 1 => text.to_owned(),
            _ => each(text, |line| line.chars().take(width).collect()),
        }
    }),
    ("cut off with an ellipsis", |text, how| {
        let (width, ellipsis) =
            ([72, 80, 100, 64][usize::from(how) % 4], ["\u{2026}", "..."][usize::from(how / 4) % 2]);
        each(text, |line| match line.char_indices().nth(width) {
            Some((at, _)) => format!("{}{ellipsis}", &line[..at]),
            None => line.to_owned(),
        })
    }),
    ("indented", |text, how| each(text, |line| format!("{}{line}", ["    ", "\t", "  "][usize::from(how) % 3]))),
    ("trailing blanks", |text, how| each(text, |line| format!("{line}{}", ["  ", " ", "\t"][usize::from(how) % 3]))),
    ("a blank line after each", |text, _| each(text, |line| format!("{line}\n"))),
    ("entities with numbers", |text, how| {
        let reference =
            |c| if how % 2 == 0 { format!("&#{};", u32::from(c)) } else { format!("&#x{:x};", u32::from(c)) };
        text.replace('&', "&amp;").replace('<', &reference('<')).replace('>', &reference('>'))
    }),
    ("a page", |text, _| {
        let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        format!("<div class=\"code\"><pre><code>{text}</code></pre></div>\n")
    }),
    ("a shell around it", |text, how| {
        let prompt = ["$", "root@host:~#", "[me@host ~]$", "me@host:/tmp$"][usize::from(how) % 4];
        format!("{prompt} head -n 60 out.txt\n{}\n{prompt} uptime -s 2\n", text.trim_end_matches('\n'))
    }),
    ("prose with numbers", |text, _| {
        format!("It happens since release 12\n\n{text}\nI have seen it 3 times, on CPU 2\n")
    }),
    ("half quoted", |text, how| {
        let (lines, from) = (text.lines().count(), usize::from(how));
        let quoted = |(at, line)| if at >= from % lines.max(1) { format!("> {line}\n") } else { format!("{line}\n") };
        text.lines().enumerate().map(quoted).collect()
    }),
    ("without the last newline", |text, _| text.trim_end_matches('\n').to_owned()),
];

fn each(text: &str, alter: impl Fn(&str) -> String) -> String {
    text.lines().map(|line| alter(line) + "\n").collect()
}

/// Converts blanks at the start of a line to tabs.
fn tabbed(line: &str) -> String {
    let text = line.trim_start_matches(' ');
    let blanks = line.len() - text.len();
    "\t".repeat(blanks / 8) + &" ".repeat(blanks % 8) + text
}

/// Wraps lines between words as mail software does; continuation lines are indented.
fn wrapped(text: &str, width: usize, indent: usize) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let mut column = 0;
        for (at, word) in line.split(' ').enumerate() {
            if column > 0 && !word.is_empty() && column + 1 + word.chars().count() > width {
                out.truncate(out.trim_end_matches(' ').len());
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent));
                column = indent;
            } else if at > 0 {
                out.push(' ');
                column += 1;
            }
            out.push_str(word);
            column += word.chars().count();
        }
        out.push('\n');
    }
    out
}

/// Wraps lines at the right edge of a terminal.
fn cut(text: &str, width: usize) -> String {
    let mut out = String::new();
    for line in text.lines() {
        for (at, c) in line.chars().enumerate() {
            if at > 0 && at % width == 0 {
                out.push('\n');
            }
            out.push(c);
        }
        out.push('\n');
    }
    out
}

fn numbered(text: &str, after: &str) -> String {
    text.lines().enumerate().map(|(at, line)| format!("{:>6}{after}{line}\n", at + 1)).collect()
}

/// Encodes quoted-printable (RFC 2045), as mail software does.
fn quoted_printable(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let mut column = 0;
        let bytes = line.as_bytes();
        for (at, &byte) in bytes.iter().enumerate() {
            let is_last = at + 1 == bytes.len();
            let is_plain = (b'!'..=b'~').contains(&byte) && byte != b'=' || byte == b' ' && !is_last;
            let piece = if is_plain { char::from(byte).to_string() } else { format!("={byte:02X}") };
            if column + piece.len() > 75 {
                out.push_str("=\n");
                column = 0;
            }
            out.push_str(&piece);
            column += piece.len();
        }
        out.push('\n');
    }
    out
}

/// Returns the first difference between two outputs.
pub fn difference(one: &str, other: &str) -> String {
    let at = one.bytes().zip(other.bytes()).take_while(|(one, other)| one == other).count();
    let around = |text: &str| -> String { text.chars().skip(at.saturating_sub(120)).take(240).collect() };
    format!("there is\n    {}\nin place of\n    {}", around(one), around(other))
}

/// Returns whether a stack is a part of another one; names may be truncated and the outermost function need not be
/// marked.
fn is_part_of(stack: &str, whole: &str) -> bool {
    let [frames, all] = [stack, whole].map(|stack| stack.split(';').collect::<Vec<_>>());
    let is_same = |at: usize, frame: &str, other: &str| match frame.strip_suffix("[cut]") {
        Some(start) => other.starts_with(start),
        None if at <= 2 && other.starts_with(frame) => true,
        // A label with blanks may have been wrapped there.
        None => frame == other || other.split(' ').any(|word| word == frame),
    };
    let mut all = all.into_iter();
    frames.into_iter().enumerate().all(|(at, frame)| all.any(|other| is_same(at, frame, other)))
}

/// Returns whether a text contains a name as a whole word.
fn is_in(text: &str, name: &str) -> bool {
    let is_end = |c: char| !c.is_alphanumeric() && c != '_';
    text.match_indices(name).any(|(at, _)| text[..at].ends_with(is_end) && text[at + name.len()..].starts_with(is_end))
}

/// Checks the import of a mangled text: it equals the original's, or is refused, or yields less, without names that the
/// text lacks, and with a count of dropped records.
pub fn check(kind: Kind, bytes: &[u8], original: &Outcome) -> Result<(), String> {
    let Ok(outcome) = imported(kind, bytes) else { return Ok(()) };
    if outcome.answer == original.answer {
        return Ok(());
    }
    // A stack may be shorter and functions may be in other sections, if that is counted.
    let is_part = |name: &String| {
        outcome.dropped > original.dropped
            && match kind {
                Kind::Stacks => original.names.iter().any(|whole| is_part_of(name, whole)),
                Kind::Irqs => is_in(&original.text, &name.replace(':', "-")),
                Kind::Trace => false,
            }
    };
    let invented: Vec<&String> = outcome.names.difference(&original.names).filter(|name| !is_part(name)).collect();
    if !invented.is_empty() {
        return Err(format!("names that are not in it: {invented:?}"));
    }
    if outcome.dropped <= original.dropped {
        return Err(format!("nothing is counted, but {}", difference(&outcome.answer, &original.answer)));
    }
    Ok(())
}
