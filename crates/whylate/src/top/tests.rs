// SPDX-License-Identifier: MIT OR Apache-2.0
//! Draws every view from synthetic ticks, and feeds keys, sizes and ticks in random order.

use jiff::tz::TimeZone;
use proptest::prelude::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use whylate_model::culprits::By;
use whylate_model::late::LateKind;
use whylate_model::path::PathSegment;
use whylate_model::recording::Unmeasured;
use whylate_model::recording::{Header, Line, Measured};
use whylate_model::sources::{OFFCPU, TIMERLAT, WQ};
use whylate_model::units::is_printable;
use whylate_model::wait::{Wait, WaitClass};
use whylate_model::{ActorName, Card, Cause, CauseKind, Cgroup, LateEvent, Series, Snapshot, Stack};
use whylate_sources::paths::Program;

use super::draw::draw;
use super::history::History;
use super::keys::Key;
use super::panel::{Glyphs, Row};
use super::program_filter::{ProgramFilter, Stacks};
use super::state::{Mode, Phase, State};
use super::view_kind::ViewKind;

const SECOND_NS: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;
/// Columns and rows in which each view is pinned.
const SIZES: [(usize, usize); 4] = [(40, 10), (80, 24), (100, 30), (160, 45)];
/// 2026-11-21T09:14:00Z.
const START_NS: u64 = 1_795_252_440 * SECOND_NS;

