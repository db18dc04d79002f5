// SPDX-License-Identifier: MIT OR Apache-2.0
//! Folded stacks: one line each, frames from the outermost to the innermost, the input of flame graphs.

use std::collections::BTreeMap;

use crate::units::is_printable;
use crate::wait::{State, WaitClass};
use crate::work::STARTS;
use crate::{Labels, Snapshot, Stack, Waker};

/// Separator of user and kernel frames.
pub const BETWEEN: &str = "-";

/// Separator of a waiting thread's stack and its waker's.
pub const WOKEN_BY: &str = "--";

/// Root frames of a flame graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Root {
    /// Name of the process.
    #[default]
    Process,
    /// Names of the process and the thread.
    Thread,
    /// Path of the cgroup and name of the process.
    Cgroup,
}

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Owner of the stack.
    Label,
    /// Marks a runnable thread: its stack shows what it did before, not what it waits for.
    Runnable,
    /// A user function.
    User,
    /// A separator between user and kernel frames, or between a stack and its waker's.
    Between,
    /// A kernel function.
    Kernel,
    /// A function of the waker, or its name.
    Waker,
    /// Description of what happened while waiting.
    WhileWaiting,
}

/// A frame with its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frame {
    /// Kind of the frame.
    pub kind: Kind,
    /// Name, escaped for a folded line.
    pub name: String,
}

impl Frame {
    /// Creates a frame with an untrusted name.
    pub fn new(kind: Kind, name: &str) -> Self {
        Frame { kind, name: if name.is_empty() { "?".to_owned() } else { safe(name) } }
    }
}

/// Returns the frames that name the stack's owner.
pub fn labels(labels: &Labels, root: Root) -> Vec<Frame> {
    let label = |name: &str| Frame::new(Kind::Label, labels.get(name).map_or("", String::as_str));
    let mut frames = match root {
        Root::Process => vec![label("process")],
        Root::Thread => vec![label("process"), label("thread")],
        Root::Cgroup => vec![label("cgroup"), label("process")],
    };
    if root == Root::Thread && labels.contains_key("tid") {
        frames.push(label("tid"));
    }
    frames
}

/// Returns the frames that name the owner of a stack, and the state of a thread that does not wait where its stack is.
fn owner(stack: &Stack, root: Root) -> Vec<Frame> {
    let mut frames = labels(&stack.labels, root);
    frames.extend(runnable(stack).map(|class| Frame { kind: Kind::Runnable, name: class.frame() }));
    frames.extend(stopped(stack).map(|class| Frame { kind: Kind::Between, name: class.frame() }));
    frames
}

/// Returns the frames of a stack, outermost first; then those of its waker, innermost first, so that they meet at the
/// wakeup.
pub fn frames(stack: &Stack, root: Root) -> Vec<Frame> {
    let mut frames = owner(stack, root);
    frames.extend(stack.user.iter().rev().map(|name| Frame { kind: Kind::User, name: safe(name) }));
    if !stack.user.is_empty() && !stack.kernel.is_empty() {
        frames.push(Frame { kind: Kind::Between, name: BETWEEN.to_owned() });
    }
    frames.extend(stack.kernel.iter().rev().map(|name| Frame { kind: Kind::Kernel, name: safe(name) }));
    frames.extend(stack.waker.iter().flat_map(frames_of_waker));
    frames
}

/// Returns the function that waits, its callers up to where the thread or the system call starts, and then the frames
/// of the waker, innermost first.
pub fn innermost_first(stack: &Stack, root: Root) -> Vec<Frame> {
    let mut frames = owner(stack, root);
    for (kind, names) in [(Kind::Kernel, &stack.kernel), (Kind::User, &stack.user)] {
        let is_start = |name: &String| STARTS.contains(&name.as_str());
        let start = names.iter().skip(1).position(is_start).map_or(names.len(), |at| at + 1);
        frames.extend(names[..start].iter().map(|name| Frame { kind, name: safe(name) }));
    }
    frames.extend(stack.waker.iter().flat_map(frames_of_waker));
    frames
}

/// Returns the wait of a runnable thread: for a CPU, or its cgroup's next quota period.
pub fn runnable(stack: &Stack) -> Option<WaitClass> {
    let class = stack.wait.as_ref()?.class;
    matches!(class, WaitClass::Cpu | WaitClass::Throttled).then_some(class)
}

/// Returns the class of a stopped thread, which does not wait for what its stack shows.
pub fn stopped(stack: &Stack) -> Option<WaitClass> {
    let class = stack.wait.as_ref()?.class;
    let is_stopped = [State::Stopped, State::Traced, State::Frozen].iter().any(|state| stack.state == state.name());
    (class == WaitClass::Stopped && is_stopped).then_some(class)
}

