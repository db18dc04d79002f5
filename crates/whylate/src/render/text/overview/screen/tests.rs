// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of the overview on a screen.

use whylate_model::culprits::Victims;
use whylate_model::overview::{HeldUp, LateOf};
use whylate_model::path::PathSegment;
use whylate_model::recording::Unmeasured;
use whylate_model::snapshot::Unexplained;
use whylate_model::{ActorName, Cause, CauseKind, LateEvent, WaitClass};

use super::*;

fn rendered(look: &Overview, columns: Option<usize>, is_verbose: bool) -> String {
    let mut out = Vec::new();
    let screen = Screen { columns, is_verbose, zone: TimeZone::UTC, replay: None };
    write(&mut out, look, &screen).expect("a vector takes everything");
    String::from_utf8(out).expect("text")
}

fn screen(look: &Overview) -> String {
    rendered(look, Some(80), false)
}

fn headline(source: &str, is_late: bool) -> Headline {
    Headline {
        source: source.to_owned(),
        of: "things that wait".to_owned(),
        count: 1234,
        p50_ns: 3_100,
        p99_ns: 45_000,
        max_ns: 20_000_000,
        late_from_ns: 5_000_000,
        late: u64::from(is_late),
        is_late,
        next: format!("whylate {source} top --why 5.00ms"),
        lost: [("late_events".to_owned(), 3)].into(),
        ..Headline::default()
    }
}

#[test]
fn renders_late_events_culprits_and_next_commands() {
    let culprit = |kind, who: &str, total_ns| Culprit {
        kind,
        who: who.parse().expect("any text"),
        alike: 0,
        cgroup: None,
        total_ns,
        victims: vec![
            Victims { source: "timerlat".to_owned(), events: 3, subjects: 1, total_ns, worst_ns: total_ns / 2 },
            Victims { source: "wq".to_owned(), events: 1, subjects: 1, total_ns: 7_000, worst_ns: 7_000 },
        ],
    };
    let event = LateEvent {
        subject: "evil\x1b[2J".to_owned(),
        at_unix_ns: 1_795_252_440_123_456_789,
        latency_ns: 20_000_000,
        cpu: 1,
        causes: vec![Cause {
            stack: vec!["console_unlock".to_owned()],
            ..Cause::new(CauseKind::IrqsOff, "dd:4242", 20_000_000)
        }],
        ..LateEvent::default()
    };
    let look = Overview {
        host: "web1".to_owned(),
        duration_ns: 10_000_000_000,
        sources: vec![headline("timerlat", true), headline("wq", false)],
        worst: vec![Sighting { source: "timerlat".to_owned(), event }],
        culprits: vec![
            culprit(CauseKind::IrqsOff, "dd:4242", 20_000_000),
            culprit(CauseKind::Thread, "evil\x1b[2J:7", 9_000_000),
            culprit(CauseKind::Irq, "nvme0q1", 3_000),
        ],
        unmeasured: vec![Unmeasured::new("sqpoll", "no thread is there")],
        limitations: vec![
            Unmeasured::new("wq", "no heartbeat"),
            Unmeasured { leaves_cpus_out: true, ..Unmeasured::new("timerlat", LEFT_OUT_CPU) },
            Unmeasured { leaves_cpus_out: true, ..Unmeasured::new("irqsoff", LEFT_OUT_CPU) },
        ],
        ..Overview::default()
    };
    insta::assert_snapshot!(screen(&look));
    insta::assert_snapshot!(rendered(&look, None, true));
    // Nothing lacks where there is no such thread.
    assert!(!rendered(&look, None, true).contains("whylate doctor"));
    // The victims have a line of their own where a terminal is too narrow.
    let narrow = rendered(&look, Some(60), false);
    let culprit = " 69.0%  20.0ms  interrupts off in dd:4242:\n                3 timers, 1 work item, worst 10.0ms\n";
    assert!(narrow.contains(culprit), "{narrow}");
}

