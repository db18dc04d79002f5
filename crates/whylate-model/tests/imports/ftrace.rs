// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ftrace files: output of a 5.4 kernel, and damaged input.

use std::io::{self, BufReader, Read};

use proptest::prelude::*;
use whylate_model::ftrace::{ImportError, ImportOptions, import};
use whylate_model::paste::PasteError;
use whylate_model::{CauseKind, LateEvent, Series, Snapshot};

const LATENCY: &str = include_str!("../ftrace/irqsoff-5.4.txt");
const PIPE: &str = include_str!("../ftrace/trace-pipe-5.4.txt");
const US_NS: u64 = 1_000;

fn read(text: impl Read, late_over_ns: Option<u64>) -> Result<(Snapshot, Vec<LateEvent>), ImportError> {
    let mut late = Vec::new();
    let options = ImportOptions { late_over_ns, worst: 20 };
    let (snapshot, _) = import(BufReader::new(text), "host", options, &mut |event| late.push(event))?;
    Ok((snapshot, late))
}

fn series<'a>(snapshot: &'a Snapshot, label: &str, value: &str) -> &'a Series {
    let found = snapshot.series.iter().find(|series| series.labels.get(label).is_some_and(|is| is == value));
    found.unwrap_or_else(|| panic!("no series has {label} {value}: {:?}", snapshot.series))
}

/// Checks the events of the reference file that show the window, the overruns and the handler.
fn check_capture(snapshot: &Snapshot, late: &[LateEvent]) {
    let window = series(snapshot, "function", "console_unlock");
    let length = &window.histograms["length"];
    assert_eq!((length.count(), length.max_ns()), (1, 10_966 * US_NS));
    assert_eq!(window.labels["kind"], "irqs_off");
    assert_eq!(window.labels["caller"], "vprintk_emit");
    assert_eq!(window.labels["disabled_by"], "console_unlock");
    assert_eq!(window.values["overruns"], 8.0);
    let timer = series(snapshot, "callback", "hrtimer_cb");
    assert_eq!(timer.values["overruns"], 8.0);
    assert_eq!(timer.histograms["lateness"].max_ns(), 9_656 * US_NS);
    let timers: Vec<&LateEvent> = late.iter().filter(|event| event.labels.contains_key("callback")).collect();
    let [event] = timers[..] else { panic!("one timer was late: {timers:?}") };
    assert_eq!((event.cpu, event.latency_ns, event.labels["overruns"].as_str()), (6, 9_656 * US_NS, "8"));
    let cause = &event.causes[0];
    assert_eq!((cause.kind, &*cause.who.to_string()), (CauseKind::IrqsOff, "<...>:6462"));
    assert_eq!(cause.stack, ["console_unlock", "vprintk_emit"]);
    // From when it was due until interrupts were enabled again; then its own interrupt.
    assert_eq!(cause.ns, 9_653 * US_NS);
    assert_eq!((event.causes[1].kind, &*event.causes[1].who.to_string()), (CauseKind::Irq, "arch_timer"));
    assert_eq!(event.causes.iter().map(|cause| cause.ns).sum::<u64>(), event.latency_ns);
}

#[test]
fn rejects_binary_and_unterminated_input() {
    assert!(matches!(read(io::repeat(0), None), Err(ImportError::Paste(PasteError::Binary))));
}

#[test]
fn trace_pipe_capture_gives_window_and_its_overruns() {
    let (snapshot, late) = read(PIPE.as_bytes(), None).expect("a capture");
    check_capture(&snapshot, &late);
    assert_eq!(
        (snapshot.source.as_str(), snapshot.backend.as_str(), snapshot.duration_ns),
        ("irqsoff", "import", 10_976 * US_NS)
    );
    // The interrupt's own section does not end in the capture.
    assert_eq!((snapshot.lost["unmatched"], snapshot.lost["unreadable"]), (1, 0));
    let (_, late) = read(PIPE.as_bytes(), Some(10_000 * US_NS)).expect("a capture");
    assert_eq!(late.len(), 1);
    assert_eq!((late[0].latency_ns, late[0].causes[0].ns), (10_966 * US_NS, 10_966 * US_NS));
}

#[test]
fn repeated_overrun_line_is_one_event() {
    let lone = PIPE.lines().find(|line| line.ends_with("overruns")).expect("there is one");
    for text in [format!("{lone}\nAnalysis: it is late.\n{PIPE}"), format!("{PIPE}\nIt was this:\n{lone}\n")] {
        let (snapshot, late) = read(text.as_bytes(), None).expect("a capture");
        check_capture(&snapshot, &late);
    }
    // It counts alone or with another timestamp.
    let later = lone.replace("743619", "843619");
    for (text, overruns) in [(lone.to_owned(), 8.0), (format!("{lone}\n{PIPE}{later}"), 16.0)] {
        let (snapshot, _) = read(text.as_bytes(), None).expect("a capture");
        assert_eq!(series(&snapshot, "callback", "hrtimer_cb").values["overruns"], overruns, "{text}");
    }
}