fn labels(pairs: &[(&str, &str)]) -> whylate_model::Labels {
    pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn snapshot(card: &Card, second: u64) -> Snapshot {
    let mut snapshot = Snapshot::new(card.name, "made", "web1", START_NS + second * SECOND_NS);
    snapshot.duration_ns = SECOND_NS;
    snapshot
}

fn series(of: &[(&str, &str)], name: &str, latencies_ns: &[u64]) -> Series {
    let histograms = [(name.to_owned(), latencies_ns.iter().copied().collect())].into();
    Series { labels: labels(of), histograms, ..Series::default() }
}

fn late(second: u64, subject: &str, causes: Vec<Cause>) -> LateEvent {
    LateEvent {
        subject: subject.to_owned(),
        at_unix_ns: START_NS + second * SECOND_NS + 250 * MS,
        latency_ns: causes.iter().map(|cause| cause.ns).sum(),
        cpu: 1,
        causes,
        ..LateEvent::default()
    }
}

/// Returns one second of three sources: every fifth second has interrupts disabled, the seventh a blocked wait.
fn tick(second: u64) -> Vec<Line> {
    let mut timerlat = snapshot(&TIMERLAT, second);
    for cpu in ["0", "1"] {
        timerlat.series.push(series(&[("cpu", cpu)], "thread", &[40_000, 60_000 + second * 100, 90_000]));
    }
    let mut wq = snapshot(&WQ, second);
    wq.series.push(series(&[("handler", "vmstat_update"), ("workqueue", "mm_percpu_wq")], "latency", &[3_000; 9]));
    wq.series.push(series(&[("handler", "\u{6f22}\u{5b57}\x1b[2J"), ("workqueue", "events")], "latency", &[9_000]));
    wq.lost.insert("unmatched".to_owned(), u64::from(second == 3));
    if second % 5 == 4 {
        let stack = vec!["console_unlock".to_owned(), "vprintk_emit".to_owned()];
        let off = Cause { stack, ..Cause::new(CauseKind::IrqsOff, "dd:4242", 18 * MS) };
        let hog = Cause::new(CauseKind::Thread, "hog:7", 2 * MS);
        timerlat.series[1] = series(&[("cpu", "1")], "thread", &[20 * MS, 60_000]);
        timerlat.late.push(late(second, "CPU 1", vec![off.clone(), hog]));
        wq.late.push(late(second, "vmstat_update", vec![Cause { ns: 12 * MS, ..off }]));
    }
    let mut offcpu = snapshot(&OFFCPU, second);
    let wait = |class| Some(Wait { class, rule: "made".to_owned() });
    let of_postgres = labels(&[("process", "postgres"), ("pid", "7"), ("thread", "postgres"), ("cgroup", "/db")]);
    offcpu.stacks.push(Stack {
        labels: of_postgres.clone(),
        wait: wait(WaitClass::OnCpu),
        weight_ns: 100 * MS,
        samples: 1,
        ..Stack::default()
    });
    offcpu.stacks.push(Stack {
        labels: of_postgres.clone(),
        wait: wait(WaitClass::Disk),
        weight_ns: 900 * MS,
        samples: 9,
        age: [70 * MS].into_iter().collect(),
        kernel: vec!["io_schedule".to_owned(), "folio_wait_bit".to_owned()],
        user: vec!["pread64".to_owned(), "main".to_owned()],
        ..Stack::default()
    });
    if second % 7 == 6 {
        let segment = |ms: u64, kind, who: &str, depth| PathSegment {
            ns: ms * MS,
            kind,
            who: who.parse().expect("any text"),
            via: Some("recvfrom (network)".to_owned()),
            waiter: Some(ActorName::thread("client", 7)),
            depth,
            ..PathSegment::default()
        };
        let path = vec![
            segment(180, CauseKind::Running, "server:8", 1),
            segment(60, CauseKind::Disk, "vda (write by server:8)", 1),
        ];
        let causes = path.iter().map(|segment| Cause::new(segment.kind, segment.who.clone(), segment.ns)).collect();
        let late = late(second, "client:7", causes);
        offcpu.late.push(LateEvent { kind: LateKind::BlockedWait, path, labels: of_postgres, ..late });
    }
    [timerlat, wq, offcpu].map(|snapshot| Line::Snapshot(Box::new(snapshot))).into()
}

fn header() -> Header {
    let measured =
        |card: &Card| Measured { source: card.name.to_owned(), backend: "made".to_owned(), ..Measured::default() };
    Header {
        host: "web1\u{202e}[2J".to_owned(),
        sources: [&TIMERLAT, &WQ, &OFFCPU].map(measured).into(),
        unmeasured: vec![Unmeasured::new("sqpoll", "no thread is there")],
        ..Header::default()
    }
}

fn state(glyphs: Glyphs, ticks: u64, columns: usize, rows: usize) -> State {
    let mut state = State::new(Mode::Live, glyphs, TimeZone::UTC, History::new(64 << 20));
    state.resize(columns, rows);
    state.start(header());
    (0..ticks).for_each(|second| add(&mut state, tick(second)));
    state
}

fn add(state: &mut State, lines: Vec<Line>) {
    state.add(lines);
    state.settle();
}

pub fn drawn(state: &State, columns: u16, rows: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).expect("a terminal");
    terminal.draw(|frame| draw(frame, state)).expect("drawn");
    let text = terminal.backend().to_string();
    // The backend quotes each line.
    text.lines().map(|line| line.trim_matches('"').trim_end().to_owned() + "\n").collect()
}

/// Presses keys; `C`, `S` and `L` stand for as many Tabs as lead to the culprits, the sources and the late events.
pub fn press(state: &mut State, keys: &str) {
    for key in keys.chars() {
        let panel = match key {
            'C' => Some("culprits"),
            'S' => Some("sources"),
            'L' => Some("late"),
            _ => None,
        };
        if let Some(panel) = panel {
            while state.view().panels[state.view().focus()].id != panel {
                state.press(Key::Tab);
            }
            continue;
        }
        state.press(match key {
            '\n' => Key::Enter,
            '\t' => Key::Tab,
            '<' => Key::Esc,
            key => Key::Char(key),
        });
    }
}