/// Returns whether the stack is of an idle kernel thread.
pub fn is_idle_kernel_thread(stack: &Stack) -> bool {
    stack.labels.contains_key("kernel") && stack.wait.as_ref().is_some_and(|wait| wait.class == WaitClass::Idle)
}

fn frames_of_waker(waker: &Waker) -> Vec<Frame> {
    let between = |name: &str| Frame { kind: Kind::Between, name: name.to_owned() };
    let frame = |name: &str| Frame { kind: Kind::Waker, name: safe(name) };
    let mut frames = vec![between(WOKEN_BY)];
    frames.extend(waker.kernel.iter().map(|name| frame(name)));
    if !waker.user.is_empty() && !waker.kernel.is_empty() {
        frames.push(between(BETWEEN));
    }
    frames.extend(waker.user.iter().map(|name| frame(name)));
    frames.push(frame(waker.name()));
    frames
}

/// Returns the stacks of threads off their CPUs; with `hide_idle` without those idle by design.
pub fn waiting(snapshot: &Snapshot, hide_idle: bool) -> impl Iterator<Item = &Stack> {
    snapshot.stacks.iter().filter(move |stack| match stack.wait.as_ref().map(|wait| wait.class) {
        Some(WaitClass::OnCpu) => false,
        Some(WaitClass::Idle) => !hide_idle,
        _ => true,
    })
}

/// Returns sorted folded lines of stacks. Stacks with equal frames are merged.
pub fn lines<'a>(stacks: impl IntoIterator<Item = &'a Stack>, root: Root) -> Vec<String> {
    lines_of(sums(stacks, root, |frame| frame.name))
}

/// Returns folded lines of joined frames with their nanoseconds: the frames, a space, and microseconds, as bcc's
/// `offcputime -f` has them.
pub fn lines_of(sums: BTreeMap<String, u64>) -> Vec<String> {
    let lines = sums.into_iter().map(|(frames, ns)| (frames, ns.saturating_add(500) / 1000));
    lines.filter(|&(_, us)| us > 0).map(|(frames, us)| line(&frames, us)).collect()
}

/// Returns lines like [`lines`], but in nanoseconds and with another name for each frame.
pub fn lines_with<'a>(
    stacks: impl IntoIterator<Item = &'a Stack>,
    root: Root,
    name: impl Fn(Frame) -> String,
) -> Vec<String> {
    let sums = sums(stacks, root, name).into_iter();
    sums.filter(|&(_, ns)| ns > 0).map(|(frames, ns)| line(&frames, ns)).collect()
}

/// Returns the time of each distinct stack in nanoseconds, by its joined frames.
fn sums<'a>(
    stacks: impl IntoIterator<Item = &'a Stack>,
    root: Root,
    name: impl Fn(Frame) -> String,
) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::<String, u64>::new();
    for stack in stacks {
        let names: Vec<String> = frames(stack, root).into_iter().map(&name).collect();
        let sum = sums.entry(names.join(";")).or_default();
        *sum = sum.saturating_add(stack.weight_ns);
    }
    sums
}

/// Formats a line of joined frames. A number at the end of the last frame would be parsed as a count, and a leading `#`
/// as a comment, so both are escaped.
pub fn line(frames: &str, count: u64) -> String {
    let escape = if frames.trim_start().starts_with('#') { "_" } else { "" };
    match frames.trim_end().rsplit_once(' ') {
        Some((before, last)) if last.parse::<f64>().is_ok() => format!("{escape}{before}_{last} {count}"),
        _ => format!("{escape}{frames} {count}"),
    }
}