#[test]
fn reads_report_with_prose_between_traces() {
    let text = format!("How we measured: a story\n\n{LATENCY}\nAnalysis: it is late.\n\n{PIPE}\nThe end.\n");
    let (snapshot, late) = read(text.as_bytes(), None).expect("both");
    check_capture(&snapshot, &late);
    let trace = series(&snapshot, "caller", "vprintk_emit");
    assert_eq!(trace.labels["kind"], "irqs_off");
    let worst = &late[0];
    assert_eq!((worst.latency_ns, worst.cpu), (12_116 * US_NS, 7));
    assert_eq!(worst.labels["task"], "qseecom-unload-:207");
    assert_eq!(
        (worst.labels["started_at"].as_str(), worst.labels["ended_at"].as_str()),
        ("vprintk_emit", "vprintk_emit")
    );
    assert_eq!(worst.stack.len(), 9);
    assert_eq!(snapshot.lost["unreadable"], 3);
}

#[test]
fn hrtimer_events_give_lateness_and_missed_periods() {
    let text = "\
        x-1 [000] d..1. 10.000000: hrtimer_start: hrtimer=00000000aabbccdd function=cb expires=10001000000 softexpires=10001000000 mode=ABS\n\
        x-1 [000] d..1. 10.000500: irq_disable: caller=dark_matter+0x1/0x2 parent=galaxy+0x1/0x2\n\
        x-1 [000] d..1. 10.004500: irq_enable: caller=dark_matter+0x1/0x2 parent=galaxy+0x1/0x2\n\
        x-1 [000] d.h1. 10.004501: hrtimer_cancel: hrtimer=00000000aabbccdd\n\
        x-1 [000] d.h1. 10.004501: hrtimer_expire_entry: hrtimer=00000000aabbccdd function=cb now=10004500000\n\
        x-1 [000] d.h1. 10.004502: hrtimer_start: hrtimer=00000000aabbccdd function=cb expires=10005000000 softexpires=10005000000 mode=ABS\n\
        x-1 [000] d.h1. 10.004503: hrtimer_expire_exit: hrtimer=00000000aabbccdd\n\
        x-1 [000] d.h1. 10.005010: hrtimer_expire_entry: hrtimer=00000000aabbccdd function=cb now=10005009000\n\
        x-1 [000] d.h1. 10.005012: hrtimer_start: hrtimer=00000000aabbccdd function=cb expires=10006000000 softexpires=10006000000 mode=ABS\n\
        x-1 [000] d.h1. 10.005012: hrtimer_expire_exit: hrtimer=00000000aabbccdd\n\
        x-1 [000] d.h1. 10.008510: hrtimer_expire_entry: hrtimer=00000000aabbccdd function=cb now=10008509000\n";
    let (snapshot, late) = read(text.as_bytes(), Some(3_000 * US_NS)).expect("a capture");
    let timer = series(&snapshot, "callback", "cb");
    assert_eq!((timer.histograms["lateness"].count(), timer.histograms["lateness"].max_ns()), (3, 3_500 * US_NS));
    // Two periods of 1 ms passed before the last call; the period was not yet known at the first call.
    assert_eq!(timer.values["overruns"], 2.0);
    let first = late.iter().find(|event| event.labels.contains_key("callback")).expect("the timer was late");
    assert_eq!((first.latency_ns, first.causes[0].ns), (3_500 * US_NS, 3_499 * US_NS));
    assert_eq!(first.causes[1].kind, CauseKind::Unknown);
}

#[test]
fn handlers_count_without_irqsoff_events() {
    let text = "<idle>-0 [001] d.h.. 5.000000: irq_handler_entry: irq=9 name=my disk\n\
        <idle>-0 [001] d.h.. 5.000250: irq_handler_exit: irq=9 ret=handled\n";
    let (snapshot, _) = read(text.as_bytes(), None).expect("a capture");
    let handler = series(&snapshot, "handler", "my disk");
    assert_eq!((handler.labels["kind"].as_str(), handler.histograms["length"].max_ns()), ("irq", 250 * US_NS));
}

#[test]
fn no_span_crosses_lost_events() {
    for gap in ["CPU:6 [LOST 3 EVENTS]", "CPU:6 [LOST EVENTS]", "##### CPU 6 buffer started ####"] {
        let (first, rest) = PIPE.split_once('\n').expect("lines");
        let (snapshot, _) = read(format!("{first}\n{gap}\n{rest}").as_bytes(), None).expect("a capture");
        assert!(
            !snapshot
                .series
                .iter()
                .any(|series| series.labels.get("function").is_some_and(|is| is == "console_unlock"))
        );
        assert_eq!(snapshot.lost["unmatched"], 2, "{gap}");
        assert_eq!(snapshot.lost["events"] > 0, gap.contains("LOST"), "{gap}");
    }
}