const LEFT_OUT_CPU: &str = "CPU 1 was left out: isolated (isolcpus); -c 1 measures it";

#[test]
fn no_row_is_cut_at_80_columns() {
    let sources = CARDS.map(|card| Headline { source: card.name.to_owned(), count: 1_000_000, ..offcpu(0, 0) });
    let look = Overview { sources: sources.to_vec(), ..Overview::default() };
    let text = screen(&look);
    assert!(!text.contains("..") && text.lines().all(|line| line.chars().count() <= 80), "{text}");
    for card in CARDS {
        let judged = [Some(card.judged), card.events, card.held_up];
        for row in judged.into_iter().flatten().map(|judged| judged.row) {
            assert!(row.len() <= 24 && text.contains(row), "{row}: {text}");
        }
    }
}

#[test]
fn ranking_has_explained_share() {
    let culprit = Culprit {
        kind: CauseKind::Thread,
        who: ActorName::thread("hog", 7),
        alike: 0,
        cgroup: None,
        total_ns: 1_000_000,
        victims: vec![Victims { source: "wq".to_owned(), events: 1, subjects: 1, total_ns: 1, worst_ns: 1 }],
    };
    let mut wq = headline("wq", true);
    wq.unexplained = Unexplained { events: 40, total_ns: 3_000_000, recorded: None };
    let look = Overview { sources: vec![wq], culprits: vec![culprit], ..Overview::default() };
    let expected = "100% of the explained delay: thread hog:7.\n\nCULPRITS, 1.00ms in total\nThat is 25.0% of the late time: 40 more \
                    late events (3.00ms in total) exceeded the budget for explanations.\n";
    let text = rendered(&look, None, false);
    assert!(text.contains(expected), "{text}");
}

#[test]
fn renders_machine_that_is_not_late() {
    let mut nothing = headline("irqsoff", false);
    (nothing.count, nothing.lost) = (0, std::collections::BTreeMap::new());
    let unmeasured = vec![Unmeasured::new("sqpoll", "no thread is there")];
    let sources = vec![nothing, offcpu(0, 0)];
    let look = Overview { host: "web1".to_owned(), sources, unmeasured, ..Overview::default() };
    insta::assert_snapshot!(screen(&look));
    insta::assert_snapshot!(rendered(&look, None, true));
}

/// `stuck` threads in uninterruptible sleep for 20 s, and `waits` long run-queue waits.
fn offcpu(stuck: u64, waits: u64) -> Headline {
    let max_ns = if waits > 0 { 95_000_000 } else { 0 };
    let late_of = Some(LateOf {
        of: "threads that can run".to_owned(),
        late_from_ns: 20_000_000,
        max_ns,
        next: "whylate offcpu --why 20.0ms -d 10s".to_owned(),
    });
    Headline {
        count: stuck,
        max_ns: 20_000_000_000,
        late_from_ns: 1_000_000_000,
        late: waits,
        late_of,
        held_up: Some(HeldUp {
            of: "threads that wait for others".to_owned(),
            late_from_ns: 100_000_000,
            next: "whylate offcpu --why 100ms -d 10s".to_owned(),
            ..HeldUp::default()
        }),
        next: "whylate offcpu --blocked 1.00s".to_owned(),
        lost: [].into(),
        ..headline("offcpu", stuck + waits > 0)
    }
}

#[test]
fn renders_wait_chain() {
    let mut source = offcpu(0, 0);
    let held_up = source.held_up.as_mut().expect("it follows waits");
    (held_up.late, held_up.late_ns, held_up.max_ns) = (3, 700_000_000, 240_000_000);
    source.is_late = true;
    let segment = |ms: u64, kind, who: &str, depth, waiter: Option<&str>| PathSegment {
        ns: ms * 1_000_000,
        kind,
        who: who.parse().expect("any text"),
        via: Some("recvfrom (network)".to_owned()),
        waiter: waiter.map(|waiter| waiter.parse().expect("any text")),
        depth,
        ..PathSegment::default()
    };
    let event = LateEvent {
        subject: "client:7".to_owned(),
        labels: [("waited_in".to_owned(), "recvfrom (network)".to_owned())].into(),
        at_unix_ns: 1_795_252_440_123_456_789,
        latency_ns: 240_000_000,
        cpu: 1,
        path: vec![
            segment(180, CauseKind::Running, "server:8", 1, Some("client:7")),
            segment(60, CauseKind::Disk, "vda (write by server:8)", 2, Some("server:8")),
        ],
        ..LateEvent::default()
    };
    let worst = vec![Sighting { source: "offcpu".to_owned(), event }];
    insta::assert_snapshot!(screen(&Overview { sources: vec![source], worst, ..Overview::default() }));
}

