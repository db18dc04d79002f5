// SPDX-License-Identifier: MIT OR Apache-2.0

use std::f64::consts::TAU;

use super::*;
use crate::programs::{HeldUpBy, HeldUpPart, HeldUpProgram, Programs};
use crate::recording::{Header, Measured};
use crate::sources::{OFFCPU, TIMERLAT, WQ};
use crate::{ActorName, Cause, CauseKind, LateEvent, Series, Snapshot, Stack};

const SECOND_NS: u64 = 1_000_000_000;
/// Number of runs of a test on false positive rates.
const RUNS: u64 = 20;

/// Pseudo-random numbers, the same in each run of the test (SplitMix64, Steele, Lea and Flood, 2014).
struct Rng(u64);

impl Rng {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.uniform()).ln()).sqrt() * (TAU * self.uniform()).cos()
    }

    /// Returns a Poisson-distributed number.
    fn poisson(&mut self, mean: f64) -> u64 {
        let (limit, mut product, mut count) = ((-mean).exp(), self.uniform(), 0);
        while product > limit {
            product *= self.uniform();
            count += 1;
        }
        count
    }
}

/// A machine in steady state: handlers with latencies, late items of which some come in bursts, and sleeping threads.
/// The load of a second correlates with the second before by `correlation`.
struct Machine {
    rng: Rng,
    correlation: f64,
    load: f64,
    /// Delay that a hog causes in each second.
    hog_ns: u64,
}

impl Machine {
    fn new(seed: u64, correlation: f64) -> Self {
        Machine { rng: Rng(seed), correlation, load: 0.0, hog_ns: 0 }
    }

    fn late(&mut self, who: &str, ns: u64) -> LateEvent {
        let number = self.rng.poisson(9.0);
        let cause = Cause::new(CauseKind::Thread, ActorName::thread(who, number as u32), ns);
        let scheduler = Cause::new(CauseKind::Wakeup, "run queue of CPU 1", 20_000);
        LateEvent {
            subject: "vmstat_update".to_owned(),
            latency_ns: ns + 20_000,
            causes: vec![cause, scheduler],
            ..LateEvent::default()
        }
    }

    fn wq(&mut self) -> Snapshot {
        self.load =
            self.correlation * self.load + (1.0 - self.correlation * self.correlation).sqrt() * self.rng.normal();
        let busy = (0.4 * self.load).exp();
        let mut snapshot = Snapshot { duration_ns: SECOND_NS, ..Snapshot::new(WQ.name, "made", "host", 0) };
        for handler in 0..12 {
            let items = self.rng.poisson(busy * f64::from(1 << (handler / 2)));
            let latency = (0..items).map(|_| ((9.0 + 0.3 * self.load + self.rng.normal()).exp()) as u64).collect();
            snapshot.series.push(Series {
                labels: [("handler".to_owned(), format!("handler{handler}"))].into(),
                histograms: [("latency".to_owned(), latency)].into(),
                ..Series::default()
            });
        }
        for culprit in 0..10 {
            for _ in 0..self.rng.poisson(busy * 0.1 * f64::from(culprit)) {
                // A few at once, each behind the previous one.
                for _ in 0..1 + self.rng.poisson(1.5) {
                    let ns = 10_000_000 + (self.rng.uniform() * 3e7) as u64;
                    let event = self.late(&format!("culprit{culprit}"), ns);
                    snapshot.late.push(event);
                }
            }
        }
        if self.hog_ns > 0 {
            let event = self.late("hog", self.hog_ns);
            snapshot.late.push(event);
        }
        snapshot
    }

    fn offcpu(&mut self) -> Snapshot {
        let mut snapshot = Snapshot { duration_ns: SECOND_NS, ..Snapshot::new(OFFCPU.name, "made", "host", 0) };
        for process in 0..40 {
            let weight_ns = SECOND_NS + (1e7 * self.rng.normal()) as u64;
            snapshot.stacks.push(Stack {
                labels: [("process".to_owned(), format!("process{process}"))].into(),
                samples: 100,
                weight_ns,
                kernel: vec!["schedule".to_owned()],
                ..Stack::default()
            });
        }
        snapshot
    }

    fn seconds(&mut self, count: usize) -> Vec<Snapshot> {
        (0..count).flat_map(|_| [self.wq(), self.offcpu()]).collect()
    }
}

fn measured(sources: &[&str]) -> Vec<Measured> {
    let measured = |source: &&str| Measured {
        source: (*source).to_owned(),
        backend: "made".to_owned(),
        late_from_ns: crate::sources::named(source).map(|card| card.events().late_from_ns),
        nothing: None,
    };
    sources.iter().map(measured).collect()
}

