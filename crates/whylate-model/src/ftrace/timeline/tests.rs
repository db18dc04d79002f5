// SPDX-License-Identifier: MIT OR Apache-2.0
//! Imports traces of each format and checks the results.

use proptest::prelude::*;

use super::*;
use crate::CauseKind;
use crate::path::command::Explained;
use crate::path::history::SwitchIn;

#[test]
fn rejects_binary_and_unterminated_input() {
    let endless = std::io::BufReader::new(std::io::repeat(0));
    assert!(matches!(Trace::read(endless), Err(ImportError::Paste(PasteError::Binary))));
    let endless = std::io::BufReader::with_capacity(1 << 20, std::io::repeat(b'y'));
    assert!(matches!(Trace::read(endless), Err(ImportError::NoEvents)));
}

const TRACEFS: &str = include_str!("../../../tests/traces/tracefs.txt");
const PERF_SCRIPT: &str = include_str!("../../../tests/traces/perf-script.txt");
const PERF_SCHED: &str = include_str!("../../../tests/traces/perf-sched.txt");

/// Thread, event and text of a line, with its time.
type LineFields<'a> = (&'a str, u32, u32, &'a str, u64, &'a str, &'a str);

/// `sh` creates `client` and waits for it. `client` sends a request to `server`, which sleeps for 5 ms, and then waits
/// 2 ms for its CPU, occupied by `hog`. All times are 1 s plus the given microseconds.
const ASKED: [LineFields<'static>; 17] = [
    ("sh", 10, 0, ".....", 0, "sched_process_fork", "comm=sh pid=10 child_comm=sh child_pid=11"),
    ("sh", 10, 0, "d..2.", 1, "sched_wakeup_new", "comm=sh pid=11 prio=120 target_cpu=000"),
    ("sh", 10, 0, "d..2.", 1_000, "sched_switch", "sh:10 S sh:11"),
    ("sh", 11, 0, ".....", 1_500, "sched_process_exec", "filename=/usr/bin/client pid=11 old_pid=11"),
    ("client", 11, 0, "d..3.", 2_000, "sched_waking", "comm=server pid=20 prio=120 target_cpu=001"),
    ("<idle>", 0, 1, "d..2.", 2_000, "sched_switch", "swapper/1:0 R server:20"),
    ("client", 11, 0, "d..2.", 2_100, "sched_switch", "client:11 S swapper/0:0"),
    ("server", 20, 1, "d..2.", 3_000, "sched_switch", "server:20 S hog:30"),
    ("hog", 30, 1, "d.h1.", 8_000, "local_timer_entry", "vector=236"),
    ("hog", 30, 1, "d.h1.", 8_000, "hrtimer_expire_entry", "hrtimer=00000000652fe2d8 function=hrtimer_wakeup now=1"),
    ("hog", 30, 1, "d.h2.", 8_000, "sched_waking", "comm=server pid=20 prio=120 target_cpu=001"),
    ("hog", 30, 1, "d.h1.", 8_000, "local_timer_exit", "vector=236"),
    ("hog", 30, 1, "d..2.", 10_000, "sched_switch", "hog:30 R server:20"),
    ("server", 20, 1, "d..3.", 11_000, "sched_waking", "comm=client pid=11 prio=120 target_cpu=000"),
    ("<idle>", 0, 0, "d..2.", 11_000, "sched_switch", "swapper/0:0 R client:11"),
    ("client", 11, 0, "d..2.", 12_000, "sched_switch", "client:11 Z swapper/0:0"),
    ("server", 20, 1, "d..2.", 13_000, "sched_switch", "server:20 S swapper/1:0"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Tracefs,
    Latency,
    FtraceDump,
    WithoutFlags,
    TraceCmd,
    Perf,
}

fn written(form: Form, lines: &[LineFields<'_>]) -> String {
    let mut text = if form == Form::TraceCmd { "cpus=2\nCPU 1 is empty\n".to_owned() } else { String::new() };
    for &(comm, tid, cpu, flags, us, event, says) in lines {
        let says = match says.split(' ').collect::<Vec<_>>()[..] {
            [from, state, to] if event == "sched_switch" => {
                let ((from, from_tid), (to, to_tid)) =
                    (from.split_once(':').expect("a thread"), to.split_once(':').expect("a thread"));
                if matches!(form, Form::TraceCmd | Form::Latency) {
                    format!("{from}:{from_tid} [120] {state} ==> {to}:{to_tid} [120]")
                } else {
                    format!(
                        "prev_comm={from} prev_pid={from_tid} prev_prio=120 prev_state={state} ==> next_comm={to} next_pid={to_tid} next_prio=120"
                    )
                }
            }
            _ => says.to_owned(),
        };
        let stamp = format!("1.{us:06}");
        text += &match form {
            Form::Tracefs => format!("{comm:>16}-{tid:<7} [{cpu:03}] {flags} {stamp}: {event}: {says}\n"),
            Form::Latency => format!("{comm:>8.8}-{tid:<5} {cpu:3}{flags}   {stamp}: {event:<20} {says}\n")
                .replace(event, &format!("{event}:")),
            Form::FtraceDump => format!("{comm:>8.8}-{tid:<7} {cpu:3}{flags} {}us+: {event}: {says}\n", 1_000_000 + us),
            Form::WithoutFlags => format!("{comm:>16}-{tid:<7} [{cpu:03}]  {stamp}: {event}: {says}\n"),
            Form::TraceCmd => format!("{comm:>16}-{tid:<5} [{cpu:03}]  {stamp}: {event:<20} {says}\n")
                .replace(event, &format!("{event}:")),
            Form::Perf => format!(
                "{comm:>16} {tid:>5} [{cpu:03}]  {stamp}:   any:{event}: {says}\n\tffffffff810b1234 frame ([kernel])\n\n"
            ),
        };
    }
    text
}

fn read(text: &str) -> Trace {
    Trace::read(text.as_bytes()).expect("a trace")
}

/// Returns the parts of at least 100 us, in microseconds.
fn parts_of(path: &crate::path::Path) -> Vec<(u64, CauseKind, String)> {
    let segments =
        path.segments.iter().map(|segment| ((segment.ns + 500) / 1_000, segment.kind, segment.who.to_string()));
    segments.filter(|segment| segment.0 >= 100).collect()
}

fn path_of(command: &Command) -> crate::path::Path {
    let Explained { path, is_folded, .. } = command.explained.clone();
    crate::path::Path { segments: path, is_folded }
}

fn part(us: u64, kind: CauseKind, who: &str) -> (u64, CauseKind, String) {
    (us, kind, who.to_owned())
}

#[test]
fn all_formats_give_the_same_path() {
    use CauseKind::{Running, Thread, Timer};
    for form in [Form::Tracefs, Form::Latency, Form::FtraceDump, Form::WithoutFlags, Form::TraceCmd, Form::Perf] {
        let mut trace = read(&written(form, &ASKED));
        assert_eq!(trace.lost, BTreeMap::new(), "{form:?}");
        assert_eq!(
            trace.limitations,
            ["no block events: waits for disks are shown as waits for interrupts"],
            "{form:?}"
        );
        let command = trace.command(Wanted::Any).expect("a command");
        let told_of = (command.name.as_str(), command.why, command.is_born, command.end.clone());
        assert_eq!(told_of, ("client:11", WhyThis::FirstExec, true, End::Exit), "{form:?}");
        let expected = [
            part(999, Thread, "sh:10"),
            part(500, Running, "sh:11"),
            part(600, Running, "client:11"),
            part(900, Running, "server:20"),
            part(5_000, Timer, "timer"),
            part(2_000, Thread, "hog:30"),
            part(1_000, Running, "server:20"),
            part(1_000, Running, "client:11"),
        ];
        assert_eq!(parts_of(&path_of(&command)), expected, "{form:?}");
        assert_eq!(path_of(&command).total_ns(), command.to_ns - command.from_ns);
        // Only this wait.
        let waits = trace.late_waits(11, 1_000_000, 3);
        assert_eq!(waits.len(), 1);
        assert_eq!(parts_of(&waits[0].path), expected[3..7]);
        assert_eq!(waits[0].path.total_ns(), waits[0].to_ns - waits[0].from_ns);
        assert_eq!(trace.late_waits(11, 10_000_000, 3), []);
    }
}

#[test]
fn timers_are_labelled_by_function() {
    for (event, function, told_as) in [
        ("timer_expire_entry", "commit_timeout", "commit interval of the journal"),
        ("timer_expire_entry", "tcp_write_timer", "TCP retransmission"),
        ("timer_expire_entry", "tcp_delack_timer", "TCP's delayed acknowledgement"),
        // A trace does not have the system call that the thread waited in.
        ("timer_expire_entry", "process_timeout", "timer"),
        ("hrtimer_expire_entry", "hrtimer_wakeup", "timer"),
    ] {
        let says = format!("timer=00000000652fe2d8 function={function} now=4295098624 baseclk=4295098624");
        let lines = ASKED.map(|line| match line.5 {
            "hrtimer_expire_entry" => (line.0, line.1, line.2, line.3, line.4, event, says.as_str()),
            _ => line,
        });
        for form in [Form::Tracefs, Form::TraceCmd, Form::Perf] {
            let command = read(&written(form, &lines)).command(Wanted::Any).expect("a command");
            let parts = parts_of(&path_of(&command));
            assert!(parts.contains(&part(5_000, CauseKind::Timer, told_as)), "{form:?}: {parts:?}");
        }
    }
}

#[test]
fn a_wait_that_ends_with_the_last_event_is_followed() {
    let ends = ASKED.iter().position(|line| line.6 == "swapper/0:0 R client:11").expect("the end of a wait");
    let waits = read(&written(Form::Tracefs, &ASKED[..=ends])).late_waits(11, 1_000_000, 1);
    let expected = [
        part(900, CauseKind::Running, "server:20"),
        part(5_000, CauseKind::Timer, "timer"),
        part(2_000, CauseKind::Thread, "hog:30"),
        part(1_000, CauseKind::Running, "server:20"),
    ];
    assert_eq!(parts_of(&waits.first().expect("a wait").path), expected);
}

#[test]
fn accepts_maximum_timestamp() {
    let text = "sh-1 [000] d..2. 18446744073.709551615: sched_switch: prev_comm=sh prev_pid=1 prev_prio=120 \
                prev_state=S ==> next_comm=b next_pid=2 next_prio=120\n";
    let trace = read(text);
    assert_eq!(trace.end_ns, u64::MAX);
    assert_eq!(trace.late_waits(2, 0, 1), []);
}

#[test]
fn selects_thread_by_pid_comm_or_default() {
    let trace = written(Form::Tracefs, &ASKED);
    let command = |wanted| read(&trace).command(wanted);
    assert_eq!(command(Wanted::Comm("client")).expect("it").name, "client:11");
    let server = command(Wanted::Pid(20)).expect("it");
    let expected = (1_000_000_000, 1_013_000_000, false, End::StillThere("server:20".to_owned()));
    assert_eq!((server.from_ns, server.to_ns / 1_000 * 1_000, server.is_born, server.end), expected);
    for (wanted, who) in [(Wanted::Pid(99), "99"), (Wanted::Pid(0), "0"), (Wanted::Comm("x"), "called x")] {
        let error = command(wanted).expect_err("there is none").to_string();
        assert_eq!(error, format!("it has no thread {who}: leave out --pid and --comm, or name one that is in it"));
    }
    // Without an exec, the thread that ran longest is selected.
    let lines: Vec<_> = ASKED.into_iter().filter(|line| line.5 != "sched_process_exec").collect();
    let any = read(&written(Form::Tracefs, &lines)).command(Wanted::Any).expect("one");
    assert_eq!((any.name.as_str(), any.why), ("hog:30", WhyThis::RanLongest));
}

#[test]
fn drops_unreliable_wakers_without_interrupt_events() {
    let lines: Vec<_> = ASKED.into_iter().filter(|line| !line.5.contains("timer")).collect();
    for form in [Form::WithoutFlags, Form::Perf] {
        let mut trace = read(&written(form, &lines));
        assert_eq!(
            trace.limitations[0],
            "no interrupts: a waker is believed only if the two threads wake each other, or have a common ancestor"
        );
        let command = trace.command(Wanted::Any).expect("a command");
        let unknown = part(7_000, CauseKind::Unknown, "its waking was not seen");
        assert!(parts_of(&path_of(&command)).contains(&unknown), "{:?}", parts_of(&path_of(&command)));
        assert!(
            path_of(&command)
                .segments
                .iter()
                .all(|segment| segment.kind != CauseKind::Running || segment.who != "hog:30")
        );
    }
    // The flags show that it was an interrupt.
    let command = read(&written(Form::Tracefs, &lines)).command(Wanted::Any).expect("a command");
    assert!(
        parts_of(&path_of(&command)).contains(&part(5_000, CauseKind::Interrupt, "interrupt")),
        "{:?}",
        parts_of(&path_of(&command))
    );
}

#[test]
fn lost_events_leave_unattributed_gap() {
    let text = written(Form::Tracefs, &ASKED);
    // CPU 1 loses the events of the hog's timer, and more.
    let is_lost = |line: &str| line.contains("hog-30");
    let mut lines: Vec<&str> = text.lines().collect();
    let at = lines.iter().position(|line| is_lost(line)).expect("the hog");
    lines.retain(|line| !is_lost(line));
    for (gap, lost) in [("CPU:1 [LOST 5 EVENTS]", Some(5)), ("CPU:1 [EVENTS DROPPED]", Some(1)), ("", None)] {
        let mut lines = lines.clone();
        lines.insert(at, gap);
        let mut trace = read(&lines.join("\n"));
        let unseen = if lost.is_some() { None } else { Some(1) };
        assert_eq!((trace.lost.get("events").copied(), trace.lost.get("unseen_switches").copied()), (lost, unseen));
        let command = trace.command(Wanted::Any).expect("a command");
        let parts = parts_of(&path_of(&command));
        assert_eq!(path_of(&command).total_ns(), command.to_ns - command.from_ns);
        assert!(parts.iter().all(|part| part.2 != "hog:30" && part.1 != CauseKind::Timer), "{gap}: {parts:?}");
        let unknown: u64 = parts.iter().filter(|part| part.1 == CauseKind::Unknown).map(|part| part.0).sum();
        assert!((7_900..=9_000).contains(&unknown), "{gap}: {parts:?}");
    }
}

#[test]
fn counts_unreadable_lines() {
    let mut text = written(Form::Tracefs, &ASKED);
    text += "what is this\n# a heading\n\n          sh-10 [000] d..2. 1.020000: sched_switch: prev_comm=sh\n";
    text += "          sh-10 [000] d..2. 0.900000: sched_stat_runtime: a\n sh-1 [99999] d..1 2.000000: any: a\n";
    let trace = read(&text);
    let lost = trace.lost.iter().map(|(&reason, &count)| (reason, count)).collect::<Vec<_>>();
    // A thread that was switched out is on the CPU again, without a line for the switch.
    assert_eq!(lost, [("cpus_full", 1), ("out_of_order", 1), ("unreadable", 2), ("unseen_switches", 1)]);
    let error = |text: &[u8]| Trace::read(text).expect_err("no trace").to_string();
    assert!(error(b"hello").starts_with("no line in it is an event"));
    assert!(error(b"").starts_with("no line in it is an event"));
    assert!(
        error(b"sh-1 [000] d..1 1.000000: sched_stat_runtime: a").starts_with("no event in it shows which thread ran")
    );
    assert!(error(b"PERFILE2").contains("perf script"));
    assert!(error(b"\x17\x08\x44tracing").contains("trace-cmd report"));
    assert!(error(b"\x1f\x8b").contains("decompress"));
}

#[test]
fn reports_missing_cpu_and_time_unit() {
    let text = written(Form::Tracefs, &ASKED);
    let error = |text: &str| Trace::read(text.as_bytes()).expect_err("no trace").to_string();
    // Clocks in nanoseconds or cycles.
    assert!(
        error(&text.replace("1.0", "10")).starts_with("its stamps have no decimal point"),
        "{}",
        text.replace("1.0", "10")
    );
    for (form, cpus) in [(Form::Tracefs, [" [000]", " [001]"]), (Form::Perf, [" [000]", " [001]"])] {
        let text = cpus.iter().fold(written(form, &ASKED), |text, cpu| text.replace(cpu, ""));
        assert!(error(&text).contains("no CPU number"), "{text}");
    }
}

#[test]
fn traces_of_several_machines_are_refused_and_of_one_are_read() {
    let text = written(Form::TraceCmd, &ASKED);
    let of = |name: &str| text.lines().map(|line| format!("{name:>18}: {line}\n")).collect::<String>();
    let both = of("trace-guest.dat") + &of("trace.dat");
    let error = Trace::read(both.as_bytes()).expect_err("two machines").to_string();
    assert!(
        error.starts_with("it has the traces of several machines or files (trace-guest.dat, trace.dat)"),
        "{error}"
    );
    let trace = read(&of("trace-guest.dat"));
    assert_eq!(trace.lives(), read(&text).lives());
    assert_eq!(trace.undone, ["the name of a file in front of each line"]);
}

#[test]
fn traces_after_one_another_are_refused_or_have_a_gap() {
    let text = format!("# tracer: nop\n#\n{}", written(Form::Tracefs, &ASKED));
    // The same times again: the files of two CPUs, or of two machines.
    let refused = Trace::read(format!("{text}{text}").as_bytes()).expect_err("two traces").to_string();
    assert!(refused.starts_with("its events are not in order of time"), "{refused}");
    let bare = written(Form::Tracefs, &ASKED).repeat(3);
    assert!(matches!(Trace::read(bare.as_bytes()), Err(ImportError::SeveralTraces)));
    // A later trace: the thread did not work between the two.
    let busy = "  hog-30 [000] d..2. 1.000000: sched_switch: prev_comm=swapper/0 prev_pid=0 prev_prio=120 prev_state=R \
                ==> next_comm=hog next_pid=30 next_prio=120\n";
    let later = "  hog-30 [000] d..2. 41.000000: sched_switch: prev_comm=hog prev_pid=30 prev_prio=120 prev_state=S \
                 ==> next_comm=swapper/0 next_pid=0 next_prio=120\n";
    let trace = read(&format!("# tracer: nop\n{busy}# tracer: nop\n{later}"));
    let worked = trace.history().cpus[0].iter().filter(|slice| slice.holder.tid() == Some(30));
    let worked_ns: u64 = worked.map(|slice| slice.end_ns - slice.start_ns).sum();
    assert!(worked_ns < 1_000_000, "{worked_ns}");
}

#[test]
fn flags_of_lazy_preemption_show_interrupts() {
    let waking = |flags: &str, latency: bool| {
        let (cpu, flags) = if latency { ("", format!("0{flags}")) } else { (" [000]", format!(" {flags}")) };
        let line = |flags: &str, at: u32, what: &str| format!("   hog-30{cpu} {flags} 5.00000{at}: {what}\n");
        let text = line(flags.trim_start(), 0, "sched_waking: comm=job pid=10 prio=120 target_cpu=000")
            + &line(
                flags.trim_start(),
                2,
                "sched_switch: prev_comm=hog prev_pid=30 prev_prio=120 prev_state=R ==> next_comm=job next_pid=10 next_prio=120",
            )
            + &line(
                flags.trim_start(),
                4,
                "sched_switch: prev_comm=job prev_pid=10 prev_prio=120 prev_state=S ==> next_comm=hog next_pid=30 next_prio=120",
            );
        let trace = read(&text);
        let slices = trace.history().cpus[0].clone();
        slices.into_iter().find(|slice| slice.holder.tid() == Some(10)).map(|slice| slice.entry)
    };
    for latency in [false, true] {
        for (flags, by) in [
            ("d..h2..", Waker::Irq),
            ("d.Lh2..", Waker::Irq),
            ("d..s2..", Waker::Softirq),
            ("d..02..", Waker::Thread(30)),
            ("d.h1.", Waker::Irq),
            ("d..2.", Waker::Thread(30)),
        ] {
            let entry = waking(flags, latency);
            assert!(matches!(entry, Some(SwitchIn::Woken { by: who, .. }) if who == by), "{flags}: {entry:?}");
        }
    }
}

#[test]
fn completes_name_cut_by_latency_format() {
    let text = "  <idle>-0       0d..2   5.000000: sched_switch: swapper/0:0 [120] R ==> containerd-shim:10 [120]\n\
                containe-10      0d..3   5.001000: sched_waking: comm=other pid=11 prio=120 target_cpu=000\n\
                containe-10      0d..2   5.002000: sched_switch: containerd-shim:10 [120] S ==> swapper/0:0 [120]\n";
    let names: Vec<String> =
        read(text).lives().iter().flat_map(|life| life.names.iter().map(|name| name.text())).collect();
    assert_eq!(names, ["containerd-shim"]);
}

/// A process with a first thread 100 and another one, 101, which executes a program.
const EXEC: &str = "\
    svc-100 [001] d..2. 10.000000: sched_switch: prev_comm=svc prev_pid=100 prev_prio=120 prev_state=S ==> next_comm=swapper/1 next_pid=0 next_prio=120
 <idle>-0 [000] d..2. 10.000100: sched_switch: prev_comm=swapper/0 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=loader next_pid=101 next_prio=120
 loader-101 [000] d..3. 10.020000: sched_waking: comm=svc pid=100 prio=120 target_cpu=001
 loader-101 [000] d..2. 10.020010: sched_switch: prev_comm=loader prev_pid=101 prev_prio=120 prev_state=D ==> next_comm=swapper/0 next_pid=0 next_prio=120
 <idle>-0 [001] d..2. 10.020030: sched_switch: prev_comm=swapper/1 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=svc next_pid=100 next_prio=120
    svc-100 [001] d..3. 10.020200: sched_waking: comm=loader pid=101 prio=120 target_cpu=000
    svc-100 [001] d..2. 10.020220: sched_switch: prev_comm=svc prev_pid=100 prev_prio=120 prev_state=Z ==> next_comm=swapper/1 next_pid=0 next_prio=120
 <idle>-0 [000] d..2. 10.020240: sched_switch: prev_comm=swapper/0 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=loader next_pid=101 next_prio=120
IN-BETWEEN   tool-100 [000] ..... 10.030400: sched_process_exec: filename=/usr/bin/tool pid=100 old_pid=101
   tool-100 [000] d..2. 10.060400: sched_switch: prev_comm=tool prev_pid=100 prev_prio=120 prev_state=Z ==> next_comm=swapper/0 next_pid=0 next_prio=120
";
/// The thread is preempted once it has its new TID, before the event.
const PREEMPTED: &str = "\
 loader-100 [000] d..2. 10.025000: sched_switch: prev_comm=loader prev_pid=100 prev_prio=120 prev_state=R ==> next_comm=hog next_pid=30 next_prio=120
    hog-30 [000] d..2. 10.026000: sched_switch: prev_comm=hog prev_pid=30 prev_prio=120 prev_state=S ==> next_comm=loader next_pid=100 next_prio=120
";

#[test]
fn follows_thread_through_exec_tid_change() {
    for (between, own_us) in [("", 60_070), (PREEMPTED, 59_070)] {
        let text = EXEC.replace("IN-BETWEEN", between);
        for wanted in [Wanted::Any, Wanted::Pid(100), Wanted::Pid(101), Wanted::Comm("loader"), Wanted::Comm("tool")] {
            let mut trace = read(&text);
            assert_eq!(trace.lost, BTreeMap::new());
            let command = trace.command(wanted).expect("a command");
            if wanted == Wanted::Pid(100) {
                assert!(["tool:100"].contains(&command.name.as_str()), "{}", command.name);
            }
            assert_eq!((command.name.as_str(), &command.end), ("tool:100", &End::Exit), "{wanted:?}");
            let path = path_of(&command);
            let own: u64 = path.segments.iter().filter(|segment| segment.is_member).map(|segment| segment.ns).sum();
            assert_eq!((own + 5_000) / 10_000 * 10, own_us, "{wanted:?}: {path:#?}");
            let unknown: u64 = path
                .segments
                .iter()
                .filter(|segment| segment.kind == CauseKind::Unknown)
                .map(|segment| segment.ns)
                .sum();
            assert!(unknown <= 310_000, "{path:#?}");
        }
    }
}

#[test]
fn thread_group_leader_and_exec_thread_are_one_command() {
    let fork = "   svc-100 [001] ..... 9.999000: sched_process_fork: comm=svc pid=100 child_comm=svc child_pid=101\n";
    let born = "    sh-99 [001] ..... 9.990000: sched_process_fork: comm=sh pid=99 child_comm=sh child_pid=100\n\
                    sh-99 [001] d..2. 9.991000: sched_switch: prev_comm=sh prev_pid=99 prev_prio=120 prev_state=S ==> next_comm=svc next_pid=100 next_prio=120\n";
    let text = born.to_owned() + fork + &EXEC.replace("IN-BETWEEN", "");
    let command = read(&text).command(Wanted::Any).expect("a command");
    assert_eq!((command.name.as_str(), command.is_born, command.end), ("tool:100", true, End::Exit));
    assert_eq!(command.from_ns / 1_000, 9_990_000);
}

#[test]
fn waking_before_switch_out_counts_if_wakeup_follows() {
    let switched = |wakeup_before: bool| {
        let wakeup = ("b", 2, 1, "d..3.", 0, "sched_wakeup", "comm=a pid=1 prio=120 target_cpu=000");
        let at = |us, line: LineFields<'static>| (line.0, line.1, line.2, line.3, us, line.5, line.6);
        let mut lines = vec![
            ("<idle>", 0, 1, "d..2.", 0, "sched_switch", "swapper/1:0 R b:2"),
            ("<idle>", 0, 0, "d..2.", 0, "sched_switch", "swapper/0:0 R a:1"),
            ("b", 2, 1, "d..3.", 10, "sched_waking", "comm=c pid=3 prio=120 target_cpu=000"),
            at(11, ("b", 2, 1, "d..3.", 0, "sched_wakeup", "comm=c pid=3 prio=120 target_cpu=000")),
            ("b", 2, 1, "d..3.", 1_000, "sched_waking", "comm=a pid=1 prio=120 target_cpu=000"),
        ];
        if wakeup_before {
            lines.push(at(1_001, wakeup));
        }
        lines.push(("a", 1, 0, "d..2.", 1_002, "sched_switch", "a:1 S c:3"));
        if !wakeup_before {
            lines.push(at(1_003, wakeup));
        }
        lines.push(("c", 3, 0, "d..2.", 4_002, "sched_switch", "c:3 S a:1"));
        lines.push(("a", 1, 0, "d..2.", 5_000, "sched_switch", "a:1 S swapper/0:0"));
        let waits = read(&written(Form::Tracefs, &lines)).late_waits(1, 1_000_000, 1);
        parts_of(&waits.first().expect("a wait").path)
    };
    assert_eq!(switched(false), [part(3_000, CauseKind::Thread, "c:3")]);
    // The thread was woken while it ran, so the waker of its wait is not recorded.
    assert_eq!(switched(true), [part(3_000, CauseKind::Unknown, "its waking was not seen")]);
}

#[test]
fn real_traces_show_the_sleep() {
    // Each is of `sh -c 'sleep 0.006 | cat'` on a busy machine.
    for (text, name, is_born) in [(TRACEFS, "sh:19025", true), (PERF_SCRIPT, "sh:19574", false)] {
        let mut trace = read(text);
        assert_eq!(trace.lost, BTreeMap::new());
        let command = trace.command(Wanted::Comm("sh")).expect("a command");
        assert_eq!((command.name.as_str(), command.is_born, &command.end), (name, is_born, &End::Exit));
        assert_eq!(path_of(&command).total_ns(), command.to_ns - command.from_ns);
        let causes = path_of(&command).causes();
        let timer = causes.iter().find(|cause| cause.kind == CauseKind::Timer).expect("a timer");
        assert!((6_000_000..6_200_000).contains(&timer.ns), "{causes:?}");
        let unknown: u64 = causes.iter().filter(|cause| cause.kind == CauseKind::Unknown).map(|cause| cause.ns).sum();
        assert!(unknown * 50 < path_of(&command).total_ns(), "{causes:?}");
    }
}

#[test]
fn reads_perf_sched_traces() {
    // A trace of `sh -c 'sleep 0.02 | cat'` without timers and programs.
    let mut trace = read(PERF_SCHED);
    assert_eq!((trace.lost.clone(), trace.limitations.len()), (BTreeMap::new(), 2));
    let command = trace.command(Wanted::Any).expect("a command");
    assert_eq!((command.name.as_str(), command.why, &command.end), ("sh:5795", WhyThis::FirstExec, &End::Exit));
    let causes = path_of(&command).causes();
    assert!(causes[0].kind == CauseKind::Unknown && causes[0].ns > 20_000_000, "{causes:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Removes, repeats or reorders lines.
    #[test]
    fn paths_add_up_for_incomplete_traces(order in prop::collection::vec(0_usize..250, 0..300), is_sorted in any::<bool>()) {
        let lines: Vec<&str> = TRACEFS.lines().collect();
        let mut order = order;
        if is_sorted {
            order.sort_unstable();
        }
        let text: Vec<&str> = order.iter().filter_map(|&at| lines.get(at).copied()).collect();
        let Ok(mut trace) = Trace::read(text.join("\n").as_bytes()) else { return Ok(()) };
        let tids: Vec<u32> = trace.lives().iter().map(|life| life.tid).collect();
        for tid in tids {
            for wait in trace.late_waits(tid, 0, 5) {
                prop_assert_eq!(wait.path.total_ns(), wait.to_ns - wait.from_ns);
            }
            if let Ok(command) = trace.command(Wanted::Pid(tid)) {
                prop_assert_eq!(path_of(&command).total_ns(), command.to_ns.saturating_sub(command.from_ns));
            }
        }
    }
}