/// Escapes separators and unprintable characters in a name: processes choose their own.
pub fn safe(name: &str) -> String {
    name.chars()
        .map(|c| match c {
            ';' => ':',
            c if is_printable(c) => c,
            _ => '?',
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WokenBy;
    use crate::import::{Imported, Names, Order};
    use crate::wait::Wait;

    #[test]
    fn callers_end_where_the_thread_starts() {
        let user = ["read", "copy", "main", "__libc_start_call_main", "__libc_start_main_impl", "cp+0x5170"];
        let kernel = ["folio_wait_bit", "vfs_read", "do_syscall_64", "entry_SYSCALL_64_after_hwframe"];
        let names = |user: &[&str], kernel: &[&str]| {
            let frames = innermost_first(&stack("cp", user, kernel, 1), Root::Process);
            frames.into_iter().map(|frame| frame.name).collect::<Vec<_>>().join(" < ")
        };
        assert_eq!(names(&user, &kernel), "cp < folio_wait_bit < vfs_read < read < copy < main");
        // Where nothing else is known, the start is where the thread waits.
        assert_eq!(names(&["_start"], &["kthread", "ret_from_fork"]), "cp < kthread < _start");
    }

    fn stack(process: &str, user: &[&str], kernel: &[&str], weight_ns: u64) -> Stack {
        Stack {
            labels: [("process", process), ("thread", "a;\"b\"\x1b<script>")].map(|(k, v)| (k.into(), v.into())).into(),
            weight_ns,
            user: user.iter().map(|name| (*name).to_owned()).collect(),
            kernel: kernel.iter().map(|name| (*name).to_owned()).collect(),
            ..Stack::default()
        }
    }

    #[test]
    fn line_goes_from_outermost_to_innermost_frame() {
        let stacks = [
            stack("p", &["read", "main"], &["pipe_read", "ksys_read"], 2_000_000),
            stack("p", &["read", "main"], &["pipe_read", "ksys_read"], 1_000),
            stack("k", &[], &["worker_thread"], 400),
        ];
        assert_eq!(lines(&stacks, Root::Process), ["p;main;read;-;ksys_read;pipe_read 2001"]);
    }

    #[test]
    fn waker_frames_go_from_wakeup_to_name() {
        let stack_of = |by, thread: &str, user: &[&str], kernel: &[&str]| Stack {
            waker: Some(Waker {
                by,
                labels: [("thread".to_owned(), thread.to_owned())].into(),
                user: user.iter().map(|name| (*name).to_owned()).collect(),
                kernel: kernel.iter().map(|name| (*name).to_owned()).collect(),
            }),
            ..stack("p", &["read", "main"], &["pipe_read"], 1_000)
        };
        let stacks = [
            stack_of(WokenBy::Thread, "b;", &["write", "ring"], &["pipe_write", "ksys_write"]),
            stack_of(WokenBy::Thread, "kworker", &[], &["process_one_work"]),
            stack_of(WokenBy::Interrupt, "", &[], &[]),
            stack_of(WokenBy::NotYet, "", &[], &[]),
        ];
        assert_eq!(
            lines(&stacks, Root::Process),
            [
                "p;main;read;-;pipe_read;--;[interrupt] 1",
                "p;main;read;-;pipe_read;--;[not woken yet] 1",
                "p;main;read;-;pipe_read;--;pipe_write;ksys_write;-;write;ring;b: 1",
                "p;main;read;-;pipe_read;--;process_one_work;kworker 1",
            ]
        );
    }

    #[test]
    fn runnable_thread_is_not_shown_asleep() {
        let stack_of = |class| Stack {
            wait: Some(Wait { class, rule: String::new() }),
            ..stack("p", &["read", "main"], &["pipe_read"], 1_000)
        };
        let frozen = Stack { state: "F".to_owned(), ..stack_of(WaitClass::Stopped) };
        let stacks = [stack_of(WaitClass::Pipe), stack_of(WaitClass::Cpu), stack_of(WaitClass::Throttled), frozen];
        assert_eq!(
            lines(&stacks, Root::Process),
            [
                "p;[stopped];main;read;-;pipe_read 1",
                "p;[throttled by cgroup];main;read;-;pipe_read 1",
                "p;[waiting for a CPU];main;read;-;pipe_read 1",
                "p;main;read;-;pipe_read 1",
            ]
        );
    }

    #[test]
    fn escapes_separators_in_names() {
        assert_eq!(lines(&[stack("p", &[], &["f"], 1_000)], Root::Thread), ["p;a:\"b\"?<script>;f 1"]);
    }

    #[test]
    fn number_at_end_of_name_is_no_count() {
        let named = |name: &str| line(&format!("a b;{name}"), 7);
        let lines = ["worker 5", "5", "x 1.5 ", "c 5 d", "worker 5:"].map(named);
        assert_eq!(lines, ["a b;worker_5 7", "a b;5 7", "a b;x_1.5 7", "a b;c 5 d 7", "a b;worker 5: 7"]);
    }

    #[test]
    fn escapes_comment_sign_of_process() {
        let folded =
            [" #b", "# a", "c #"].map(|name| lines(&[stack(name, &[], &["f"], 1_000)], Root::Process)).concat();
        assert_eq!(folded, ["_ #b;f 1", "_# a;f 1", "c #;f 1"]);
        let read = Imported::read(&folded.join("\n"), Names::Process).expect("folded lines");
        assert_eq!(read.lines(Order::RootFirst), folded);
    }

    #[test]
    fn threads_on_cpu_do_not_wait() {
        let mut snapshot = Snapshot::new("offcpu", "sample", "host", 0);
        for class in [WaitClass::OnCpu, WaitClass::Idle, WaitClass::Disk] {
            let wait = Some(Wait { class, rule: String::new() });
            snapshot.stacks.push(Stack { wait, ..stack("p", &[], &["f"], 1) });
        }
        assert_eq!(waiting(&snapshot, false).count(), 2);
        assert_eq!(waiting(&snapshot, true).count(), 1);
    }
}