fn compare_as(measured: [&[Measured]; 2], sides: [&[Snapshot]; 2]) -> Diff {
    let lengths = sides.map(|side| {
        let mut lengths = Lengths::default();
        side.iter().for_each(|snapshot| lengths.add(snapshot));
        lengths
    });
    let mut comparison = Comparison::new(measured, block_ns([&lengths[0], &lengths[1]]));
    for (number, side) in sides.into_iter().enumerate() {
        let mut at_ns = BTreeMap::new();
        for snapshot in side {
            let at_ns: &mut u64 = at_ns.entry(snapshot.source.clone()).or_default();
            comparison.add(number, *at_ns + snapshot.duration_ns / 2, snapshot.clone());
            *at_ns += snapshot.duration_ns;
        }
    }
    comparison.finish([About::default(), About::default()])
}

fn compare(before: &[Snapshot], after: &[Snapshot]) -> Diff {
    let both = measured(&[WQ.name, OFFCPU.name]);
    compare_as([&both, &both], [before, after])
}

fn row<'a>(diff: &'a Diff, figure: &str, is_of: impl Fn(&What) -> bool) -> &'a Row {
    diff.rows.iter().find(|row| row.figure == figure && is_of(&row.what)).expect("such a row")
}

#[test]
fn a_recording_does_not_differ_from_itself() {
    let side = Machine::new(1, 0.5).seconds(40);
    let diff = compare(&side, &side);
    assert!(diff.differ == 0 && diff.compared > 50, "{} of {}", diff.differ, diff.compared);
    assert!(diff.rows.iter().all(|row| row.before == row.after));
    let text = serde_json::to_string(&diff).expect("it serialises");
    let read: Diff = serde_json::from_str(&text).expect("and parses");
    assert_eq!((read.rows.len(), read.test), (diff.rows.len(), diff.test));
}

#[test]
fn false_positive_rate_is_bounded() {
    for correlation in [0.0, 0.5, 0.8] {
        let (mut compared, mut differ, mut with_any) = (0, 0, 0);
        for seed in 0..RUNS {
            let run = Machine::new(seed, correlation).seconds(60);
            let diff = compare(&run[..60], &run[60..]);
            compared += diff.compared;
            differ += diff.differ;
            with_any += u64::from(diff.differ > 0);
        }
        println!("neighbours {correlation} alike: {differ} of {compared} rows differ, in {with_any} of {RUNS} runs");
        assert!(compared > RUNS * 50 && differ * 20 <= compared, "{correlation}: {differ} of {compared}");
    }
}

#[test]
fn new_culprit_ranks_first() {
    for seed in 0..20 {
        let mut machine = Machine::new(seed, 0.5);
        let before = machine.seconds(20);
        machine.hog_ns = 80_000_000;
        let diff = compare(&before, &machine.seconds(20));
        let first = &diff.rows[0];
        assert_eq!(first.what, What::Culprit { kind: CauseKind::Thread, who: ActorName::program("hog") }, "{first:?}");
        assert_eq!((first.outcome, first.before.count, first.after.count), (Outcome::More, 0, 20));
        assert_eq!(first.after.value, Some(80_000_000.0));
        let back = compare(&machine.seconds(20), &before);
        let gone = back.rows.iter().find(|row| row.what == first.what).expect("it has a row");
        assert_eq!(gone.outcome, Outcome::Less);
    }
}

#[test]
fn reports_burst_that_the_test_cannot_find() {
    let machine = || Machine::new(5, 0.5);
    let before = machine().seconds(40);
    let mut after = machine().seconds(40);
    // In two of 40 seconds, and never before.
    let mut hogged = machine();
    hogged.hog_ns = 30_000_000;
    for second in [30, 31] {
        let late = (0..50).map(|_| hogged.late("hog", 30_000_000));
        after[second * 2].late.extend(late);
    }
    let diff = compare(&before, &after);
    let is_hog = |what: &What| matches!(what, What::Culprit { who, .. } if who.comm() == Some("hog"));
    assert!(!diff.rows.iter().any(|row| row.outcome.differs() && is_hog(&row.what)), "the test has found it");
    let burst = diff.bursts.iter().find(|row| is_hog(&row.what)).expect("a row for it");
    assert_eq!((burst.before.count, burst.after.count), (0, 100));
    // No burst if both sides have it or if neither has events.
    assert!(compare(&before, &before).bursts.is_empty());
}

#[test]
fn culprit_with_drifting_delays_ranks_first() {
    let mut machine = Machine::new(8, 0.5);
    let before = machine.seconds(20);
    // A timer that meets the same disturbance a bit later each time.
    let mut after = Vec::new();
    for second in 0..20 {
        machine.hog_ns = 50_000_000 + second * 5_000_000;
        after.extend(machine.seconds(1));
    }
    let first = &compare(&before, &after).rows[0];
    assert_eq!(first.what, What::Culprit { kind: CauseKind::Thread, who: ActorName::program("hog") }, "{first:?}");
}