#[test]
fn draws_each_view_in_each_size() {
    // Keys that open each view.
    for (name, keys) in [
        ("look", ""),
        ("source", "Sjjj\n"),
        ("stacks", "S\n\t"),
        ("frames", "S\n\tjj\n"),
        ("series", "Sjjjj\n\n"),
        ("culprit", "C\n"),
        ("event", "L\n"),
        ("path", "Ljj\n\t"),
        ("keys", "?"),
    ] {
        for (columns, rows) in SIZES {
            let mut state = state(Glyphs::Unicode, 30, columns, rows);
            press(&mut state, keys);
            let screen = drawn(&state, columns as u16, rows as u16);
            assert!(screen.lines().all(|line| line.chars().all(is_printable)), "{screen}");
            assert!(name != "look" || columns < 80 || screen.contains("wait: held up by others"), "{screen}");
            insta::assert_snapshot!(format!("{name}_{columns}x{rows}"), screen);
        }
    }
}

#[test]
fn program_view_opens_above_overview() {
    let pid = ProgramFilter::Program(Program::Process(7));
    for (columns, rows) in SIZES {
        let mut state = state(Glyphs::Unicode, 30, columns, rows);
        state.open_program(pid.clone());
        insta::assert_snapshot!(format!("program_{columns}x{rows}"), drawn(&state, columns as u16, rows as u16));
    }
    let mut state = state(Glyphs::Ascii, 30, 120, 40);
    state.open_program(pid.clone());
    let panels = &state.view().panels;
    assert_eq!((panels[0].rows()[0].key.as_str(), panels[1].len(), panels[2].len()), ("disk", 2, 4));
    // A late event leads back to the program, and its frames are filtered by the program.
    press(&mut state, "\t\t\n\t\t\t");
    assert_eq!(state.view().panels[state.view().focus()].id, "program");
    press(&mut state, "\n");
    assert_eq!((&state.view().kind, state.views().len()), (&ViewKind::Program(pid.clone()), 2));
    press(&mut state, "\t\n");
    let ViewKind::Frames(_, shown, _) = &state.view().kind else { panic!("{:?}", state.view().kind) };
    assert_eq!(*shown, Stacks::Chains(pid.clone()));
    assert!(state.view().panels[0].title.contains("Wakeup chains of late waits"), "{}", state.view().panels[0].title);
    press(&mut state, "<\t\n");
    assert!(
        matches!(&state.view().kind, ViewKind::Frames(_, Stacks::Program(of), _) if *of == pid),
        "{:?}",
        state.view().kind
    );
    press(&mut state, "<<");
    assert_eq!(state.view().kind, ViewKind::Overview);
    state.open_program(ProgramFilter::Program(Program::Cgroup("/web".to_owned())));
    assert!(state.view().panels.iter().all(|panel| panel.rows().is_empty()));
    assert!(drawn(&state, 120, 40).contains("none of its threads was seen"));
}

#[test]
fn shows_early_sources_until_all_are_attached() {
    let mut state = State::new(Mode::Live, Glyphs::Ascii, TimeZone::UTC, History::new(1 << 20));
    state.resize(100, 30);
    let first = Header { sources: header().sources[..1].to_vec(), ..header() };
    for second in 0..2 {
        state.add_early(first.clone(), tick(second)[..1].to_vec());
        state.settle();
    }
    state.phase = Phase::Attaching("wq".to_owned());
    let early = drawn(&state, 100, 30);
    assert!(
        early.contains("timer: until") && early.contains("attaching wq") && !early.contains("run queue"),
        "{early}"
    );
    state.start(header());
    assert!(drawn(&state, 100, 30).contains("timer: until"));
    add(&mut state, tick(2));
    add(&mut state, tick(3));
    assert_eq!((state.window.ticks().len(), state.window.range.clone()), (2, 2..4));
}

#[test]
fn draws_ascii_and_empty_screens() {
    insta::assert_snapshot!("ascii_80x24", drawn(&state(Glyphs::Ascii, 30, 80, 24), 80, 24));
    let empty = State::new(Mode::Live, Glyphs::Ascii, TimeZone::UTC, History::new(1 << 20));
    insta::assert_snapshot!("empty_80x24", drawn(&empty, 80, 24));
    drawn(&empty, 5, 2);
}