#[test]
fn renders_waits_for_sleepers_separately() {
    let mut source = offcpu(0, 0);
    let held_up = source.held_up.as_mut().expect("it follows waits");
    let pair = |who: &str, waits, ms: u64| ForSleeper {
        who: who.to_owned(),
        sleeper: "peer\x1b[2J:8".to_owned(),
        waits,
        total_ns: ms * 1_000_000,
    };
    held_up.for_sleepers = vec![pair("client:7", 12, 1_800), pair("client:9", 1, 150)];
    let text = screen(&Overview { sources: vec![source], ..Overview::default() });
    let expected = "\nNot counted, maybe by design: waits of 100ms or longer for a sleeping thread
    client:7 waited for peer?[2J:8 12 times, 1.80s in total
    client:9 waited for peer?[2J:8 once, 150ms in total
";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn names_thread_in_uninterruptible_sleep() {
    let sleeper = |who: &str, process: Option<&str>| Sleeper {
        who: who.parse().expect("any text"),
        process: process.map(str::to_owned),
        asleep_ns: 5_210_000_000,
        waits_in: Some("mem_cgroup_oom_synchronize".to_owned()),
        class: WaitClass::Memory,
    };
    let sleepers = vec![sleeper("mem-waiter:71", Some("app\x1b[2J:70")), sleeper("alone:80", None)];
    let source = Headline { sleepers, late_figures: 2, ..offcpu(2, 0) };
    let look = Overview { sources: vec![source], duration_ns: 7_000_000_000, ..Overview::default() };
    let text = rendered(&look, None, false);
    assert!(text.starts_with("LATE on  in 7.00s: 2 threads in D state.\n"), "{text}");
    let row = text.lines().find(|line| line.contains("D state: age")).expect("a row");
    assert!(row.ends_with("LATE  D state: age at the end      2      2  3.10us  45.0us  20.0s     1s"), "{row}");
    let worst = "WORST\n00:00:07.000000 5.21s mem-waiter:71 of app?[2J:70, still in D state in mem_cgroup_oom_synchronize \
                 (memory)\n00:00:07.000000 5.21s alone:80, still in D state in ";
    assert!(text.contains(worst), "{text}");
    let parsed: Overview =
        serde_json::from_str(&serde_json::to_string(&look).expect("an overview serializes")).expect("and parses");
    assert_eq!(parsed.sources[0].sleepers, look.sources[0].sleepers);
}

#[test]
fn each_row_has_threshold_and_late_count() {
    let look = |source| Overview { sources: vec![source], ..Overview::default() };
    let (waits, both) = (screen(&look(offcpu(0, 69))), screen(&look(offcpu(2, 69))));
    insta::assert_snapshot!(format!("{waits}\n{both}"));
    // A source without figures has no count.
    let sqpoll = Headline {
        of: String::new(),
        count: 0,
        remark: "submission threads: 1".to_owned(),
        ..headline("sqpoll", true)
    };
    let text = screen(&look(sqpoll));
    let row = text.lines().find(|line| line.contains("SQPOLL: until")).unwrap_or_default();
    let row: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(row, ["LATE", "SQPOLL:", "until", "it", "runs", "1", "-", "-", "-", "-", "5ms"]);
    assert!(text.contains("\n      submission threads: 1\n"), "{text}");
}