#[test]
fn accepts_non_breaking_spaces() {
    let (snapshot, late) = read(format!("{LATENCY}{PIPE}").replace(' ', "\u{a0}").as_bytes(), None).expect("both");
    check_capture(&snapshot, &late);
    assert_eq!(late[0].labels["ended_at"], "vprintk_emit");
}

#[test]
fn errors_state_their_reason() {
    let error = |bytes: &[u8]| read(bytes, None).expect_err("it has no events").to_string();
    assert!(error(b"").starts_with("no line in it is a latency trace"));
    assert!(error(b"\xff\xfe garbage \x80\n\n").starts_with("no line in it is a latency trace"));
    assert!(error(b"\x17\x08\x44tracing6").starts_with("this is a trace.dat"));
    assert!(error(b"\x1f\x8b\x08").starts_with("this is compressed"));
    assert!(error(&LATENCY.as_bytes()[..80]).contains("breaks off in its heading"));
    assert!(error(LATENCY.replace("irqsoff", "wakeup_rt").as_bytes()).contains("another tracer"));
    assert!(error(b"sh-1 [000] d..1 5.000000: sched_wakeup: comm=a pid=1\n").contains("tells of interrupts"));
}

#[test]
fn sub_microsecond_times_survive_json() {
    let fine = "sh-1 [000] d..1 5.0000015: irq_disable: caller=f+0x1/0x2 parent=g\n\
                sh-1 [000] d..1 5.0000095: irq_enable: caller=f+0x1/0x2 parent=g\n";
    let (snapshot, _) = read(fine.as_bytes(), None).expect("a capture");
    assert_eq!((snapshot.start_unix_ns, snapshot.duration_ns), (5_000_001_000, 8_500));
    let text = serde_json::to_string(&snapshot).expect("it serialises");
    assert_eq!(serde_json::from_str::<Snapshot>(&text).expect("and parses"), snapshot);
}

#[test]
fn unterminated_line_uses_bounded_memory() {
    let endless = io::repeat(b'x').take(64 << 20).chain(io::Cursor::new(format!("\n{PIPE}")));
    let (snapshot, late) = read(endless, None).expect("a capture after it");
    check_capture(&snapshot, &late);
    assert_eq!(snapshot.lost["unreadable"], 1);
}

#[test]
fn memory_is_independent_of_file_size() {
    let lines = (0..200_000_u64).map(|number| {
        let (at, until) = (number * 20, number * 20 + 10);
        format!(
            "a{number}-1 [{cpu:03}] d..1 {}.{:06}: irq_disable: caller=f{number}+0x1/0x2 parent=g\n\
             a{number}-1 [{cpu:03}] d..1 {}.{:06}: irq_enable: caller=f{number}+0x1/0x2 parent=g\n\
             a{number}-1 [{cpu:03}] d..1 {}.{:06}: hrtimer_start: hrtimer={number:x} function=t{number} expires=5\n",
            at / 1_000_000,
            at % 1_000_000,
            until / 1_000_000,
            until % 1_000_000,
            until / 1_000_000,
            until % 1_000_000,
            cpu = number % 20_000,
        )
    });
    let (snapshot, late) = read(lines.collect::<String>().as_bytes(), None).expect("a capture");
    assert_eq!((snapshot.series.len(), late.len()), (16 << 10, 20));
    assert!(snapshot.lost["cpus_full"] > 0 && snapshot.lost["series_full"] > 0);
}

proptest! {
    #[test]
    fn arbitrary_text_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), threshold in prop::option::of(0u64..100)) {
        let _ = read(&bytes[..], threshold);
    }

    #[test]
    fn damaged_text_does_not_panic(
        cuts in prop::collection::vec((0usize..4_000, 0usize..4_000, "[0-9d: <>=\\[\\]#us.-]{0,12}"), 1..6),
        threshold in prop::option::of(0u64..20_000_000),
    ) {
        let mut text = format!("{LATENCY}{PIPE}");
        for (at, length, inserted) in cuts {
            // The texts are ASCII, and so is the inserted text.
            let at = at.min(text.len());
            let end = (at + length % 40).min(text.len());
            text.replace_range(at..end, &inserted);
        }
        if let Ok((snapshot, late)) = read(text.as_bytes(), threshold) {
            for event in late {
                prop_assert_eq!(event.causes.iter().map(|cause| u128::from(cause.ns)).sum::<u128>(), u128::from(event.latency_ns));
            }
            let text = serde_json::to_string(&snapshot).expect("it serialises");
            prop_assert_eq!(serde_json::from_str::<Snapshot>(&text).expect("and parses"), snapshot);
        }
    }
}