#[test]
fn equal_late_events_of_a_tick_are_one_row() {
    let mut state = state(Glyphs::Unicode, 4, 100, 30);
    let mut lines = tick(20);
    let Line::Snapshot(wq) = &mut lines[1] else { panic!("no snapshot") };
    let item = |ms| late(20, "mover", vec![Cause::new(CauseKind::Thread, "hog:7", ms * MS)]);
    wq.late = (0..160).map(|number| item(11 + number % 3)).collect();
    add(&mut state, lines);
    let text = drawn(&state, 100, 30);
    let rows: Vec<&str> = text.lines().filter(|line| line.contains("mover")).collect();
    assert!(rows.len() == 1 && rows[0].contains("13.0ms") && rows[0].contains("mover × 160"), "{text}");
}

#[test]
fn nothing_was_late_is_not_said_at_the_start() {
    let mut state = state(Glyphs::Ascii, 1, 100, 30);
    let text = drawn(&state, 100, 30);
    assert!(text.contains("starting: no results yet") && !text.contains("nothing was late"), "{text}");
    add(&mut state, tick(1));
    let text = drawn(&state, 100, 30);
    assert!(text.contains("nothing was late") && !text.contains("starting"), "{text}");
}

#[test]
fn verdict_is_that_of_the_overview() {
    let screen = |columns, rows| drawn(&state(Glyphs::Ascii, 30, columns, rows), columns as u16, rows as u16);
    let what = "LATE on web1 in 30.0s: 4 held-up waits, 6 timers, 6 work items; 1.15s of delay.";
    let verdict = format!("{what} 62% of it: thread server:8 running.");
    assert_eq!(screen(160, 45).lines().nth(1), Some(&*verdict));
    // It needs two lines here, and has one there.
    let two = screen(80, 24).lines().skip(1).take(2).collect::<Vec<_>>().join(" ");
    assert_eq!(two, verdict);
    let small = screen(40, 10);
    assert!(
        small.lines().nth(1).is_some_and(|line| line.starts_with("LATE on web1") && line.ends_with(" ...")),
        "{small}"
    );
    let quiet = state(Glyphs::Ascii, 2, 80, 24);
    assert!(drawn(&quiet, 80, 24).contains("\nNothing was late on web1 in 2.00s.\n"));
}

#[test]
fn panel_counts_rows_without_room() {
    let text = drawn(&state(Glyphs::Ascii, 30, 80, 12), 80, 12);
    assert!(
        text.contains("> CULPRITS, 1.15s in total  +3 more") && text.contains("full bar = limit  +5 more"),
        "{text}"
    );
    let text = drawn(&state(Glyphs::Ascii, 30, 160, 45), 160, 45);
    assert!(!text.contains(" more"), "{text}");
}

#[test]
fn rows_of_sources_stay_selected_when_culprits_appear() {
    let mut state = state(Glyphs::Ascii, 3, 80, 24);
    press(&mut state, "j");
    (3..6).for_each(|second| add(&mut state, tick(second)));
    assert_eq!(state.view().panels[state.view().focus()].id, "sources");
}

#[test]
fn frozen_window_stays_and_steps_back() {
    let mut state = state(Glyphs::Ascii, 10, 100, 30);
    press(&mut state, " ");
    let frozen = drawn(&state, 100, 30);
    assert!(frozen.contains("FROZEN"), "{frozen}");
    add(&mut state, tick(10));
    assert_eq!(drawn(&state, 100, 30), frozen);
    press(&mut state, "t");
    assert_ne!(drawn(&state, 100, 30), frozen);
    press(&mut state, "TTTTTT[[[");
    assert_eq!((state.window.range.clone(), state.window_ns()), (4..5, SECOND_NS));
    assert_eq!(state.window.lines().count(), 1);
    press(&mut state, "t]");
    assert_eq!(state.window.range, 0..6);
    press(&mut state, " ");
    assert!(!state.is_frozen() && drawn(&state, 100, 30).contains("LIVE"));
}