#[test]
fn new_series_differs_despite_declining_rate() {
    let mut machine = Machine::new(9, 0.5);
    let [before, mut after] = [20, 20].map(|seconds| machine.seconds(seconds));
    let of_wq = after.iter_mut().filter(|snapshot| snapshot.source == WQ.name);
    for (second, snapshot) in (0..).zip(of_wq) {
        snapshot.series.push(Series {
            labels: [("handler".to_owned(), "new".to_owned())].into(),
            histograms: [("latency".to_owned(), vec![1_000_000; 500 - 20 * second].into_iter().collect())].into(),
            ..Series::default()
        });
    }
    let diff = compare(&before, &after);
    let rate = row(&diff, "rate", |what| matches!(what, What::Series { labels } if labels["handler"] == "new"));
    assert_eq!((rate.outcome, rate.before.count), (Outcome::More, 0), "{rate:?}");
}

#[test]
fn side_without_values_has_no_percentiles() {
    let mut machine = Machine::new(3, 0.0);
    let before = machine.seconds(30);
    let mut after = machine.seconds(30);
    for snapshot in &mut after {
        let more = snapshot.series.last().cloned();
        snapshot
            .series
            .extend(more.map(|series| Series { labels: [("handler".to_owned(), "new".to_owned())].into(), ..series }));
    }
    let diff = compare(&before, &after);
    let is_new = |what: &What| matches!(what, What::Series { labels } if labels["handler"] == "new");
    let (rate, p50) = (row(&diff, "rate", is_new), row(&diff, "p50", is_new));
    // The rate is known to be 0; the latency is not known.
    assert_eq!((rate.outcome, rate.before), (Outcome::More, Measure { count: 0, value: Some(0.0), share: None }));
    assert_eq!((p50.outcome, p50.before, p50.p), (Outcome::TooLittle, Measure::default(), None));
    assert!(p50.after.value.is_some());
}

#[test]
fn skips_source_measured_on_one_side() {
    let run = Machine::new(4, 0.0).seconds(60);
    let (both, one) = (measured(&[WQ.name, OFFCPU.name]), measured(&[WQ.name]));
    let of_wq: Vec<Snapshot> = run.iter().filter(|snapshot| snapshot.source == WQ.name).cloned().collect();
    let diff = compare_as([&both, &one], [&run, &of_wq]);
    assert!(diff.rows.iter().all(|row| row.source != OFFCPU.name) && !diff.rows.is_empty());
    assert_eq!(diff.not_compared[0].source, OFFCPU.name);
    // It was measured, but recorded nothing in this span.
    let diff = compare_as([&both, &both], [&of_wq, &run]);
    assert!(diff.rows.iter().all(|row| row.source != OFFCPU.name) && !diff.rows.is_empty());
    assert!(diff.not_compared[0].reason.ends_with("before"), "{:?}", diff.not_compared);
}

#[test]
fn compares_late_events_above_the_higher_threshold() {
    let run = Machine::new(5, 0.0).seconds(60);
    let both = measured(&[WQ.name, OFFCPU.name]);
    let mut higher = both.clone();
    higher[0].late_from_ns = Some(25_000_000);
    let diff = compare_as([&both, &higher], [&run, &run]);
    let late = row(&diff, "late", |what| matches!(what, What::Late { .. }));
    let all = row(&compare(&run, &run), "late", |what| matches!(what, What::Late { .. })).before.count;
    assert!(late.before == late.after && late.before.count < all && late.before.count > all / 4, "{late:?}");
    higher[0].late_from_ns = None;
    let diff = compare_as([&both, &higher], [&run, &run]);
    assert!(diff.rows.iter().all(|row| !matches!(row.what, What::Late { .. } | What::Culprit { .. })));
    assert_eq!(diff.not_compared.len(), 1);
}

#[test]
fn names_sources_measured_on_other_cpus() {
    let sources = measured(&[WQ.name, TIMERLAT.name]);
    let of_all = Header { cpus: 2, ..Header::default() };
    let left_out =
        Unmeasured { leaves_cpus_out: true, ..Unmeasured::new(TIMERLAT.name, "CPU 1 was left out: isolated") };
    let of_one = Header { limitations: vec![left_out], ..of_all.clone() };
    let notes = |sides: [&Header; 2]| {
        let mut comparison = Comparison::new([&sources, &sources], SECOND_NS);
        comparison.compare_cpus(sides);
        comparison.finish(Default::default()).not_compared
    };
    assert_eq!(notes([&of_one, &of_one]), []);
    let [note] = &notes([&of_all, &of_one])[..] else { panic!("there is one note") };
    assert_eq!(note.source, TIMERLAT.name);
    assert!(note.reason.ends_with("left CPUs out only after"), "{note:?}");
    let [note] = &notes([&of_all, &Header { cpus: 4, ..Header::default() }])[..] else { panic!("there is one note") };
    assert!(note.reason.contains("2 CPUs were online before and 4 after"), "{note:?}");
}