#[test]
fn frozen_window_survives_eviction() {
    let mut state = State::new(Mode::Live, Glyphs::Ascii, TimeZone::UTC, History::new(100_000));
    state.resize(100, 30);
    state.start(header());
    (0..20).for_each(|second| add(&mut state, tick(second)));
    press(&mut state, "[ \t\t\n");
    let (at, window) = (state.window.end_unix_ns(), state.window.range.clone());
    let mut second = 20;
    while state.window.history.forgotten() <= window.start {
        assert_eq!((state.window.end_unix_ns(), &state.window.range), (at, &window));
        add(&mut state, tick(second));
        press(&mut state, "jk");
        second += 1;
    }
    // As its oldest ticks are evicted, the frozen window shrinks, and finally moves to the oldest tick.
    (0..50).for_each(|more| {
        add(&mut state, tick(second + more));
        press(&mut state, "jk<\n");
        drawn(&state, 100, 30);
    });
    assert!(
        state.is_frozen()
            && state.window.range.start >= state.window.history.forgotten()
            && !state.window.range.is_empty()
    );
}

#[test]
fn view_stack_stays_bounded() {
    let mut state = state(Glyphs::Ascii, 10, 100, 30);
    for _ in 0..20 {
        press(&mut state, "\t\n\n\n");
    }
    assert!(state.views().len() <= 16, "{}", state.views().len());
}

#[test]
fn plays_recording_to_its_end() {
    let mut state = state(Glyphs::Ascii, 10, 100, 30);
    state.mode = Mode::Replay("web1.whylate".to_owned());
    state.end(None);
    press(&mut state, "TTT ");
    assert!(state.is_playing() && drawn(&state, 100, 30).contains("REPLAY web1.whylate (playing)"));
    (0..4).for_each(|_| state.play());
    assert!(!state.is_playing() && state.said.contains("ends"), "{}", state.said);
}

#[test]
fn filters_and_sorts_rows() {
    let mut state = state(Glyphs::Ascii, 30, 120, 40);
    press(&mut state, "\t\t/vmstat\n");
    let panel = &state.view().panels[2];
    assert!(panel.len() == 6 && panel.rows().iter().all(|row| row.cells[3].text() == "vmstat_update"));
    press(&mut state, "<ss");
    let latencies: Vec<String> = state.view().panels[2].rows().iter().map(|row| row.cells[1].text()).collect();
    assert!(latencies.is_sorted(), "{latencies:?}");
    press(&mut state, "I");
    assert_eq!(state.view().panels[2].rows()[0].cells[1].text(), "wq");
}

#[test]
fn groups_culprits_by_thread_name() {
    let mut state = state(Glyphs::Ascii, 10, 120, 40);
    press(&mut state, "C");
    let dd = |number: u64| Cause::new(CauseKind::Thread, ActorName::thread("dd", number as u32), 900 * MS);
    let mut wq = snapshot(&WQ, 10);
    wq.late.push(late(10, "vmstat_update", vec![dd(1)]));
    add(&mut state, vec![Line::Snapshot(Box::new(wq.clone()))]);
    state.press(Key::Home);
    let first = |state: &State| state.view().panels[0].rows()[0].cells[3].text();
    assert_eq!(first(&state), "thread dd:1");
    let chosen = state.view().choice(&state.view().panels[0]).key;
    wq.late = (2..65).map(|number| late(10, "vmstat_update", vec![dd(number)])).collect();
    add(&mut state, vec![Line::Snapshot(Box::new(wq))]);
    assert_eq!(first(&state), "thread dd (64 threads)");
    assert_eq!(state.view().choice(&state.view().panels[0]).key, chosen);
    press(&mut state, "\n");
    let panels = &state.view().panels;
    assert_eq!(
        (panels[0].title.as_str(), panels[0].rows()[0].cells[2].text()),
        ("Victims of thread dd", "64".to_owned())
    );
    let alike = panels.iter().find(|panel| panel.id == "alike").expect("its threads");
    assert_eq!(
        (alike.len(), alike.rows()[0].opens.clone()),
        (64, Some(ViewKind::Culprit(CauseKind::Thread, ActorName::thread("dd", 1))))
    );
}