#[test]
fn too_few_blocks_give_no_verdict() {
    let run = Machine::new(6, 0.0).seconds(12);
    let diff = compare(&run[..12], &run[12..]);
    assert!(diff.compared == 0 && diff.too_little > 0);
}

#[test]
fn sides_of_different_length_use_equal_blocks() {
    let mut machine = Machine::new(7, 0.0);
    let (long, short) = (machine.seconds(600), machine.seconds(60));
    let diff = compare(&long, &short);
    assert_eq!((diff.test.block_ns, diff.test.blocks_before, diff.test.blocks_after), (2 * SECOND_NS, 300, 30));
    assert!(diff.differ * 20 <= diff.compared, "{} of {}", diff.differ, diff.compared);
}

/// Sets how long two threads of a program were held up in each second, in milliseconds: the second one half as long.
fn hold_up(seconds: &mut [Snapshot], held_up_ms: impl Fn(u64) -> u64) {
    let of_offcpu = seconds.iter_mut().filter(|snapshot| snapshot.source == OFFCPU.name);
    for (snapshot, second) in of_offcpu.zip(0..) {
        let thread = |tid: u32, ms: u64| HeldUpProgram {
            who: ActorName::thread("service", 1_000 * second as u32 + tid),
            lived_ns: SECOND_NS,
            parts: vec![HeldUpPart {
                by: HeldUpBy::Lock,
                ns: ms * 1_000_000,
                latency: (0..ms / 20).map(|_| 20_000_000).collect(),
                ..HeldUpPart::default()
            }],
            ..HeldUpProgram::default()
        };
        let ms = held_up_ms(second);
        let held_up = if ms > 0 { vec![thread(1, ms), thread(2, ms / 2)] } else { Vec::new() };
        snapshot.programs = Programs { covered_ns: SECOND_NS, held_up, ..Programs::default() };
    }
}

fn is_service(what: &What) -> bool {
    *what == What::HeldUp { program: "service".to_owned() }
}

#[test]
fn program_is_compared_by_the_share_for_which_it_was_held_up() {
    let mut machine = Machine::new(11, 0.5);
    let [mut before, mut after] = [30, 30].map(|seconds| machine.seconds(seconds));
    hold_up(&mut before, |second| 60 + 20 * (second % 3));
    hold_up(&mut after, |second| 480 + 20 * (second % 5));
    let diff = compare(&before, &after);
    let share = row(&diff, "held_up", is_service);
    assert_eq!((share.outcome, share.unit, share.source.as_str()), (Outcome::More, Unit::Share, OFFCPU.name));
    // The thread that was held up longer stands for both.
    let is_near = |side: Measure, share: f64| side.value.is_some_and(|value| (value - share).abs() < 1e-9);
    assert!(is_near(share.before, 0.08) && is_near(share.after, 0.52), "{share:?}");
    assert_eq!(share.before.count, 10 * (3 + 4 + 5) + 10 * (1 + 2 + 2));
    // Less than 5 points are no difference.
    hold_up(&mut after, |second| 100 + 20 * (second % 3));
    assert_eq!(row(&compare(&before, &after), "held_up", is_service).outcome, Outcome::NoDifference);
}

#[test]
fn program_held_up_in_a_burst_is_listed() {
    let mut machine = Machine::new(12, 0.5);
    let [mut before, mut after] = [30, 30].map(|seconds| machine.seconds(seconds));
    hold_up(&mut before, |_| 0);
    hold_up(&mut after, |second| if second == 20 { 900 } else { 0 });
    let diff = compare(&before, &after);
    assert!(!row(&diff, "held_up", is_service).outcome.differs());
    let burst = diff.bursts.iter().find(|row| is_service(&row.what)).expect("a row");
    assert_eq!((burst.before.count, burst.after.count), (0, 45 + 22));
    // Too few blocks for any test.
    let few = compare(&before[..8], &after[40..48]);
    assert!(few.test.are_too_few() && few.bursts.iter().any(|row| is_service(&row.what)));
}

#[test]
fn programs_that_only_one_side_recorded_are_not_compared() {
    let mut machine = Machine::new(13, 0.5);
    let [before, mut after] = [30, 30].map(|seconds| machine.seconds(seconds));
    hold_up(&mut after, |_| 500);
    let diff = compare(&before, &after);
    assert!(!diff.rows.iter().chain(&diff.bursts).any(|row| is_service(&row.what)));
    let [note] = &diff.not_compared[..] else { panic!("{:?}", diff.not_compared) };
    assert!(note.reason.ends_with("recorded only after"), "{note:?}");
}