#[test]
fn ranks_culprits_as_asked() {
    let in_pod = |number: u32, pod: &str| Cause {
        cgroup: Some(Cgroup::new(pod)),
        ..Cause::new(CauseKind::Thread, ActorName::thread("dd", number), 900 * MS)
    };
    for (by, first, threads) in [(By::Culprit, "thread dd:1", 1), (By::Cgroup, "threads of cgroup /pod1", 2)] {
        let mut state = state(Glyphs::Ascii, 10, 120, 40);
        state.window.rank_by = by;
        let mut wq = snapshot(&WQ, 10);
        let causes = [in_pod(1, "/pod1"), in_pod(2, "/pod1"), in_pod(3, "/pod2"), in_pod(1, "/pod1")];
        wq.late = causes.map(|cause| late(10, "vmstat_update", vec![cause])).into();
        add(&mut state, vec![Line::Snapshot(Box::new(wq))]);
        state.press(Key::Home);
        assert_eq!(state.view().panels[0].rows()[0].cells[3].text(), first);
        press(&mut state, "\n");
        let panels = &state.view().panels;
        let events = if threads == 1 { "2" } else { "3" };
        assert_eq!(panels[0].rows()[0].cells[2].text(), events, "{by:?}");
        assert_eq!(panels.iter().any(|panel| panel.id == "alike"), threads > 1, "{by:?}");
    }
}

#[test]
fn groups_sleeping_culprits_by_thread_name() {
    let mut state = state(Glyphs::Ascii, 10, 120, 40);
    press(&mut state, "C");
    let mut wq = snapshot(&WQ, 10);
    let sleep = |number: u64| Cause::new(CauseKind::Timer, ActorName::thread("wl-copy", number as u32), 9_000 * MS);
    let timeout = Cause::new(CauseKind::Timer, "timeout in poll (curl:7)", 8_000 * MS);
    wq.late = vec![late(10, "a", vec![sleep(5837)]), late(10, "a", vec![sleep(5838)]), late(10, "a", vec![timeout])];
    add(&mut state, vec![Line::Snapshot(Box::new(wq))]);
    state.press(Key::Home);
    let text = |state: &State, panel: usize, row: usize, cell: usize| {
        state.view().panels[panel].rows()[row].cells[cell].text()
    };
    assert_eq!(text(&state, 0, 0, 3), "wl-copy sleeping (2 threads)");
    assert_eq!(text(&state, 0, 1, 3), "timeout in poll (curl:7)");
    assert!([0, 1, 2].map(|row| text(&state, 2, row, 4)).contains(&"wl-copy:5837 sleeping".to_owned()));
    press(&mut state, "\n");
    assert_eq!(state.view().panels[0].title, "Victims of wl-copy sleeping");
}

#[test]
fn text_scrolls_back_from_its_end() {
    let mut state = state(Glyphs::Ascii, 1, 100, 30);
    let mut wq = snapshot(&WQ, 1);
    let stack = (0..100).map(|number| format!("frame_{number}")).collect();
    wq.late.push(LateEvent { stack, ..late(1, "vmstat_update", vec![Cause::new(CauseKind::Work, "hog", 40 * MS)]) });
    add(&mut state, vec![Line::Snapshot(Box::new(wq))]);
    press(&mut state, "\t\t\n\tG");
    let end = drawn(&state, 100, 30);
    assert!(end.contains("frame_99") && !end.contains("frame_0\n"), "{end}");
    press(&mut state, "k");
    assert!(!drawn(&state, 100, 30).contains("frame_99"));
}

#[test]
fn much_is_drawn_at_once() {
    let mut state = state(Glyphs::Unicode, 1, 120, 40);
    let (mut wq, mut timerlat) = (snapshot(&WQ, 1), snapshot(&TIMERLAT, 1));
    for number in 0..10_000 {
        wq.series.push(series(&[("handler", &format!("\u{6f22}handler_{number}"))], "latency", &[number * 1_000]));
    }
    for cpu in 0..4_096 {
        timerlat.series.push(series(&[("cpu", &cpu.to_string())], "thread", &[50_000 + cpu]));
    }
    add(&mut state, [wq, timerlat].map(|snapshot| Line::Snapshot(Box::new(snapshot))).into());
    // Prints how long a frame takes, without asserting it: `cargo test --release much_is -- --nocapture`.
    let took = |what: &str, work: &mut dyn FnMut()| {
        let began = std::time::Instant::now();
        work();
        println!("{what}: {:.1} ms", began.elapsed().as_secs_f64() * 1e3);
    };
    for (card, series) in [(&WQ, 10_000), (&TIMERLAT, 4_096)] {
        let source = card.name;
        let is_its = |row: &Row| row.cells[0].text() == card.judged.row;
        let row = state.view().panels[1].rows().iter().position(is_its).expect("a row");
        state.press(Key::Home);
        for _ in 0..row {
            state.press(Key::Down);
        }
        took(&format!("opening {source}"), &mut || {
            state.press(Key::Enter);
        });
        assert_eq!(state.view().kind, ViewKind::Source(source));
        assert!(state.view().panels[0].len() >= series);
        state.press(Key::End);
        let mut screen = String::new();
        took(&format!("a frame of {source}"), &mut || screen = drawn(&state, 120, 40));
        took(&format!("a key and a frame of {source}"), &mut || {
            state.press(Key::Up);
            drop(drawn(&state, 120, 40));
        });
        let last = state.view().panels[0].rows().last().expect("a row").cells[0].text();
        assert!(screen.contains(&format!(" {last} ")), "{last} {screen}");
        state.press(Key::Esc);
    }
}

fn key() -> impl Strategy<Value = Key> {
    prop_oneof![
        prop::sample::select("jkhlgGsIqtT[]/?w xvd".chars().map(Key::Char).collect::<Vec<_>>()),
        prop::sample::select(vec![
            Key::Enter,
            Key::Esc,
            Key::Tab,
            Key::BackTab,
            Key::Backspace,
            Key::Up,
            Key::Down,
            Key::Left,
            Key::Right,
            Key::PageUp,
            Key::PageDown,
            Key::Home,
            Key::End,
            Key::Redraw,
        ]),
    ]
}

#[derive(Clone, Debug)]
enum Step {
    Key(Key),
    Tick,
    Size(u16, u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => key().prop_map(Step::Key),
        2 => Just(Step::Tick),
        1 => (1_u16..210, 1_u16..60).prop_map(|(columns, rows)| Step::Size(columns, rows)),
    ]
}

/// Returns the number of key sequences, from `PROPTEST_CASES`.
fn sequences() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(24)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: sequences(), ..ProptestConfig::default() })]
    #[test]
    fn keys_never_lose_the_selection(steps in prop::collection::vec(step(), 1..120)) {
        // A small history, so that shown ticks are evicted now and then.
        let mut state = State::new(Mode::Live, Glyphs::Unicode, TimeZone::UTC, History::new(60_000));
        let (mut size, mut second) = ((80, 24), 0);
        state.resize(80, 24);
        state.start(header());
        for step in steps {
            let chosen = |state: &State| {
                let view = state.view();
                view.panels.get(view.focus()).map(|panel| (panel.id, view.choice(panel).key))
            };
            let before = chosen(&state);
            match step {
                Step::Key(key) => {
                    state.press(key);
                }
                Step::Tick => {
                    add(&mut state, tick(second));
                    second += 1;
                    // A panel may disappear, as that of stacks does; then another one has the focus.
                    let after = chosen(&state);
                    let is_same_panel = before.as_ref().map(|of| of.0) == after.as_ref().map(|of| of.0);
                    prop_assert!(!is_same_panel || before == after, "{before:?} {after:?}");
                }
                Step::Size(columns, rows) => {
                    size = (columns, rows);
                    state.resize(usize::from(columns), usize::from(rows));
                }
            }
            let screen = drawn(&state, size.0, size.1);
            prop_assert!(screen.lines().all(|line| line.chars().all(is_printable)));
        }
    }
}
